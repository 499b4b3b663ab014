"""Where a batch lies beside its model: how operations are split, and rows from the host to the mesh and back."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.config import ModelConfig
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Setting
from dspark_jax.sharding import RULES, mesh_axes
from pallas_kernels.partition import Partition


def partition_of(model: Model) -> Partition | None:
    """How operations on this model are split: over the mesh on which `load` put it; None for one device.

    It asks an array where it lies, so call it outside `jax.jit`; inside, there is `partition_on`.
    """
    sharding = model.vocabulary.embed.get_value().sharding
    if not isinstance(sharding, NamedSharding):
        return None
    assert isinstance(sharding.mesh, Mesh)
    return partition_on(sharding.mesh, model.config)


def partition_on(mesh: Mesh, config: ModelConfig) -> Partition:
    """How operations on a model of this config are split that `load` puts on this mesh."""
    rows = tuple(name for name in RULES.batch if name in mesh.shape)
    return Partition(mesh, rows, mesh_axes(mesh, "expert", config.n_routed_experts))


def setting_of(model: Model, capacity: int) -> Setting:
    """`model.setting(capacity)` where the model lies; outside `jax.jit`, like `partition_of`."""
    partition = partition_of(model)
    return place_copies(model.setting(capacity, partition), partition)


def row_sharding(partition: Partition, batch: int) -> NamedSharding:
    """Where a value with a leading axis of sequences lives; replicated (logged once) if they do not divide."""
    mesh_axes(partition.mesh, "batch", batch)  # says so if they do not divide
    return NamedSharding(partition.mesh, PartitionSpec(partition.rows_of(batch) or None))


def constrain_rows[Tree](tree: Tree, partition: Partition | None) -> Tree:
    """Inside `jax.jit`: keeps every leaf, each with a leading axis of sequences, split over the mesh by sequences.

    Apply it to what a program makes or hands on (fresh caches, the carry of a loop), so that no choice of XLA's moves
    them. Without a partition it changes nothing.
    """
    if partition is None:
        return tree
    return jax.tree.map(
        lambda leaf: jax.lax.with_sharding_constraint(leaf, row_sharding(partition, leaf.shape[0])), tree
    )


def place_rows[Tree](tree: Tree, partition: Partition | None) -> Tree:
    """Outside `jax.jit`: host values with a leading axis of sequences as arrays on the mesh, split by sequences.

    Every process of a mesh passes the same values and keeps what its devices need. Without a partition it changes
    nothing.
    """
    if partition is None:
        return tree
    return jax.tree.map(lambda leaf: _place(leaf, row_sharding(partition, len(leaf))), tree)


def place_copies[Tree](tree: Tree, partition: Partition | None) -> Tree:
    """Like `place_rows`, with a copy of each value on every device."""
    if partition is None:
        return tree
    sharding = NamedSharding(partition.mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: _place(leaf, sharding), tree)


def _place(values: jax.typing.ArrayLike, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(values)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch[Tree](tree: Tree) -> Tree:
    """Outside `jax.jit`: the leaves as numpy arrays, whole on every process, which all have to call this."""

    def values(leaf: jax.Array) -> np.ndarray:
        if not leaf.is_fully_addressable and isinstance(leaf.sharding, NamedSharding):
            leaf = jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
        return np.asarray(leaf)

    return jax.tree.map(values, tree)
