"""Accepted lengths and rates: DeepSeek's own figures, simulated drafters, and intervals that know what a sample is."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_logs import log_of
from safetensors.numpy import load_file

from dspark_jax.decoding.trace import Round
from dspark_jax.evaluation.acceptance import NO_CATEGORY, acceptance, by_category, by_length
from dspark_jax.evaluation.log import RoundLog, Traced

GOLDEN = Path(__file__).parents[1] / "golden" / "training"
LOOPS = ("greedy", "greedy_budget1", "greedy_budget7", "greedy_stop_as_final", "greedy_stop_in_drafts")
LOOPS += ("greedy_threshold", "sampled", "sampled_cool_threshold", "sampled_stop")


@pytest.mark.parametrize("run", LOOPS)
def test_figures_are_those_of_the_official_code(run: str) -> None:
    loop = load_file(GOLDEN / "loop.safetensors")
    rounds = {name: loop[f"{run}/rounds/{name}"] for name in ("effective", "accepted", "counted", "position")}
    log = log_of(rounds["effective"], rounds["accepted"], tokens=rounds["counted"], prompt=0 * rounds["position"])
    ours = acceptance(log)
    offered, length, verified = loop[f"{run}/statistics"]
    assert ours.offered_drafts / ours.rounds == pytest.approx(offered)
    assert ours.accepted_length.value == pytest.approx(length)
    assert ours.committed_tokens_per_verified_row.value == pytest.approx(verified)
    rates = [rate.value for rate in ours.prefix_acceptance_per_offering_round]
    np.testing.assert_allclose(np.array(rates, float), loop[f"{run}/accept_rates"])
    assert (ours.prompts, ours.accepted_length.low, ours.accepted_length.high) == (1, None, None)


def brute_force(rounds: list[Round], block: int) -> dict[str, list[float | None]]:
    """Counted one round at a time."""

    def rate(part: list[bool], whole: list[bool]) -> float | None:
        return sum(part) / sum(whole) if any(whole) else None

    offered = [[r.offered > k for r in rounds] for k in range(block)]
    accepted = [[r.accepted > k for r in rounds] for k in range(block)]
    reached = [[r.offered > k and r.accepted >= k for r in rounds] for k in range(block)]
    return {
        "prefix": [rate(*pair) for pair in zip(accepted, offered, strict=True)],
        "conditional": [rate(*pair) for pair in zip(accepted, reached, strict=True)],
    }


@st.composite
def round_of(draw: st.DrawFn) -> Round:
    offered = draw(st.integers(0, 3))
    accepted = draw(st.integers(0, offered))
    stopped = draw(st.booleans()) and accepted == offered > 0
    return Round(draw(st.integers(0, 600)), offered, accepted, accepted + (not stopped), [0.5] * offered)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(round_of(), max_size=6), min_size=1, max_size=5))
def test_every_rate_is_what_counting_gives(completions: list[list[Round]]) -> None:
    rounds = [one for completion in completions for one in completion]
    log = RoundLog.of([Traced(i, "", completion) for i, completion in enumerate(completions)], block=3)
    ours, expected = acceptance(log), brute_force(rounds, block=3)
    assert [rate.value for rate in ours.prefix_acceptance_per_offering_round] == pytest.approx(expected["prefix"])
    conditional = [rate.value for rate in ours.conditional_acceptance_per_reached_round]
    assert conditional == pytest.approx(expected["conditional"])
    assert ours.rounds_by_accepted_drafts == [sum(r.accepted == m for r in rounds) for m in range(4)]
    assert sum(part.rounds for part in by_length(log).values()) == ours.rounds == len(rounds)
    estimates = [ours.accepted_length, *ours.prefix_acceptance_per_offering_round, *ours.accepted_length_by_width]
    assert all(e.low <= e.high for e in estimates if e.low is not None and e.high is not None)


# A drafter whose k-th draft stands with chance c_k, whatever came before --------------------------------------------

CHANCES = np.array([0.9, 0.7, 0.8, 0.4, 0.6])


def simulated(prompts: int, rounds: int, width: int = 5, seed: int = 0) -> RoundLog:
    stands = np.random.default_rng(seed).random((prompts * rounds, width)) < CHANCES[:width]
    accepted = np.cumprod(stands, axis=1).sum(axis=1)
    return log_of(np.full(len(accepted), width), accepted, prompt=np.repeat(np.arange(prompts), rounds))


def test_one_trace_tells_the_accepted_length_of_every_width() -> None:
    curve = acceptance(simulated(200, 100)).accepted_length_by_width
    expected = 1 + np.cumsum([0, *np.cumprod(CHANCES)])
    for width in range(6):
        low, high = curve[width].low, curve[width].high
        assert low is not None and high is not None and low <= expected[width] <= high
        narrow = acceptance(simulated(200, 100, width, seed=1))
        assert narrow.accepted_length.value == pytest.approx(curve[width].value, abs=0.03)


def test_intervals_hold_what_they_promise_where_prompts_differ() -> None:
    """Prompts that accept much or little: of 200 intervals about 95 % hold the truth; those over rounds would not."""
    rng, truth, hits, widths = np.random.default_rng(1), 1 + 2.5, 0, []
    for trial in range(200):
        chance = rng.uniform(0, 1, 40)  # of all five drafts standing together
        accepted = 5 * (rng.random((40, 20)) < chance[:, None]).ravel()
        log = log_of(np.full(800, 5), accepted, prompt=np.repeat(np.arange(40), 20))
        estimate = acceptance(log, seed=trial).accepted_length
        assert estimate.low is not None and estimate.high is not None
        hits += estimate.low <= truth <= estimate.high
        widths.append(estimate.high - estimate.low)
    assert 180 <= hits <= 199
    alone = acceptance(log_of(log.offered, log.accepted)).accepted_length  # each round as a prompt of its own
    assert alone.low is not None and alone.high is not None
    assert alone.high - alone.low < 0.6 * np.mean(widths)


def test_intervals_are_repeatable() -> None:
    log = simulated(20, 10)
    assert acceptance(log) == acceptance(log) != acceptance(log, seed=1)


# Parts ---------------------------------------------------------------------------------------------------------------


def test_parts_are_the_acceptance_of_their_rounds() -> None:
    log = log_of(
        [5] * 6, [0, 1, 2, 3, 4, 5], prompt=[0, 0, 1, 1, 2, 2], category=["a", "a", "", "", "b", "b"],
        begin=[0, 31, 32, 127, 512, 10_000],
    )  # fmt: skip
    categories, lengths = by_category(log), by_length(log)
    assert {name: part.rounds_by_accepted_drafts for name, part in categories.items()} == {
        NO_CATEGORY: [0, 0, 1, 1, 0, 0],
        "a": [1, 1, 0, 0, 0, 0],
        "b": [0, 0, 0, 0, 1, 1],
    }
    assert {name: part.accepted_length.value for name, part in lengths.items()} == {
        "0-31": 1.5,
        "32-127": 3.5,
        "512 and more": 5.5,
    }
    assert by_category(log.where(log.category == "")) == {}


def test_a_log_without_rounds_has_no_figures() -> None:
    nothing = acceptance(RoundLog.of([], block=5))
    assert (nothing.rounds, nothing.prompts, nothing.accepted_length.value) == (0, 0, None)
    assert [estimate.value for estimate in nothing.accepted_length_by_width] == [None] * 6
