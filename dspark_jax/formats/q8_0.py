"""Q8_0 of ggml: 32 values in 34 bytes, a float16 scale d and 32 signed bytes q; a value is d * q."""

import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats.blocks import from_bytes, map_blocks, to_bytes, to_halves

BLOCK = 32
BYTES = 34
LARGEST = 127


def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 [..., n] -> uint8 [..., n / 32 * 34], the bytes of ggml.

    Values are divided by the scale before it is rounded to float16, and go to the nearest q, halves away from zero.

    Raises:
        ValueError: n is no multiple of 32, or a value is not finite or beyond 127 times the range of float16.
    """
    return map_blocks(_encode, values, BLOCK, BYTES, np.uint8)


def decode(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [..., n / 32 * 34] -> float32 [..., n], exact.

    Raises:
        ValueError: the last axis is no whole number of blocks.
    """
    return map_blocks(_decode, blocks, BYTES, BLOCK, np.float32)


def _encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    amax: NDArray[np.float32] = np.abs(values).max(axis=1)
    scales = amax / np.float32(LARGEST)
    halves = to_halves(scales)
    with np.errstate(divide="ignore", over="ignore"):
        inverses = np.float32(1) / scales
    # The inverse of nearly nothing overflows as that of zero does. The scale is stored as zero then, whatever q is.
    quotients = values * np.where(np.isinf(inverses), np.float32(0), inverses)[:, None]
    whole = np.trunc(quotients)
    away = np.abs(quotients - whole) >= np.float32(0.5)  # exact, as half added to a float32 is not
    q = (whole + np.copysign(away, quotients)).astype(np.int8)
    return np.concatenate([to_bytes(halves), q.view(np.uint8)], axis=1)


def _decode(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return from_bytes(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)
