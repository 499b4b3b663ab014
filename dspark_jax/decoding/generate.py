"""Generation for people: lists of token ids in, lists and statistics out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from dspark_jax.decoding.generation import Generation
from dspark_jax.decoding.programs import check_drafter, finish, pack, start
from dspark_jax.decoding.request import Request, check_requests, sampling_of, stop_slots
from dspark_jax.decoding.state import bucket, pick
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.decoding.trace import Round
from dspark_jax.errors import NotFiniteError, RequestError, check_count
from dspark_jax.model.model import Model
from dspark_jax.placement import fetch, place_rows, setting_of

FinishReason = Literal["stop", "length", "not_finite"]


@dataclass(frozen=True)
class Completion:
    """One completed prompt.

    Attributes:
        tokens: the new token ids, a stop id included if one ended them.
        finish_reason: "stop" for a stop id, "length" for a spent budget, "not_finite" if the target's logits were not:
            the last tokens then mean nothing.
        statistics: of this sequence.
        target_logprobs: natural logarithms of the tokens' probabilities under the target's own distribution
            (temperature 1, nothing cut); None if nobody asked for them.
        drawn_logprobs: the same under the distribution each token was drawn from; 0 where decoding was greedy.
        rounds: what each round did; None if nobody asked for them.
    """

    tokens: list[int]
    finish_reason: FinishReason
    statistics: Statistics
    target_logprobs: list[float] | None
    drawn_logprobs: list[float] | None
    rounds: list[Round] | None = None

    @classmethod
    def of(cls, generation: Generation, row: int) -> "Completion":
        """One row of a generation on the host."""
        new = slice(int(generation.prompt_length[row]), int(generation.length[row]))
        logs, trace = generation.logprobs, generation.trace
        reason: FinishReason = "stop" if generation.stopped[row] else "length"
        return cls(
            tokens=generation.tokens[row, new].tolist(),
            finish_reason=reason if generation.finite[row] else "not_finite",
            statistics=Statistics.of(jax.tree.map(lambda counts: counts[row : row + 1], generation.counters)),
            target_logprobs=logs.target[row, new].tolist() if logs else None,
            drawn_logprobs=logs.drawn[row, new].tolist() if logs else None,
            rounds=trace.rounds(row, new.start) if trace else None,
        )


@dataclass(frozen=True)
class Completions:
    """What `generate` returns: lists with one of each for every prompt, the samples of a prompt together.

    Attributes:
        tokens: see `Completion`, here and below.
        finish_reasons: "stop" or "length".
        target_logprobs: None if nobody asked for them.
        drawn_logprobs: None if nobody asked for them.
        statistics: totals over all.
    """

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    target_logprobs: list[list[float]] | None
    drawn_logprobs: list[list[float]] | None
    statistics: Statistics

    @classmethod
    def of(cls, generation: Generation) -> "Completions":
        """All rows of a generation on the host.

        Raises:
            NotFiniteError: the target's logits are not finite.
        """
        broken = np.flatnonzero(~generation.finite).tolist()
        if broken:
            raise NotFiniteError(f"the target's logits are not finite for prompts {broken}; check its weights.")
        rows = [Completion.of(generation, row) for row in range(len(generation.tokens))]
        wanted = generation.logprobs is not None
        return cls(
            tokens=[row.tokens for row in rows],
            finish_reasons=[row.finish_reason for row in rows],
            target_logprobs=[row.target_logprobs or [] for row in rows] if wanted else None,
            drawn_logprobs=[row.drawn_logprobs or [] for row in rows] if wanted else None,
            statistics=Statistics.of(generation.counters),
        )


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = Request.max_new_tokens,
    draft_tokens: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    temperature: float | Sequence[float] = Request.temperature,
    top_k: int | Sequence[int] = Request.top_k,
    top_p: float | Sequence[float] = Request.top_p,
    seed: int | Sequence[int] = Request.seed,
    greedy_drafts: bool | Sequence[bool] = Request.greedy_drafts,
    samples: int = 1,
    logprobs: bool = False,
) -> Completions:
    """Completes prompts; drafting, verification and acceptance stay on the device until all are done.

    Greedy tokens do not depend on `draft_tokens`: with the same batch size and capacity every draft length, 0 included,
    runs the same program, and its logits have the same bits. Sampled tokens have the same distribution.

    Args:
        model: with a target; without a drafter decoding is plain.
        prompts: token ids, one list a prompt, of any lengths.
        max_new_tokens: budget. This and the following settings are one value for all, or a list of one for each prompt.
        draft_tokens: drafts offered in a round; None for the trained block. More than the block is clamped with a
            warning, since a longer block than the trained one degrades every draft.
        stop_ids: ids that end a completion; None for the config's EOS, () for none.
        temperature: 0 decodes greedily.
        top_k: samples from the k likeliest tokens; 0 from all.
        top_p: samples from the likeliest tokens that together have this share; 1 from all.
        seed: of the random numbers. The same prompt and seed draw the same numbers in any batch.
        greedy_drafts: let the drafter propose its likeliest tokens instead of drawing them.
        samples: completions of each prompt, which is run once; row p * samples + s is sample s of prompt p. Sample 0
            has the prompt's seed and the others have seeds made of it (`Request.sample`).
        logprobs: return log-probabilities.

    Raises:
        RequestError: no target, no prompt, an empty prompt, an id outside the vocabulary, a negative or absurd number.
        NotFiniteError: the target's logits are not finite.
        SilentDrafterError: the drafter was allowed to draft and never offered a finite draft.
    """
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; expected a list of lists of token ids.")
    prompts = list(prompts)
    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "draft_tokens": draft_tokens,
        "greedy_drafts": greedy_drafts,
        "stop_ids": stop_ids,
    }
    columns = [_one_for_each(value, name, len(prompts)) for name, value in settings.items()]
    requests = [
        Request(prompt, **dict(zip(settings, row, strict=True))) for prompt, *row in zip(prompts, *columns, strict=True)
    ]
    generation = run(model, check_requests(requests, model), samples, logprobs)
    completions = Completions.of(generation)
    check_drafter(generation)
    return completions


def run(model: Model, requests: Sequence[Request], samples: int = 1, logprobs: bool = False) -> Generation:
    """Completes checked requests in one batch, `samples` rows for each; arrays on the host."""
    samples = check_count(samples, "samples")
    capacity = bucket(max(request.positions for request in requests))
    setting = setting_of(model, capacity)
    prompts = place_rows(pack([request.prompt for request in requests], capacity), setting.partition)
    state = start(model, setting, *prompts, logprobs=logprobs)
    if samples > 1:
        state = pick(state, np.repeat(np.arange(len(requests)), samples))
    rows = [request.sample(number) for request in requests for number in range(samples)]
    sampling = place_rows(sampling_of(rows, stop_slots(rows)), setting.partition)
    return fetch(Generation.of(finish(model, setting, state, sampling)))


def _one_for_each(value: Any, name: str, count: int) -> list[Any]:
    """A setting for each prompt, from one for all or a list; a flat list of stop ids is one setting."""
    if isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value).tolist()
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if name == "stop_ids":
        listed = listed and any(ids is None or isinstance(ids, Sequence | np.ndarray | jax.Array) for ids in value)
    if not listed:
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} values for {count} prompts; give one for all, or one for each.")
    return list(value)
