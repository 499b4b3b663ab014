"""Pre-training: its loss is the forward path's, gradients reach what they should, and what is saved is trained."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, QUICK
from safetensors.numpy import load_file

import dspark_jax
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.forward import forward
from dspark_jax.model.model import Model
from dspark_jax.model.moe import Routing
from dspark_jax.model.numerics import PRESETS
from dspark_jax.model.target import LayerSeen
from dspark_jax.training.parameters import Parameters, masters, release, weights_of
from dspark_jax.training.tiny_v4 import pretrain, train_target
from dspark_jax.training.tiny_v4.initialise import hash_table, initial_model, site_base
from dspark_jax.training.tiny_v4.pretrain import Losses, Plan
from dspark_jax.training.tiny_v4.train_target import Budget, steps_that_fit, write_checkpoint
from pallas_kernels.hyper_connection import split_mixes
from pallas_kernels.precision import contract

pytestmark = pytest.mark.usefixtures("quick")

CONFIG = ModelConfig.tiny(
    num_hidden_layers=1,
    num_hash_layers=0,
    compress_ratios=[4, 0],
    hc_sinkhorn_iters=3,
    index_n_heads=2,
    dspark_target_layer_ids=[0],
)
BIAS = "target.layers.0.ffn.gate.bias"
PLAN = Plan(batch=2, row_tokens=24, peak=1e-2, warm_up=4)


@pytest.fixture(scope="module")
def model(quick: None) -> Model:
    return initial_model(CONFIG, PRESETS["bfloat16"], seed=1)


@pytest.fixture(scope="module")
def target(model: Model) -> Model:
    return dataclasses.replace(model, drafter=None)


@pytest.fixture(scope="module")
def parameters(target: Model) -> Parameters:
    return masters(target, [name for name, _ in weights_of(target)])


@pytest.fixture(scope="module")
def ids() -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(0, 96, (2, 25)), jnp.int32)


Gradients = dict[str, Parameters]


@pytest.fixture(scope="module")
def found(target: Model, parameters: Parameters, ids: jax.Array) -> tuple[jax.Array, Losses, Gradients]:
    """The loss, its parts, and the gradient of each part."""

    def run(parameters: Parameters) -> tuple[jax.Array, Losses, Gradients]:
        def parts(parameters: Parameters) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, Losses]]:
            loss, losses = pretrain.target_loss(parameters, target, ids)
            return (losses.cross_entropy, losses.indexer), (loss, losses)

        _, pull, (loss, losses) = jax.vjp(parts, parameters, has_aux=True)
        one, none = jnp.ones(()), jnp.zeros(())
        return loss, losses, {"cross_entropy": pull((one, none))[0], "indexer": pull((none, one))[0]}

    return jax.jit(run, compiler_options=QUICK)(parameters)


class TestLoss:
    def test_it_is_the_cross_entropy_of_the_forward_path(
        self, target: Model, ids: jax.Array, found: tuple[jax.Array, Losses, Gradients]
    ) -> None:
        loss, losses, _ = found
        logits = np.asarray(forward(target, ids[:, :-1]).logits, np.float64)
        chosen = np.take_along_axis(logits, np.asarray(ids[:, 1:, None]), axis=-1)[..., 0]
        expected = np.mean(np.log(np.exp(logits).sum(-1)) - chosen)
        assert float(losses.cross_entropy) == pytest.approx(expected, rel=2e-3)
        assert float(loss) == pytest.approx(float(losses.cross_entropy + losses.indexer))
        assert float(losses.indexer) > 0

    def test_every_master_has_a_gradient_but_the_biases_of_the_router(
        self, found: tuple[jax.Array, Losses, Gradients]
    ) -> None:
        _, _, gradients = found
        total = jax.tree.map(jnp.add, gradients["cross_entropy"], gradients["indexer"])
        assert all(bool(jnp.isfinite(value).all()) for value in total.values())
        idle = [name for name, value in total.items() if not (value != 0).any()]
        assert idle == [BIAS]

    def test_the_indexer_learns_from_its_divergence_and_nothing_else_does(
        self, found: tuple[jax.Array, Losses, Gradients]
    ) -> None:
        _, _, gradients = found
        for part, belongs in (("indexer", True), ("cross_entropy", False)):
            moved = {name for name, value in gradients[part].items() if (value != 0).any()}
            expected = {name for name in gradients[part] if (".indexer." in name) is belongs}
            assert moved == expected - {BIAS}


class TestIndexDivergence:
    @staticmethod
    def seen(picks: jax.Array, scores: jax.Array, shares: jax.Array) -> LayerSeen:
        nothing = jnp.zeros(())
        return LayerSeen(nothing, Routing(nothing, nothing), picks, scores, shares)

    def test_against_the_formula(self) -> None:
        rng = np.random.default_rng(3)
        counts, shares = [0, 1, 3, 4], rng.random((1, 4, 2, 4)).astype(np.float32) / 8
        picks, scores = np.full((1, 4, 4), -1, np.int32), np.full((1, 4, 4), -np.inf, np.float32)
        expected = 0.0
        for row, count in enumerate(counts):
            picks[0, row, :count], scores[0, row, :count] = np.arange(count), rng.normal(size=count)
            shares[0, row, :, count:] = 0
            if count:
                p = shares[0, row].sum(0)[:count].astype(np.float64)
                p, q = p / p.sum(), np.exp(scores[0, row, :count].astype(np.float64))
                expected += float(np.sum(p * np.log(p / (q / q.sum()))))
        found = pretrain.index_divergence(self.seen(*map(jnp.asarray, (picks, scores, shares))))
        assert float(found) == pytest.approx(expected / 4, rel=1e-5)

    def test_it_is_zero_where_scores_follow_shares_and_missing_picks_have_no_gradient(self) -> None:
        shares = jnp.array([0.1, 0.3, 0.2, 0.0])[None, None, None]
        scores = jnp.array([jnp.log(0.1), jnp.log(0.3), jnp.log(0.2), -jnp.inf])[None, None] + 5
        picks = jnp.array([[[4, 2, 7, -1]]])
        divergence, gradient = jax.value_and_grad(
            lambda scores: pretrain.index_divergence(self.seen(picks, scores, shares))
        )(scores)
        assert float(divergence) == pytest.approx(0, abs=1e-6)
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


class TestSteps:
    def test_rates_are_those_of_the_official_schedule(self) -> None:
        golden = load_file(GOLDEN / "training" / "optimiser.safetensors")
        total, ratio, peak = golden["schedule/0/setting"]
        plan = Plan(batch=1, row_tokens=1, peak=float(peak), warm_up=int(ratio * total))
        rates = [pretrain.learning_rate(jnp.float32(s), jnp.float32(total), plan) for s in range(int(total))]
        np.testing.assert_allclose(rates, golden["schedule/0/lr"], rtol=1e-4, atol=1e-12)

    def test_an_epoch_has_every_row_once_and_the_next_another_order(self) -> None:
        stream = jnp.arange(24 * 12 + 5)
        rows = [np.asarray(pretrain.rows_of_step(stream, jnp.int32(step), PLAN)) for step in range(10)]
        assert all(row.dtype == np.int32 and (np.diff(row) == 1).all() for row in rows)
        epochs = np.stack(rows[:5]), np.stack(rows[5:])
        for epoch in epochs:
            labels = np.sort(epoch[..., 1:].ravel())
            assert (np.diff(labels) == 1).sum() >= labels.size - 3 and len(set(labels)) == labels.size == 240
        assert (epochs[0] != epochs[1]).any()
        np.testing.assert_array_equal(pretrain.rows_of_step(stream, jnp.int32(7), PLAN), rows[7])

    def test_biases_move_toward_equal_load(self) -> None:
        loads = jnp.array([0.25, 0.5, 0.25, 0.0]), jnp.array([0.5, 0.5, 0.0, 0.0])  # the second layer has no bias
        moved = pretrain.balanced({BIAS: jnp.zeros(4), "other": jnp.ones(2)}, loads, 0.1)
        np.testing.assert_allclose(moved[BIAS], [0, -0.1, 0, 0.1], atol=1e-7)
        assert list(moved) == [BIAS, "other"] and (moved["other"] == 1).all()

    def test_load_is_the_share_of_picks(self) -> None:
        routing = Routing(jnp.array([[[0, 1], [0, 2]], [[0, 1], [3, 2]]]), jnp.ones((2, 2, 2)))
        np.testing.assert_allclose(pretrain.expert_load(routing, 5), [3 / 8, 2 / 8, 2 / 8, 1 / 8, 0])

    def test_a_gradient_that_is_not_finite_changes_nothing(self) -> None:
        values = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
        optimiser = pretrain.optimiser(PLAN)
        state = optimiser.init(values)
        with jax.numpy_dtype_promotion("standard"):
            unchanged, _ = optimiser.update(values | {"b": jnp.array([1.0, jnp.nan])}, state, values)
            updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, values), state, values)
        assert all((value == 0).all() for value in unchanged.values())
        np.testing.assert_allclose(updates["a"], PLAN.decay)  # decay is of matrices only
        np.testing.assert_allclose(updates["b"], 0)


Run = tuple[list[dict[str, float]], Model]


@pytest.fixture(scope="module")
def run(model: Model) -> Run:
    """Sixty steps on text that counts upwards, in dispatches of ten."""
    stream, lines = np.tile(np.arange(90, dtype=np.uint16), 12), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_target, "DISPATCH", 10)
        patched.setattr(train_target, "VALIDATE_EVERY", 3)
        trained = train_target.train_target(model, stream, stream, PLAN, Budget(60, 0.0), lines.append)
    return lines, trained


class TestRun:
    def test_the_loss_falls(self, run: Run) -> None:
        lines, _ = run
        assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60]
        assert [number for number, line in enumerate(lines) if "validation" in line] == [2, 5]
        assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
        assert all(np.isfinite(list(line.values())).all() for line in lines)
        json.dumps(lines)

    def test_what_is_saved_is_what_was_trained(self, run: Run, model: Model, tmp_path: Path) -> None:
        _, trained = run
        write_checkpoint(trained, "{}", tmp_path / "folder")
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
        loaded = dspark_jax.load(tmp_path / "folder", "bfloat16")
        stream = jnp.tile(jnp.arange(90, dtype=jnp.uint16), 12)
        rows = pretrain.rows_of_step(stream, jnp.int32(0), PLAN)
        assert (forward(loaded, rows[:, :-1]).logits.argmax(-1) == rows[:, 1:]).mean() > 0.8
        names = [name for name, _ in weights_of(trained)]
        stored, kept, before = (jax.jit(lambda m: masters(m, names))(one) for one in (loaded, trained, model))
        for name in names:
            np.testing.assert_array_equal(stored[name], kept[name])
            assert (stored[name] == before[name]).all() == name.startswith("drafter."), name

    def test_released_masters_have_the_loss_that_they_had(
        self, target: Model, parameters: Parameters, ids: jax.Array, found: tuple[jax.Array, Losses, Gradients]
    ) -> None:
        moved = jax.tree.map(lambda value: value * 1.003, parameters)  # off the grids of the formats
        loss = jax.jit(lambda p, model: pretrain.target_loss(p, model, ids)[0], compiler_options=QUICK)
        stored = release(target, moved)
        assert float(loss(moved, target)) == pytest.approx(float(loss({}, stored)), rel=1e-6)

    def test_steps_fill_the_time(self) -> None:
        assert steps_that_fit(4, 2.0, 21.0) == (4 + 10) * train_target.DISPATCH
        assert steps_that_fit(4, 2.0, -1.0) == 4 * train_target.DISPATCH


class TestInitialWeights:
    def test_a_site_starts_as_a_residual_connection(self) -> None:
        for own in range(4):
            base = jnp.asarray(site_base(4, own), jnp.float32)
            pre, post, comb = split_mixes(jnp.zeros(24), base, jnp.ones(3), 5, 1e-6)
            assert float(pre.sum()) == pytest.approx(1, abs=1e-4) and int(pre.argmax()) == own
            np.testing.assert_allclose(post, 1, atol=1e-6)
            np.testing.assert_allclose(comb.sum(0), 1, atol=1e-4)
            np.testing.assert_allclose(comb.sum(1), 1, atol=1e-4)
            assert (jnp.diag(comb) > 0.9).all()

    def test_hash_tables_are_balanced(self) -> None:
        for picked in (1, 2, 3):
            config = dataclasses.replace(CONFIG, num_experts_per_tok=picked)
            table = hash_table(config, np.random.default_rng(4))
            assert table.shape == (96, picked) and table.dtype == np.int32
            assert all(len(set(row)) == picked for row in table.tolist())
            assert set(np.bincount(table.ravel(), minlength=6)) == {96 * picked // 6}


class TestContract:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_its_gradient_is_that_of_the_einsum(self, dtype: str) -> None:
        keys = jax.random.split(jax.random.key(5), 3)
        x, y = (
            jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, [(3, 4, 8), (5, 8)], strict=False)
        )
        cotangent = jax.random.normal(keys[2], (3, 4, 5))
        value, pull = jax.vjp(lambda x, y: contract("...i,oi->...o", x, y), x, y)
        found = pull(cotangent)
        assert value.dtype == jnp.float32 and [g.dtype for g in found] == [x.dtype, y.dtype]
        exact = [np.asarray(array, np.float64) for array in (x, y, cotangent)]
        expected = np.einsum("bto,oi->bti", exact[2], exact[1]), np.einsum("bto,bti->oi", exact[2], exact[0])
        for got, wanted in zip(found, expected, strict=True):
            scale = np.abs(wanted).max()
            limit = 1e-6 if dtype == "float32" else 2e-2
            np.testing.assert_allclose(np.asarray(got, np.float64) / scale, wanted / scale, atol=limit)
