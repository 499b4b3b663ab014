"""The model against the independent oracle on six tiny configurations, and its pieces against published numbers.

A position at or after a choice (router, indexer, draft) with a margin below 1e-5 is not compared, but counted.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import draft_program
from flax import nnx
from oracle import Array, DraftResult, Result, Weights, draft, target
from random_model import random_model
from tiny_configs import CONFIGS, NEAR_TIE, TOLERANCE, oracle_weights, random_ids, smallest_margins

from dspark_jax import Forward, Model, ModelConfig, forward
from dspark_jax.model import indexer
from dspark_jax.model.cache import ENTRY_BLOCK, target_cache
from dspark_jax.model.drafter import DraftStep
from dspark_jax.model.moe import route
from dspark_jax.model.numerics import PRESETS
from dspark_jax.model.rope import frequencies, rope_tables, yarn
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import lm_logits, target_step
from pallas_kernels.fake_quant import fake_e2m1, fake_e4m3
from pallas_kernels.hyper_connection import expand, split_mixes

BATCH, TOKENS = 2, 140
QUICK = {"xla_backend_optimization_level": 0}  # for programs that take longer to compile than to run

with_drafter = pytest.mark.parametrize("case", [name for name in CONFIGS if CONFIGS[name].drafter], indirect=True)


# Against the oracle --------------------------------------------------------------------------------------------------


@partial(jax.jit, compiler_options=QUICK)
def target_program(model: Model, setting: Setting, ids: jax.Array) -> Forward:
    """The target on whole sequences at once."""
    assert model.target is not None
    batch, tokens = ids.shape
    rows = Rows(ids, jnp.zeros(batch, jnp.int32), jnp.full(batch, tokens, jnp.int32))
    cache = target_cache(model.config, model.numerics, batch, tokens, width=1)
    step = target_step(model.target, model.vocabulary, rows, cache, setting)
    return Forward(lm_logits(model.vocabulary, step.hidden), step.taps, step.seen)


@dataclass(frozen=True, repr=False)
class Case:
    """One configuration: the model's evaluation of two sequences, the oracle's, and how far they may be compared."""

    model: Model
    weights: Weights
    ids: Array
    result: Forward
    expected: list[Result]
    clear: list[int]

    @property
    def config(self) -> ModelConfig:
        return self.model.config


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = random_model(CONFIGS[request.param])
    weights = oracle_weights(model, tmp_path_factory.mktemp("model") / "checkpoint")
    ids = random_ids(model.config, BATCH, TOKENS, seed=11)
    expected = [target(model.config, weights, row) for row in ids]
    clear = [clear_positions(run) for run in expected]
    result = target_program(model, model.setting(TOKENS), jnp.asarray(ids))
    return Case(model, weights, ids, result, expected, clear)


def clear_positions(run: Result) -> int:
    """How many positions come before the first choice that rounding decides."""
    return int(np.append(smallest_margins(run) < NEAR_TIE, True).argmax())


def assert_close(actual: jax.typing.ArrayLike, expected: Array, what: str = "") -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=what)


def test_few_positions_are_left_out(case: Case) -> None:
    assert sum(case.clear) >= 0.95 * BATCH * TOKENS


@pytest.mark.parametrize("name", ["logits", "taps"])
def test_outputs(case: Case, name: str) -> None:
    for actual, run, clear in zip(getattr(case.result, name), case.expected, case.clear, strict=True):
        assert_close(actual[:clear], getattr(run, name)[:clear])


def test_streams(case: Case) -> None:
    seen = case.result.seen
    assert seen is not None
    for row, (run, clear) in enumerate(zip(case.expected, case.clear, strict=True)):
        for number, layer in enumerate(seen.layers):
            assert_close(layer.streams[row, :clear], run.streams[number, :clear], f"layer {number}")
        assert_close(seen.collapsed[row, :clear], run.collapsed[:clear])


def test_routing(case: Case) -> None:
    seen = case.result.seen
    assert seen is not None
    for row, (run, clear) in enumerate(zip(case.expected, case.clear, strict=True)):
        for number, layer in enumerate(seen.layers):
            picks, weights = (np.asarray(part)[row, :clear] for part in (layer.routing.picks, layer.routing.weights))
            order = picks.argsort(axis=1)
            np.testing.assert_array_equal(np.take_along_axis(picks, order, 1), run.router_picks[number, :clear])
            assert_close(np.take_along_axis(weights, order, 1), run.router_weights[number, :clear])


def test_index_picks(case: Case) -> None:
    seen = case.result.seen
    assert seen is not None
    for row, (run, clear) in enumerate(zip(case.expected, case.clear, strict=True)):
        for number, layer in enumerate(seen.layers):
            assert (
                (layer.index_picks is not None)
                == (number in run.index_picks)
                == (case.config.layer_ratios[number] == 4)
            )
            if layer.index_picks is not None:
                picks = np.asarray(layer.index_picks)[row, :clear]
                assert [{w for w in t if w >= 0} for t in picks.tolist()] == run.index_picks[number][:clear]
                np.testing.assert_array_equal((picks >= 0).sum(1), [len(p) for p in run.index_picks[number][:clear]])


@pytest.mark.parametrize("case", ["two-streams"], indirect=True)
def test_forward_in_chunks(case: Case) -> None:
    """The last of the three chunks is cut."""
    result = forward(case.model, case.ids, internals=True, chunk=64)
    assert jax.tree.map(jnp.shape, result) == jax.tree.map(jnp.shape, case.result)
    for actual, expected in zip(jax.tree.leaves(result), jax.tree.leaves(case.result), strict=True):
        clear = min(case.clear)
        assert_close(actual[:, :clear], np.asarray(expected)[:, :clear])


# The drafter ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Drafts:
    """Contexts of several lengths for one drafter: taps [B, T, w], lengths [B] and anchors [B]."""

    case: Case
    taps: jax.Array
    context: Array
    anchor: Array

    def run(self, model: Model) -> DraftStep:
        inputs = (jnp.asarray(values, jnp.int32) for values in (self.context, self.anchor))
        return draft_program(model, model.setting(TOKENS + 8), self.taps, *inputs)

    def expected(self, row: int) -> DraftResult:
        taps = self.case.expected[row % BATCH].taps[: self.context[row]]
        return draft(self.case.config, self.case.weights, taps, int(self.anchor[row]))


@pytest.fixture(scope="module")
def drafts(case: Case) -> Drafts:
    window = case.config.sliding_window
    context = np.array([0, 1, window - 1, window, window + 1, window + 9])
    sequence = np.arange(len(context)) % BATCH
    assert (context <= np.array(case.clear)[sequence]).all()
    return Drafts(case, case.result.taps[sequence], context, case.ids[sequence, context])


@with_drafter
def test_drafts(drafts: Drafts) -> None:
    step = drafts.run(drafts.case.model)
    left_out = 0
    for row in range(len(drafts.context)):
        expected = drafts.expected(row)
        clear = int(np.append(expected.margin < NEAR_TIE, True).argmax())
        left_out += len(expected.ids) - clear
        np.testing.assert_array_equal(step.ids[row, :clear], expected.ids[:clear])
        assert_close(step.base_logits[row], expected.base_logits)
        assert_close(step.logits[row, : clear + 1], expected.logits[: clear + 1])
        assert_close(step.confidence[row, : clear + 1], expected.confidence[: clear + 1])
        assert_close(step.hidden[row], expected.hidden)
        assert_close(np.stack([stage[row] for stage in step.stages]), expected.stages)
    assert left_out <= 0.05 * step.ids.size


@with_drafter
def test_the_first_slot_sees_the_later_ones(drafts: Drafts) -> None:
    """Another embedding of the noise token, which all slots but the first are fed, changes what the first gives."""
    model, config = drafts.case.model, drafts.case.config
    assert config.drafter is not None
    embed = model.vocabulary.embed[...].at[config.drafter.noise_token_id].multiply(-1)
    vocabulary = with_params(model.vocabulary, embed=embed)
    before, after = (drafts.run(m).hidden for m in (model, dataclasses.replace(model, vocabulary=vocabulary)))
    assert (drafts.anchor != config.drafter.noise_token_id).all()
    assert (np.abs(after - before)[:, 0].max(axis=-1) > 10 * TOLERANCE).all()


@with_drafter
def test_without_a_markov_bias_every_slot_is_its_own_argmax(drafts: Drafts) -> None:
    model = drafts.case.model
    assert model.drafter is not None
    drafter = nnx.clone(model.drafter)
    head = drafter.markov_head
    drafter.markov_head = with_params(head, markov_w2=jnp.zeros_like(head.markov_w2[...]))
    step = drafts.run(dataclasses.replace(model, drafter=drafter))
    np.testing.assert_array_equal(step.logits, step.base_logits)
    np.testing.assert_array_equal(step.ids, np.argmax(step.base_logits, axis=-1))
    biased = drafts.run(model)
    np.testing.assert_array_equal(biased.base_logits, step.base_logits)
    assert (biased.ids != step.ids).any()


def with_params[M: nnx.Module](module: M, **values: jax.Array) -> M:
    """A copy of a module with some of its direct weights replaced."""
    copy = nnx.clone(module)
    for name, value in values.items():
        setattr(copy, name, nnx.Param(value))
    return copy


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["two-streams"], indirect=True)
def test_gradient_through_frozen_packed_weights(case: Case) -> None:
    """Of all logits with respect to one token's embedding, along one direction: as the oracle's difference quotient."""
    ids, token = case.ids[0, :14], int(case.ids[0, 1])
    model, setting = case.model, case.model.setting(16)
    rows = Rows(jnp.asarray(ids[None]), jnp.zeros(1, jnp.int32), jnp.full(1, len(ids), jnp.int32))
    cache = target_cache(model.config, model.numerics, 1, 16, width=1)
    table = model.vocabulary.embed[...].astype(jnp.float32)

    @jax.grad
    def gradient(row: jax.Array) -> jax.Array:
        assert model.target is not None
        vocabulary = with_params(model.vocabulary, embed=table.at[token].set(row))
        return jnp.sum(lm_logits(vocabulary, target_step(model.target, vocabulary, rows, cache, setting).hidden))

    actual = np.asarray(jax.jit(gradient, compiler_options=QUICK)(table[token]))
    assert np.isfinite(actual).all() and (actual != 0).all()

    direction, step = np.random.default_rng(0).standard_normal(case.config.hidden_size), 1e-5

    def total(distance: float) -> float:
        embed = case.weights["embed"].copy()
        embed[token] += distance * direction
        return float(target(case.config, case.weights | {"embed": embed}, ids).logits.sum())

    assert actual @ direction == pytest.approx((total(step) - total(-step)) / (2 * step), rel=1e-3)


# The running top-k ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "slots", "topk"), [(8, 40, 1), (8, 40, 5), (8, 40, 64), (8, 8, 5), (ENTRY_BLOCK, 2 * ENTRY_BLOCK, 5)]
)
def test_top_entries_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int, slots: int, topk: int) -> None:
    """Small integers, so that scores are exact and ties are everywhere: the lowest number wins."""
    monkeypatch.setattr(indexer, "ENTRY_BLOCK", block)
    rng = np.random.default_rng(topk)
    query = rng.integers(-1, 2, (2, 5, 3, 4)).astype(np.float32)
    weights = rng.integers(-2, 3, (2, 5, 3)).astype(np.float32)
    entries = rng.integers(-1, 2, (2, slots, 4)).astype(np.float32)
    visible = np.array([[0, 1, 3, slots // 2 + 1, slots], [2, 7, 8, slots - 1, slots]], np.int32)
    picks, _ = indexer.top_entries(*map(jnp.asarray, (query, weights, entries, visible)), topk, PRESETS["float32"])

    assert picks.shape == (2, 5, min(topk, slots))
    scores = np.einsum("bth,bths->bts", weights, np.maximum(np.einsum("bthk,bsk->bths", query, entries), 0))
    for b, t in np.ndindex(visible.shape):
        best = np.argsort(-scores[b, t, : visible[b, t]], kind="stable")[:topk]
        np.testing.assert_array_equal(picks[b, t, : len(best)], best)
        assert (picks[b, t, len(best) :] == -1).all()


# Check vectors of the specification ----------------------------------------------------------------------------------


def flash() -> ModelConfig:
    """The rotary fields of Flash; nothing else of it matters here."""
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    return ModelConfig.tiny(head_dim=512, index_head_dim=128, qk_rope_head_dim=64, rope_scaling=scaling)


def test_sinkhorn_vectors() -> None:
    i = jnp.arange(24, dtype=jnp.float32)
    pre, post, comb = split_mixes(jnp.sin(0.37 * i), 0.3 * jnp.cos(0.11 * i), jnp.array([0.5, 1.5, 2.0]), 20, 1e-6)
    np.testing.assert_allclose(pre, [0.5744435, 0.6175115, 0.6524708, 0.6751709], atol=2e-7)
    np.testing.assert_allclose(post, [1.7077312, 1.6904604, 1.6143775, 1.4626831], atol=5e-7)
    rows = [
        [0.5082967, 0.2900052, 0.1386407, 0.0630564],
        [0.2013578, 0.2235565, 0.2591948, 0.3158898],
        [0.0660344, 0.1613300, 0.3143158, 0.4583188],
        [0.2243100, 0.3251073, 0.2878477, 0.1627339],
    ]
    np.testing.assert_allclose(comb, rows, atol=5e-7)


def test_streams_are_mixed_from_source_to_destination() -> None:
    comb = jnp.zeros((4, 4)).at[0, 2].set(3)
    streams = jnp.arange(4.0)[:, None] + jnp.array([1.0, 10.0])
    mixed = expand(jnp.array([100.0, 200.0]), streams, jnp.array([0.0, 1.0, 0.0, 2.0]), comb)
    np.testing.assert_array_equal(mixed, [[0, 0], [100, 200], [3, 30], [200, 400]])


def test_sqrt_softplus_vector() -> None:
    """All four experts are picked, so their weights are the scores up to the sum."""
    expected = np.array([0.3562696, 0.8325546, 1.3043822, 5.0])
    config = ModelConfig.tiny(n_routed_experts=4, num_experts_per_tok=4)
    gate = SimpleNamespace(weight=nnx.Param(jnp.eye(4)), bias=nnx.Param(jnp.zeros(4)), tid2eid=None)
    setting = Setting(config, PRESETS["float32"], rope_tables(config, 1))
    routing = route(gate, jnp.array([[[-2, 0, 1.5, 25]]]), jnp.zeros((1, 1), jnp.int32), setting)
    weights = np.asarray(routing.weights)[0, 0][np.argsort(routing.picks[0, 0])]
    np.testing.assert_allclose(weights, expected / expected.sum() * config.routed_scaling_factor, rtol=2e-7)


def test_rotary_frequencies() -> None:
    config = flash()
    plain, slow = (frequencies(64, base) for base in (config.rope_theta, config.compress_rope_theta))
    np.testing.assert_allclose(plain[[1, 15, 31]], [0.749894, 1.333522e-2, 1.333521e-4], rtol=1e-6)
    expected = [1, 0.687656, 5.286857e-3, 3.635539e-3, 2.265625e-3, 2.969778e-4, 5.372312e-6, 5.680529e-7]
    np.testing.assert_allclose(yarn(slow, config)[[0, 1, 14, 15, 16, 20, 25, 31]], expected, rtol=1e-6)


def test_rotary_table() -> None:
    tables = rope_tables(flash(), 2000)
    compressed = [[-0.1823784, -0.9832284], [0.8288996, 0.5593973], [0.9999993, 0.0011355]]
    np.testing.assert_allclose(tables.of(4)[1999, jnp.array([16, 20, 31])], compressed, atol=2e-7)
    np.testing.assert_array_equal(tables.of(128), tables.of(4))
    plain = [[-0.8781781, -0.4783338], [0.0464259, 0.9989218]]
    np.testing.assert_allclose(tables.of(0)[1999, jnp.array([1, 15])], plain, atol=2e-7)


def test_fake_quantisation_vectors() -> None:
    x = jnp.array([0.1, -0.3, 0.7, 1.9, -2.6, 3.3, 0.013, -0.0009])
    e4m3 = [0.1015625, -0.3125, 0.6875, 1.875, -2.5, 3.25, 0.0126953125, -0.00091552734375]
    np.testing.assert_array_equal(fake_e4m3(x, 8), e4m3)
    e2m1 = np.array([0, -0.5, 0.5, 2, -3, 3, 0, -0.0])
    np.testing.assert_array_equal(fake_e2m1(x, 8), e2m1)
    np.testing.assert_array_equal(np.signbit(fake_e2m1(x, 8)), np.signbit(e2m1))
    ties = jnp.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    np.testing.assert_array_equal(fake_e2m1(ties, 8), [6, 0, 1, 1, 2, 2, 4, 4])
