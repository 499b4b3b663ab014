"""How the operands of an operation lie on a mesh of devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, PartitionSpec


@dataclass(frozen=True)
class Partition:
    """Which mesh axes split which operands. Hashable, so that it can be a static part of what a program is traced with.

    Attributes:
        mesh: with automatic axes.
        rows: mesh axes that may split the leading axis of activations.
        experts: mesh axes that split the leading axis of a stack of experts, evenly; () if every device has them all.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    experts: tuple[str, ...]

    def rows_of(self, size: int) -> tuple[str, ...]:
        """The axes that split a leading axis of activations of this size: `rows`, or none where they do not divide."""
        return () if size % self.devices(self.rows) else self.rows

    def devices(self, axes: tuple[str, ...]) -> int:
        """Over how many devices these mesh axes split."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


def map_rows[Out](function: Callable[[jax.Array], Out], x: jax.Array, partition: Partition | None) -> Out:
    """`function(x)`, of which every device computes its own rows; for what XLA would rather gather than split.

    Args:
        function: treats the rows along the leading axis each by itself; so does its result have them in front.
        x: activations [B, ...], whole on every device but for its leading axis.
        partition: None for one device.
    """
    if partition is None:
        return function(x)
    rows = PartitionSpec(partition.rows_of(x.shape[0]))
    return jax.shard_map(function, mesh=partition.mesh, in_specs=rows, out_specs=rows, check_vma=False)(x)
