"""What a training step sees of its data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """What the target makes of tokens, for every position: all that a drafter learns from.

    Attributes:
        taps: bfloat16 or float32 [B, T, taps_width], the outputs of the tapped layers, before the drafter's projection.
        hidden: bfloat16 or float32 [B, T, d], the LM head's input. It does not follow from the taps.
    """

    taps: jax.Array
    hidden: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Example:
    """A batch of rows, each one document with padding behind it, or several documents one after the other.

    Attributes:
        ids: int32 [B, T], token ids.
        supervised: bool [B, T], tokens that the drafter learns to predict.
        document: int32 [B, T], number of the document in its row, ascending from 0; -1 behind the last.
        features: of the target; None if the step shall compute them.
    """

    ids: jax.Array
    supervised: jax.Array
    document: jax.Array
    features: Features | None

    @property
    def positions(self) -> jax.Array:
        """int32 [B, T], each token's position in its own document."""
        index = jnp.broadcast_to(jnp.arange(self.ids.shape[1], dtype=jnp.int32), self.ids.shape)
        begins = jnp.diff(self.document, axis=1, prepend=self.document[:, :1] - 1) != 0
        return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


class Examples(Protocol):
    """Where training takes its examples from: with features or without, each found by the number of its step."""

    @property
    def steps_per_epoch(self) -> int:
        """Examples after which the data begin anew."""

    def starting_at(self, step: int) -> Iterator[Example]:
        """The examples of this and all later steps, without end, the same whenever they are asked for."""
