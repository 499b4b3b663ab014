"""Quantisations of activations that are simulated, and the rotation before the coarsest one.

Source: spec of the official kernels: per block of channels the scale is the power of two 2^ceil(log2(max|x| / qmax)),
values are rounded to nearest even in the small format, and what goes on is value times scale. The derivative is that
of no quantisation.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.number_formats import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    power_of_two_scale_exponent,
)
from pallas_kernels.precision import straight_through

LINEAR_BLOCK = 128
"""Channels of one scale in what packed matrices see."""

_RECIPROCAL_E4M3_MAX = np.float32(1 / 448)
_RECIPROCAL_E2M1_MAX = np.float32(1 / 6)
_E4M3_FLOOR = np.float32(1e-4)
_E2M1_FLOOR = np.float32(6 * 2.0**-126)


def quantise_e4m3(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """E4M3 values and their scales: float [..., c] -> float32 [..., c] on the grid, float32 [..., ceil(c/block)]."""
    blocks = _blocks(x, block)
    scale = _scale(blocks, _E4M3_FLOOR, _RECIPROCAL_E4M3_MAX)
    values = decode_e4m3(encode_e4m3(blocks / scale))
    return _flat(values, x.shape), scale[..., 0]


def fake_e4m3(x: jax.Array, block: int) -> jax.Array:
    """`x` after E4M3 quantisation with one scale for `block` channels of the last axis; same dtype as `x` (exact)."""

    def rounding(x: jax.Array) -> jax.Array:
        values, scale = quantise_e4m3(x, block)
        return _flat(_blocks(values, block) * scale[..., None], x.shape).astype(x.dtype)

    return straight_through(rounding, x)


def fake_e2m1(x: jax.Array, block: int) -> jax.Array:
    """`x` after E2M1 quantisation with one scale for `block` channels of the last axis; same dtype as `x` (exact)."""

    def rounding(x: jax.Array) -> jax.Array:
        blocks = _blocks(x, block)
        scale = _scale(blocks, _E2M1_FLOOR, _RECIPROCAL_E2M1_MAX)
        return _flat(decode_e2m1(encode_e2m1(blocks / scale)) * scale, x.shape).astype(x.dtype)

    return straight_through(rounding, x)


def hadamard(x: jax.Array) -> jax.Array:
    """Orthonormal Walsh-Hadamard transform of the last axis (a power of two), Sylvester order; float32."""
    width = x.shape[-1]
    y = x.astype(jnp.float32)
    half = 1
    while half < width:
        pairs = y.reshape(*x.shape[:-1], width // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        half *= 2
    return y * np.float32(width**-0.5)


def _scale(blocks: jax.Array, floor: np.float32, reciprocal_qmax: np.float32) -> jax.Array:
    largest = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), floor)
    exponent = power_of_two_scale_exponent(largest, jnp.float32(reciprocal_qmax))
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)  # both floors keep it a normal number


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """float32 [..., ceil(c/block), block]; a ragged last block is filled with zeros, which change no maximum."""
    missing = -x.shape[-1] % block
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return padded.reshape(*x.shape[:-1], -1, block)


def _flat(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return blocks.reshape(*shape[:-1], -1)[..., : shape[-1]]
