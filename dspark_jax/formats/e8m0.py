"""E8M0: a byte b means 2^(b - 127), 0xFF means NaN; there is neither zero nor sign (OCP Microscaling Formats 1.0).

It only ever appears as the scale of a block of smaller numbers; what is common to all such blocks is here as well.
"""

import numpy as np
from numpy.typing import NDArray

BIAS = 127
NAN = 0xFF
LARGEST_EXPONENT = 127


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 -> float32 of the same shape, exact; byte 0 is 2^-127, a float32 subnormal."""
    return scale(np.ones(codes.shape, np.float32), codes)


def encode(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Exact powers of two from 2^-127 to 2^127, or NaN, as uint8 of the same shape.

    Raises:
        ValueError: a value is neither; the format rounds nothing, a scale is always chosen as an exponent.
    """
    mantissas, exponents = np.frexp(values)  # a power of two is 0.5 * 2^exponent
    is_nan = np.isnan(values)
    representable = is_nan | ((mantissas == 0.5) & (np.abs(exponents - 1) <= LARGEST_EXPONENT))
    if not representable.all():
        raise ValueError(f"{values[~representable].flat[0]} is not a power of two from 2^-127 to 2^127: no E8M0 scale")
    return np.where(is_nan, NAN, exponents - 1 + BIAS).astype(np.uint8)


def scale(values: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 values times the scales of the same shape: exact, infinite above the float32 range, NaN for 0xFF."""
    exponents = codes.astype(np.int32) - BIAS
    with np.errstate(over="ignore"):
        scaled = np.ldexp(values, exponents)
    return np.where(codes == NAN, np.float32(np.nan), scaled)


def spread(codes: NDArray[np.uint8], block: tuple[int, int], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The scale of every element: [..., ceil(out/rows), ceil(in/columns)] -> `shape` [..., out, in]; last blocks cut.

    Raises:
        ValueError: the scales do not form one scale a block.
    """
    *leading, rows, columns = shape
    grid = (*leading, -(-rows // block[0]), -(-columns // block[1]))
    if codes.shape != grid:
        raise ValueError(
            f"a matrix of shape {shape} with one scale for {block[0]} x {block[1]} elements needs scales of shape "
            f"{grid}; these have shape {codes.shape}"
        )
    return np.repeat(np.repeat(codes, block[0], axis=-2), block[1], axis=-1)[..., :rows, :columns]


def choose(weights: NDArray[np.float32], block: tuple[int, int], qmax: float) -> NDArray[np.uint8]:
    """Smallest scales that let every block of `weights` [..., out, in] fit into +-qmax: 2^ceil(log2(amax / qmax)).

    A block of zeros gets the scale 1.

    Returns:
        uint8 [..., ceil(out/rows), ceil(in/columns)]; a last block may be cut.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    rows, columns = weights.shape[-2:]
    amax = np.maximum.reduceat(np.abs(weights), np.arange(0, rows, block[0]), axis=-2)
    amax = np.maximum.reduceat(amax, np.arange(0, columns, block[1]), axis=-1)
    if not np.isfinite(amax).all():
        raise ValueError("weights to quantise must be finite; these hold NaN or infinity")
    # float64 has bits to spare: the quotient rounds to a power of two only where it is one. frexp(0) is (0, 0).
    mantissas, exponents = np.frexp(amax.astype(np.float64) / qmax)
    ceilings = np.where(mantissas == 0.5, exponents - 1, exponents)
    return (np.maximum(ceilings, -LARGEST_EXPONENT) + BIAS).astype(np.uint8)


def divide(values: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 values divided by the scales of the same shape (none of them NaN)."""
    return np.ldexp(values, BIAS - codes.astype(np.int32))
