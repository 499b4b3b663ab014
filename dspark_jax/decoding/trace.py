"""What every round of a generation did, recorded where it began: for those who ask how well the drafter drafts."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.accept import Commit
from dspark_jax.model.cache import write


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trace:
    """The rounds of each sequence, at the positions of the anchors they began with; zeros where none began.

    What counts as offered, accepted and committed is what `Counters` counts.

    Attributes:
        offered: int32 [B, S], drafts that count as offered.
        accepted: int32 [B, S], drafts committed.
        tokens: int32 [B, S], tokens committed, the bonus included; at least 1 where a round began.
        confidence: float32 [B, S, g], the drafter's confidence logits, which mean nothing behind the offered drafts.
    """

    offered: jax.Array
    accepted: jax.Array
    tokens: jax.Array
    confidence: jax.Array

    @classmethod
    def zeros(cls, batch: int, capacity: int, block: int) -> "Trace":
        """A trace before the first round."""
        column = jnp.zeros((batch, capacity), jnp.int32)
        return cls(column, column, column, jnp.zeros((batch, capacity, block), jnp.float32))

    def record(self, anchor: jax.Array, active: jax.Array, cut: Commit, confidence: jax.Array) -> "Trace":
        """Adds one round.

        Args:
            anchor: int32 [B], absolute position of the token that the round began with.
            active: bool [B], the sequences that ran.
            cut: what they committed.
            confidence: float32 [B, g].
        """

        def put(column: jax.Array, values: jax.Array) -> jax.Array:
            return write(column, anchor[:, None], values[:, None], active[:, None])

        return Trace(
            put(self.offered, cut.offered),
            put(self.accepted, cut.accepted),
            put(self.tokens, cut.tokens),
            put(self.confidence, confidence),
        )

    def rounds(self, row: int, prompt_length: int) -> "list[Round]":
        """The rounds of one sequence in their order; of a trace on the host."""
        began = np.flatnonzero(self.tokens[row])
        columns = (self.offered, self.accepted, self.tokens, self.confidence)
        rounds = zip(began.tolist(), *(column[row, began].tolist() for column in columns), strict=True)
        return [
            Round(anchor + 1 - prompt_length, offered, accepted, tokens, confidence[:offered])
            for anchor, offered, accepted, tokens, confidence in rounds
        ]


class Round(NamedTuple):
    """One verification step of a sequence.

    Attributes:
        begin: new tokens that were committed before it.
        offered: drafts that count as offered; those behind an accepted stop id do not.
        accepted: drafts committed.
        tokens: tokens committed: the accepted drafts and, unless a draft stopped the sequence, the target's own.
        confidence: logits of the offered drafts.
    """

    begin: int
    offered: int
    accepted: int
    tokens: int
    confidence: list[float]
