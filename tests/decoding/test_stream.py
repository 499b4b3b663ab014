"""Many prompts through a few places, shared prefills, and the pure function: all say what `generate` says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import QUICK
from random_model import random_model
from tiny_configs import CONFIGS

import dspark_jax
from dspark_jax import Completion, Generation, Model, Request, Sampling, Statistics
from dspark_jax.decoding import stream as streaming
from dspark_jax.decoding.programs import start

PLACES, CAPACITY = 3, 64


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(CONFIGS["two-streams"])


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Prompts, budgets, temperatures, stop ids and draft lengths of all sorts that fit in the smallest capacity."""
    rng = np.random.default_rng(0)
    mixed = [
        Request(
            rng.integers(0, 96, rng.integers(1, 30)).tolist(),
            max_new_tokens=int(rng.integers(0, 35)),
            temperature=[0.0, 1.0, 0.6][i % 3],
            top_k=[0, 50][i % 2],
            top_p=[1.0, 0.9][i // 2 % 2],
            seed=i,
            draft_tokens=[None, 3, 1, 0][i % 4],
            greedy_drafts=i % 5 == 0,
            stop_ids=[(), (3, 9, 50), range(60, 68)][i % 3],
        )
        for i in range(11)
    ]
    many = Request([5, 6, 7], max_new_tokens=20, temperature=1.0, stop_ids=())
    return mixed + [many.sample(number) for number in range(5)]


@pytest.fixture(scope="module")
def streamed(model: Model, requests: list[Request]) -> dict[int, Completion]:
    reports: list[dspark_jax.StreamProgress] = []
    finished = list(dspark_jax.stream(model, requests, PLACES, logprobs=True, progress=reports.append))
    assert sorted(number for number, _ in finished) == list(range(len(requests)))
    assert reports == sorted(reports) and len(reports) > 3
    tokens = sum(len(completion.tokens) for _, completion in finished)
    rounds = sum(completion.statistics.rounds for _, completion in finished)
    assert reports[-1] == (len(requests), tokens, rounds)
    return dict(finished)


@pytest.fixture(scope="module")
def generated(model: Model, requests: list[Request]) -> dspark_jax.Completions:
    """All of them in one batch."""
    return dspark_jax.generate(
        model,
        [request.prompt for request in requests],
        max_new_tokens=[request.max_new_tokens for request in requests],
        temperature=[request.temperature for request in requests],
        top_k=[request.top_k for request in requests],
        top_p=[request.top_p for request in requests],
        seed=[request.seed for request in requests],
        draft_tokens=[request.draft_tokens for request in requests],
        greedy_drafts=[request.greedy_drafts for request in requests],
        stop_ids=[list(request.stop_ids or ()) for request in requests],
        logprobs=True,
    )


def test_a_prompt_and_its_seed_give_the_same_tokens_in_any_batch(
    streamed: dict[int, Completion], generated: dspark_jax.Completions, requests: list[Request]
) -> None:
    assert generated.target_logprobs is not None and generated.drawn_logprobs is not None
    for number, request in enumerate(requests):
        ours = streamed[number]
        assert ours.tokens == generated.tokens[number]
        assert ours.finish_reason == generated.finish_reasons[number]
        stopped = bool(ours.tokens) and ours.tokens[-1] in (request.stop_ids or ())
        assert ours.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(ours.tokens) == request.max_new_tokens
        assert len(ours.tokens) == ours.statistics.accepted_drafts + ours.statistics.bonus_tokens
        np.testing.assert_allclose(ours.target_logprobs, generated.target_logprobs[number], atol=2e-5)
        np.testing.assert_allclose(ours.drawn_logprobs, generated.drawn_logprobs[number], atol=5e-5)
        if request.temperature == 0:
            assert not any(ours.drawn_logprobs or ())
    reasons = [completion.finish_reason for completion in streamed.values()]
    assert {"stop", "length"} <= set(reasons)


def test_places_are_refilled_without_compiling(model: Model, streamed: dict[int, Completion]) -> None:
    programs = [streaming._empty, streaming._move, streaming._advance, start]
    before = [program._cache_size() for program in programs]
    again = [Request([i + 1, i + 2], max_new_tokens=1 + i, seed=i, stop_ids=(i,)) for i in range(10)]
    done = dict(dspark_jax.stream(model, again, PLACES, logprobs=True))
    assert all(1 <= len(done[i].tokens) <= 1 + i for i in range(10))
    assert [program._cache_size() for program in programs] == before


def test_a_row_has_the_same_bits_whoever_its_neighbours_are(
    model: Model, requests: list[Request], streamed: dict[int, Completion]
) -> None:
    """One program: other neighbours, another place, another moment; log-probabilities equal to the bit."""
    order = [14, 2, 9, 0, 7, 4, 12]
    done = dict(dspark_jax.stream(model, [requests[i] for i in order], PLACES, logprobs=True))
    for number, i in enumerate(order):
        assert done[number] == streamed[i]


def test_several_samples_share_a_prefill(
    model: Model, requests: list[Request], streamed: dict[int, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefills: list[int] = []

    def counted(model: Model, setting: object, tokens: np.ndarray, *rest: object, **options: bool) -> object:
        prefills.append(len(tokens))
        return start(model, setting, tokens, *rest, **options)

    monkeypatch.setattr(streaming, "start", counted)
    done = dict(dspark_jax.stream(model, requests[11:14], PLACES, logprobs=True))
    assert prefills == [PLACES]
    assert [done[i] for i in range(3)] == [streamed[11 + i] for i in range(3)]
    assert len({tuple(done[i].tokens) for i in range(3)}) == 3


def test_generate_takes_samples_and_refuses_what_does_not_fit(model: Model, streamed: dict[int, Completion]) -> None:
    many = dspark_jax.generate(model, [[5, 6, 7]], 20, temperature=1.0, samples=5, stop_ids=())
    assert many.tokens == [streamed[11 + s].tokens for s in range(5)]
    for options, message in (
        ({"temperature": [1.0]}, "temperature has 1 values for 2 prompts"),
        ({"temperature": float("nan")}, "temperature is nan; expected a number of at least 0"),
        ({"top_p": 1.1}, "top_p is 1.1; expected a number from 0 to 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": 2**32}, "seed is 4294967296; expected an integer from 0 to 4294967295"),
        ({"samples": 0}, "samples is 0"),
        ({"greedy_drafts": 1}, "greedy_drafts is 1; expected true or false"),
        ({"stop_ids": [[1], [2], [3]]}, "stop_ids has 3 values for 2 prompts"),
    ):
        with pytest.raises(dspark_jax.RequestError, match=message):
            dspark_jax.generate(model, [[1], [2]], **options)
    with pytest.raises(dspark_jax.RequestError, match="batch_size is 0"):
        dspark_jax.stream(model, [Request([1])], batch_size=0)


# What rounds did -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(model: Model, requests: list[Request]) -> dict[int, Completion]:
    return dict(dspark_jax.stream(model, requests, PLACES, logprobs=True, trace=True))


def test_a_trace_changes_nothing_else(traced: dict[int, Completion], streamed: dict[int, Completion]) -> None:
    assert {number: replace(completion, rounds=None) for number, completion in traced.items()} == streamed


def test_rounds_add_up_to_the_statistics(model: Model, requests: list[Request], traced: dict[int, Completion]) -> None:
    """Also in places that others had before."""
    for number, completion in traced.items():
        rounds, statistics = completion.rounds, completion.statistics
        assert rounds is not None
        ends = np.cumsum([0, *(entry.tokens for entry in rounds)]).tolist()
        assert [*(entry.begin for entry in rounds), len(completion.tokens)] == ends
        assert Statistics.of_rounds(rounds, model.block_size) == statistics
        assert all(len(entry.confidence) == entry.offered for entry in rounds)
        assert requests[number].draft_tokens != 0 or not any(entry.offered for entry in rounds)
    every = [entry for completion in traced.values() for entry in completion.rounds or ()]
    assert any(entry.tokens == entry.accepted for entry in every), "a round ends at an accepted stop id"
    assert len({entry.confidence[0] for entry in every if entry.offered}) > 30


# The pure function ---------------------------------------------------------------------------------------------------


class Scorer:
    """Inside a jit of one's own: two prompts, three samples each, and something computed of them."""

    def __init__(self, model: Model) -> None:
        self.model, run = model, dspark_jax.generate_fn(model.config, CAPACITY, samples=3, logprobs=True)

        @jax.jit(compiler_options=QUICK)
        def step(model: Model, ids: jax.Array, lengths: jax.Array, temperature: jax.Array, budget: int) -> tuple:
            seed = jnp.asarray(
                [many.sample(number).seed for many in [Request([])] * 2 for number in range(3)], jnp.uint32
            )
            sampling = Sampling.of(6, temperature=temperature, seed=seed, max_new_tokens=budget)
            out = run(model, ids, lengths, sampling, jax.random.key(0))
            return out, jnp.sum(jnp.where(out.is_new, out.logprobs.drawn, 0), axis=1)

        self.step = step

    def __call__(self, prompts: list[list[int]], temperature: float, budget: int) -> Generation:
        ids = np.zeros((2, 40), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        generation, totals = self.step(self.model, ids, lengths, jnp.float32(temperature), budget)
        np.testing.assert_allclose(totals, np.asarray(generation.logprobs.drawn).sum(axis=1), rtol=1e-5)
        return jax.device_get(generation)


@pytest.fixture(scope="module")
def score(model: Model) -> Scorer:
    return Scorer(model)


def test_generate_fn_says_what_generate_says(score: Scorer, streamed: dict[int, Completion]) -> None:
    out = score([[5, 6, 7], [8]], temperature=1.0, budget=20)
    assert out.length.tolist() == [23] * 3 + [21] * 3
    assert np.asarray(out.is_new).sum(axis=1).tolist() == [20] * 6
    for sample in range(3):
        assert out.tokens[sample, 3:23].tolist() == streamed[11 + sample].tokens
        np.testing.assert_allclose(out.logprobs.target[sample, 3:23], streamed[11 + sample].target_logprobs, atol=2e-5)
    assert not out.stopped.any() and out.finite.all()


def test_a_row_ends_where_its_room_ends(score: Scorer, model: Model) -> None:
    """The last position of the capacity is used, and every token is the likeliest in one pass over all of them."""
    out = score([list(range(40)), [8, 7]], temperature=0.0, budget=2**31 - 1)
    assert out.length.tolist() == [CAPACITY] * 6 and not out.stopped.any()
    rows = out.tokens[[0, 3]]
    choice = np.asarray(dspark_jax.forward(model, rows).logits).argmax(axis=-1)
    for row, prompt_length in zip((0, 1), (40, 2), strict=True):
        assert rows[row, prompt_length:].tolist() == choice[row, prompt_length - 1 : -1].tolist()


def test_generate_fn_refuses_what_does_not_fit(model: Model) -> None:
    run = dspark_jax.generate_fn(model.config, CAPACITY)
    key, ids, lengths = jax.random.key(0), jnp.zeros((2, 8), jnp.int32), jnp.ones(2, jnp.int32)
    other = dspark_jax.ModelConfig.tiny()
    for call, message in (
        (
            lambda: run(model, ids, lengths, Sampling.of(3), key),
            r"settings for \[\[3\]\] rows; expected 2: 2 prompts and 1",
        ),
        (lambda: run(model, ids, lengths[:1], Sampling.of(2), key), r"prompt_lengths \[1\]; expected"),
        (lambda: run(model, jnp.zeros((2, 65), jnp.int32), lengths, Sampling.of(2), key), "the capacity is 64"),
        (lambda: dspark_jax.generate_fn(other, 64)(model, ids, lengths, Sampling.of(2), key), "another config"),
        (lambda: dspark_jax.generate_fn(model.config, 0), "capacity is 0"),
    ):
        with pytest.raises(dspark_jax.RequestError, match=message):
            call()


# Broken weights: planted faults -------------------------------------------------------------------------------------


def with_not_a_number(model: Model, place: str, row: int | slice) -> Model:
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    broken = [leaf.at[row].set(jnp.nan) if place in jax.tree_util.keystr(path) else leaf for path, leaf in leaves]
    return jax.tree.unflatten(structure, broken)


def test_a_prompt_that_breaks_the_target_breaks_nobody_else(model: Model, requests: list[Request]) -> None:
    """First, in the middle and last; whoever gets its place afterwards is sound. Nobody drafts the broken token."""
    sound = [replace(request, draft_tokens=0) for request in requests[:9]]
    expected = dict(dspark_jax.stream(model, sound, PLACES, logprobs=True))
    used = {token for i, request in enumerate(sound) for token in (*request.prompt, *expected[i].tokens)}
    unused = next(i for i in range(96) if i not in used)
    bad = Request([3, unused, 4], max_new_tokens=5, draft_tokens=0, stop_ids=())
    broken = with_not_a_number(model, "vocabulary.embed", unused)
    done = dict(dspark_jax.stream(broken, [bad, *sound[:4], bad, *sound[4:], bad], PLACES, logprobs=True))
    assert [i for i, completion in sorted(done.items()) if completion.finish_reason == "not_finite"] == [0, 5, 11]
    assert [done[i] for i in (1, 2, 3, 4, 6, 7, 8, 9, 10)] == [expected[i] for i in range(9)]
    with pytest.raises(dspark_jax.NotFiniteError, match=r"not finite for prompts \[0, 1, 2, 3, 4\]"):
        dspark_jax.generate(broken, [[3, unused, 4]], 20, temperature=1.0, samples=5, stop_ids=())


def test_a_silent_drafter_is_an_error_of_the_stream_too(model: Model, requests: list[Request]) -> None:
    silent = with_not_a_number(model, "markov_w2", slice(None))
    with pytest.raises(dspark_jax.SilentDrafterError, match="offered none"):
        dict(dspark_jax.stream(silent, requests[:3], PLACES, logprobs=True))
