"""Whether float32 values survive in two bytes: nothing here rounds, so that a writer can refuse instead."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def fits_bfloat16(values: NDArray[np.float32]) -> bool:
    """Whether every value is a finite bfloat16 number, subnormals included.

    Block-scaled E4M3 values (`e4m3.dequantise`) are, as long as the scales of all but zeros stay in range: at least
    2^-124 for the smallest value, at most 2^119 for the largest; outside, float32 gets lower bits or infinity.
    """
    return bool(np.isfinite(values).all() and not (values.view(np.uint32) & np.uint32(0xFFFF)).any())


class Float16Range(NamedTuple):
    """How many values float16 has no number near.

    Attributes:
        overflow: of them, would become infinite (65520 and above), or are not finite.
        vanish: are not zero, and would become zero (2^-25 and below).
    """

    overflow: int
    vanish: int


def float16_range(values: NDArray[Any]) -> Float16Range:
    """Of float32 or bfloat16 values of any shape, what lies outside the range of float16."""
    if values.dtype not in (np.float32, ml_dtypes.bfloat16):
        raise TypeError(f"values are {values.dtype}; expected float32 or bfloat16")
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    overflow = ~np.isfinite(halves)
    vanish = (halves == 0) & (values != 0)
    return Float16Range(int(overflow.sum()), int(vanish.sum()))
