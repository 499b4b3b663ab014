"""Blocks of GGUF: bytes that ggml made, decoders of the package gguf, and what must hold of any bytes and values.

`tests/golden/ggml` holds the bytes of ggml, and tells how they were made. The package gguf decodes all formats; it
encodes Q8_0 and MXFP4.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open

from dspark_jax.formats import blocks, e4m3, k_quants, mxfp4, narrow, q2_k, q4_k, q8_0

Array = np.ndarray[Any, Any]
GOLDEN = Path(__file__).parent.parent / "golden" / "ggml" / "blocks.safetensors"

few_examples = settings(max_examples=40, derandomize=True, deadline=None)


def encode_mxfp4(values: Array) -> Array:
    return mxfp4.to_gguf(*mxfp4.quantise_as_ggml(values))


def decode_mxfp4(encoded: Array) -> Array:
    return mxfp4.dequantise(*mxfp4.from_gguf(encoded))


ENCODE = {"q8_0": q8_0.encode, "q2_k": q2_k.encode, "q4_k": q4_k.encode, "mxfp4": encode_mxfp4}
DECODE = {"q8_0": q8_0.decode, "q2_k": q2_k.decode, "q4_k": q4_k.decode, "mxfp4": decode_mxfp4}
TYPE = {"q8_0": Type.Q8_0, "q2_k": Type.Q2_K, "q4_k": Type.Q4_K, "mxfp4": Type.MXFP4}
SIZE = {name: gguf.GGML_QUANT_SIZES[kind] for name, kind in TYPE.items()}
every_format = pytest.mark.parametrize("name", TYPE)
k_formats = pytest.mark.parametrize("module", [q2_k, q4_k], ids=["q2_k", "q4_k"])
both_ways = pytest.mark.parametrize("search", [True, False], ids=["search", "plain"])


def gaussian(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def random_bytes(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def relative_rms(values: Array, decoded: Array) -> float:
    squares = [np.square(part.astype(np.float64)).sum() for part in (decoded - values, values)]
    return float(np.sqrt(squares[0] / squares[1]))


# Bytes ---------------------------------------------------------------------------------------------------------------


@every_format
def test_bytes_are_those_of_ggml(name: str) -> None:
    with safe_open(GOLDEN, "numpy") as golden:
        rows = golden.metadata()["rows"].split("\n")
        values, expected = golden.get_tensor("values"), golden.get_tensor(name)
    different = (ENCODE[name](values) != expected).any(axis=1)
    assert len(rows) == len(different) > 10
    assert [row for row, differs in zip(rows, different, strict=True) if differs] == []


@every_format
def test_sizes_are_those_of_gguf(name: str) -> None:
    values, size = SIZE[name]
    assert ENCODE[name](np.zeros((2, 3, 4 * values), np.float32)).shape == (2, 3, 4 * size)
    assert DECODE[name](np.zeros((2, 3, 4 * size), np.uint8)).shape == (2, 3, 4 * values)
    assert ENCODE[name](np.zeros((0, values), np.float32)).shape == (0, size)


@every_format
def test_random_blocks_decode_as_in_gguf(name: str) -> None:
    values, size = SIZE[name]
    encoded = random_bytes(300, 2, size)
    if name == "mxfp4":
        encoded[..., 0] = encoded[..., 0] % 253  # above, gguf knows neither NaN nor infinity
    else:
        halves = np.random.default_rng(1).integers(0, 0x7C00, (300, 2, 2), np.uint16)  # finite
        places = {"q8_0": [(0, 2)], "q2_k": [(80, 82), (82, 84)], "q4_k": [(0, 2), (2, 4)]}[name]
        for index, (start, stop) in enumerate(places):
            encoded[..., start:stop] = halves[..., index, None].view(np.uint8)
    rows = encoded.reshape(300, 2 * size)
    expected = gguf.quants.dequantize(rows, TYPE[name])
    assert expected.shape == (300, 2 * values)
    actual = DECODE[name](rows)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)
    if name != "mxfp4":  # whose -0 is 0 in gguf
        np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["q8_0", "mxfp4"])
@few_examples
@given(values=hnp.arrays(np.float32, (3, 64), elements=st.floats(-60000, 60000, width=32, allow_subnormal=False)))
def test_encoded_as_in_gguf(name: str, values: Array) -> None:
    values = np.where(np.abs(values) < 1e-30, np.float32(0), values)  # 1 / scale overflows in gguf, which then warns
    np.testing.assert_array_equal(ENCODE[name](values), gguf.quants.quantize(values, TYPE[name]))


def test_halves_go_away_from_zero_in_q8_0() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :7] = [127, 0.5, -0.5, 1.5, -2.5, np.nextafter(np.float32(0.5), np.float32(0)), -126.5]
    q = q8_0.encode(values)[0, 2:].view(np.int8)
    assert q[:7].tolist() == [127, 1, -1, 2, -3, 0, -127]


# Errors of rounding --------------------------------------------------------------------------------------------------


def test_relative_errors_of_gaussian_weights() -> None:
    values = 0.02 * gaussian(64, 4096)
    bounds = {(q2_k, True): 0.305, (q2_k, False): 0.335, (q4_k, True): 0.075, (q4_k, False): 0.082}
    errors = {
        (module, search): relative_rms(values, module.decode(module.encode(values, search=search)))
        for module, search in bounds
    }
    for case, bound in bounds.items():
        assert 0.9 * bound < errors[case] <= bound
    assert relative_rms(values, q8_0.decode(q8_0.encode(values))) < 0.006


def test_weights_of_mxfp4_are_exact_in_mxfp4() -> None:
    scales = np.random.default_rng(0).integers(100, 130, (16, 8), np.uint8)
    packed = random_bytes(16, 128)
    values = mxfp4.dequantise(packed, scales)
    np.testing.assert_array_equal(decode_mxfp4(encode_mxfp4(values)), values)


def plain_by_hand(block: Array, kind: k_quants.Kind) -> list[float]:
    """What plain rounding leaves of 256 values: a group and a value at a time, by the definition, in float64."""
    groups = [[float(value) for value in group] for group in block.reshape(-1, kind.group)]
    lows = [min(0.0, *group) for group in groups]
    scales = [(max(0.0, *group) - low) / kind.levels for group, low in zip(groups, lows, strict=True)]
    d, dmin = float(np.float16(max(scales) / kind.largest)), float(np.float16(-min(lows) / kind.largest))
    left = []
    for group, low, scale in zip(groups, lows, scales, strict=True):
        step, offset = d * min(round(scale / d), kind.largest), dmin * min(round(-low / dmin), kind.largest)
        left += [step * min(max(round((value + offset) / step), 0), kind.levels) - offset for value in group]
    return left


@k_formats
def test_plain_rounding_by_hand(module: Any) -> None:
    values = 0.02 * gaussian(20, 256)
    expected = np.array([plain_by_hand(block, module.KIND) for block in values])
    np.testing.assert_allclose(module.decode(module.encode(values, search=False)), expected, rtol=1e-5, atol=1e-7)


@k_formats
@both_ways
@few_examples
@given(
    values=hnp.arrays(np.float32, (2, 256), elements=st.floats(-1000, 1000, width=32)),
    exponents=hnp.arrays(np.int32, (2, 8), elements=st.integers(-20, 0)),
)
def test_no_other_q_is_nearer(module: Any, search: bool, values: Array, exponents: Array) -> None:
    """Of the values that a group can stand for, every value got the nearest, to a rounding."""
    values = np.ldexp(values, exponents.repeat(32, axis=1))
    encoded = module.encode(values, search=search)
    choices = np.stack([module.decode(_with_q(module, encoded, q)) for q in range(module.KIND.levels + 1)])
    distance = np.abs(choices.astype(np.float64) - values)
    chosen = np.abs(module.decode(encoded).astype(np.float64) - values)
    assert (chosen <= distance.min(axis=0) + 1e-5 * np.abs(choices).max(axis=0)).all()


def _with_q(module: Any, encoded: Array, q: int) -> Array:
    place, pattern = {q2_k: (slice(16, 80), 0b01010101), q4_k: (slice(16, 144), 0b00010001)}[module]
    changed = encoded.copy()
    changed[:, place] = q * pattern
    return changed


@k_formats
def test_the_search_lowers_the_error_that_it_weighs(module: Any) -> None:
    x = gaussian(module.KIND.group, 1000)
    weights = module.KIND.weights(x)

    def error(grid: k_quants.Grid) -> Array:
        q = np.rint((x - grid.origin) * grid.inverse).clip(0, module.KIND.levels)
        return (weights * module.KIND.distance(grid.scale * q + grid.low - x)).sum(axis=0)

    low, high = np.minimum(x.min(axis=0), 0), x.max(axis=0)
    spanning = k_quants.Grid((high - low) / module.KIND.levels, low, low, module.KIND.levels / (high - low))
    found = k_quants.searched(x, module.KIND)
    assert (error(found) <= error(spanning) * 1.0001).all() and error(found).mean() < 0.95 * error(spanning).mean()


@k_formats
@both_ways
def test_a_block_depends_on_itself_alone(module: Any, search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = gaussian(5, 3, 512)
    together = module.encode(values, search=search)
    monkeypatch.setattr(blocks, "PIECE", 1024)
    np.testing.assert_array_equal(module.encode(values, search=search), together)
    np.testing.assert_array_equal(module.encode(values[4, 2, 256:], search=search), together[4, 2, module.BYTES :])
    swapped = np.swapaxes(values, 0, 1)  # not contiguous
    np.testing.assert_array_equal(module.encode(swapped, search=search), np.swapaxes(together, 0, 1))


# MXFP4, a permutation ------------------------------------------------------------------------------------------------


def element(row: Array, column: int) -> int:
    """Of packed bytes as a checkpoint has them: even columns low."""
    return int(row[column // 2]) >> 4 * (column % 2) & 15


def test_every_code_is_where_gguf_has_it() -> None:
    packed, scales = random_bytes(3, 5, 48), random_bytes(3, 5, 3, seed=1)
    made = mxfp4.to_gguf(packed, scales)
    for place in np.ndindex(3, 5):
        expected = []
        for block in range(3):
            expected.append(int(scales[place][block]))
            columns = [32 * block + j for j in range(16)]
            expected += [element(packed[place], c) | element(packed[place], c + 16) << 4 for c in columns]
        assert made[place].tolist() == expected


def test_blocks_and_matrices_are_each_others_inverse() -> None:
    packed, scales = random_bytes(4, 64).view(np.int8), random_bytes(4, 4, seed=1)
    again = mxfp4.from_gguf(mxfp4.to_gguf(packed, scales))
    np.testing.assert_array_equal(again[0], packed.view(np.uint8))
    np.testing.assert_array_equal(again[1], scales)
    encoded = random_bytes(4, 5 * 17)
    np.testing.assert_array_equal(mxfp4.to_gguf(*mxfp4.from_gguf(encoded)), encoded)


# What does not fit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: q2_k.encode(np.zeros((2, 300), np.float32)), "a row of 300 float32 elements .* blocks of 256"),
        (lambda: q4_k.encode(np.zeros(128, np.float32)), "a row of 128 float32 elements .* blocks of 256"),
        (lambda: q8_0.encode(np.zeros((2, 40), np.float32)), "a row of 40 float32 elements .* blocks of 32"),
        (lambda: mxfp4.quantise_as_ggml(np.zeros((2, 40), np.float32)), "a row of 40 float32 elements .* blocks of 32"),
        (lambda: q2_k.decode(np.zeros((2, 85), np.uint8)), "a row of 85 uint8 elements .* blocks of 84"),
        (lambda: q4_k.decode(np.zeros((2, 145), np.uint8)), "a row of 145 uint8 elements .* blocks of 144"),
        (lambda: q8_0.decode(np.zeros((2, 35), np.uint8)), "a row of 35 uint8 elements .* blocks of 34"),
        (lambda: mxfp4.from_gguf(np.zeros((2, 16), np.uint8)), "a row of 16 bytes .* blocks of 17"),
        (lambda: mxfp4.to_gguf(np.zeros((2, 40), np.uint8), np.zeros((2, 3), np.uint8)), r"\(2, 40\) .* \(2, 3\)"),
    ],
)
def test_rows_that_are_no_blocks(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(name: str, bad: float) -> None:
    values = gaussian(3, 512)
    values[1, 300] = bad
    with pytest.raises(ValueError, match="finite"):
        ENCODE[name](values)


@pytest.mark.parametrize("name", ["q8_0", "q2_k", "q4_k"])
def test_what_would_decode_to_nan(name: str) -> None:
    values = gaussian(3, 512)
    values[1, 300] = 1e8
    with pytest.raises(ValueError, match="float16 ends at 65504"):
        ENCODE[name](values)


# Two bytes -----------------------------------------------------------------------------------------------------------


def bfloat16_holds(value: float) -> bool:
    """By the definition: a multiple of the last place, and smaller than 2^128. Python's floats hold all values here."""
    exponent = max(np.frexp(value)[1] - 8, -133)
    return bool(np.isfinite(value) and (value / 2.0**exponent).is_integer() and abs(value) < 2.0**128)


def test_which_e4m3_values_fit_bfloat16() -> None:
    codes = np.array([0x00, 0x80, 0x01, 0x83, 0x07, 0x08, 0x35, 0x7E, 0xFE], np.uint8)
    values = e4m3.decode(codes).astype(np.float64)
    for scale in range(255):
        expected = [bfloat16_holds(float(value) * 2.0 ** (scale - 127)) for value in values]
        scales = np.full((1, 1), scale, np.uint8)
        assert [narrow.fits_bfloat16(e4m3.dequantise(code.reshape(1, 1), scales)) for code in codes] == expected


def test_scales_for_which_every_e4m3_value_fits_bfloat16() -> None:
    codes = np.arange(256, dtype=np.uint8)
    finite = np.resize(codes[codes % 128 != e4m3.NAN], (2, 127))
    fits = [s for s in range(256) if narrow.fits_bfloat16(e4m3.dequantise(finite, np.full((1, 1), s, np.uint8)))]
    assert fits == list(range(3, 247))
    with_nan = e4m3.dequantise(codes.reshape(2, 128), np.full((1, 1), 127, np.uint8))
    assert not narrow.fits_bfloat16(with_nan)


def test_every_bfloat16_fits_and_no_neighbour_does() -> None:
    numbers = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    assert narrow.fits_bfloat16(numbers)
    assert not any(narrow.fits_bfloat16(np.nextafter(numbers[i : i + 1], np.float32(9))) for i in range(0, 60000, 97))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_range_of_float16(dtype: Any) -> None:
    values = np.array([0, -0.0, 1, -1, 65504, -2e5, 1e38, np.inf, np.nan, 2**-24, -(2**-25), 1e-30, 2**-14], dtype)
    overflow = {np.float32: 4, ml_dtypes.bfloat16: 5}[dtype]  # bfloat16 has 65536 next to 65504
    assert narrow.float16_range(values) == narrow.Float16Range(overflow=overflow, vanish=2)


def test_range_of_float16_wants_values_that_it_knows() -> None:
    with pytest.raises(TypeError, match="float64"):
        narrow.float16_range(np.zeros(3))
