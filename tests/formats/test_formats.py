"""Number formats: device codecs, host codecs and values written down from the definitions agree bit for bit.

The oracle of this file is float64 arithmetic on the definition of each format; float64 holds every value, every product
with a scale and every midpoint exactly.
"""

import functools
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dspark_jax.formats import e4m3, e8m0, mxfp4
from pallas_kernels import number_formats as device
from pallas_kernels.block_scaled import BlockScaled, Format

Array = np.ndarray[Any, Any]
GOLDEN = Path(__file__).parent.parent / "golden"

few_examples = settings(max_examples=25, derandomize=True, deadline=None)
encode_e4m3_jitted, encode_e2m1_jitted = jax.jit(device.encode_e4m3), jax.jit(device.encode_e2m1)
decode_jitted = jax.jit(BlockScaled.decode, static_argnames="dtype")
in_both_modes = pytest.mark.parametrize("mode", [jax.jit, lambda function: function], ids=["jit", "eager"])


# The definitions -----------------------------------------------------------------------------------------------------


def value_of_bits(exponent_field: int, mantissa: int, mantissa_bits: int, bias: int) -> float:
    if exponent_field == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (2**mantissa_bits + mantissa) * 2.0 ** (exponent_field - bias - mantissa_bits)


E4M3_MAGNITUDES = np.array([value_of_bits(code >> 3, code & 7, 3, 7) for code in range(0x7F)])
E2M1_MAGNITUDES = np.array([value_of_bits(code >> 1, code & 1, 1, 1) for code in range(8)])
E4M3_VALUES = np.array([*E4M3_MAGNITUDES, math.nan, *-E4M3_MAGNITUDES, math.nan])
E2M1_VALUES = np.array([*E2M1_MAGNITUDES, *-E2M1_MAGNITUDES])
E8M0_VALUES = np.array([*(2.0 ** (code - 127) for code in range(255)), math.nan])


def float32(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def nearest_code(values: Array, magnitudes: Array) -> Array:
    """Brute force: the code of the nearest magnitude, of two equally near ones the even code; the sign is left out."""
    wanted = np.minimum(np.abs(values.astype(np.float64)), 1e6)  # infinity is as far from everything
    distances = np.abs(wanted[:, None] - magnitudes)
    nearest = distances.argmin(axis=1)  # the lower one of a tie
    upper = np.minimum(nearest + 1, len(magnitudes) - 1)
    rows = np.arange(len(values))
    tie = (upper != nearest) & (distances[rows, nearest] == distances[rows, upper])
    return np.where(tie & (nearest % 2 == 1), upper, nearest)


def encode_by_brute_force(values: Array, magnitudes: Array, sign_bit: int) -> Array:
    return (nearest_code(values, magnitudes) + np.where(np.signbit(values), sign_bit, 0)).astype(np.uint8)


def hard_values(magnitudes: Array) -> Array:
    """Every bfloat16 number but the NaNs, and every number and midpoint of a grid with its two float32 neighbours."""
    bfloat16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    points = np.concatenate([magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2]).astype(np.float32)
    neighbours = [np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf)]
    grid = np.concatenate([points, *neighbours])
    return np.concatenate([bfloat16[~np.isnan(bfloat16)], grid, -grid])


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal shapes and float32 bits; one NaN is as good as another."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    nan = np.isnan(expected)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    assert actual.shape == expected.shape


def random_codes(shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> Array:
    return np.random.default_rng(seed).integers(low, high, shape, dtype=np.uint8)


def test_the_definitions_have_the_published_corners() -> None:
    assert E4M3_VALUES[[1, 8, 0x7E, 0xFE]].tolist() == [2**-9, 2**-6, 448.0, -448.0]
    assert E2M1_VALUES.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert E8M0_VALUES[[0, 127, 254]].tolist() == [2**-127, 1.0, 2.0**127]


# Decoding ------------------------------------------------------------------------------------------------------------


@in_both_modes
def test_assemble(mode: Callable[..., Any]) -> None:
    sign, significand, exponent = (
        grid.ravel().astype(np.int32)
        for grid in np.meshgrid([0, 1], np.arange(16), np.arange(-149, 140), indexing="ij")
    )
    expected = float32(np.where(sign == 1, -1.0, 1.0) * np.ldexp(significand.astype(np.float64), exponent))
    assert_same_bits(mode(device.assemble)(sign, significand, exponent), expected)
    assert np.isinf(expected).any() and (np.abs(expected)[expected != 0] < 2**-126).any()


@in_both_modes
def test_every_e8m0_code(mode: Callable[..., Any]) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = float32(E8M0_VALUES)
    assert_same_bits(mode(device.decode_e8m0)(codes), expected)
    assert_same_bits(e8m0.decode(codes), expected)
    np.testing.assert_array_equal(e8m0.encode(expected), codes)


@in_both_modes
def test_every_unscaled_code(mode: Callable[..., Any]) -> None:
    codes = np.arange(256, dtype=np.uint8)
    assert_same_bits(mode(device.decode_e4m3)(codes), float32(E4M3_VALUES))
    assert_same_bits(e4m3.decode(codes), float32(E4M3_VALUES))
    assert_same_bits(mode(device.decode_e2m1)(codes[:16]), float32(E2M1_VALUES))
    assert_same_bits(mxfp4.decode(codes[:16]), float32(E2M1_VALUES))


@in_both_modes
def test_every_e4m3_code_with_scales_at_the_corners(mode: Callable[..., Any]) -> None:
    scales = np.array([0, 1, 2, 100, 127, 200, 254, 255], np.uint8)
    codes, scale_codes = np.meshgrid(np.arange(256, dtype=np.uint8), scales)
    expected = float32(E4M3_VALUES[codes] * E8M0_VALUES[scale_codes])
    assert_same_bits(mode(device.decode_scaled_e4m3)(codes, scale_codes), expected)
    assert_same_bits(e4m3.dequantise(codes, scale_codes, block=(1, 1)), expected)


@in_both_modes
def test_every_e2m1_code_with_every_scale(mode: Callable[..., Any]) -> None:
    codes, scale_codes = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    expected = float32(E2M1_VALUES[codes] * E8M0_VALUES[scale_codes])
    assert_same_bits(mode(device.decode_scaled_e2m1)(codes, scale_codes), expected)
    assert_same_bits(mxfp4.dequantise(mxfp4.pack(codes), scale_codes[:, :1]), expected)


def test_the_even_column_is_the_low_nibble() -> None:
    packed = np.array([[0x21, 0xF8]], np.uint8)
    assert mxfp4.unpack(packed).tolist() == [[1, 2, 8, 15]]
    assert mxfp4.unpack(packed.view(np.int8)).tolist() == [[1, 2, 8, 15]]
    assert device.unpack_nibbles(jnp.asarray(packed)).tolist() == [[1, 2, 8, 15]]
    assert mxfp4.pack(np.array([[1, 2, 8, 15]], np.uint8)).tolist() == packed.tolist()


# Encoding ------------------------------------------------------------------------------------------------------------


@in_both_modes
def test_e4m3_rounds_to_nearest_even(mode: Callable[..., Any]) -> None:
    values = hard_values(E4M3_MAGNITUDES)
    expected = encode_by_brute_force(values, E4M3_MAGNITUDES, 0x80)
    np.testing.assert_array_equal(mode(device.encode_e4m3)(values), expected)
    np.testing.assert_array_equal(e4m3.encode(values), expected)


@in_both_modes
def test_e2m1_rounds_to_nearest_even(mode: Callable[..., Any]) -> None:
    values = hard_values(E2M1_MAGNITUDES)
    expected = encode_by_brute_force(values, E2M1_MAGNITUDES, 8)
    np.testing.assert_array_equal(mode(device.encode_e2m1)(values), expected)
    np.testing.assert_array_equal(mxfp4.encode(values), expected)


def test_e2m1_ties_as_published() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5], np.float32)
    published = [0, 1, 1, 2, 2, 4, 4, -0.0, -4]
    assert_same_bits(device.decode_e2m1(encode_e2m1_jitted(ties)), np.array(published, np.float32))
    assert_same_bits(mxfp4.decode(mxfp4.encode(ties)), np.array(published, np.float32))


def test_every_code_survives_decoding_and_encoding() -> None:
    codes = np.arange(256, dtype=np.uint8)
    survivors = np.where((codes & 0x7F) == 0x7F, 0x7F, codes)  # the sign of a NaN is dropped
    np.testing.assert_array_equal(encode_e4m3_jitted(jax.jit(device.decode_e4m3)(codes)), survivors)
    np.testing.assert_array_equal(e4m3.encode(e4m3.decode(codes)), survivors)
    np.testing.assert_array_equal(encode_e2m1_jitted(jax.jit(device.decode_e2m1)(codes[:16])), codes[:16])
    np.testing.assert_array_equal(mxfp4.encode(mxfp4.decode(codes[:16])), codes[:16])


def test_every_nan_becomes_the_positive_one() -> None:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.asarray(encode_e4m3_jitted(nans)).tolist() == [0x7F] * 4
    assert e4m3.encode(nans).tolist() == [0x7F] * 4


def test_random_float32_against_the_cast_of_ml_dtypes() -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(20_000) * np.exp2(generator.uniform(-20, 12, 20_000))
    values = values.astype(np.float32)
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(encode_e4m3_jitted(values), expected)


@few_examples
@given(hnp.arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False)))
def test_device_and_host_encode_any_float32_alike(values: Array) -> None:
    np.testing.assert_array_equal(encode_e4m3_jitted(values), e4m3.encode(values))
    np.testing.assert_array_equal(encode_e2m1_jitted(values), mxfp4.encode(values))


# Power-of-two scales -------------------------------------------------------------------------------------------------


@in_both_modes
@pytest.mark.parametrize("qmax", [448.0, 6.0])
def test_scale_exponent(mode: Callable[..., Any], qmax: float) -> None:
    reciprocal = np.float32(1) / np.float32(qmax)
    largest = np.float32(qmax) * np.exp2(np.arange(-126, 118, dtype=np.float32))  # exactly a power of two times qmax
    random = np.exp2(np.random.default_rng(1).uniform(-60, 60, 4000)).astype(np.float32)
    amax = np.concatenate([largest, largest * np.float32(1.125), np.nextafter(largest, np.float32(0))[1:], random])
    product = (amax * reciprocal).astype(np.float64)  # the float32 rounding of the product belongs to the definition
    mantissa, exponent = np.frexp(product)
    actual = np.asarray(mode(device.power_of_two_scale_exponent)(amax, reciprocal))
    np.testing.assert_array_equal(actual, np.where(mantissa == 0.5, exponent - 1, exponent))
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual[: len(largest)], np.arange(-126, 118))


Codec = tuple[Callable[..., jax.Array], Callable[..., jax.Array], float, float]
FP8: Codec = (device.encode_e4m3, device.decode_scaled_e4m3, 1e-4, 448.0)
FP4: Codec = (device.encode_e2m1, device.decode_scaled_e2m1, 6 * 2.0**-126, 6.0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def fake_quantise(values: jax.Array, block: int, codec: Codec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The common rule of the inference code, from the device codecs: scale codes a block, codes, the values used."""
    encode, decode_scaled, floor, qmax = codec
    blocks = values.reshape(-1, block)
    amax = jnp.maximum(jnp.abs(blocks).max(axis=1, keepdims=True), jnp.float32(floor))
    exponent = device.power_of_two_scale_exponent(amax, jnp.float32(1 / qmax))
    codes = encode(blocks * device.assemble(jnp.zeros_like(exponent), jnp.ones_like(exponent), -exponent))
    scale_codes = (exponent + 127).astype(jnp.uint8)
    used = decode_scaled(codes, jnp.broadcast_to(scale_codes, codes.shape))
    return scale_codes, codes.reshape(values.shape), used.reshape(values.shape)


def test_published_fake_quantisation_vectors() -> None:
    x = np.array([0.1, -0.3, 0.7, 1.9, -2.6, 3.3, 0.013, -0.0009], np.float32)
    y8 = np.array([0.1015625, -0.3125, 0.6875, 1.875, -2.5, 3.25, 0.0126953125, -0.00091552734375], np.float32)
    y4 = np.array([0, -0.5, 0.5, 2, -3, 3, 0, -0.0], np.float32)
    ties = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    rounded = np.array([6, 0, 1, 1, 2, 2, 4, 4], np.float32)
    for values, codec, scale_code, expected in [(x, FP8, 120, y8), (x, FP4, 127, y4), (ties, FP4, 127, rounded)]:
        scales, _, used = fake_quantise(values, 8, codec)
        assert scales.tolist() == [[scale_code]]
        assert_same_bits(used, expected)


# Matrices ------------------------------------------------------------------------------------------------------------


def random_matrix(format: Format, shape: tuple[int, ...], seed: int) -> tuple[BlockScaled, Array]:
    """A block-scaled matrix of the logical shape, any code and any scale, and the oracle's numbers."""
    *leading, rows, columns = shape
    if format == "e4m3":
        payload = random_codes(shape, seed)
        scales = random_codes((*leading, -(-rows // 128), -(-columns // 128)), seed + 1)
        row_block, column_block = np.arange(rows) // 128, np.arange(columns) // 128
        values = E4M3_VALUES[payload]
    else:
        payload = random_codes((*leading, rows, columns // 2), seed)
        scales = random_codes((*leading, rows, -(-columns // 32)), seed + 1)
        row_block, column_block = np.arange(rows), np.arange(columns) // 32
        values = np.empty(shape)
        values[..., 0::2], values[..., 1::2] = E2M1_VALUES[payload & 15], E2M1_VALUES[payload >> 4]
    expected = float32(values * E8M0_VALUES[scales[..., row_block[:, None], column_block]])
    return BlockScaled(jnp.asarray(payload), jnp.asarray(scales), format), expected


SHAPES: list[tuple[Format, tuple[int, ...]]] = [
    ("e4m3", (130, 257)),
    ("e4m3", (256, 128)),
    ("e4m3", (5, 3)),
    ("e4m3", (2, 129, 130)),
    ("e2m1", (3, 64)),
    ("e2m1", (5, 80)),
    ("e2m1", (2, 3, 7, 96)),
]


@pytest.mark.parametrize(("format", "shape"), SHAPES)
def test_block_scaled_matrices(format: Format, shape: tuple[int, ...]) -> None:
    matrix, expected = random_matrix(format, shape, seed=2)
    assert matrix.shape == shape
    assert_same_bits(decode_jitted(matrix), expected)
    dequantise = e4m3.dequantise if format == "e4m3" else mxfp4.dequantise
    assert_same_bits(dequantise(np.asarray(matrix.payload), np.asarray(matrix.scales)), expected)


@pytest.mark.parametrize(("format", "shape"), [("e4m3", (130, 257)), ("e2m1", (5, 80))])
def test_block_scaled_matrices_outside_jit(format: Format, shape: tuple[int, ...]) -> None:
    matrix, expected = random_matrix(format, shape, seed=3)
    assert_same_bits(matrix.decode(), expected)


@pytest.mark.parametrize(("format", "shape"), SHAPES[-4:])
def test_bfloat16_is_exact_in_its_normal_range(format: Format, shape: tuple[int, ...]) -> None:
    matrix, _ = random_matrix(format, shape, seed=3)
    matrix = BlockScaled(matrix.payload, jnp.clip(matrix.scales, 20, 240), format)
    decoded = decode_jitted(matrix, dtype=jnp.bfloat16)
    assert decoded.dtype == jnp.bfloat16
    assert_same_bits(np.asarray(decoded).astype(np.float32), decode_jitted(matrix))


@pytest.mark.parametrize(("format", "shape"), [("e4m3", (4, 130, 257)), ("e2m1", (4, 3, 80))])
def test_one_of_a_stack_is_picked_by_a_traced_index(format: Format, shape: tuple[int, ...]) -> None:
    stack, expected = random_matrix(format, shape, seed=4)

    @jax.jit
    def pick(stack: BlockScaled, expert: jax.Array) -> jax.Array:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), stack).decode()

    assert_same_bits(pick(stack, jnp.int32(2)), expected[2])


def test_block_scaled_is_a_tree_of_two_leaves_which_may_be_abstract() -> None:
    matrix, _ = random_matrix("e2m1", (4, 3, 80), seed=5)
    abstract = jax.eval_shape(lambda: matrix)
    assert isinstance(abstract, BlockScaled) and isinstance(abstract.payload, jax.ShapeDtypeStruct)
    assert (abstract.shape, abstract.format) == ((4, 3, 80), "e2m1")
    assert jax.eval_shape(BlockScaled.decode, abstract).shape == (4, 3, 80)
    assert jax.tree.map(operator.attrgetter("ndim"), abstract) == BlockScaled(3, 3, "e2m1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="e4m3"):  # the format is part of the structure, so formats do not mix
        jax.tree.map(jnp.add, matrix, BlockScaled(matrix.payload, matrix.scales, "e4m3"))


def test_scales_that_do_not_fit_are_refused() -> None:
    payload, scales = random_codes((130, 64), 6), random_codes((2, 2), 7)
    with pytest.raises(ValueError, match=r"scales of shape \(2, 1\); these have shape \(2, 2\)"):
        BlockScaled(jnp.asarray(payload), jnp.asarray(scales), "e4m3").decode()
    with pytest.raises(ValueError, match=r"needs scales of shape \(2, 1\); these have shape \(2, 2\)"):
        e4m3.dequantise(payload, scales)
    with pytest.raises(ValueError, match=r"needs scales of shape \(130, 4\); these have shape \(2, 2\)"):
        mxfp4.dequantise(payload, scales)


# Quantising on the host ----------------------------------------------------------------------------------------------


def test_scales_are_the_smallest_that_fit() -> None:
    top = np.array([[448.0, 449.0], [448 * 2.0**-140, 2.0**-149], [0.0, -448 * 2.0**100]], np.float32)
    _, scales = e4m3.quantise(top, block=(1, 1))
    assert (scales.astype(int) - 127).tolist() == [[0, 1], [-127, -127], [0, 100]]
    _, scales = mxfp4.quantise(np.array([[6, 0], [np.nextafter(np.float32(6), np.float32(7)), 0], [0, 0]], np.float32))
    assert (scales.astype(int) - 127).tolist() == [[0], [1], [0]]


def test_ragged_blocks_are_quantised_by_themselves() -> None:
    weights = np.ones((130, 257), np.float32)
    weights[:128, 128:256], weights[128:, 256:] = 2.0**20, 0.0
    codes, scales = e4m3.quantise(weights)
    assert (scales.astype(int) - 127).tolist() == [[-8, 12, -8], [-8, -8, 0]]
    assert_same_bits(e4m3.dequantise(codes, scales), weights)


@pytest.mark.parametrize(("format", "shape"), SHAPES)
def test_numbers_of_the_format_are_quantised_without_loss(format: Format, shape: tuple[int, ...]) -> None:
    matrix, _ = random_matrix(format, shape, seed=8)
    payload, scales = np.asarray(matrix.payload), np.clip(np.asarray(matrix.scales), 0, 240)
    if format == "e4m3":
        weights = e4m3.dequantise(np.where((payload & 0x7F) == 0x7F, 0, payload), scales)
        assert_same_bits(e4m3.dequantise(*e4m3.quantise(weights)), weights)
    else:
        weights = mxfp4.dequantise(payload, scales)
        assert_same_bits(mxfp4.dequantise(*mxfp4.quantise(weights)), weights)


any_matrix = hnp.arrays(np.float32, (3, 70), elements=st.floats(-(2.0**100), 2.0**100, width=32))


@few_examples
@given(any_matrix)
def test_error_of_e4m3_is_within_half_a_step(weights: Array) -> None:
    codes, scales = e4m3.quantise(weights, block=(2, 32))
    step = e8m0.decode(np.repeat(np.repeat(scales, 2, axis=0), 32, axis=1)[:3, :70]).astype(np.float64) * 2.0**-9
    error = np.abs(e4m3.dequantise(codes, scales, block=(2, 32)).astype(np.float64) - weights)
    assert (error <= np.maximum(np.abs(weights.astype(np.float64)) / 16, step / 2)).all()


@few_examples
@given(any_matrix)
def test_error_of_mxfp4_is_within_half_a_step(weights: Array) -> None:
    packed, scales = mxfp4.quantise(weights)
    step = e8m0.decode(np.repeat(scales, 32, axis=1)[:, :70]).astype(np.float64) / 2
    error = np.abs(mxfp4.dequantise(packed, scales).astype(np.float64) - weights)
    assert (error <= np.maximum(np.abs(weights.astype(np.float64)) / 4, step / 2)).all()


@few_examples
@given(hnp.arrays(np.uint8, (3, 7)))
def test_packing_is_the_inverse_of_unpacking(packed: Array) -> None:
    np.testing.assert_array_equal(mxfp4.pack(mxfp4.unpack(packed)), packed)


def test_what_has_no_code_is_refused() -> None:
    for weights in (np.full((2, 2), np.nan, np.float32), np.full((2, 2), np.inf, np.float32)):
        for quantise in (e4m3.quantise, mxfp4.quantise):
            with pytest.raises(ValueError, match="finite"):
                quantise(weights)
    with pytest.raises(ValueError, match="no FP4 code"):
        mxfp4.encode(np.array([np.nan], np.float32))
    with pytest.raises(ValueError, match="even; its length is 3"):
        mxfp4.quantise(np.ones((1, 3), np.float32))
    for value in (0.0, -1.0, 3.0, 2.0**-128, np.inf):
        with pytest.raises(ValueError, match="not a power of two"):
            e8m0.encode(np.array([1.0, value], np.float32))


# What the official PyTorch code made of the miniature checkpoints ----------------------------------------------------


def read_tensors(path: Path, prefixes: tuple[str, ...]) -> dict[str, Array]:
    """Tensors of one safetensors file whose names start with a prefix; the small formats as bytes."""
    dtypes = {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int(data[:8].view("<u8")[0])
    tensors = {}
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name.startswith(prefixes):
            begin, end = entry["data_offsets"]
            raw = np.array(data[start + begin : start + end])
            tensors[name] = raw.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def read_matrix(case: str, name: str) -> tuple[Array, Array]:
    tensors: dict[str, Array] = {}
    for path in sorted((GOLDEN / case).glob("model-*.safetensors")):
        tensors |= read_tensors(path, (f"{name}.weight", f"{name}.scale"))
    return tensors[f"{name}.weight"], tensors[f"{name}.scale"]


@pytest.mark.parametrize("case", ["tiny-a", "tiny-b"])
@pytest.mark.parametrize(
    ("name", "format", "rows"),
    [
        ("layers.1.attn.wkv", "e4m3", slice(None)),
        ("layers.1.attn.wo_a", "e4m3", slice(-16, None)),
        ("mtp.0.main_proj", "e4m3", slice(-16, None)),
        ("layers.2.ffn.experts.3.w2", "e2m1", slice(48)),
    ],
)
def test_golden_dequantised_matrices(case: str, name: str, format: Format, rows: slice) -> None:
    expected = read_tensors(GOLDEN / case / "expected.safetensors", ("dequant/",))[f"dequant/{name}"]
    payload, scales = read_matrix(case, name)
    dequantise = e4m3.dequantise if format == "e4m3" else mxfp4.dequantise
    assert_same_bits(dequantise(payload, scales)[rows], expected.astype(np.float32))
    decoded = decode_jitted(BlockScaled(jnp.asarray(payload), jnp.asarray(scales), format), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(decoded)[rows].view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("case", ["tiny-a", "tiny-b"])
def test_golden_activation_quantisers(case: str) -> None:
    ops = read_tensors(GOLDEN / case / "expected.safetensors", ("ops/",))
    x = jnp.asarray(ops["ops/x"].astype(np.float32))
    scales, codes, _ = fake_quantise(x, 128, FP8)
    assert_same_bits(e8m0.decode(np.asarray(scales)), ops["ops/act_quant128/scale"])
    assert_same_bits(e4m3.decode(np.asarray(codes)), ops["ops/act_quant128/q"].astype(np.float32))
    assert_same_bits(fake_quantise(x, 64, FP8)[2], ops["ops/act_quant64_inplace"].astype(np.float32))
    assert_same_bits(fake_quantise(x, 32, FP4)[2], ops["ops/fp4_act_quant_inplace"].astype(np.float32))
