"""What instructions of PTX do with registers, in all threads at once and in the words of the manual.

Registers are bits, uint16, uint32 or uint64 [threads]; predicates are bool.
"""

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def unsigned(function: Callable[..., np.ndarray], kind: Any = np.uint32) -> Callable[..., np.ndarray]:
    """An operation on integers, of which the lowest bits are kept."""
    return lambda *values: function(*(value.astype(kind, copy=False) for value in values)).astype(kind, copy=False)


def signed(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on integers of 32 bits, with a result of 64."""
    return lambda *values: function(*(word(value).view(np.int32).astype(np.int64) for value in values)).view(np.uint64)


def floating(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on float32, exact before it is rounded."""

    def run(*values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(*(small(value).astype(np.float64) for value in values)).astype(np.float32).view(np.uint32)

    return run


def compare(function: Callable[..., np.ndarray], kind: Any = np.uint32) -> Callable[..., np.ndarray]:
    return lambda a, b: function(word(a).view(kind), word(b).view(kind))


def word(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32, copy=False)


def small(values: np.ndarray) -> np.ndarray:
    return word(values).view(np.float32)


def halves(values: np.ndarray) -> np.ndarray:
    return word(values)[:, None].view(np.uint16)


def decode_pair(codes: np.ndarray) -> np.ndarray:
    return codes[:, None].view(E4M3).astype(np.float16).view(np.uint32)[:, 0]


def encode_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    values = np.stack([small(low), small(high)], axis=1)
    with np.errstate(invalid="ignore"):
        return np.clip(values, -448, 448).astype(E4M3).view(np.uint16)[:, 0]


def largest_pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of magnitudes, with the product of the signs; NaN if one is."""
    a, b = halves(a), halves(b)
    magnitude = np.maximum(a & 0x7FFF, b & 0x7FFF)
    return np.where(magnitude > 0x7F80, 0x7FFF, magnitude | (a ^ b) & 0x8000).astype(np.uint16).view(np.uint32)[:, 0]


def paired(function: Callable[..., np.ndarray], kind: Any) -> Callable[..., np.ndarray]:
    """An operation on pairs of 16-bit numbers, exact before they are rounded."""

    def run(*values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return (
                function(*(halves(v).view(kind).astype(np.float64) for v in values)).astype(kind).view(np.uint32)[:, 0]
            )

    return run


def round_pair(kind: Any) -> Callable[..., np.ndarray]:
    def run(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.stack([small(low), small(high)], axis=1).astype(kind).view(np.uint32)[:, 0]

    return run


def by_table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """lop3: bit 4a + 2b + c of the table, for each bit of the operands."""
    rows = [row for row in range(8) if table[0] >> row & 1]
    return functools.reduce(
        np.bitwise_or, [(a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c) for row in rows]
    )


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "mov.u32": unsigned(lambda a: a),
    "mov.b32": unsigned(lambda a: a),
    "cvt.u32.u16": unsigned(lambda a: a),
    "cvt.u64.u32": unsigned(lambda a: a, np.uint64),
    "add.u32": unsigned(np.add),
    "add.u64": unsigned(np.add, np.uint64),
    "sub.u32": unsigned(np.subtract),
    "mul.lo.u32": unsigned(np.multiply),
    "div.u32": unsigned(np.floor_divide),
    "rem.u32": unsigned(np.remainder),
    "and.b32": unsigned(np.bitwise_and),
    "or.b32": unsigned(np.bitwise_or),
    "xor.b32": unsigned(np.bitwise_xor),
    "lop3.b32": unsigned(by_table),
    "shl.b32": unsigned(np.left_shift),
    "shr.u32": unsigned(np.right_shift),
    "popc.b32": unsigned(np.bitwise_count),
    "max.u32": unsigned(np.maximum),
    "min.u32": unsigned(np.minimum),
    "mad.lo.u32": unsigned(lambda a, b, c: a * b + c),
    "mad.wide.u32": unsigned(lambda a, b, c: a * b + c, np.uint64),
    "mul.wide.u32": unsigned(np.multiply, np.uint64),
    "mul.wide.s32": signed(np.multiply),
    "bfe.u32": unsigned(lambda a, b, c: a >> b & ((np.uint32(1) << c) - np.uint32(1))),
    "max.u16x2": lambda a, b: np.maximum(halves(a), halves(b)).view(np.uint32)[:, 0],
    "max.NaN.xorsign.abs.bf16x2": largest_pair,
    "mul.rn.bf16x2": paired(np.multiply, BF16),
    "sub.rn.bf16x2": paired(np.subtract, BF16),
    "selp.b32": lambda a, b, flag: np.where(flag, a, b).astype(np.uint32),
    "and.pred": np.logical_and,
    "setp.ne.b32": compare(np.not_equal),
    "setp.ne.u32": compare(np.not_equal),
    "setp.eq.u32": compare(np.equal),
    "setp.ge.u32": compare(np.greater_equal),
    "setp.lt.u32": compare(np.less),
    "setp.ge.s32": compare(np.greater_equal, np.int32),
    "setp.lt.s32": compare(np.less, np.int32),
    "add.f32": floating(np.add),
    "mul.f32": floating(np.multiply),
    "mul.rn.f32": floating(np.multiply),
    "max.f32": floating(np.fmax),
    "max.NaN.f32": floating(np.maximum),
    "min.NaN.f32": floating(np.minimum),
    "fma.rn.f32": floating(lambda a, b, c: a * b + c),
    "ex2.approx.f32": floating(np.exp2),
    "div.full.f32": floating(np.divide),
    "cvt.f32.f16": lambda a: a.view(np.float16).astype(np.float32).view(np.uint32),
    "cvt.rn.bf16.f32": lambda a: small(a).astype(BF16).view(np.uint16),
    "cvt.rn.bf16x2.f32": round_pair(BF16),
    "cvt.rn.f16x2.e4m3x2": decode_pair,
    "cvt.rn.f16x2.f32": round_pair(np.float16),
    "cvt.rn.satfinite.e4m3x2.f32": encode_pair,
}
