"""What the target makes of tokens: the features that a drafter learns from."""

import jax
import jax.numpy as jnp

from dspark_jax.data.example import Example, Features
from dspark_jax.decoding.loop import PREFILL_CHUNK
from dspark_jax.model.cache import TargetCache, target_cache
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows
from dspark_jax.model.target import target_step
from dspark_jax.placement import constrain_rows
from pallas_kernels.partition import Partition


def target_features(
    model: Model, example: Example, partition: Partition | None = None, chunk: int = PREFILL_CHUNK
) -> Features:
    """Taps and the LM head's input at every position: pure, and made to be called inside `jax.jit`.

    The target runs over chunks of the rows from an empty cache, and no further than the longest row, so that memory
    beside the result is that of one chunk. No gradient passes.

    Args:
        model: with a target, and a config that says which layers are tapped.
        example: one document a row: see `assemble.refuse_packed`. Its features, if any, are not read.
        partition: how the model lies on a mesh; None on one device.
        chunk: rows of a step, static. Bits are promised for one chunk size.

    Returns:
        In the activations' dtype, zero behind each document.
    """
    model = jax.lax.stop_gradient(model)
    target = model.target
    assert target is not None, "features are those of a target"
    batch, length = example.ids.shape
    chunk = min(chunk, length)
    padded = -(-length // chunk) * chunk
    setting = model.setting(padded, partition)
    ids = jnp.pad(jnp.asarray(example.ids), [(0, 0), (0, padded - length)])
    lengths = jnp.sum(jnp.asarray(example.document) >= 0, axis=1, dtype=jnp.int32)

    def step(number: jax.Array, carry: tuple[TargetCache, Features]) -> tuple[TargetCache, Features]:
        cache, features = carry
        first = number * chunk
        piece = jax.lax.dynamic_slice_in_dim(ids, first, chunk, axis=1)
        rows = Rows(piece, jnp.full_like(lengths, first), jnp.clip(lengths - first, 0, chunk))
        passed = target_step(target, model.vocabulary, rows, cache, setting)

        def put(whole: jax.Array, part: jax.Array) -> jax.Array:
            live = jnp.where(rows.live[..., None], part, jnp.zeros_like(part))
            return jax.lax.dynamic_update_slice_in_dim(whole, live, first, axis=1)

        features = Features(put(features.taps, passed.taps), put(features.hidden, passed.hidden))
        return constrain_rows((passed.cache, features), partition)

    def empty(width: int) -> jax.Array:
        return jnp.zeros((batch, padded, width), model.numerics.activations)

    cache = target_cache(model.config, model.numerics, batch, padded, width=1)
    features = Features(empty(model.config.taps_width), empty(model.config.hidden_size))
    carry = constrain_rows((cache, features), partition)
    _, features = jax.lax.fori_loop(0, -(-jnp.max(lengths) // chunk), step, carry)
    return Features(features.taps[:, :length], features.hidden[:, :length])
