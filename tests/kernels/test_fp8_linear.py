"""The FP8 linear: against float64 from the bytes, as PTX on a machine of ours, and as a program for CUDA."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pallas_machine
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_scaled import BlockScaled
from pallas_kernels.fake_quant import fake_e4m3
from pallas_kernels.fp8_linear import fp8_linear, grouped_fp8_linear, mosaic
from pallas_kernels.fp8_linear.plan import THREAD_BLOCKS, Plan, plan_of

BF16 = ml_dtypes.bfloat16

# Of V4-Flash and its drafter: groups, features of each, columns.
SHAPES = {
    "wq_a": (1, 1024, 4096),
    "wq_b": (1, 32768, 1024),
    "wkv": (1, 512, 4096),
    "wo_a": (8, 1024, 4096),
    "wo_b": (1, 4096, 8192),
    "shared gate and up": (1, 2048, 4096),
    "shared down": (1, 4096, 2048),
    "indexer": (1, 8192, 1024),
    "main_proj": (1, 4096, 12288),
}
quantise = jax.jit(fake_e4m3, static_argnums=1)

OF_REFERENCE = 1e-6  # relative: sums in float32
KERNEL = 3e-7


def e4m3_table() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    return np.where(code & 127 == 127, np.nan, np.where(code < 128, magnitude, -magnitude))


TABLE = e4m3_table()


def product(x: np.ndarray, payload: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [rows, groups, out] of x [rows, groups, in]."""
    powers = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    spread = powers.repeat(128, 0).repeat(128, 1)[: payload.shape[0], : payload.shape[1]]
    matrices = (TABLE[payload] * spread).reshape(x.shape[1], -1, x.shape[2])
    return np.einsum("rgi,goi->rgo", x.astype(np.float64), matrices)


def operands(
    rows: int, groups: int, features: int, columns: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x bfloat16 with an outlier, a small block, and zeros; payload without NaN; scales of ordinary size."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, groups, columns))
    x[0, 0, 3] = 300
    x[:, :, 130:200] *= 1e-6
    x[-1, -1, :128] = 0
    payload = random.integers(0, 256, (groups * features, columns), np.uint8)
    payload[payload & 127 == 127] -= 1
    blocks = -(-groups * features // 128), -(-columns // 128)
    return x.astype(BF16), payload, random.integers(112, 122, blocks).astype(np.uint8)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Of the worst row, relative to its norm."""
    norms = np.linalg.norm(want, axis=-1)
    return float(np.max(np.linalg.norm(got - want, axis=-1) / np.where(norms == 0, 1, norms)))


class TestReference:
    @pytest.mark.parametrize("shape", [(1, 1, 128, 128), (5, 1, 100, 300), (3, 2, 128, 256), (7, 1, 576, 192)], ids=str)
    def test_against_float64(self, shape: tuple[int, int, int, int]) -> None:
        x, payload, scales = operands(*shape)
        got = jax.jit(grouped_fp8_linear)(x.astype(np.float32), BlockScaled(payload, scales, "e4m3"))
        assert error(np.asarray(got), product(x, payload, scales)) < OF_REFERENCE

    def test_one_matrix_is_one_group(self) -> None:
        x, payload, scales = operands(6, 1, 256, 256)
        weight = BlockScaled(jnp.asarray(payload), jnp.asarray(scales), "e4m3")
        got = jax.jit(fp8_linear, static_argnames="quantised")(x.reshape(2, 3, 256), weight, quantised=True)
        rounded = np.asarray(quantise(x, 128)).astype(np.float64)
        assert got.shape == (2, 3, 256)
        assert error(np.asarray(got).reshape(6, 1, 256), product(rounded, payload, scales)) < OF_REFERENCE


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch):
    """The kernel's PTX, run here: x, payload, scales -> float32 [rows, groups, out]."""

    monkeypatch.setattr(plgpu, "kernel", pallas_machine.kernel)

    def run(x: np.ndarray, payload: np.ndarray, scales: np.ndarray, quantised: bool = False) -> np.ndarray:
        rows, groups, columns = x.shape
        plan = plan_of(rows, groups, payload.shape[0] // groups, columns)
        sums = mosaic.kernel(plan, quantised)(x, payload, scales)
        return sum(sums[1:], sums[0]).reshape(rows, groups, -1)

    return run


class TestPTX:
    @pytest.mark.parametrize(
        "shape",
        [
            (1, 1, 128, 512),
            (6, 1, 256, 1024),
            (8, 2, 128, 1024),
            (13, 1, 128, 1536),
            (27, 1, 128, 512),
            (40, 2, 128, 512),
        ],
        ids=str,
    )
    def test_against_float64(self, computed, shape: tuple[int, int, int, int]) -> None:
        x, payload, scales = operands(*shape, seed=sum(shape))
        assert error(computed(x, payload, scales), product(x, payload, scales)) < KERNEL

    def test_of_rows_quantised_like_the_reference(self, computed) -> None:
        x, payload, scales = operands(6, 1, 128, 1024)
        x[2, 0, 128:256] = 1e-5  # below the floor of the largest magnitude
        x[3, 0, 256:384] = np.ldexp(448, -3)  # which is just within its power of two
        rounded = np.asarray(quantise(x, 128)).astype(np.float64)
        assert error(computed(x, payload, scales, quantised=True), product(rounded, payload, scales)) < KERNEL

    @pytest.mark.parametrize("blocks", [1, 3])
    def test_thread_blocks_with_several_units_of_several_panels(self, computed, monkeypatch, blocks: int) -> None:
        x, payload, scales = operands(9, 3, 128, 1024)
        monkeypatch.setattr(mosaic, "THREAD_BLOCKS", blocks)
        assert error(computed(x, payload, scales), product(x, payload, scales)) < KERNEL

    def test_all_codes_and_extreme_scales(self, computed) -> None:
        x, payload, scales = operands(2, 1, 640, 512)
        x = (x.astype(np.float32) / 1024).astype(BF16)
        scales[:4] = np.array([0, 1, 254, 255])[:, None]
        payload[256:384] &= 0x87  # subnormal codes, so that 2^127 times their sums is finite
        payload[520, 77] = 0x7F
        got, want = (values[:, 0] for values in (computed(x, payload, scales), product(x, payload, scales)))
        assert np.isnan(got[:, 384:512]).all() and np.isnan(got[:, 520]).all()
        finite = np.ones(640, bool)
        finite[384:512] = finite[520] = False
        assert np.isfinite(got[:, finite]).all()
        for block in (0, 1, 2):  # code 0 is 2^-127
            part = slice(128 * block, 128 * block + 128)
            assert error(got[:, part].astype(np.float64), want[:, part]) < 1e-5
        assert error(got[:, 521:], want[:, 521:]) < KERNEL

    @pytest.mark.parametrize("quantised", [False, True])
    def test_a_row_keeps_its_bits_whatever_the_others_hold(self, computed, quantised: bool) -> None:
        x, payload, scales = operands(6, 1, 128, 512)
        got = computed(x, payload, scales, quantised)
        np.testing.assert_array_equal(computed(x[::-1], payload, scales, quantised)[::-1], got)
        others = x.copy()
        others[1:] = np.nan
        others[2] = np.inf
        alone = computed(others, payload, scales, quantised)
        np.testing.assert_array_equal(alone[0], got[0])
        assert np.isnan(alone[1:]).all() or not quantised
        assert not np.isfinite(alone[1:]).any()


def abstract(rows: int, groups: int, features: int, columns: int) -> tuple[jax.ShapeDtypeStruct, BlockScaled]:
    x = jax.ShapeDtypeStruct((rows, groups, columns), jnp.bfloat16)
    payload = jax.ShapeDtypeStruct((groups * features, columns), jnp.uint8)
    scales = jax.ShapeDtypeStruct((-(-groups * features // 128), -(-columns // 128)), jnp.uint8)
    return x, BlockScaled(payload, scales, "e4m3")


class TestProgram:
    @pytest.mark.parametrize("quantised", [False, True])
    @pytest.mark.parametrize("name", SHAPES)
    def test_lowers_for_cuda(self, name: str, quantised: bool) -> None:
        lowered = (
            jax.jit(lambda x, w: grouped_fp8_linear(x, w, quantised, "mosaic"))
            .trace(*abstract(6, *SHAPES[name]))
            .lower(lowering_platforms=("cuda",))
        )
        assert lowered.as_text().count("mosaic_gpu") >= 1

    @pytest.mark.parametrize("rows", [1, 16, 128])
    def test_lowers_for_other_numbers_of_rows(self, rows: int) -> None:
        traced = jax.jit(lambda x, w: grouped_fp8_linear(x, w, False, "mosaic")).trace(*abstract(rows, *SHAPES["wo_a"]))
        traced.lower(lowering_platforms=("cuda",))

    def test_its_gradient_is_the_reference_s(self) -> None:
        x, weight = abstract(6, 1, 256, 512)

        def loss(x: jax.Array, weight: BlockScaled) -> jax.Array:
            return jnp.sum(grouped_fp8_linear(x, weight, True, "mosaic") ** 2)

        traced = jax.jit(jax.grad(loss)).trace(x, weight)
        assert traced.out_info.shape == x.shape and traced.out_info.dtype == x.dtype
        traced.lower(lowering_platforms=("cuda",))


def plans() -> Iterator[tuple[str, int, Plan]]:
    for name, shape in SHAPES.items():
        for rows in (1, 6, 8, 9, 16, 17, 33, 128):
            yield name, rows, plan_of(rows, *shape)


class TestPlan:
    @pytest.mark.parametrize(("name", "rows", "plan"), [*plans()])
    def test_covers_the_matrix_and_fits(self, name: str, rows: int, plan: Plan) -> None:
        groups, features, columns = SHAPES[name]
        assert plan.slices * plan.chunks * 512 == columns
        assert plan.units * 64 == groups * features * plan.slices * -(-rows // plan.tile)
        assert plan.shared_bytes <= 225_000
        assert plan.balance > 0.45 if name == "wkv" else plan.balance > 0.9
        assert plan.units >= 64 and THREAD_BLOCKS == 132

    def test_is_the_same_for_all_rows_that_share_a_tile(self) -> None:
        for shape in SHAPES.values():
            assert len({plan_of(rows, *shape).slices for rows in range(1, 9)}) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("shape", "dtype", "message"),
        [
            ((6, 1, 192, 512), jnp.bfloat16, "multiple of 128 by one of 512, and this is 192 x 512"),
            ((6, 1, 128, 640), jnp.bfloat16, "and this is 128 x 640"),
            ((6, 2, 64, 512), jnp.bfloat16, "and this is 64 x 512"),
            ((6, 1, 128, 512), jnp.float32, "takes bfloat16 rows, and these are float32"),
            ((mosaic.MOST_ROWS + 1, 1, 128, 512), jnp.bfloat16, f"at most|1 to {mosaic.MOST_ROWS} rows"),
        ],
    )
    def test_say_what_is_taken(self, shape: tuple[int, int, int, int], dtype: type, message: str) -> None:
        x, weight = abstract(*shape)
        x = jax.ShapeDtypeStruct(x.shape, dtype)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(grouped_fp8_linear, implementation="mosaic"), x, weight)
        assert jax.eval_shape(grouped_fp8_linear, x, weight).shape == (*shape[:2], shape[2])


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
class TestOnGPU:
    @pytest.mark.parametrize(
        ("rows", "quantised"), [(1, False), (6, False), (6, True), (13, False), (27, False), (40, True)]
    )
    def test_against_float64(self, rows: int, quantised: bool) -> None:
        x, payload, scales = operands(rows, 2, 512, 4096, seed=rows)
        weight = BlockScaled(jnp.asarray(payload), jnp.asarray(scales), "e4m3")
        got = np.asarray(grouped_fp8_linear(jnp.asarray(x), weight, quantised, "mosaic"))
        seen = np.asarray(quantise(x, 128)) if quantised else x
        assert error(got, product(seen, payload, scales)) < 1e-5
