"""FP8 E4M3FN and matrices of it with one power-of-two scale for 128 x 128 elements.

Bias 7, largest value 448, no infinity, 0x7F and 0xFF are NaN. W[i, j] = value * 2^(scale[i // 128, j // 128] - 127).
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats import e8m0

LARGEST = 448.0
NAN = 0x7F
BLOCK = (128, 128)


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 -> float32 of the same shape, exact."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 -> uint8 of the same shape: to nearest, ties to even, saturating at +-448; NaN -> 0x7F."""
    is_nan = np.isnan(values)
    # The cast alone turns what exceeds 464 into NaN, and warns of a signalling NaN.
    numbers = np.clip(np.where(is_nan, np.float32(0), values), -LARGEST, LARGEST)
    codes = numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(is_nan, np.uint8(NAN), codes)


def dequantise(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], block: tuple[int, int] = BLOCK
) -> NDArray[np.float32]:
    """Block-scaled matrix -> float32 [..., out, in], exact.

    Args:
        codes: uint8 [..., out, in].
        scales: uint8 e8m0 [..., ceil(out/rows), ceil(in/columns)] for `block` = (rows, columns).
    """
    return e8m0.scale(decode(codes), e8m0.spread(scales, block, codes.shape))


def quantise(
    weights: NDArray[np.float32], block: tuple[int, int] = BLOCK
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """float32 [..., out, in] -> codes [..., out, in] and e8m0 scales; the inverse of `dequantise` up to rounding.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    scales = e8m0.choose(weights, block, LARGEST)
    return encode(e8m0.divide(weights, e8m0.spread(scales, block, weights.shape))), scales
