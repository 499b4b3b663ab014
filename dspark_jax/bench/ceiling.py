"""What bounds a decoding step: the weights it must read, and how fast the device moves memory."""

import math
import time
from statistics import median

import jax
import jax.numpy as jnp

from dspark_jax.checkpoint.layout import layout
from dspark_jax.model.model import Model
from dspark_jax.placement import partition_of

COPIED = 1 << 28  # bytes, several times any cache
COPIES = 5


def plain_step_bytes(model: Model, batch_size: int) -> float:
    """Bytes of weights that each device reads in a step with one live row a sequence, packed as they are stored.

    The target once, with two exceptions: of embedding and hash tables a few rows are read, which are not counted, and
    of the experts only those that wake: in the mean a share of 1 - (1 - k/E)^B, if B sequences choose k of E each
    independently and evenly. On a mesh a device has its share of the weights and of the sequences. Caches and
    activations are not counted.
    """
    partition = partition_of(model)
    batch_size //= partition.devices(partition.rows_of(batch_size)) if partition else 1
    experts, chosen = model.config.n_routed_experts, model.config.num_experts_per_tok
    awake = 1 - (1 - chosen / experts) ** batch_size
    return sum(
        entry.stored_bytes * (awake if entry.stacked else 1) * _share(leaf)
        for entry, leaf in zip(layout(model), jax.tree.leaves(model), strict=True)
        if not entry.names[0].startswith(("embed.", "mtp.")) and entry.dtype != "I64"
    )


def _share(array: jax.Array) -> float:
    """The part of an array that each of its devices holds."""
    return math.prod(array.sharding.shard_shape(array.shape)) / array.size


def copy_bandwidth() -> float:
    """Bytes a second that the first device moves in a large copy, read and written bytes both counted."""
    copy = jax.jit(lambda values: values + 1)
    values = jax.block_until_ready(copy(jnp.zeros(COPIED // 4, jnp.float32)))
    seconds = []
    for _ in range(COPIES):
        began = time.perf_counter()
        jax.block_until_ready(copy(values))
        seconds.append(time.perf_counter() - began)
    return 2 * COPIED / median(seconds)
