"""Q2_K of ggml: 256 values in 84 bytes, 16 groups of 16, each value two bits.

Bytes: 16 of which the low nibble is s_g and the high one m_g, 64 of q, float16 d, float16 dmin. In each half of 128
values, byte l of 32 holds the q of values l, l + 32, l + 64 and l + 96, from the low bits up.
"""

import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats import k_quants
from dspark_jax.formats.blocks import from_bytes, map_blocks, to_bytes
from dspark_jax.formats.k_quants import BLOCK

BYTES = 84
KIND = k_quants.Kind(group=16, levels=3, largest=15, first=-0.5, trials=16, weights=np.abs, distance=np.abs)

_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def encode(values: NDArray[np.float32], search: bool = True) -> NDArray[np.uint8]:
    """float32 [..., n] -> uint8 [..., n / 256 * 84]: the bytes of ggml, or with `search=False` plain rounding.

    The plain one takes a hundredth of the time, and its error is a tenth larger.

    Raises:
        ValueError: n is no multiple of 256, or a value is not finite or too large for float16 scales.
    """
    return map_blocks(lambda piece: _pack(k_quants.quantise(piece, KIND, search)), values, BLOCK, BYTES, np.uint8)


def decode(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [..., n / 256 * 84] -> float32 [..., n].

    Raises:
        ValueError: the last axis is no whole number of blocks.
    """
    return map_blocks(_decode, blocks, BYTES, BLOCK, np.float32)


def _pack(parts: k_quants.Parts) -> NDArray[np.uint8]:
    quarters = parts.q.reshape(-1, 2, 4, 32) << _SHIFTS
    q = np.bitwise_or.reduce(quarters, axis=2).reshape(-1, 64)
    return np.concatenate([parts.s + 16 * parts.m, q, to_bytes(parts.d), to_bytes(parts.dmin)], axis=1)


def _decode(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    shares, packed, d, dmin = np.split(blocks, [16, 80, 82], axis=1)
    q = packed.reshape(-1, 2, 1, 32) >> _SHIFTS & np.uint8(3)
    return k_quants.dequantise(from_bytes(d), from_bytes(dmin), shares % 16, shares // 16, q.reshape(-1, BLOCK))
