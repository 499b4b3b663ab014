"""What `bench_kernel` times: an operation at a shape, its operands, its bytes, and what is right.

A call of a chain has operands of its own, so that no cache serves two calls. A chain is unrolled: a loop would have to
cut each call's matrices out of a stack, a copy; experts stay in one stack, out of which kernels pick by number.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.block_scaled import BLOCKS, BlockScaled, Format
from pallas_kernels.implementation import Implementation
from pallas_kernels.number_formats import E4M3_NAN, E8M0_BIAS

Operation = Literal["mxfp4-gate-up", "mxfp4-down", "mxfp4-experts", "fp8-linear", "hyper-connection"]
"""Names on the command line."""

Shape = tuple[int, int]
"""[out, in] of a matrix."""


@dataclass(frozen=True)
class Case(ABC):
    """An operation at a shape. Inputs, outputs and operands are pytrees whose kind is the operation's own.

    Attributes:
        operation: its name.
        rows: token rows; where there are experts, of each live one.
    """

    operation: ClassVar[Operation]

    rows: int

    @property
    @abstractmethod
    def bytes(self) -> int:
        """What a call must read (and write, where that counts)."""

    @property
    def peer_shapes(self) -> tuple[Shape, ...]:
        """[out, in] of dense MXFP4 matrices of as many bytes, one product after the other; () if there are none."""
        return ()

    @abstractmethod
    def draw(self, key: jax.Array, calls: int) -> tuple[Any, tuple[Any, ...]]:
        """Random input of the first call, and operands of every call."""

    @abstractmethod
    def apply(self, x: Any, operands: Any, implementation: Implementation) -> Any:
        """The operation as it is timed.

        Raises:
            ValueError: this implementation does not take these operands.
        """

    @abstractmethod
    def reference(self, x: Any, operands: Any) -> Any:
        """What is right: float32 to float32, so that nothing is rounded on the way."""

    def next_input(self, x: Any, y: Any) -> Any:
        """The input of the call after the one that made `y` of `x`."""
        return waiting(x, y)

    def to_dict(self) -> dict[str, Any]:
        """The operation, its shape and its bytes as JSON values."""
        shape = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "config"}
        return {"operation": self.operation} | shape | {"bytes": self.bytes}


def waiting(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x`, but that it has to wait for the whole of `y`."""
    x, y = jax.lax.optimization_barrier((x, y))
    first = jax.lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape((1,) * x.ndim)
    return jax.lax.optimization_barrier(x + (first.astype(jnp.float32) * 1e-6).astype(x.dtype))


# Packed matrices -----------------------------------------------------------------------------------------------------

_PER_BYTE: dict[Format, int] = {"e4m3": 1, "e2m1": 2}
_ROOT_MEAN_SQUARE: dict[Format, float] = {"e4m3": 120.0, "e2m1": 2.9}  # of all codes but NaN
_SCALE_STEPS = 3  # a block's scale is up to 2^3 above or below that of a matrix which keeps the size of its input


def stored_bytes(format: Format, shape: Shape) -> int:
    """Of payload and scales of a matrix."""
    rows, columns = BLOCKS[format]
    return math.prod(shape) // _PER_BYTE[format] + -(-shape[0] // rows) * -(-shape[1] // columns)


def draw_matrix(key: jax.Array, format: Format, shape: tuple[int, ...]) -> BlockScaled:
    """Every code but NaN, under scales with which rows of unit size get products of a few units."""
    *leading, out, columns = shape
    for_codes, for_scales = jax.random.split(key)
    codes = jax.random.bits(for_codes, (*leading, out, columns // _PER_BYTE[format]), jnp.uint8)
    if format == "e4m3":
        codes = jnp.where(codes & E4M3_NAN == E4M3_NAN, codes ^ 1, codes)
    block_rows, block_columns = BLOCKS[format]
    grid = (*leading, -(-out // block_rows), -(-columns // block_columns))
    middle = E8M0_BIAS - round(math.log2(_ROOT_MEAN_SQUARE[format] * math.sqrt(columns)))
    steps = jax.random.randint(for_scales, grid, -_SCALE_STEPS, _SCALE_STEPS + 1, jnp.int8)
    return BlockScaled(codes, (steps.astype(jnp.int32) + middle).astype(jnp.uint8), format)
