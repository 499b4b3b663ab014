"""The number types of GGUF files: the number that names each in a file, the bytes of its blocks, and its two codecs.

The last axis of a tensor is cut into blocks of `block` values, each stored in `bytes` bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark_jax.formats import e8m0, mxfp4, q2_k, q4_k, q8_0

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]


@dataclass(frozen=True)
class Type:
    """A number type.

    Attributes:
        name: as ggml spells it.
        number: as files spell it.
        block: values that are stored together.
        bytes: that they take.
        decode: uint8 [..., n / block * bytes] -> float32 [..., n]; None if this package does not read the type.
        encode: float32 [..., n] -> uint8 [..., n / block * bytes]; None if values alone do not say how (K-quants are
            searched for, or not), or if this package does not write the type from values.
    """

    name: str
    number: int
    block: int
    bytes: int
    decode: Callable[[Bytes], Values] | None = None
    encode: Callable[[Values], Bytes] | None = None

    def row_bytes(self, values: int) -> int:
        """Bytes of a row, whose length must be a multiple of `block`."""
        return values // self.block * self.bytes


def _decode_mxfp4(stored: Bytes) -> Values:
    """A block is its scale, then sixteen bytes of which byte j holds value j in the low nibble and j + 16 in the high.

    Not through `mxfp4.from_gguf`, so that a comparison of files can find a fault of that permutation.
    """
    blocks = stored.reshape(*stored.shape[:-1], -1, MXFP4.bytes)
    codes = np.concatenate([blocks[..., 1:] % 16, blocks[..., 1:] // 16], axis=-1)
    with np.errstate(over="ignore"):
        values = mxfp4.decode(codes) * e8m0.decode(blocks[..., :1])  # a product with a power of two rounds nothing
    return values.reshape(*stored.shape[:-1], -1)


def _plain(dtype: type) -> dict[str, Callable]:
    """Codecs of numbers that numpy knows. What is outside the range of a smaller type becomes infinite."""

    def encode(values: Values) -> Bytes:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)

    return {"decode": lambda stored: np.ascontiguousarray(stored).view(dtype).astype(np.float32), "encode": encode}


F32 = Type("F32", 0, 1, 4, **_plain(np.float32))
F16 = Type("F16", 1, 1, 2, **_plain(np.float16))
BF16 = Type("BF16", 30, 1, 2, **_plain(ml_dtypes.bfloat16))
Q8_0 = Type("Q8_0", 8, q8_0.BLOCK, q8_0.BYTES, q8_0.decode, q8_0.encode)
Q2_K = Type("Q2_K", 10, q2_k.BLOCK, q2_k.BYTES, q2_k.decode)
Q4_K = Type("Q4_K", 12, q4_k.BLOCK, q4_k.BYTES, q4_k.decode)
MXFP4 = Type("MXFP4", 39, 32, 17, _decode_mxfp4)
OTHERS = (Type("IQ2_XXS", 16, 256, 66), Type("I32", 26, 1, 4), Type("I64", 27, 1, 8))

TYPES = {type.number: type for type in (F32, F16, BF16, Q8_0, Q2_K, Q4_K, MXFP4, *OTHERS)}
