"""Q4_K of ggml: 256 values in 144 bytes, 8 groups of 32, each value four bits.

Bytes: float16 d, float16 dmin, 12 with six bits for each s_g and m_g, 128 of q. Of the twelve, byte g < 4 holds s_g and
byte g + 4 holds m_g, below two bits of group g + 4: the high ones of s_(g+4) and m_(g+4), whose low nibbles are the low
and the high one of byte g + 8. In each 64 values, byte l of 32 holds the q of values l (low nibble) and l + 32.
"""

import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats import k_quants
from dspark_jax.formats.blocks import from_bytes, map_blocks, to_bytes
from dspark_jax.formats.k_quants import BLOCK

BYTES = 144


def _weights(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Root mean square of the group plus the magnitude."""
    return np.sqrt((x * x).sum(axis=0) / np.float32(len(x))) + np.abs(x)


KIND = k_quants.Kind(group=32, levels=15, largest=63, first=-1.0, trials=21, weights=_weights, distance=np.square)

_SHIFTS = np.array([0, 4], np.uint8)[:, None]


def encode(values: NDArray[np.float32], search: bool = True) -> NDArray[np.uint8]:
    """float32 [..., n] -> uint8 [..., n / 256 * 144]: the bytes of ggml, or with `search=False` plain rounding.

    Raises:
        ValueError: n is no multiple of 256, or a value is not finite or too large for float16 scales.
    """
    return map_blocks(lambda piece: _pack(k_quants.quantise(piece, KIND, search)), values, BLOCK, BYTES, np.uint8)


def decode(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [..., n / 256 * 144] -> float32 [..., n].

    Raises:
        ValueError: the last axis is no whole number of blocks.
    """
    return map_blocks(_decode, blocks, BYTES, BLOCK, np.float32)


def _pack(parts: k_quants.Parts) -> NDArray[np.uint8]:
    (s, s_late), (m, m_late) = np.split(parts.s, 2, axis=1), np.split(parts.m, 2, axis=1)
    shares = [s | s_late >> 4 << 6, m | m_late >> 4 << 6, s_late & 15 | m_late << 4]
    q = np.bitwise_or.reduce(parts.q.reshape(-1, 4, 2, 32) << _SHIFTS, axis=2).reshape(-1, 128)
    return np.concatenate([to_bytes(parts.d), to_bytes(parts.dmin), *shares, q], axis=1)


def _decode(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    d, dmin, early_s, early_m, late, packed = np.split(blocks, [2, 4, 8, 12, 16], axis=1)
    s = np.concatenate([early_s & 63, late & 15 | early_s >> 6 << 4], axis=1)
    m = np.concatenate([early_m & 63, late >> 4 | early_m >> 6 << 4], axis=1)
    q = packed.reshape(-1, 4, 1, 32) >> _SHIFTS & np.uint8(15)
    return k_quants.dequantise(from_bytes(d), from_bytes(dmin), s, m, q.reshape(-1, BLOCK))
