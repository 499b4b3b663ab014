"""What Q2_K and Q4_K of ggml have in common: 256 values, cut into groups that each have a scale and a minimum.

A value of group g is d * s_g * q - dmin * m_g: float16 numbers d and dmin for all, small integers s_g and m_g for the
group, and q for the value. Groups stand in columns here, [values of a group, groups], for ggml adds up a group from
left to right in float32: a sum over the first axis adds rows in their order, and the bytes are those of ggml (built
without fused multiply-add, as for any x86-64).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats.blocks import to_halves

BLOCK = 256

ROUNDING = np.float32(1.5 * 2**23)
MANTISSA, ZERO = np.int32(2**23 - 1), np.int32(2**22)
"""Of float32: see `_nearest`."""

type Floats = NDArray[np.float32]


class Grid(NamedTuple):
    """Where the values of a group may lie: low + scale * (0, 1, ..., levels).

    Attributes:
        scale: float32 [groups].
        low: float32 [groups], at most 0.
        origin, inverse: float32 [groups], of the rounding that chose it: q was (value - origin) * inverse.
    """

    scale: Floats
    low: Floats
    origin: Floats
    inverse: Floats


@dataclass(frozen=True)
class Kind:
    """One of the two formats.

    Attributes:
        group: values of a group.
        levels: the largest q.
        largest: the largest s_g and m_g.
        first: of the search, what the first trial stretches `levels` by; every next one adds 0.1.
        trials: how many there are.
        weights: of the search, [group, groups] of values -> weights of the errors.
        distance: of the search, errors -> what a weight multiplies.
    """

    group: int
    levels: int
    largest: int
    first: float
    trials: int
    weights: Callable[[Floats], Floats]
    distance: Callable[[Floats], Floats]


class Parts(NamedTuple):
    """Blocks taken apart: float16 d and dmin [blocks], uint8 s and m [blocks, groups], uint8 q [blocks, 256]."""

    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
    s: NDArray[np.uint8]
    m: NDArray[np.uint8]
    q: NDArray[np.uint8]


def quantise(values: Floats, kind: Kind, search: bool) -> Parts:
    """float32 [blocks, 256] -> the parts of blocks.

    With the search a group's grid is the best of many by a weighted error, and s, m are rounded against the scales as
    they were found: what ggml does where nothing tells it which values matter. Without, a grid spans its values and
    zero, and s, m are rounded against d and dmin as they are stored.

    Raises:
        ValueError: a value is not finite, or so large that d or dmin is not.
    """
    x = np.ascontiguousarray(values.reshape(-1, kind.group).T)
    with np.errstate(all="ignore"):  # a group of equal or nearly equal values divides by zero: its q are 0
        grid = searched(x, kind) if search else spanning(x, kind)
        scales, minima = (part.reshape(len(values), -1) for part in (grid.scale, -grid.low))
        d, s = _share(scales, kind, stored=not search)
        dmin, m = _share(minima, kind, stored=not search)
        steps, offsets = ((half.astype(np.float32)[:, None] * index).reshape(-1) for half, index in ((d, s), (dmin, m)))
        rounded = np.where(steps == 0, (x - grid.origin) * grid.inverse, (x + offsets) / steps)
        q = _nearest(rounded, kind.levels)
    return Parts(d, dmin, s, m, q.T.astype(np.uint8).reshape(-1, BLOCK))


def dequantise(d: Floats, dmin: Floats, s: NDArray[np.uint8], m: NDArray[np.uint8], q: NDArray[np.uint8]) -> Floats:
    """float32 d and dmin [blocks, 1], uint8 s and m [blocks, groups], q [blocks, 256] -> float32 [blocks, 256]."""
    in_groups = q.reshape(*s.shape, -1)
    return ((d * s)[..., None] * in_groups - (dmin * m)[..., None]).reshape(-1, BLOCK)


def spanning(x: Floats, kind: Kind) -> Grid:
    """The grid from the least value or zero to the greatest or zero."""
    low, high = np.minimum(x.min(axis=0), np.float32(0)), np.maximum(x.max(axis=0), np.float32(0))
    span: Floats = high - low
    return Grid(span / np.float32(kind.levels), low, low, np.zeros_like(low))


def searched(x: Floats, kind: Kind) -> Grid:
    """The best of the grid that spans the values and of least-squares fits to roundings by stretched grids.

    Each improvement moves the lower end from which the next trials stretch, so that the order of the trials matters.
    """
    weights = kind.weights(x)
    weight, moment = weights.sum(axis=0), (weights * x).sum(axis=0)
    high, low = x.max(axis=0), np.minimum(x.min(axis=0), np.float32(0))
    inverse = np.float32(kind.levels) / (high - low)
    scale = np.float32(1) / inverse
    best = Grid(scale, low, low, inverse)
    error = _error(x, weights, _nearest(inverse * (x - low), kind.levels), scale, low, kind)
    for trial in range(kind.trials):
        stretched = np.float32(kind.first) + np.float32(0.1) * np.float32(trial) + np.float32(kind.levels)
        inverse = stretched / (high - best.low)
        q = _nearest(inverse * (x - best.low), kind.levels)
        scale, low, determined = _fit(x, weights, q, weight, moment)
        trial_error = _error(x, weights, q, scale, low, kind)
        better = determined & (trial_error < error)
        error = np.where(better, trial_error, error)
        found = Grid(scale, low, best.low, inverse)
        best = Grid(*(np.where(better, new, old) for new, old in zip(found, best, strict=True)))
    return best


def _fit(
    x: Floats, weights: Floats, q: Floats, weight: Floats, moment: Floats
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Weighted least squares: scale and low <= 0 for which scale * q + low is nearest to x, and where they exist."""
    weighted = weights * q
    sum_q, sum_qq, sum_qx = weighted.sum(axis=0), (weighted * q).sum(axis=0), (weighted * x).sum(axis=0)
    determinant = weight * sum_qq - sum_q * sum_q
    low = (sum_qq * moment - sum_q * sum_qx) / determinant
    scale = np.where(low > 0, sum_qx / sum_qq, (weight * sum_qx - moment * sum_q) / determinant)
    return scale, np.minimum(low, np.float32(0)), determinant > 0


def _error(x: Floats, weights: Floats, q: Floats, scale: Floats, low: Floats, kind: Kind) -> Floats:
    difference = scale * q
    difference += low
    difference -= x
    distance = kind.distance(difference)
    distance *= weights
    return distance.sum(axis=0)


def _nearest(values: Floats, largest: int) -> Floats:
    """The nearest of 0..largest, halves to even; as ggml computes it: 0 for NaN and infinity, meaningless from 2^22 on.

    Adding 1.5 * 2^23 rounds to an integer, and leaves it in the mantissa as the distance from 2^22.
    """
    bits = (values + ROUNDING).view(np.int32)
    bits &= MANTISSA
    np.clip(bits, ZERO, ZERO + np.int32(largest), out=bits)
    bits -= ZERO
    return bits.astype(np.float32)


def _share(scales: Floats, kind: Kind, stored: bool) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Scales [blocks, groups] >= 0 -> a float16 unit [blocks], and how many units each is nearest to, 0..largest.

    They are counted in the unit as it is stored, or as it was before it was rounded to float16.
    """
    most = scales.max(axis=1)
    most = np.where(most <= 0, np.float32(0), most)  # which may be -0, or NaN for `to_halves` to refuse
    largest = np.float32(kind.largest)
    unit = to_halves(most / largest)
    shares = scales / unit.astype(np.float32)[:, None] if stored else (largest / most)[:, None] * scales
    return unit, _nearest(shares, kind.largest).astype(np.uint8)
