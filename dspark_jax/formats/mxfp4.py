"""MXFP4: FP4 E2M1 numbers, two a byte, with one power-of-two scale for 32 columns (OCP Microscaling Formats 1.0).

Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6 and codes 8..15 their negatives. Along the input axis the even column 2j lies
in the low nibble and the odd column 2j + 1 in the high one. W[i, j] = value * 2^(scale[i, j // 32] - 127).

GGUF stores the same codes and scales in blocks of 17 bytes for 32 columns: the scale, then 16 bytes of which byte j has
column j in the low nibble and column j + 16 in the high one.
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats import e8m0

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]
BLOCK = (1, 32)
GGUF_BYTES = 17
ALWAYS_FINITE = 252  # the largest scale that keeps +-6 within float32: 6 * 2^125

VALUES = np.array([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], np.float32)
MIDPOINTS = (VALUES[:7] + VALUES[1:8]) / 2


def unpack(packed: NDArray[np.uint8] | NDArray[np.int8]) -> NDArray[np.uint8]:
    """Bytes [..., k/2] -> codes uint8 [..., k] in 0..15. The checkpoint declares the bytes signed; both are taken."""
    unsigned = packed.view(np.uint8)  # a shift of the signed byte would drag its sign along
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = unsigned % 16
    codes[..., 1::2] = unsigned // 16
    return codes


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes uint8 [..., k] in 0..15, k even -> bytes uint8 [..., k/2]; the inverse of `unpack`."""
    if codes.shape[-1] % 2:
        raise ValueError(f"two codes go into a byte, so the last axis must be even; its length is {codes.shape[-1]}")
    return codes[..., 0::2] + np.uint8(16) * codes[..., 1::2]


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Codes uint8 in 0..15 -> float32 of the same shape, exact."""
    return VALUES[codes]


def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 -> codes uint8 in 0..15 of the same shape: to nearest, ties to even, saturating at +-6.

    Raises:
        ValueError: a value is NaN, for which the format has no code.
    """
    if np.isnan(values).any():
        raise ValueError("NaN has no FP4 code")
    return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def dequantise(packed: NDArray[np.uint8] | NDArray[np.int8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Packed matrix -> float32 [..., out, in], exact.

    Args:
        packed: bytes [..., out, in/2].
        scales: uint8 e8m0 [..., out, ceil(in/32)].
    """
    values = decode(unpack(packed))
    return e8m0.scale(values, e8m0.spread(scales, BLOCK, values.shape))


def finite(packed: NDArray[np.uint8] | NDArray[np.int8], scales: NDArray[np.uint8]) -> bool:
    """Whether every value that `dequantise` gives is finite; decodes only rows whose scales leave that open."""
    rows = (scales > ALWAYS_FINITE).any(axis=-1)
    return bool(np.isfinite(dequantise(packed[rows], scales[rows])).all())


def quantise(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """float32 [..., out, in], in even -> packed [..., out, in/2] and e8m0 scales [..., out, ceil(in/32)].

    Raises:
        ValueError: a weight is NaN or infinite, or the last axis is odd.
    """
    scales = e8m0.choose(weights, BLOCK, LARGEST)
    return pack(encode(e8m0.divide(weights, e8m0.spread(scales, BLOCK, weights.shape)))), scales


def quantise_as_ggml(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """`quantise` by the rule of ggml: the scale is 2^(floor(log2(amax)) - 2), so that what exceeds 6 becomes 6.

    Ties go to the smaller magnitude, zero has no sign, and a block of zeros has the scale byte 0.

    Args:
        weights: float32 [..., out, in], in a multiple of 32.

    Raises:
        ValueError: a weight is NaN or infinite, or the last axis is no multiple of 32.
    """
    *leading, length = weights.shape
    if length % BLOCK[1]:
        raise ValueError(f"a row of {length} float32 elements is no whole number of blocks of {BLOCK[1]}")
    blocks = weights.reshape(*leading, length // BLOCK[1], BLOCK[1])
    amax = np.abs(blocks).max(axis=-1)
    if not np.isfinite(amax).all():
        raise ValueError("weights to quantise must be finite; these hold NaN or infinity")
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(amax)) - 2 + e8m0.BIAS
    # Below 2^-125 the byte wraps around to scales so large that every code is 0.
    scales = np.where(amax > 0, exponents, np.float32(0)).astype(np.int32).astype(np.uint8)
    values = e8m0.divide(blocks, np.broadcast_to(scales[..., None], blocks.shape))
    magnitudes = np.searchsorted(MIDPOINTS, np.abs(values), side="left").astype(np.uint8)
    codes = np.where((values < 0) & (magnitudes > 0), magnitudes + np.uint8(8), magnitudes)
    return pack(codes.reshape(weights.shape)), scales


def to_gguf(packed: NDArray[np.uint8] | NDArray[np.int8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packed matrix -> blocks of GGUF, uint8 [..., in / 32 * 17]: every code and scale as it is.

    Args:
        packed: bytes [..., in/2], in a multiple of 32.
        scales: uint8 e8m0 [..., in/32].

    Raises:
        ValueError: there is not one scale for 16 bytes.
    """
    half = BLOCK[1] // 2
    if packed.shape != (*scales.shape[:-1], half * scales.shape[-1]):
        raise ValueError(f"packed bytes of shape {packed.shape} need a scale for {half}; there are {scales.shape}")
    codes = unpack(packed).reshape(*scales.shape, 2, half)
    blocks = np.concatenate([scales[..., None], codes[..., 0, :] + np.uint8(16) * codes[..., 1, :]], axis=-1)
    return blocks.reshape(*scales.shape[:-1], GGUF_BYTES * scales.shape[-1])


def from_gguf(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blocks uint8 [..., in / 32 * 17] -> packed [..., in/2] and scales [..., in/32], the inverse of `to_gguf`.

    Raises:
        ValueError: the last axis is no whole number of blocks.
    """
    *leading, length = blocks.shape
    if length % GGUF_BYTES:
        raise ValueError(f"a row of {length} bytes is no whole number of blocks of {GGUF_BYTES}")
    in_blocks = blocks.reshape(*leading, length // GGUF_BYTES, GGUF_BYTES)
    scales, halves = in_blocks[..., 0], in_blocks[..., 1:]
    codes = np.concatenate([halves % 16, halves // 16], axis=-1).reshape(*leading, BLOCK[1] * scales.shape[-1])
    return pack(codes), scales.copy()
