"""Blocks of GGUF have the bytes that the ggml of today makes of the same values.

`tests/golden/ggml` holds bytes of chosen rows, made once. Here are the wheel's own encoder, and random rows.
"""

import ctypes
import platform
from collections.abc import Callable

import numpy as np
import pytest
from oracle import Array

from dspark_jax.formats import mxfp4, q2_k, q4_k, q8_0
from dspark_jax.formats.ggml import MXFP4, Q2_K, Q4_K, Q8_0, Bytes, Type, Values

library = pytest.importorskip("xllamacpp.xllamacpp", reason="ggml is not here: uv sync --group peers")

ENCODE: dict[Type, Callable[[Values], Bytes]] = {
    Q8_0: q8_0.encode,
    Q2_K: q2_k.encode,
    Q4_K: q4_k.encode,
    MXFP4: lambda values: mxfp4.to_gguf(*mxfp4.quantise_as_ggml(values)),
}
ROWS, COLUMNS = 64, 2048


def ggml(type: Type, values: Values) -> Bytes:
    """What ggml makes of rows of values without importances."""
    encode = ctypes.CDLL(library.__file__).ggml_quantize_chunk
    encode.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    encode.restype = ctypes.c_size_t
    encoded = np.zeros((len(values), type.row_bytes(values.shape[1])), np.uint8)
    written = encode(type.number, values.ctypes.data, encoded.ctypes.data, 0, *values.shape, None)
    assert written == encoded.nbytes
    return encoded


def rows(rng: np.random.Generator) -> dict[str, Array]:
    """Values of several kinds, [ROWS, COLUMNS] each."""
    gaussian = rng.standard_normal((ROWS, COLUMNS))
    sparse = np.where(rng.random((ROWS, COLUMNS)) < 0.002, gaussian, 0)
    return {
        "gaussian": gaussian,
        "zeros, and now and then a value": sparse,
        "one large value": gaussian + np.where(sparse, 1e4, 0),
        "of one sign": np.abs(gaussian) * rng.choice([-1, 1], (ROWS, 1)),
        "few levels": np.round(gaussian),
        "of all sizes": gaussian * 10.0 ** rng.integers(-6, 4, (ROWS, COLUMNS)),
        "subnormal": gaussian * 1e-40,
    }


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sums of the search are rounded otherwise elsewhere")
@pytest.mark.parametrize("type", ENCODE, ids=lambda type: type.name)
def test_bytes_are_those_of_ggml(type: Type) -> None:
    for name, values in rows(np.random.default_rng(6)).items():
        values = values.astype(np.float32)
        assert np.array_equal(ENCODE[type](values), ggml(type, values)), name
