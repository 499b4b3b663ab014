"""Rows of blocks, as GGUF stores them: so many values next to each other become so many bytes, a block at a time."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

PIECE = 1 << 18
"""Values, or bytes, that a thread works on at once: so many that threads seldom wait for the interpreter's lock, taken
between operations of NumPy, and so few that a dozen operands stay in the cache."""


def map_blocks(
    function: Callable[[NDArray[Any]], NDArray[Any]], rows: NDArray[Any], before: int, after: int, dtype: DTypeLike
) -> NDArray[Any]:
    """Replaces every block along the last axis, in pieces that stay in the cache, on all cores.

    Args:
        function: [blocks, before] -> [blocks, after]; runs in threads, for NumPy lets go of the interpreter.
        rows: [..., n].
        before: elements of a block in `rows`.
        after: elements of a block in the result.
        dtype: of the result.

    Returns:
        [..., n / before * after].

    Raises:
        ValueError: n is no multiple of `before`, or `function` raises it.
    """
    *leading, length = rows.shape
    if length % before:
        raise ValueError(f"a row of {length} {rows.dtype} elements is no whole number of blocks of {before}")
    blocks = rows.reshape(-1, before)
    result = np.empty((len(blocks), after), dtype)
    step = PIECE // max(before, after)

    def work(start: int) -> None:
        piece = slice(start, start + step)
        result[piece] = function(blocks[piece])

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for _ in threads.map(work, range(0, len(blocks), step)):
            pass  # but raise what a piece raised
    return result.reshape(*leading, length // before * after)


def to_halves(scales: NDArray[np.float32]) -> NDArray[np.float16]:
    """Scales of blocks in float16, to nearest.

    Raises:
        ValueError: one is NaN or beyond the range; a block of it would decode to NaN.
    """
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.isfinite(halves).all():
        worst = scales[~np.isfinite(halves)][0]
        raise ValueError(f"a block needs the scale {worst}, but float16 ends at 65504; give finite and smaller values")
    return halves


def to_bytes(halves: NDArray[np.float16]) -> NDArray[np.uint8]:
    """float16 [blocks] -> uint8 [blocks, 2], little endian."""
    return halves.astype("<f2")[:, None].view(np.uint8)


def from_bytes(pairs: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [blocks, 2], the bytes of little-endian float16 -> float32 [blocks, 1]."""
    return np.ascontiguousarray(pairs).view("<f2").astype(np.float32)
