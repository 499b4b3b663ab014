"""Exact sampling: against DeepSeek's own verification, against exact probabilities, and with planted faults."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file
from scipy.stats import chisquare
from table_models import Tables

from dspark_jax.decoding import accept, loop, sampling
from dspark_jax.decoding.accept import Proposal, Verdict, accept_greedy, accept_sampled
from dspark_jax.decoding.sampling import Sampling, Stream, row_keys, target_probabilities, uniforms

GOLDEN = Path(__file__).parents[1] / "golden" / "training"
DRAWS = 100_000
VOCABULARY, BLOCK, FIRST = 5, 3, 3


# DeepSeek's verification of single rounds, random numbers given -----------------------------------------------------


@pytest.fixture(scope="module")
def verify() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "verify.safetensors")


def inverse_cdf(probabilities: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The smallest index whose cumulative probability exceeds the noise."""
    cumulative = np.cumsum(probabilities.astype(np.float64), axis=-1)
    return np.argmax(cumulative > noise[:, None], axis=-1).astype(np.int32)


def test_a_round_is_that_of_the_official_code(verify: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, one-hot drafters, short offers, stop ids and guards: 55 rounds, with the official random numbers."""
    golden = {key.removeprefix("verify/"): value for key, value in verify.items() if key.startswith("verify/")}
    rows, final = len(golden["kind"]), []

    def draw(keys: jax.Array, positions: jax.Array, stream: Stream, logits: jax.Array) -> jax.Array:
        assert stream is Stream.FINAL
        probabilities = np.exp(np.asarray(logits))
        final.append(probabilities / probabilities.sum(axis=-1, keepdims=True))
        return jnp.asarray(inverse_cdf(final[-1], golden["final_uniform"]))

    monkeypatch.setattr(accept, "uniforms", lambda *_: jnp.asarray(golden["uniforms"]))
    monkeypatch.setattr(accept, "draw", draw)
    monkeypatch.setattr(accept, "draft_probabilities", lambda logits, drafts, sampling: logits)
    proposal = Proposal(
        jnp.asarray(np.maximum(golden["draft_tokens"], 0)),
        jnp.asarray(golden["draft_probs"]),
        jnp.asarray(golden["offered"]),
    )
    settings = Sampling.of(rows, temperature=golden["temperature"], stop_ids=golden["stop"])
    keys, position = jnp.zeros((rows, 2), jnp.uint32), jnp.zeros(rows, jnp.int32)
    verdict = accept_sampled(jnp.asarray(golden["target_logits"]), proposal, settings, keys, position)
    cut = accept.commit(verdict, proposal.offered, settings.stop_ids)

    # The official code cuts at accepted stop drafts here and looks at its own token later.
    ended = golden["terminated"]
    assert ended.sum() >= 4 and (golden["kind"] == 5).sum() >= 4
    assert np.array_equal(cut.accepted, golden["accepted"])
    assert np.array_equal(cut.offered, golden["effective"])
    assert np.array_equal(cut.bonus == 0, ended)
    np.testing.assert_allclose(final[0][~ended], golden["final_probs"][~ended], atol=2e-6)
    for row in range(rows):
        committed = golden["committed"][row]
        count = golden["accepted"][row] + (0 if ended[row] else 1)
        assert verdict.tokens[row, :count].tolist() == committed[:count].tolist()


def test_temperatures_are_those_of_the_official_code(verify: dict[str, np.ndarray]) -> None:
    for temperature, expected in zip(verify["temperature/values"], verify["temperature/probs"], strict=True):
        logits = jnp.asarray(verify["temperature/logits"])[:, None]
        ours = target_probabilities(logits, Sampling.of(len(logits), temperature=temperature))
        np.testing.assert_allclose(ours[:, 0], expected, atol=1e-6)


# Whole loops ---------------------------------------------------------------------------------------------------------

GREEDY_RUNS = ("greedy", "greedy_budget1", "greedy_budget7", "greedy_stop_as_final", "greedy_stop_in_drafts")


def test_greedy_loops_of_table_models_are_those_of_the_official_code() -> None:
    """Five runs in one batch, each with its own budget and stop ids."""
    golden = load_file(GOLDEN / "loop.safetensors")
    drafter = golden["drafter_hidden"] @ golden["lm_head"].T
    tables = Tables(golden["target_table"], drafter, golden["markov_w1"] @ golden["markov_w2"].T)
    prompts = np.stack([golden[f"{run}/prompt_ids"] for run in GREEDY_RUNS])
    stops = np.full((len(GREEDY_RUNS), 2), -1)
    for row, run in zip(stops, GREEDY_RUNS, strict=True):
        row[: len(golden[f"{run}/stop_ids"])] = golden[f"{run}/stop_ids"]
    budgets = np.array([golden[f"{run}/setting"][2] for run in GREEDY_RUNS], np.int32)
    tokens = np.pad(prompts, [(0, 0), (0, 64)])
    lengths = np.full(len(prompts), prompts.shape[1], np.int32)
    done = tables.decode(tokens, lengths, Sampling.of(len(prompts), max_new_tokens=budgets, stop_ids=stops))
    for row, run in enumerate(GREEDY_RUNS):
        expected = golden[f"{run}/output_ids"].tolist()
        assert done.tokens[row, : len(expected)].tolist() == expected
        assert int(done.length[row]) == len(expected)
        assert bool(done.stopped[row]) == ("stop" in run)


@pytest.fixture(scope="module")
def tables() -> Tables:
    return random_tables()


def random_tables() -> Tables:
    rng = np.random.default_rng(7)
    shapes = {1.2: (4, VOCABULARY, VOCABULARY), 1.0: (4, VOCABULARY, BLOCK, VOCABULARY), 0.7: (VOCABULARY, VOCABULARY)}
    return Tables(*(rng.normal(0, size, shape).astype(np.float32) for size, shape in shapes.items()))


def expected_probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """By sorting, in float64: float [V] -> float [V]."""
    probabilities = np.exp(logits.astype(np.float64) / temperature)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = order[: top_k or len(order)]
    share = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    kept = kept[: 1 + int(np.sum(share[:-1] < top_p))] if top_p < 1 else kept
    cut = np.zeros_like(probabilities)
    cut[kept] = probabilities[kept]
    return cut / cut.sum()


def joint(tables: Tables, anchor: int, position: int, **cut: float) -> np.ndarray:
    """Exact probabilities of the first three tokens, [V, V, V]."""
    table = np.asarray(tables.target)

    def after(token: int, position: int) -> np.ndarray:
        return expected_probabilities(table[position % len(table), token], **cut)

    total = np.zeros((VOCABULARY,) * FIRST)
    for first, p in enumerate(after(anchor, position)):
        for second, q in enumerate(after(first, position + 1)):
            total[first, second] = p * q * after(second, position + 2)
    return total


def sample(tables: Tables, seed: int = 0, budget: int = 4, **settings: object) -> np.ndarray:
    """DRAWS sequences, from one prompt: int [DRAWS, FIRST]; draft lengths 0 to 3 side by side."""
    tokens = np.zeros((DRAWS, 16), np.int32)
    tokens[:, :2] = [4, 1]
    columns = {"draft_tokens": np.arange(DRAWS) % 5, "seed": np.arange(DRAWS), "max_new_tokens": budget}
    done = tables.decode(tokens, np.full(DRAWS, 2, np.int32), Sampling.of(DRAWS, **columns | settings), key=seed)
    return np.asarray(done.tokens)[:, 2 : 2 + FIRST]


def agreement(drawn: np.ndarray, expected: np.ndarray) -> float:
    """p-value of a chi-squared test of all cells, rare ones together; 0 if something impossible was drawn."""
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(drawn.T), 1)
    if counts[expected == 0].any():
        return 0.0
    cells, expected = counts.ravel(), expected.ravel() * len(drawn)
    common = expected >= 5
    cells, expected = (np.append(values[common], values[~common].sum()) for values in (cells, expected))
    keep = expected > 0
    return chisquare(cells[keep], expected[keep] * cells.sum() / expected[keep].sum()).pvalue


CUTS = {"whole": (0, 1.0), "top-p 0.9": (0, 0.9), "top-k 3": (3, 1.0), "both": (3, 0.8)}


@pytest.mark.parametrize("greedy_drafts", [False, True], ids=["sampled drafts", "greedy drafts"])
@pytest.mark.parametrize(("temperature", "cut"), [*((1.0, cut) for cut in CUTS), (0.3, "whole"), (0.3, "both")])
def test_three_tokens_have_their_joint_distribution(
    tables: Tables, temperature: float, cut: str, greedy_drafts: bool
) -> None:
    top_k, top_p = CUTS[cut]
    expected = joint(tables, anchor=1, position=1, temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = sample(tables, temperature=temperature, top_k=top_k, top_p=top_p, greedy_drafts=greedy_drafts)
    assert agreement(drawn, expected) > 1e-3


def test_a_budget_that_cuts_the_block_changes_no_distribution(tables: Tables) -> None:
    expected = joint(tables, anchor=1, position=1, temperature=1.0, top_k=0, top_p=1.0)
    assert agreement(sample(tables, budget=FIRST, temperature=1.0), expected) > 1e-3


def ignoring_the_residual(logits: jax.Array, proposal: Proposal, *rest: object) -> Verdict:
    """A fault: after a rejection the target draws from p."""
    verdict = accept_sampled(logits, proposal, *rest)
    anew = accept_sampled(logits, proposal._replace(offered=verdict.accepted), *rest)
    return Verdict(anew.tokens, verdict.accepted)


FAULTS: dict[str, tuple[object, str, Callable]] = {
    "drafts drawn at temperature 1": (loop, "tempered", lambda logits, _: logits),
    "no residual": (accept, "accept_sampled", ignoring_the_residual),
    "noise shared by streams": (sampling, "_key", lambda key, position, _: sampling_key(key, position, Stream.DRAFT)),
}
sampling_key = sampling._key


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(tables: Tables, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong = FAULTS[fault]
    expected = joint(tables, anchor=1, position=1, temperature=0.6, top_k=0, top_p=1.0)
    assert agreement(sample(tables, temperature=0.6), expected) > 1e-3
    monkeypatch.setattr(place, name, wrong)
    assert agreement(sample(random_tables(), temperature=0.6), expected) < 1e-9


@pytest.mark.parametrize(
    ("offered", "expected"),
    [(lambda draft: jnp.ones_like(draft), 0.7), (lambda draft: (draft == 0).astype(jnp.int32), 0.85)],
    ids=["always", "looking at the draft"],
)
def test_offering_may_not_look_at_the_draft(offered: Callable, expected: float) -> None:
    """The paper's counter-example: p = (0.7, 0.3), q = (0.5, 0.5); an offer that sees A first emits A too often."""
    rows = jnp.arange(DRAWS, dtype=jnp.uint32)
    settings, keys = Sampling.of(DRAWS, temperature=1.0), row_keys(jax.random.key(1), rows)
    p = jnp.log(jnp.broadcast_to(jnp.asarray([0.7, 0.3]), (DRAWS, 2, 2)))
    q = jnp.zeros((DRAWS, 1, 2))
    drafts = sampling.draw(keys, jnp.zeros(DRAWS, jnp.int32), Stream.DRAFT, q[:, 0])
    proposal = Proposal(drafts[:, None], q, offered(drafts))
    verdict = accept.accept(p, proposal, settings, keys, jnp.zeros(DRAWS, jnp.int32))
    share = float(jnp.mean(verdict.tokens[:, 0] == 0))
    assert abs(share - expected) < 3 * np.sqrt(expected * (1 - expected) / DRAWS)


# Rows and distributions ----------------------------------------------------------------------------------------------


def test_a_row_draws_the_same_alone_and_among_others(tables: Tables) -> None:
    tokens = np.zeros((8, 64), np.int32)
    tokens[:, :3] = np.random.default_rng(0).integers(0, VOCABULARY, (8, 3))
    lengths = np.array([3, 1, 2, 3, 3, 2, 1, 3], np.int32)
    columns = {
        "temperature": np.array([1.0, 0, 0.7, 1.3, 0, 1, 0.2, 2], np.float32),
        "top_k": np.array([0, 0, 2, 0, 3, 4, 0, 0]),
        "top_p": np.array([1, 1, 1, 0.8, 1, 0.95, 1, 0.5], np.float32),
        "seed": np.array([1, 2, 3, 4, 5, 6, 7, 2**32 - 1]),
        "max_new_tokens": np.array([40, 50, 3, 60, 0, 22, 63, 9]),
        "stop_ids": np.array([[-1], [2], [-1], [0], [-1], [-1], [-1], [-1]]),
    }
    together = tables.decode(tokens, lengths, Sampling.of(8, **columns))
    for row in range(8):
        alone = Sampling.of(1, **{name: values[row : row + 1] for name, values in columns.items()})
        done = tables.decode(tokens[row : row + 1], lengths[row : row + 1], alone)
        end = int(done.length[0])
        assert int(together.length[row]) == end
        assert together.tokens[row, :end].tolist() == done.tokens[0, :end].tolist()
        assert np.array_equal(together.logprobs.target[row], done.logprobs.target[0])
    assert together.length.tolist()[4] == 3, "no budget, no token"
    assert together.length.tolist()[3] <= 64, "a row ends where its room ends"


def test_a_rejected_draft_that_the_target_cannot_bear_is_harmless() -> None:
    """Behind token 2 the target's logits are not finite; it is drafted in every round and never accepted."""
    rng = np.random.default_rng(5)
    target = rng.normal(size=(4, VOCABULARY, VOCABULARY)).astype(np.float32)
    target[..., 2], target[:, 2] = -1e9, np.nan
    drafter = np.zeros((4, VOCABULARY, BLOCK, VOCABULARY), np.float32)
    drafter[..., 2] = 50
    tables = Tables(target, drafter, np.zeros((VOCABULARY, VOCABULARY), np.float32))
    settings = Sampling.of(4, temperature=[0.0, 0.0, 1.0, 1.0], draft_tokens=[0, 3, 0, 3], max_new_tokens=20)
    done = tables.decode(np.zeros((4, 32), np.int32), np.ones(4, np.int32), settings)
    assert done.finite.tolist() == [True] * 4 and done.length.tolist() == [21] * 4
    assert done.tokens[0].tolist() == done.tokens[1].tolist()
    assert np.asarray(done.counters.offered).sum(axis=1).tolist()[::2] == [0, 0]
    assert np.asarray(done.counters.accepted).sum() == 0 < np.asarray(done.counters.offered).sum()


def test_log_probabilities_are_those_of_the_tables(tables: Tables) -> None:
    tokens = np.zeros((3, 48), np.int32)
    columns = {"temperature": np.array([0.7, 1.0, 0.0], np.float32), "top_k": np.array([3, 0, 0]), "seed": np.arange(3)}
    done = tables.decode(tokens, np.ones(3, np.int32), Sampling.of(3, max_new_tokens=40, **columns))
    table = np.asarray(tables.target)
    for row, (temperature, top_k) in enumerate([(0.7, 3), (1.0, 0), (1e-9, 0)]):
        emitted = np.asarray(done.tokens[row])
        for position in range(1, 41):
            logits = table[(position - 1) % len(table), emitted[position - 1]]
            target = expected_probabilities(logits, 1.0, 0, 1.0)[emitted[position]]
            logits = logits - logits.max()
            drawn = expected_probabilities(logits, temperature, top_k, 1.0)[emitted[position]]
            assert float(done.logprobs.target[row, position]) == pytest.approx(np.log(target), abs=1e-5)
            assert float(done.logprobs.drawn[row, position]) == pytest.approx(np.log(drawn), abs=1e-5)
    assert not np.asarray(done.logprobs.target)[:, 41:].any() and not np.asarray(done.logprobs.target)[:, 0].any()


LOGITS = arrays(np.int32, 9, elements=st.integers(-300, 300), unique=True).map(lambda tenths: tenths / np.float32(10))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(logits=LOGITS, temperature=st.floats(0.05, 4), top_k=st.integers(0, 12), top_p=st.floats(0.01, 1))
def test_truncation_is_that_of_sorting(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> None:
    settings = Sampling.of(1, temperature=temperature, top_k=top_k, top_p=top_p)
    ours = np.asarray(_probabilities(jnp.asarray(logits)[None, None], settings))[0, 0]
    # A cut that falls on the threshold to within rounding may keep one token more or less.
    near = [expected_probabilities(logits, temperature, top_k, min(top_p * (1 + e), 1.0)) for e in (0, -3e-6, 3e-6)]
    assert min(np.abs(ours - expected).max() for expected in near) < 3e-6


_probabilities = jax.jit(target_probabilities)


def test_equally_likely_tokens_at_a_cut_stay_together() -> None:
    logits = jnp.log(jnp.asarray([[[0.4, 0.2, 0.2, 0.1, 0.1]]]))
    kept = target_probabilities(logits, Sampling.of(1, temperature=1.0, top_k=2))
    np.testing.assert_allclose(kept[0, 0], np.array([0.4, 0.2, 0.2, 0, 0]) / 0.8, atol=1e-6)
    kept = target_probabilities(logits, Sampling.of(1, temperature=1.0, top_p=0.5))
    np.testing.assert_allclose(kept[0, 0], np.array([0.4, 0.2, 0.2, 0, 0]) / 0.8, atol=1e-6)
    kept = target_probabilities(logits, Sampling.of(1, temperature=1.0, top_p=0.0))
    np.testing.assert_allclose(kept[0, 0], [1, 0, 0, 0, 0])


def test_greedy_rows_of_a_sampling_batch_follow_the_greedy_rule() -> None:
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(64, 4, 7)).astype(np.float32))
    drafts = jnp.where(rng.random((64, 3)) < 0.7, jnp.argmax(logits, -1)[:, :-1], 0).astype(jnp.int32)
    offered = jnp.asarray(rng.integers(0, 4, 64), jnp.int32)
    keys = row_keys(jax.random.key(0), jnp.arange(64, dtype=jnp.uint32))
    settings = Sampling.of(64, temperature=np.zeros(64, np.float32))
    proposal = Proposal(drafts, jnp.zeros((64, 3, 7)), offered)
    ours = accept_sampled(logits, proposal, settings, keys, jnp.zeros(64, jnp.int32))
    greedy = accept_greedy(logits, drafts, offered)
    assert np.array_equal(ours.accepted, greedy.accepted)
    kept = np.arange(4) <= np.asarray(greedy.accepted)[:, None]
    assert np.array_equal(np.asarray(ours.tokens)[kept], np.asarray(greedy.tokens)[kept])
    assert len(set(np.asarray(greedy.accepted).tolist())) == 4


def test_noise_depends_on_seed_position_and_stream_alone() -> None:
    seeds = jnp.arange(5, dtype=jnp.uint32)
    positions = jnp.arange(12, dtype=jnp.int32).reshape(1, 12).repeat(5, axis=0)
    keys = row_keys(jax.random.key(0), seeds)
    noise = np.stack([uniforms(keys, positions, stream) for stream in Stream])
    assert len(np.unique(noise)) == noise.size
    alone = uniforms(row_keys(jax.random.key(0), seeds[3:4]), positions[3:4, 7:8], Stream.FINAL)
    assert alone[0, 0] == noise[Stream.FINAL, 3, 7]
    for other in (jax.random.key(1), jax.random.key(0, impl="rbg")):
        assert not np.array_equal(uniforms(row_keys(other, seeds), positions, Stream.DRAFT), noise[0])


def test_settings_are_broadcast_and_keep_their_dtypes() -> None:
    settings = Sampling.of(3, temperature=jnp.float32(0.5), seed=2**32 - 1, stop_ids=[4, 5])
    assert settings.stop_ids.tolist() == [[4, 5]] * 3
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(replace(settings, greedy_drafts=settings.greedy))} == {
        "float32",
        "int32",
        "uint32",
        "bool",
    }
    assert Sampling.of(2).stop_ids.tolist() == [[-1], [-1]]
