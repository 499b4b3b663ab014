"""What bounds a decoding step: the weights that it must read."""

import math
from dataclasses import replace

import jax

from dspark_jax.checkpoint.layout import layout
from dspark_jax.model.model import Model
from dspark_jax.placement import partition_of


def plain_step_bytes(model: Model, batch_size: int) -> float:
    """Bytes of weights that each device reads in a step with one live row a sequence, packed as they are stored.

    The target once, with two exceptions: of embedding and hash tables a few rows are read, which are not counted, and
    of the experts only those that wake: in the mean a share of 1 - (1 - k/E)^B, if B sequences choose k of E each
    independently and evenly. On a mesh a device has its share of the weights and of the sequences. Caches and
    activations are not counted.
    """
    partition, target = partition_of(model), replace(model, drafter=None)
    batch_size //= partition.devices(partition.rows_of(batch_size)) if partition else 1
    experts, chosen = model.config.n_routed_experts, model.config.num_experts_per_tok
    awake = 1 - (1 - chosen / experts) ** batch_size
    return sum(
        entry.stored_bytes * (awake if entry.stacked else 1) * _share(leaf)
        for entry, leaf in zip(layout(target), jax.tree.leaves(target), strict=True)
        if not entry.names[0].startswith("embed.") and entry.dtype != "I64"
    )


def _share(array: jax.Array) -> float:
    """The part of an array that each of its devices holds."""
    return math.prod(array.sharding.shard_shape(array.shape)) / array.size
