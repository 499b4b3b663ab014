"""On a mesh: the numbers of one device, whatever divides; and nothing but activations travels."""

import logging
import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, QUICK
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from random_model import on_mesh, random_model, shaped
from test_config import FLASH
from tiny_configs import CONFIGS, random_ids

import dspark_jax
from dspark_jax import Forward, Model, ModelConfig, RequestError, make_mesh
from dspark_jax import sharding as sharding_module
from dspark_jax.model import cache as cache_module
from dspark_jax.model.cache import TargetCache, drafter_cache, target_cache
from dspark_jax.model.drafter import draft_step, remember
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import PRESETS
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import lm_logits, target_step
from dspark_jax.placement import constrain_rows, fetch, partition_of, place_copies, place_rows, row_sharding
from dspark_jax.sharding import mesh_axes, sharding_of
from pallas_kernels.block_scaled import BlockScaled
from pallas_kernels.mxfp4_experts import Matrices, mxfp4_experts
from pallas_kernels.mxfp4_experts.reference import mxfp4_experts as reference
from pallas_kernels.partition import Partition, map_rows

pytestmark = pytest.mark.usefixtures("quick")

TINY_A = GOLDEN / "tiny-a"
Tree = Any


# Meshes and rules ----------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the rules have logged; each test starts as a new process would."""
    sharding_module._log_once.cache_clear()
    caplog.set_level(logging.WARNING, logger=sharding_module.__name__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == sharding_module.__name__]


class TestMakeMesh:
    def test_axes_are_named_and_automatic(self) -> None:
        mesh = make_mesh(data=2, tensor=2)
        assert mesh.shape == {"data": 2, "expert": 1, "tensor": 2}
        assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 3
        assert set(mesh.devices.flat) == set(jax.devices()[:4])

    def test_of_given_devices(self) -> None:
        assert set(make_mesh(expert=2, devices=jax.devices()[5:]).devices.flat) == set(jax.devices()[5:7])

    def test_too_few_devices(self) -> None:
        expected = "a mesh of data 2 x expert 3 x tensor 2 needs 12 devices; there are 8."
        with pytest.raises(RequestError, match=f"^{re.escape(expected)}$"):
            make_mesh(data=2, expert=3, tensor=2)

    @pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
    def test_sizes_are_counts(self, size: Any) -> None:
        with pytest.raises(RequestError, match=r"^tensor is .*; expected an integer of at least 1\.$"):
            make_mesh(tensor=size)


@pytest.mark.parametrize(
    ("experts", "axes"),
    [(8, ("expert", "tensor")), (12, ("expert", "tensor")), (6, ("tensor",)), (4, ("expert", "tensor")), (5, ())],
)
def test_experts_are_split_as_far_as_they_divide(experts: int, axes: tuple[str, ...], warnings: Callable) -> None:
    shapes = {"expert": 4, "tensor": 2} if experts in (8, 6, 5) else {"expert": 2, "tensor": 2}
    mesh = AbstractMesh(tuple(shapes.values()), tuple(shapes))
    for _ in range(2):
        assert mesh_axes(mesh, "expert", experts) == axes
    over = "does not divide over mesh axis 'expert' of 4 x 'tensor' of 2"
    outcome = "split over mesh axis 'tensor' of 2 alone" if axes else "replicated"
    expected = [] if len(axes) == 2 else [f"axis 'expert' of size {experts} {over}: {outcome}"]
    assert warnings() == expected


def test_an_axis_of_one_device_is_none() -> None:
    assert mesh_axes(make_mesh(tensor=2), "expert", 7 * 2) == ("tensor",)
    assert sharding_of(make_mesh(), ("vocabulary", None), (10, 3)).spec == P(None, None)


class TestBatches:
    def test_one_device_has_no_partition_and_moves_nothing(self) -> None:
        tree = {"a": np.ones(2)}
        model = random_model(ModelConfig.tiny(), parts=("drafter",))
        assert partition_of(model) is None
        assert place_rows(tree, None) is place_copies(tree, None) is constrain_rows(tree, None) is tree

    def test_sequences_are_split_over_data(self) -> None:
        partition = Partition(make_mesh(data=2, tensor=2), ("data",), ())
        tree = {"ids": np.arange(12).reshape(4, 3), "length": np.arange(4)}
        for placed in (place_rows(tree, partition), jax.jit(partial(constrain_rows, partition=partition))(tree)):
            assert [leaf.sharding.spec for leaf in placed.values()] == [P("data")] * 2
            jax.tree.map(np.testing.assert_array_equal, fetch(placed), tree)
        assert place_copies(tree, partition)["ids"].sharding.is_fully_replicated

    def test_sequences_that_do_not_divide_are_everywhere(self, warnings: Callable) -> None:
        partition = Partition(make_mesh(data=2), ("data",), ())
        assert row_sharding(partition, 3).is_fully_replicated
        assert warnings() == ["axis 'batch' of size 3 does not divide over mesh axis 'data' of 2: replicated"]


# Experts -------------------------------------------------------------------------------------------------------------

ROWS, PICKS, EXPERTS, WIDTH, LIMIT = 6, 2, 8, 32, 10.0


def experts_case() -> tuple[jax.Array, ...]:
    """Rows, picks, weights, live, and experts; row 4 is dead and alone in picking expert 5, whose scales are NaN."""
    rng = np.random.default_rng(0)
    picks = np.array([[0, 1], [7, 2], [2, 3], [0, 4], [5, 6], [1, 7]], np.int32)
    weights = rng.random((ROWS, PICKS), np.float32)
    scales = np.full((EXPERTS, WIDTH, 1), 125, np.uint8)
    scales[5] = 0xFF

    def matrix() -> BlockScaled:
        return BlockScaled(jnp.asarray(rng.integers(0, 256, (EXPERTS, WIDTH, WIDTH // 2), np.uint8)), scales, "e2m1")

    x = jnp.asarray(rng.standard_normal((ROWS, WIDTH), np.float32))
    return x, jnp.asarray(picks), jnp.asarray(weights), jnp.arange(ROWS) != 4, Matrices(matrix(), matrix(), matrix())


PARTITIONS = {
    "rows and experts": (dict(data=2, expert=2, tensor=2), ("expert", "tensor")),
    "one axis of two": (dict(data=3, expert=2), ("expert",)),
    "rows that do not divide": (dict(data=4, tensor=2), ("tensor",)),
    "rows alone": (dict(data=2), ()),
}


class TestExperts:
    def test_one_device_runs_the_reference(self) -> None:
        x, picks, weights, live, experts = experts_case()
        programs = [
            jax.make_jaxpr(lambda x, run=run: run(x, picks, weights, live, experts, LIMIT))(x)
            for run in (mxfp4_experts, reference)
        ]
        assert str(programs[0]) == str(programs[1])

    @pytest.mark.parametrize("name", PARTITIONS)
    def test_sums_and_gradients_are_those_of_the_reference(self, name: str) -> None:
        shape, axes = PARTITIONS[name]
        partition = Partition(make_mesh(**shape), ("data",), axes)
        x, picks, weights, live, experts = experts_case()

        def loss(x: jax.Array, weights: jax.Array, partition: Partition | None) -> tuple[jax.Array, jax.Array]:
            y = mxfp4_experts(x, picks, weights, live, experts, LIMIT, partition=partition)
            return jnp.sum(jnp.sin(y)), y

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
        (_, sums), gradients = run(x, weights, partition)
        (_, expected_sums), expected_gradients = run(x, weights, None)
        assert np.isfinite(sums).all() and not np.asarray(sums[4]).any()
        for actual, expected in zip((sums, *gradients), (expected_sums, *expected_gradients), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())

    def test_the_dead_row_would_have_been_seen(self) -> None:
        x, picks, weights, live, experts = experts_case()
        partition = Partition(make_mesh(data=2, expert=2), ("data",), ("expert",))
        y = mxfp4_experts(x, picks, weights, jnp.ones_like(live), experts, LIMIT, partition=partition)
        assert np.isnan(y[4]).all() and np.isfinite(np.delete(y, 4, axis=0)).all()

    def test_rows_may_have_two_axes(self) -> None:
        x, picks, weights, live, experts = experts_case()
        flat = mxfp4_experts(x, picks, weights, live, experts, LIMIT)
        paired = [values.reshape(2, 3, *values.shape[1:]) for values in (x, picks, weights, live)]
        for partition in (None, Partition(make_mesh(data=2, tensor=2), ("data",), ("tensor",))):
            y = mxfp4_experts(*paired, experts, LIMIT, partition=partition)
            np.testing.assert_allclose(y.reshape(ROWS, WIDTH), flat, rtol=1e-5, atol=1e-5)


def test_a_function_is_mapped_over_rows() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 9)))
    for partition in (None, Partition(make_mesh(data=2, tensor=2), ("data",), ())):
        values, order = map_rows(lambda x: jax.lax.top_k(x, 2), x, partition)
        np.testing.assert_array_equal(values, jnp.sort(x, axis=-1)[..., :-3:-1])
        np.testing.assert_array_equal(order, jnp.argsort(-x, axis=-1)[..., :2])


# Logits --------------------------------------------------------------------------------------------------------------


def run_target(model: Model, batch: int) -> Forward:
    """40 tokens in chunks of 16: the last eight rows of the last chunk are dead."""
    return fetch(dspark_jax.forward(model, random_ids(model.config, batch, 40, seed=0), internals=True, chunk=16))


@cache
def golden_on_one_device() -> Forward:
    return run_target(dspark_jax.load(TINY_A), batch=4)


def assert_same_numbers(actual: Forward, expected: Forward) -> None:
    """Float32 logits and taps to 1e-5 relative, and every choice."""
    for values, others in ((actual.logits, expected.logits), (actual.taps, expected.taps)):
        assert np.abs(values - others).max() <= 1e-5 * np.abs(others).max()
    assert actual.seen is not None and expected.seen is not None
    for layer, other in zip(actual.seen.layers, expected.seen.layers, strict=True):
        np.testing.assert_array_equal(layer.routing.picks, other.routing.picks)
        if other.index_picks is not None:
            np.testing.assert_array_equal(layer.index_picks, other.index_picks)
    np.testing.assert_array_equal(np.argmax(actual.logits, axis=-1), np.argmax(expected.logits, axis=-1))


def test_logits_are_those_of_one_device() -> None:
    model = dspark_jax.load(TINY_A, mesh=make_mesh(data=2, expert=2, tensor=2))
    assert_same_numbers(run_target(model, batch=4), golden_on_one_device())


def test_logits_where_next_to_nothing_divides() -> None:
    """3 sequences, 3 heads and groups, 6 experts, blocks of scales cut at the end; on 2 x 2 x 2."""
    config = CONFIGS["ragged-blocks"]
    model = random_model(config, parts=("target",))
    mesh = make_mesh(data=2, expert=2, tensor=2)
    assert_same_numbers(run_target(on_mesh(model, mesh), batch=3), run_target(model, batch=3))


# What travels --------------------------------------------------------------------------------------------------------

# Three layers of Flash at their real sizes, where every axis divides: programs are compiled and never run.
LAYERS = ModelConfig.from_dict(
    FLASH
    | {
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 0, 0, 0],
        "dspark_target_layer_ids": [0, 1, 2],
    },
    source="three layers of Flash",
)
BATCH, CAPACITY, CHUNK = 4, 1 << 14, 256
STEP = LAYERS.step_width


class Programs:
    """Compiled steps of a model without values."""

    def __init__(self, **shape: int) -> None:
        self.mesh = make_mesh(**shape)
        self.model = on_mesh(abstract_model(LAYERS, PRESETS["bfloat16"]), self.mesh)
        self.partition = partition_of(self.model)

    def setting(self, partition: Partition | None) -> Setting:
        return self.everywhere(self.model.setting(CAPACITY, partition))

    def everywhere(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: shaped(leaf, NamedSharding(self.mesh, P())), tree)

    def split(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: shaped(leaf, NamedSharding(self.mesh, P("data"))), tree)

    def rows(self, width: int) -> Rows:
        return self.split(Rows(np.zeros((BATCH, width), np.int32), *np.zeros((2, BATCH), np.int32)))

    def target_cache(self) -> TargetCache:
        return self.split(jax.eval_shape(partial(target_cache, LAYERS, self.model.numerics, BATCH, CAPACITY, STEP)))

    def target(self, width: int, partition: Partition | None) -> str:
        def run(model: Model, setting: Setting, rows: Rows, cache: TargetCache) -> Tree:
            step = target_step(model.target, model.vocabulary, rows, cache, setting)
            return lm_logits(model.vocabulary, step.hidden), step.taps, step.cache

        arguments = self.model, self.setting(partition), self.rows(width), self.target_cache()
        return jax.jit(run, donate_argnums=3, compiler_options=QUICK).lower(*arguments).compile().as_text()

    def drafter(self, partition: Partition | None) -> str:
        def run(model: Model, setting: Setting, rows: Rows, taps: jax.Array, cache: Tree) -> Tree:
            cache = remember(model.drafter, cache, taps, rows, setting)
            step = draft_step(
                model.drafter, model.vocabulary, cache, rows.ids[:, 0], rows.start, rows.count > 0, setting
            )
            return step.ids, step.confidence, cache

        taps = self.split(jax.ShapeDtypeStruct((BATCH, STEP, LAYERS.taps_width), jnp.bfloat16))
        cache = self.split(jax.eval_shape(partial(drafter_cache, LAYERS, self.model.numerics, BATCH)))
        arguments = self.model, self.setting(partition), self.rows(STEP), taps, cache
        return jax.jit(run, donate_argnums=4, compiler_options=QUICK).lower(*arguments).compile().as_text()


def transfers(text: str) -> list[tuple[str, int]]:
    """Every collective of a compiled program with the elements of its result on one device."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
    sizes = [re.findall(r"\[([\d,]*)\]", result) for result, _ in found]
    return [
        (kind, max(math.prod(int(size) for size in dims.split(",") if size) for dims in shapes))
        for (_, kind), shapes in zip(found, sizes, strict=True)
    ]


def excess(programs: Programs, text: str, width: int) -> list[tuple[str, int]]:
    """Collectives other than sums of one device's activations, and a few numbers a row (an argmax over shards)."""
    rows = BATCH // programs.mesh.shape["data"] * width
    assert sum(kind == "all-reduce" for kind, _ in transfers(text)) >= 3, "the pattern finds collectives at all"
    allowed = {"all-reduce": rows * LAYERS.hidden_size}
    return [(kind, size) for kind, size in transfers(text) if size > allowed.get(kind, 4 * rows)]


def shapes_of(operation: str, text: str) -> set[tuple[int, ...]]:
    """Shapes that an operation of a compiled program results in."""
    found = re.findall(rf"\[([\d,]*)\]\S* {operation}\(", text)
    return {tuple(int(size) for size in dims.split(",") if size) for dims in found}


class TestTransfers:
    @pytest.mark.parametrize(
        "shape", [dict(data=2, expert=2, tensor=2), dict(tensor=8), dict(data=2, expert=4)], ids=str
    )
    def test_decoding_moves_activations_only_and_copies_no_cache(self, shape: dict[str, int]) -> None:
        programs = Programs(**shape)
        text = programs.target(STEP, programs.partition)
        assert excess(programs, text, STEP) == []
        caches = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(programs.target_cache())}
        assert not caches & (shapes_of("copy", text) | shapes_of("select", text))
        assert caches <= shapes_of("parameter", text), "shapes are found at all"

    def test_prefill_moves_activations_only(self) -> None:
        programs = Programs(data=2, expert=2, tensor=2)
        assert excess(programs, programs.target(CHUNK, programs.partition), CHUNK) == []

    def test_a_draft_moves_activations_only(self) -> None:
        programs = Programs(data=2, expert=2, tensor=2)
        assert excess(programs, programs.drafter(programs.partition), STEP) == []

    def test_moved_experts_and_caches_are_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Planted faults: experts left to XLA, and rings that lie on every device while they are written."""
        programs = Programs(data=2, expert=2, tensor=2)
        everywhere, write = NamedSharding(programs.mesh, P()), cache_module.write

        def careless(cache: jax.Array, slots: jax.Array, values: jax.Array, keep: jax.Array) -> jax.Array:
            return write(jax.lax.with_sharding_constraint(cache, everywhere), slots, values, keep)

        monkeypatch.setattr(cache_module, "write", careless)
        found = excess(programs, programs.target(STEP, None), STEP)
        stack = programs.model.target.layers[0].ffn.experts.w1.get_value().payload
        window = programs.target_cache().layers[0].window
        assert {("all-gather", stack.size), ("all-gather", window.size)} <= set(found)
