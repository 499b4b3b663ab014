"""How many drafts are accepted, where in a block and where in a completion, and how sure that is.

Every rate names its denominator, as in `Statistics`. Intervals come from resampling prompts, not rounds: rounds of one
completion resemble each other, and counting them as independent would make the intervals too narrow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dspark_jax.evaluation.log import RoundLog

RESAMPLES = 1000
INTERVAL = (0.025, 0.975)
LENGTH_EDGES = (0, 32, 128, 512)  # new tokens before a round: a drafter's window fills while it generates
NO_CATEGORY = "no category"


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % bootstrap interval.

    Attributes:
        value: None where its denominator is 0.
        low: None where there are fewer than two prompts, or no value.
        high: see `low`.
    """

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of some rounds, for blocks of g drafts.

    Attributes:
        prompts: from which the rounds come.
        rounds: verification steps.
        committed_tokens: accepted drafts and bonus tokens. The last round of a completion counts whole, even where the
            budget cuts its tokens off.
        offered_drafts: that count; those behind an accepted stop id do not.
        accepted_drafts: committed.
        offering_rounds: [g], rounds that offered draft k.
        reached_rounds: [g], rounds that offered draft k and accepted all before it.
        accepting_rounds: [g], rounds that accepted draft k.
        rounds_by_accepted_drafts: [1+g], rounds that accepted exactly 0 ... g drafts.
        accepted_length: committed tokens per round, bonus included.
        accepted_drafts_per_offered_draft: in total.
        committed_tokens_per_verified_row: a round verifies its anchor and the offered drafts.
        prefix_acceptance_per_offering_round: [g], accepting over offering rounds.
        conditional_acceptance_per_reached_round: [g], accepting over reached rounds.
        accepted_length_by_width: [1+g], the accepted length if only the first 0 ... g drafts were offered: 1 plus the
            prefix acceptances up to there. The drafts of a narrower offer are the same drafts, so this is exact for
            rounds that begin where these began; assumed is that rounds elsewhere would accept as much, and that no
            stop id ends a round early.
    """

    prompts: int
    rounds: int
    committed_tokens: int
    offered_drafts: int
    accepted_drafts: int
    offering_rounds: list[int]
    reached_rounds: list[int]
    accepting_rounds: list[int]
    rounds_by_accepted_drafts: list[int]
    accepted_length: Estimate
    accepted_drafts_per_offered_draft: Estimate
    committed_tokens_per_verified_row: Estimate
    prefix_acceptance_per_offering_round: list[Estimate]
    conditional_acceptance_per_reached_round: list[Estimate]
    accepted_length_by_width: list[Estimate]


@dataclass(frozen=True)
class _Sums:
    """Counts with any leading axes: of prompts, of resamples, or none."""

    rounds: np.ndarray  # [...]
    tokens: np.ndarray
    offering: np.ndarray  # [..., g]
    reached: np.ndarray
    accepting: np.ndarray

    @classmethod
    def of(cls, packed: np.ndarray) -> "_Sums":
        """From [..., 2 + 3g]."""
        return cls(packed[..., 0], packed[..., 1], *np.split(packed[..., 2:], 3, axis=-1))


def acceptance(log: RoundLog, seed: int = 0) -> Acceptance:
    """The acceptance of all rounds of a log.

    Args:
        log: of one way to decode; greedy and sampled rounds together mean nothing.
        seed: of the resampling.
    """
    by_prompt = _sums_by_prompt(log)
    whole, prompts = _Sums.of(by_prompt.sum(axis=0)), len(by_prompt)
    resampled = _Sums.of(_resample(by_prompt, seed)) if prompts > 1 else None

    def estimates(figure: Callable[[_Sums], np.ndarray]) -> list[Estimate]:
        values = np.atleast_1d(figure(whole))
        if resampled is None:
            return [Estimate(_or_none(value), None, None) for value in values]
        drawn = figure(resampled).reshape(len(resampled.rounds), -1)
        return [_estimate(value, column) for value, column in zip(values, drawn.T, strict=True)]

    return Acceptance(
        prompts=prompts,
        rounds=int(whole.rounds),
        committed_tokens=int(whole.tokens),
        offered_drafts=int(whole.offering.sum()),
        accepted_drafts=int(whole.accepting.sum()),
        offering_rounds=whole.offering.astype(int).tolist(),
        reached_rounds=whole.reached.astype(int).tolist(),
        accepting_rounds=whole.accepting.astype(int).tolist(),
        rounds_by_accepted_drafts=np.bincount(log.accepted, minlength=log.block + 1).tolist(),
        accepted_length=estimates(lambda sums: _ratio(sums.tokens, sums.rounds))[0],
        accepted_drafts_per_offered_draft=estimates(
            lambda sums: _ratio(sums.accepting.sum(axis=-1), sums.offering.sum(axis=-1))
        )[0],
        committed_tokens_per_verified_row=estimates(
            lambda sums: _ratio(sums.tokens, sums.rounds + sums.offering.sum(axis=-1))
        )[0],
        prefix_acceptance_per_offering_round=estimates(lambda sums: _ratio(sums.accepting, sums.offering)),
        conditional_acceptance_per_reached_round=estimates(lambda sums: _ratio(sums.accepting, sums.reached)),
        accepted_length_by_width=estimates(_length_by_width),
    )


def by_category(log: RoundLog, seed: int = 0) -> dict[str, Acceptance]:
    """The acceptance of each kind of prompt, by name; nothing where no prompt has a category."""
    names = np.unique(log.category).tolist()
    if names in ([], [""]):
        return {}
    return {name or NO_CATEGORY: acceptance(log.where(log.category == name), seed) for name in names}


def by_length(log: RoundLog, seed: int = 0) -> dict[str, Acceptance]:
    """The acceptance of rounds by the new tokens before them, in buckets such as "32-127"; empty ones are left out."""
    buckets = {f"{low}-{high - 1}": (low, high) for low, high in pairwise(LENGTH_EDGES)}
    buckets[f"{LENGTH_EDGES[-1]} and more"] = (LENGTH_EDGES[-1], np.iinfo(np.int32).max)
    chosen = {name: log.where((log.begin >= low) & (log.begin < high)) for name, (low, high) in buckets.items()}
    return {name: acceptance(part, seed) for name, part in chosen.items() if len(part)}


def _sums_by_prompt(log: RoundLog) -> np.ndarray:
    """Float64 [P, 2 + 3g], what `_Sums` holds."""
    draft, accepted = np.arange(log.block), log.accepted[:, None]
    offering = log.offered[:, None] > draft
    columns = [np.ones((len(log), 1)), log.tokens[:, None], offering, offering & (accepted >= draft), accepted > draft]
    _, group = np.unique(log.prompt, return_inverse=True)
    rows = np.concatenate(columns, axis=1).astype(np.float64)
    sums = np.zeros((int(group.max(initial=-1)) + 1, rows.shape[1]))
    np.add.at(sums, group, rows)
    return sums


def _resample(by_prompt: np.ndarray, seed: int) -> np.ndarray:
    """Sums of as many prompts as there are, drawn with replacement: [RESAMPLES, ...]."""
    rng, prompts = np.random.default_rng(seed), len(by_prompt)
    chances = np.full(prompts, 1 / prompts)
    return np.stack([rng.multinomial(prompts, chances) @ by_prompt for _ in range(RESAMPLES)])


def _length_by_width(sums: _Sums) -> np.ndarray:
    prefix = _ratio(sums.accepting, sums.offering)
    ones = np.where(sums.rounds > 0, 1.0, np.nan)[..., None]
    return np.cumsum(np.concatenate([ones, prefix], axis=-1), axis=-1)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """NaN where the denominator is 0."""
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    drawn = drawn[np.isfinite(drawn)]
    if not np.isfinite(value) or not len(drawn):
        return Estimate(_or_none(value), None, None)
    low, high = np.quantile(drawn, INTERVAL)
    return Estimate(float(value), float(low), float(high))


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
