"""Packed weight matrices as they lie in the checkpoint: small codes and one power-of-two scale a block.

A matrix W [out, in] is stored as `payload` and `scales`, both uint8, and means W[i, j] = value * 2^(scale - 127):

* "e4m3": `payload` [out, in] holds one FP8 code a byte; `scales` [ceil(out/128), ceil(in/128)] one e8m0 byte for every
  128 x 128 block. Where a size is no multiple of 128 the last block is cut.
* "e2m1": `payload` [out, in/2] holds two FP4 codes a byte along the input axis, the even column 2j in the low nibble
  and the odd column 2j + 1 in the high one; `scales` [out, ceil(in/32)] one e8m0 byte for 32 columns of a row (MXFP4).

Stacked matrices (experts) put the same leading axes before both. Nothing is repacked between the file and the matmul.

A matrix that is being trained is a `Master`: float32 values that are read as what `encode` would store of them, so that
the stored matrix is the one that was trained. A matrix in the place of a packed one, with values that neither format
has, is `Unpacked`. Products take any of the three.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.number_formats import (
    E8M0_BIAS,
    FLOAT32_MANTISSA_BITS,
    decode_scaled_e2m1,
    decode_scaled_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    power_of_two_scale_exponent,
    unpack_nibbles,
)
from pallas_kernels.precision import contract, straight_through

Format = Literal["e4m3", "e2m1"]

BLOCKS: dict[Format, tuple[int, int]] = {"e4m3": (128, 128), "e2m1": (1, 32)}
_ENCODERS = {"e4m3": encode_e4m3, "e2m1": encode_e2m1}
_DECODERS = {"e4m3": decode_scaled_e4m3, "e2m1": decode_scaled_e2m1}
_LARGEST: dict[Format, float] = {"e4m3": 448.0, "e2m1": 6.0}
_SMALLEST_SCALE = 2.0**-126  # smaller scales are subnormal in float32, which a CPU takes for zero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaled:
    """A matrix [..., out, in] in a block-scaled format. A pytree: its leaves are the two arrays (or abstract ones).

    Attributes:
        payload: uint8 codes; e4m3: [..., out, in]; e2m1: [..., out, in/2], two a byte.
        scales: uint8 e8m0; e4m3: [..., ceil(out/128), ceil(in/128)]; e2m1: [..., out, ceil(in/32)].
        format: which of the two layouts; static.
    """

    payload: jax.Array
    scales: jax.Array
    format: Format = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in], in numbers, not bytes."""
        *leading, columns = self.payload.shape
        return (*leading, 2 * columns if self.format == "e2m1" else columns)

    def decode(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The matrix as numbers, [..., out, in].

        Exact in float32, then rounded to `dtype`. bfloat16 is exact too within its normal range: a product of the
        formats has at most four significant bits.

        Raises:
            ValueError: the scales do not form one scale a block.
        """
        codes = unpack_nibbles(self.payload) if self.format == "e2m1" else self.payload
        return _decode(codes, self.scales, self.format).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Master:
    """A block-scaled matrix in training. A pytree with one leaf.

    Attributes:
        values: float32 [..., out, in], what the optimiser moves.
        format: that it is read in; static, None to read the values as they are.
    """

    values: jax.Array
    format: Format | None = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        return self.values.shape

    def decode(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """What `encode` stores, as numbers [..., out, in]; its derivative is that of the values themselves."""
        format = self.format
        if format is None:
            return self.values.astype(dtype)
        return straight_through(lambda values: _decode(*_encode(values, format), format), self.values).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unpacked:
    """A frozen matrix as plain numbers. A pytree with one leaf.

    Attributes:
        values: float32 or bfloat16 [..., out, in].
    """

    values: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        return self.values.shape

    def decode(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The matrix as numbers of `dtype`, [..., out, in]."""
        return self.values.astype(dtype)


Matrix = BlockScaled | Master | Unpacked


def encode(values: jax.Array, format: Format) -> BlockScaled:
    """float32 [..., out, in] in a block-scaled format, every value to the nearest, ties to even.

    A block's scale is the smallest power of two under which its largest value fits: 2^ceil(log2(max|x| / qmax)), as the
    official quantiser of activations takes it. Decoded matrices therefore encode to the same numbers, if not always to
    the same bytes. Blocks below the smallest normal float32 become zeros.
    """
    codes, scales = _encode(values, format)
    return BlockScaled(pack_nibbles(codes) if format == "e2m1" else codes, scales, format)


def _encode(values: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Codes, uint8 [..., out, in], and scales, uint8 e8m0, one a block."""
    block_rows, block_columns = BLOCKS[format]
    *leading, rows, columns = values.shape
    missing = [(0, 0)] * len(leading) + [(0, -rows % block_rows), (0, -columns % block_columns)]
    grid = (*leading, -(-rows // block_rows), block_rows, -(-columns // block_columns), block_columns)
    largest = jnp.max(jnp.abs(jnp.pad(values, missing).reshape(grid)), axis=(-3, -1))
    qmax = _LARGEST[format]
    exponent = power_of_two_scale_exponent(jnp.maximum(largest, qmax * _SMALLEST_SCALE), jnp.float32(1 / qmax))
    scales = (exponent + E8M0_BIAS).astype(jnp.uint8)
    scale_bits = _spread(scales, values.shape, format).astype(jnp.int32) << FLOAT32_MANTISSA_BITS
    return _ENCODERS[format](values / jax.lax.bitcast_convert_type(scale_bits, jnp.float32)), scales


def _decode(codes: jax.Array, scales: jax.Array, format: Format) -> jax.Array:
    return _DECODERS[format](codes, _spread(scales, codes.shape, format))


def _spread(scales: jax.Array, shape: tuple[int, ...], format: Format) -> jax.Array:
    """The scale of every element of a matrix of logical shape [..., out, in]."""
    *leading, rows, columns = shape
    block_rows, block_columns = BLOCKS[format]
    grid = (*leading, -(-rows // block_rows), -(-columns // block_columns))
    if scales.shape != grid:
        raise ValueError(
            f"a {format} matrix of shape {shape} has one scale for {block_rows} x {block_columns} elements, so scales "
            f"of shape {grid}; these have shape {scales.shape}"
        )
    spread = jnp.repeat(jnp.repeat(scales, block_rows, axis=-2), block_columns, axis=-1)
    return spread[..., :rows, :columns]


def decoded_product(x: jax.Array, weight: Matrix) -> jax.Array:
    """Rows [..., in] times a matrix [out, in] that is first decoded to their dtype: float32 [..., out]."""
    return contract("...i,oi->...o", x, weight.decode(x.dtype))
