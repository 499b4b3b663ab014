"""The compressor: pools the tokens of a window, channel by channel, into one entry.

Ratio 4 overlaps: entry w pools the first halves of the channels of tokens 4w-4 ... 4w-1 and the second halves of tokens
4w ... 4w+3. Every other ratio pools its own r tokens. All of it is float32 until the entry is finished.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspark_jax.config import OVERLAP_RATIO
from dspark_jax.model.cache import Compressed, append, pooled_span, write
from dspark_jax.model.linear import project, rms_norm
from dspark_jax.model.rope import angles_at, rotate
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.weights import Compressor


def compress(
    weights: Compressor,
    x: jax.Array,
    cache: Compressed,
    rows: Rows,
    ratio: int,
    finish: Callable[[jax.Array], jax.Array],
    setting: Setting,
) -> Compressed:
    """Adds the tokens of a step and the entries that they complete.

    Args:
        x: activations [B, T, d], the attention's input.
        finish: last touch on a normed and rotated entry [B, E, D], such as fake quantisation.

    Returns:
        The cache with the live rows and every completed entry written.
    """
    gates = project(x, weights.wgate) + weights.ape[...][rows.positions % ratio]
    pair = jnp.stack([project(x, weights.wkv), gates], axis=2)
    ring, view = append(cache.ring, rows, pair, pooled_span(ratio))

    candidates = -(-x.shape[1] // ratio)  # windows that can close within the step
    window = rows.start[:, None] // ratio + jnp.arange(candidates, dtype=jnp.int32)
    first, newest = window * ratio, window * ratio + ratio - 1
    span = first[..., None] + jnp.arange(ratio - pooled_span(ratio), ratio, dtype=jnp.int32)
    pooled = _pool(view.at(span), span >= 0, ratio)

    entry = rms_norm(setting.numerics.round(pooled), weights.norm, setting.config.rms_norm_eps, setting.numerics)
    angles = angles_at(setting.rope.of(ratio), first)
    entry = finish(setting.numerics.round(rotate(entry, angles)))
    return Compressed(ring, write(cache.entries, window, entry, newest <= rows.last[:, None]))


def visible_entries(rows: Rows, ratio: int) -> jax.Array:
    """int32 [B, T]: a row may use the entries below this number, those whose window it has completed or follows."""
    return (rows.positions + 1) // ratio


def _pool(pairs: jax.Array, present: jax.Array, ratio: int) -> jax.Array:
    """Softmax-weighted mean over tokens: [B, E, span, 2, w] and bool [B, E, span] -> float32 [B, E, D]."""
    if ratio == OVERLAP_RATIO:
        previous, own = pairs[:, :, :ratio], pairs[:, :, ratio:]
        half = pairs.shape[-1] // 2
        pairs = jnp.concatenate([previous[..., :half], own[..., half:]], axis=2)
    values, gates = pairs[..., 0, :], pairs[..., 1, :]
    share = jax.nn.softmax(jnp.where(present[..., None], gates, -jnp.inf), axis=2)
    return jnp.sum(jnp.where(present[..., None], values, 0) * share, axis=2)
