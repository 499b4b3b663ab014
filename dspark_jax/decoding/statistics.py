"""What a generation counts, and the rates made of it. Every rate names its denominator."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.accept import Commit
from dspark_jax.decoding.trace import Round


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    """Cumulative counts of each sequence; g is the trained block.

    A round is one verification step of a running sequence. A round that stops at an accepted draft counts only the
    drafts up to it, offered and accepted alike, and no bonus.

    Attributes:
        rounds: int32 [B].
        allowed_rounds: int32 [B], rounds in which draft length and budget left room for a draft.
        bonus: int32 [B], tokens emitted that were not drafts.
        offered: int32 [B, g], rounds that offered draft k (and so all before it).
        reached: int32 [B, g], rounds that offered draft k and accepted all before it.
        accepted: int32 [B, g], rounds that accepted draft k (and so all before it).
    """

    rounds: jax.Array
    allowed_rounds: jax.Array
    bonus: jax.Array
    offered: jax.Array
    reached: jax.Array
    accepted: jax.Array

    @classmethod
    def zeros(cls, batch: int, block: int) -> "Counters":
        """Counters before the first round."""
        row, position = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, block), jnp.int32)
        return cls(row, row, row, position, position, position)

    def count(self, active: jax.Array, allowed: jax.Array, cut: Commit) -> "Counters":
        """Adds one round; `active` and `allowed` are bool [B]."""
        draft = jnp.arange(self.offered.shape[1], dtype=jnp.int32)
        offered = active[:, None] & (draft < cut.offered[:, None])
        new = Counters(
            rounds=active,
            allowed_rounds=active & allowed,
            bonus=active & (cut.bonus == 1),
            offered=offered,
            reached=offered & (draft <= cut.accepted[:, None]),
            accepted=offered & (draft < cut.accepted[:, None]),
        )
        return jax.tree.map(lambda total, one: total + one.astype(jnp.int32), self, new)


@dataclass(frozen=True)
class Statistics:
    """Totals of a generation over all its sequences, and the rates that follow.

    Attributes:
        rounds: verification steps, summed over sequences.
        offered_drafts: drafts put to verification.
        accepted_drafts: drafts committed.
        bonus_tokens: tokens committed that were not drafts.
        accepted_length: committed tokens per round, bonus included; 0 if there was no round.
        accepted_drafts_per_offered_draft: None if none was offered.
        offering_rounds: for each draft position, rounds that offered it.
        reached_rounds: for each draft position, rounds that offered it and accepted all before it.
        accepting_rounds: for each draft position, rounds that accepted it.
        prefix_acceptance_per_offering_round: accepting / offering rounds, for each draft position; None where none
            offered.
        conditional_acceptance_per_reached_round: accepting / reached rounds, for each draft position; None where none.
    """

    rounds: int
    offered_drafts: int
    accepted_drafts: int
    bonus_tokens: int
    accepted_length: float
    accepted_drafts_per_offered_draft: float | None
    offering_rounds: list[int]
    reached_rounds: list[int]
    accepting_rounds: list[int]
    prefix_acceptance_per_offering_round: list[float | None]
    conditional_acceptance_per_reached_round: list[float | None]

    @classmethod
    def of(cls, counters: Counters) -> "Statistics":
        """Totals over the sequences of a batch."""
        totals = jax.tree.map(lambda counts: np.asarray(counts).sum(axis=0).tolist(), counters)
        return cls._of_counts(totals.rounds, totals.bonus, totals.offered, totals.reached, totals.accepted)

    @classmethod
    def of_rounds(cls, rounds: Sequence[Round], block: int) -> "Statistics":
        """Totals over rounds that offered at most `block` drafts each."""
        draft = range(block)
        return cls._of_counts(
            len(rounds),
            sum(one.tokens - one.accepted for one in rounds),
            [sum(one.offered > k for one in rounds) for k in draft],
            [sum(one.offered > k and one.accepted >= k for one in rounds) for k in draft],
            [sum(one.accepted > k for one in rounds) for k in draft],
        )

    @classmethod
    def total(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Totals over several generations of one model, of which there is at least one."""

        def add(name: str) -> list[int]:
            return np.sum([getattr(part, name) for part in parts], axis=0).tolist()

        return cls._of_counts(
            sum(part.rounds for part in parts),
            sum(part.bonus_tokens for part in parts),
            add("offering_rounds"),
            add("reached_rounds"),
            add("accepting_rounds"),
        )

    @classmethod
    def _of_counts(
        cls, rounds: int, bonus: int, offering: list[int], reached: list[int], accepting: list[int]
    ) -> "Statistics":
        offered, accepted = sum(offering), sum(accepting)
        return cls(
            rounds=rounds,
            offered_drafts=offered,
            accepted_drafts=accepted,
            bonus_tokens=bonus,
            accepted_length=(accepted + bonus) / rounds if rounds else 0.0,
            accepted_drafts_per_offered_draft=_ratio(accepted, offered),
            offering_rounds=offering,
            reached_rounds=reached,
            accepting_rounds=accepting,
            prefix_acceptance_per_offering_round=[*map(_ratio, accepting, offering)],
            conditional_acceptance_per_reached_round=[*map(_ratio, accepting, reached)],
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
