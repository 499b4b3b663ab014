"""Packed weight matrices as they lie in the checkpoint: small codes and one power-of-two scale a block.

A matrix W [out, in] is stored as `payload` and `scales`, both uint8, and means W[i, j] = value * 2^(scale - 127):

* "e4m3": `payload` [out, in] holds one FP8 code a byte; `scales` [ceil(out/128), ceil(in/128)] one e8m0 byte for every
  128 x 128 block. Where a size is no multiple of 128 the last block is cut.
* "e2m1": `payload` [out, in/2] holds two FP4 codes a byte along the input axis, the even column 2j in the low nibble
  and the odd column 2j + 1 in the high one; `scales` [out, ceil(in/32)] one e8m0 byte for 32 columns of a row (MXFP4).

Stacked matrices (experts) put the same leading axes before both. Nothing is repacked between the file and the matmul.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.number_formats import decode_scaled_e2m1, decode_scaled_e4m3, unpack_nibbles
from pallas_kernels.precision import contract

Format = Literal["e4m3", "e2m1"]

BLOCKS: dict[Format, tuple[int, int]] = {"e4m3": (128, 128), "e2m1": (1, 32)}


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

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share one scale."""
        return BLOCKS[self.format]

    def decode(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The matrix as numbers, [..., out, in].

        Exact in float32, then rounded to `dtype`. bfloat16 is exact too within its normal range: a product of the
        formats has at most four significant bits.

        Raises:
            ValueError: the scales do not form one scale a block.
        """
        scale_codes = self._scale_of_every_element()
        if self.format == "e2m1":
            values = decode_scaled_e2m1(unpack_nibbles(self.payload), scale_codes)
        else:
            values = decode_scaled_e4m3(self.payload, scale_codes)
        return values.astype(dtype)

    def _scale_of_every_element(self) -> jax.Array:
        *leading, rows, columns = self.shape
        block_rows, block_columns = self.block
        grid = (*leading, -(-rows // block_rows), -(-columns // block_columns))
        if self.scales.shape != grid:
            raise ValueError(
                f"a {self.format} matrix of shape {self.shape} has one scale for {block_rows} x {block_columns} "
                f"elements, so scales of shape {grid}; these have shape {self.scales.shape}"
            )
        spread = jnp.repeat(jnp.repeat(self.scales, block_rows, axis=-2), block_columns, axis=-1)
        return spread[..., :rows, :columns]


def decoded_product(x: jax.Array, weight: BlockScaled) -> jax.Array:
    """Rows [..., in] times a matrix [out, in] that is first decoded to their dtype: float32 [..., out]."""
    return contract("...i,oi->...o", x, weight.decode(x.dtype))
