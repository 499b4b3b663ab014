"""The token rows of one step, and the setting that every layer works in."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.model.numerics import Numerics
from dspark_jax.model.rope import RopeTables
from pallas_kernels.implementation import Implementation
from pallas_kernels.partition import Partition


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Consecutive tokens of every sequence, of which the first few are live.

    A dead row is computed like any other, but it writes nothing, wakes no expert and is seen by nobody.

    Attributes:
        ids: int32 [B, T], token ids (hash routing needs them).
        start: int32 [B], absolute position of the first row.
        count: int32 [B], number of live rows, 0 to T.
    """

    ids: jax.Array
    start: jax.Array
    count: jax.Array

    @property
    def positions(self) -> jax.Array:
        """int32 [B, T], absolute positions."""
        return self.start[:, None] + jnp.arange(self.ids.shape[1], dtype=jnp.int32)

    @property
    def live(self) -> jax.Array:
        """bool [B, T]."""
        return jnp.arange(self.ids.shape[1], dtype=jnp.int32) < self.count[:, None]

    @property
    def last(self) -> jax.Array:
        """int32 [B], the newest position once this step is written; start - 1 if no row is live."""
        return self.start + self.count - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Setting:
    """What every layer needs besides its weights, rows and cache.

    Attributes:
        config: what the checkpoint says it is.
        numerics: how activations are rounded.
        rope: tables for every position of the step.
        partition: how operands lie on a mesh, for the operations; None on one device. Layers pass it on.
    """

    config: ModelConfig = field(metadata={"static": True})
    numerics: Numerics = field(metadata={"static": True})
    rope: RopeTables
    partition: Partition | None = field(default=None, metadata={"static": True})

    @property
    def linear_implementation(self) -> Implementation | None:
        """Of FP8 matrices: on a mesh XLA splits them, which it can do with no kernel."""
        return "xla" if self.partition else self.numerics.implementation
