"""What the operations mean, in float32. n streams of d channels; m = (2+n)*n mixing values a token."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.precision import contract, round_to


@dataclass(frozen=True)
class Constants:
    """What is the same for every site of a model.

    Attributes:
        norm_eps: added to the mean square of the streams.
        iterations: Sinkhorn iterations; the first takes its rows from a softmax.
        eps: added to the reading weights, to the softmax, and to every sum that divides.
    """

    norm_eps: float
    iterations: int
    eps: float


def read(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, constants: Constants
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a half-block reads, and how it writes.

    Args:
        streams: float32 or bfloat16 [..., n, d].
        fn: float32 [m, n*d].
        base: float32 [m].
        scale: float32 [3], one factor for what reads, what writes and what mixes.
        constants: of the model.

    Returns:
        The input of the half-block [..., d] in the dtype of the streams, post float32 [..., n], and comb float32
        [..., n, n] from source to destination stream.
    """
    mixed = mixes(streams, fn, constants.norm_eps)
    pre, post, comb = split_mixes(mixed, base, scale, constants.iterations, constants.eps)
    return round_to(collapse(streams, pre), streams.dtype), post, comb


def write(y: jax.Array, streams: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """The streams after a half-block whose output is `y` [..., d], in their dtype; the rest as `read` gives it."""
    return round_to(expand(y, streams, post, comb), streams.dtype)


def mixes(streams: jax.Array, fn: jax.Array, norm_eps: float) -> jax.Array:
    """Projects the flattened streams: [..., n, d] and float32 [m, n*d] -> float32 [..., m].

    The RMS factor of the whole vector multiplies the product, not the input.
    """
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
    return contract("...i,mi->...m", flat, fn) * factor


def split_mixes(
    mixed: jax.Array, base: jax.Array, scale: jax.Array, iterations: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits mixing values into what a site reads, what it writes, and how the streams are mixed.

    Args:
        mixed: float32 [..., m], ordered n reading, n writing, n*n mixing values.
        base: float32 [m].
        scale: float32 [3], one factor for each of the three groups.
        iterations: Sinkhorn iterations; the first takes its rows from a softmax.
        eps: added to the reading weights, to the softmax, and to every sum that divides.

    Returns:
        pre [..., n], post [..., n], and comb [..., n, n] from source to destination stream, whose columns sum to
        almost 1.
    """
    n = math.isqrt(mixed.shape[-1] + 1) - 1  # m + 1 = (n + 1)^2
    read, write, mix = jnp.split(mixed, [n, 2 * n], axis=-1)
    read_base, write_base, mix_base = jnp.split(base, [n, 2 * n])
    pre = jax.nn.sigmoid(read * scale[0] + read_base) + eps
    post = 2 * jax.nn.sigmoid(write * scale[1] + write_base)
    comb = (mix * scale[2] + mix_base).reshape(*mixed.shape[:-1], n, n)
    return pre, post, sinkhorn(comb, iterations, eps)


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Alternates row and column normalisation, ending with columns: float32 [..., n, n] -> same."""

    def columns(c: jax.Array) -> jax.Array:
        return c / (jnp.sum(c, axis=-2, keepdims=True) + eps)

    def rows_then_columns(_: int, c: jax.Array) -> jax.Array:
        return columns(c / (jnp.sum(c, axis=-1, keepdims=True) + eps))

    first = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.fori_loop(0, iterations - 1, rows_then_columns, first)


def head_weights(mixed: jax.Array, base: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Reading weights where the streams end: float32 [..., n] -> float32 [..., n]."""
    return jax.nn.sigmoid(mixed * scale + base) + eps


def collapse(streams: jax.Array, weights: jax.Array) -> jax.Array:
    """Reads the streams: [..., n, d] and float32 [..., n] -> float32 [..., d]."""
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), axis=-2)


def expand(x: jax.Array, streams: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """Writes a layer's output back: destination k gets post_k x + sum_j comb_jk stream_j; float32 [..., n, d]."""
    mixed = jnp.sum(comb[..., None] * streams.astype(jnp.float32)[..., :, None, :], axis=-3)
    return post[..., None] * x.astype(jnp.float32)[..., None, :] + mixed
