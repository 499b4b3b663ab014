"""MXFP4: FP4 E2M1 numbers, two a byte, with one power-of-two scale for 32 columns (OCP Microscaling Formats 1.0).

Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6 and codes 8..15 their negatives. Along the input axis the even column 2j lies
in the low nibble and the odd column 2j + 1 in the high one. W[i, j] = value * 2^(scale[i, j // 32] - 127).
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats import e8m0

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]
BLOCK = (1, 32)

VALUES = np.array([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], np.float32)


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


def quantise(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """float32 [..., out, in], in even -> packed [..., out, in/2] and e8m0 scales [..., out, ceil(in/32)].

    Raises:
        ValueError: a weight is NaN or infinite, or the last axis is odd.
    """
    scales = e8m0.choose(weights, BLOCK, LARGEST)
    return pack(encode(e8m0.divide(weights, e8m0.spread(scales, BLOCK, weights.shape)))), scales
