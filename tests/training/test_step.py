"""A step of training: what it moves, the optimiser against DeepSpec's numbers, meshes, memory, and every head."""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, QUICK
from random_model import on_mesh, random_model
from training_case import BLOCK, VOCABULARY, example_of, tiny

import dspark_jax
from dspark_jax.checkpoint.safetensors import SafetensorsFile
from dspark_jax.errors import RequestError
from dspark_jax.model.drafter import block_end
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Setting
from dspark_jax.model.weights import Drafter
from dspark_jax.placement import partition_of, place_rows
from dspark_jax.sharding import make_mesh
from dspark_jax.training import slot_terms as chunked
from dspark_jax.training.blocks import Blocks, draw_blocks
from dspark_jax.training.losses import Metrics, Objective
from dspark_jax.training.parameters import Parameters, masters, merge, names_in, release, weights_of
from dspark_jax.training.slot_terms import SlotTerms, slot_terms
from dspark_jax.training.step import (
    Recipe,
    TrainingState,
    check_recipe,
    initial_state,
    learning_rate,
    loss_fn,
    optimiser,
    train_step,
)

pytestmark = pytest.mark.usefixtures("quick")

RECIPE = Recipe(steps=10, scope="full", anchors=4, learning_rate=1e-3)
HEADS = dataclasses.replace(RECIPE, scope="heads")


def trained(model: Model, recipe: Recipe, steps: int) -> tuple[TrainingState, list[Metrics]]:
    """Steps on one batch."""
    partition = partition_of(model)
    state, example = initial_state(model, recipe), place_rows(example_of(model.config), partition)
    measured = []
    for _ in range(steps):
        state, report = train_step(state, model, example, recipe, partition)
        measured.append(report.metrics)
    return state, measured


def pointers(tree: Any) -> set[int]:
    """Where the parts of all arrays lie in memory."""
    return {part.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for part in leaf.addressable_shards}


@dataclasses.dataclass(frozen=True)
class Case:
    """The whole drafter, trained for the steps of the recipe on one device."""

    model: Model
    before: Model
    state: TrainingState
    losses: list[float]


@pytest.fixture(scope="module")
def case(quick: None) -> Case:
    model = random_model(tiny(dspark_markov_head="gated"))
    before = jax.tree.map(np.array, model)
    state, measured = trained(model, RECIPE, RECIPE.steps)
    return Case(model, before, state, [float(metrics.loss) for metrics in measured])


# What moves ----------------------------------------------------------------------------------------------------------


class TestIsolation:
    def test_the_model_given_in_stays_as_it_was(self, case: Case) -> None:
        for leaf, before in zip(jax.tree.leaves(case.model), jax.tree.leaves(case.before), strict=True):
            assert not leaf.is_deleted()
            np.testing.assert_array_equal(leaf, before)

    def test_the_first_state_shares_no_memory_with_the_model(self, case: Case) -> None:
        """A step gives its state up, and many weights are float32 like their masters."""
        assert any(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(case.model.drafter))
        assert not pointers(initial_state(case.model, RECIPE)) & pointers(case.model)

    def test_every_master_moves_and_all_are_of_the_drafter(self, case: Case) -> None:
        first = initial_state(case.model, RECIPE).parameters
        assert set(case.state.parameters) == set(first) == set(names_in(case.model, "full"))
        assert all(name.startswith("drafter.") for name in first)
        still = [name for name, master in case.state.parameters.items() if (master == first[name]).all()]
        assert [name for name in still if not name.endswith("gate.bias")] == []  # a bias only picks

    def test_confidence_alone_moves_its_own_weights_unless_its_gradient_may_pass(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The stages, which take long to compile, are cut off: what reaches them passes the head of the streams."""
        model, example = dataclasses.replace(case.model, target=None), example_of(case.model.config)
        ends = re.compile(r"drafter\.(confidence|markov_head|norm|hc_head)")
        parameters = masters(model, [name for name, _ in weights_of(model) if ends.match(name)])
        streams = jax.random.normal(jax.random.key(1), (4 * RECIPE.anchors, BLOCK, 2, 64))

        def end(
            weights: Drafter, vocabulary: Any, example: Any, features: Any, blocks: Blocks, setting: Setting
        ) -> Any:
            return [values.reshape(*blocks.labels.shape, -1) for values in block_end(weights, streams, setting)]

        monkeypatch.setattr("dspark_jax.training.step.draft_blocks", end)

        def slopes(parameters: Parameters, passes: bool) -> Parameters:
            objective = Objective(cross_entropy=0.0, l1=0.0, confidence_gradient=passes)
            recipe = dataclasses.replace(RECIPE, objective=objective)
            return jax.grad(loss_fn, has_aux=True)(parameters, model, example, jax.random.key(0), recipe)[0]

        both = jax.jit(lambda p: (slopes(p, False), slopes(p, True)), compiler_options=QUICK)(parameters)
        stopped, passing = ({name for name, slope in some.items() if (slope != 0).any()} for some in both)
        head = {name for name in parameters if name.startswith("drafter.hc_head")}
        assert stopped == {"drafter.confidence"}
        assert passing == {"drafter.confidence", "drafter.markov_head.markov_w1"} | head and len(head) == 3
        np.testing.assert_allclose(both[0]["drafter.confidence"], both[1]["drafter.confidence"], rtol=1e-6)


# The optimiser -------------------------------------------------------------------------------------------------------


@cache
def golden(name: str) -> np.ndarray:
    return SafetensorsFile(GOLDEN / "training" / "optimiser.safetensors").read(name)


def adamw_recipe(**changes: Any) -> Recipe:
    total, ratio, peak = golden("adamw/setting")
    return Recipe(steps=int(total), warm_up=float(ratio), learning_rate=float(peak), **changes)


def stepped(recipe: Recipe, gradients: str) -> Iterator[tuple[int, Parameters]]:
    """The masters after each of the golden steps."""
    parameters = {name: jnp.asarray(golden(f"adamw/init_{name}")).astype(jnp.float32) for name in "ab"}
    state = optimiser(recipe).init(parameters)

    @jax.jit
    def step(slopes: Parameters, state: Any, parameters: Parameters) -> tuple[Parameters, Any]:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser(recipe).update(slopes, state, parameters)
        return jax.tree.map(jnp.add, parameters, updates), state

    for number in range(recipe.steps):
        slopes = {name: jnp.asarray(golden(f"adamw/{gradients}_{name}")[number]).astype(jnp.float32) for name in "ab"}
        parameters, state = step(slopes, state, parameters)
        yield number, parameters


class TestOptimiser:
    @pytest.mark.parametrize("number", range(3))
    def test_rates_are_those_of_the_official_schedule(self, number: int) -> None:
        total, ratio, peak = golden(f"schedule/{number}/setting")
        recipe = Recipe(steps=int(total), warm_up=float(ratio), learning_rate=float(peak))
        with jax.numpy_dtype_promotion("standard"):
            rates = jax.vmap(learning_rate(recipe))(jnp.arange(recipe.steps))
        np.testing.assert_allclose(rates, golden(f"schedule/{number}/lr"), rtol=1e-6, atol=1e-7 * peak)

    def test_all_of_a_run_may_be_warm_up(self) -> None:
        recipe = Recipe(steps=4, warm_up=1.0, learning_rate=1.0)
        np.testing.assert_allclose([learning_rate(recipe)(step) for step in range(4)], [0.25, 0.5, 0.75, 1.0])

    def test_masters_are_those_of_official_adamw(self) -> None:
        for number, parameters in stepped(adamw_recipe(clip=100.0), "clipped"):
            for name, master in parameters.items():
                np.testing.assert_allclose(master, golden(f"adamw/masters_{name}")[number], rtol=2e-6, atol=2e-7)

    def test_gradients_are_clipped_by_their_common_norm(self) -> None:
        """As far as the official ones, which are rounded to bfloat16 on the way."""
        for recipe, near in ((adamw_recipe(), True), (adamw_recipe(clip=100.0), False)):
            distances = [
                float(jnp.abs(master - golden(f"adamw/masters_{name}")[number]).max())
                for number, parameters in stepped(recipe, "grads")
                for name, master in parameters.items()
            ]
            assert (max(distances) < 5e-4) is near

    def test_weight_decay_is_decoupled_and_for_matrices(self) -> None:
        recipe = Recipe(steps=1, warm_up=0.0, learning_rate=0.5, weight_decay=0.1)
        value = {"matrix": jnp.ones((3, 1)), "bias": jnp.ones(3)}
        with jax.numpy_dtype_promotion("standard"):
            nothing = jax.tree.map(jnp.zeros_like, value)
            updates, _ = optimiser(recipe).update(nothing, optimiser(recipe).init(value), value)
        np.testing.assert_allclose(updates["matrix"], -0.5 * 0.1)
        np.testing.assert_array_equal(updates["bias"], 0)


# On several devices --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # small axes do not divide, which is said
def test_ten_steps_on_eight_devices_have_the_losses_of_one(case: Case) -> None:
    model = on_mesh(case.model, make_mesh(data=2, expert=2, tensor=2))
    state, measured = trained(model, RECIPE, RECIPE.steps)
    np.testing.assert_allclose([float(metrics.loss) for metrics in measured], case.losses, rtol=1e-5)
    assert max(case.losses) > 1.01 * min(case.losses), "the steps change the loss"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model))
    (adam,) = (some for some in jax.tree.leaves(state.optimiser, is_leaf=is_adam) if is_adam(some))
    for name, weight in weights_of(model):
        for values in (tree[name] for tree in (state.parameters, adam.mu, adam.nu) if name in tree):
            lies = jax.tree.leaves(weight.get_value())[0].sharding  # of packed weights, the payload
            assert values.sharding.is_equivalent_to(lies, values.ndim), name
    assert state.parameters["drafter.stages.0.ffn.experts.w1"].sharding.shard_shape((4, 32, 64))[0] < 4


def is_adam(node: Any) -> bool:
    return hasattr(node, "mu")


# Memory --------------------------------------------------------------------------------------------------------------

ANCHORS = 15  # x 3 slots x 106 words: no other tensor's size is a multiple of that
WHOLE = ANCHORS * BLOCK * VOCABULARY


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Of words and blocks."""

    words: int
    blocks: int

    def set(self, patched: pytest.MonkeyPatch) -> None:
        patched.setattr(chunked, "WORD_CHUNK", self.words)
        patched.setattr(chunked, "BLOCK_CHUNK", self.blocks)


SMALL, LARGE = Chunks(16, 5), Chunks(VOCABULARY, ANCHORS)


def whole_tensors(program: str) -> list[str]:
    """Shapes in a program's text that have room for all slots' logits."""
    shapes = re.findall(r"\bf32\[([\d,]+)\]|tensor<([\dx]+)xf32>", program)
    sizes = [np.prod([int(size) for size in re.split("[,x]", hlo or mlir)]) for hlo, mlir in shapes]
    assert sizes, "it is a program"
    return [hlo or mlir for (hlo, mlir), size in zip(shapes, sizes, strict=True) if size and size % WHOLE == 0]


ByChunks = dict[Chunks, tuple[str, SlotTerms, Any]]


@pytest.fixture(scope="module")
def by_chunks(case: Case) -> ByChunks:
    """The compiled program, terms and slopes of all inputs, by chunks."""
    model, keys = case.model, jax.random.split(jax.random.key(0), 4)
    normed, latent, target = (
        jax.random.normal(key, (1, ANCHORS, BLOCK, width)) for key, width in zip(keys, (64, 8, 64), strict=False)
    )
    labels = jax.random.randint(keys[3], (1, ANCHORS, BLOCK), 0, VOCABULARY)
    parameters = masters(model, ["drafter.markov_head.markov_w2"])

    def total(*inputs: Any) -> tuple[jax.Array, SlotTerms]:
        parameters, normed, latent = inputs
        weights = merge(model, parameters).drafter
        assert weights is not None
        terms = slot_terms(weights, model.vocabulary, normed, latent, target, labels)
        return jnp.sum(terms.cross_entropy + 0.7 * terms.distance), terms

    results = {}
    for chunks in (SMALL, LARGE):
        with pytest.MonkeyPatch.context() as patched:
            chunks.set(patched)
            slopes = jax.jit(lambda *inputs: jax.grad(total, (0, 1, 2), has_aux=True)(*inputs))
            program = slopes.lower(parameters, normed, latent).compile(QUICK)
            gradient, terms = program(parameters, normed, latent)
            results[chunks] = program.as_text() or "", terms, gradient
    return results


class TestChunks:
    def test_they_change_nothing_beyond_rounding(self, by_chunks: ByChunks) -> None:
        small, large = (jax.tree.leaves(by_chunks[chunks][1:]) for chunks in (SMALL, LARGE))
        for one, other in zip(small, large, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)

    def test_no_tensor_has_all_slots_and_all_words(self, by_chunks: ByChunks) -> None:
        assert whole_tensors(by_chunks[SMALL][0]) == []
        assert whole_tensors(by_chunks[LARGE][0]), "the check can fail"

    def test_nor_does_a_whole_step(self, case: Case) -> None:
        model, example = case.model, example_of(case.model.config, batch=1)
        for seed, chunks in enumerate((SMALL, LARGE)):
            recipe = dataclasses.replace(HEADS, anchors=ANCHORS, seed=seed)  # traced anew
            with pytest.MonkeyPatch.context() as patched:
                chunks.set(patched)
                text = train_step.lower(initial_state(model, recipe), model, example, recipe).as_text()
            assert bool(whole_tensors(text)) is (chunks is LARGE)


# What comes of it ----------------------------------------------------------------------------------------------------


def test_a_gated_drafter_is_saved_and_generates(case: Case, tmp_path: Path) -> None:
    model = case.model
    tuned = jax.jit(release)(model, case.state.parameters)
    dspark_jax.save(tuned, tmp_path / "tuned")
    loaded = dspark_jax.load(tmp_path / "tuned")
    assert loaded.config == model.config
    for path, leaf in jax.tree_util.tree_leaves_with_path(loaded):
        name = jax.tree_util.keystr(path)
        origin = tuned if name.startswith(".drafter") else model
        np.testing.assert_array_equal(leaf, dict(jax.tree_util.tree_leaves_with_path(origin))[path], err_msg=name)
    prompt = [[5, 6, 7]]
    with_drafts, plain = (
        dspark_jax.generate(loaded, prompt, max_new_tokens=8, draft_tokens=count).tokens for count in (BLOCK, 0)
    )
    assert with_drafts == plain and len(plain[0]) == 8


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"steps": 0}, "steps is 0; expected at least 1."),
        ({"anchors": 0}, "anchors is 0; expected at least 1."),
        ({"learning_rate": -1e-5}, "learning_rate is -1e-05; expected a number of at least 0."),
        ({"learning_rate": float("nan")}, "learning_rate is nan; expected a number of at least 0."),
        ({"warm_up": 1.5}, r"warm_up is 1.5; expected a part of the steps, 0 to 1."),
        ({"clip": 0.0}, "clip is 0.0; expected a positive norm."),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; expected a number of at least 0."),
        ({"objective": Objective(l1=-1.0)}, r"objective is \(0.1, -1.0, 1.0\); expected weights of at least 0"),
        ({"objective": Objective(l1=float("nan"))}, r"objective is \(0.1, nan, 1.0\); expected weights"),
        ({"objective": Objective(0.0, 0.0, 0.0)}, "weights of at least 0, not all 0."),
        ({"objective": Objective(decay=float("nan"))}, "decay is nan; expected a number of at least 0."),
        ({"objective": Objective(decay=-1.0)}, "decay is -1.0; expected a number of at least 0."),
        ({"seed": -1}, "seed is -1; expected an integer from 0 to 4294967295."),
        ({"seed": 2**32}, "seed is 4294967296; expected an integer from 0 to 4294967295."),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(changes: dict[str, Any], complaint: str) -> None:
    check_recipe(Recipe(steps=1))
    with pytest.raises(RequestError, match=complaint):
        check_recipe(dataclasses.replace(Recipe(steps=1), **changes))


def test_a_step_without_anchors_has_loss_zero_and_changes_nothing(case: Case) -> None:
    example = example_of(case.model.config)
    nothing = dataclasses.replace(example, supervised=jnp.zeros(example.ids.shape, bool))
    state = initial_state(case.model, RECIPE)
    first = {name: np.array(master) for name, master in state.parameters.items()}
    state, report = train_step(state, case.model, nothing, RECIPE, None)
    assert (float(report.metrics.loss), float(report.gradient_norm)) == (0.0, 0.0)
    for name, master in state.parameters.items():
        np.testing.assert_array_equal(master, first[name])
    assert int(draw_blocks(jax.random.key(0), nothing, 4, BLOCK).kept.sum()) == 0
