"""Accepting and committing one round, against a plain Python account of the rules."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.accept import Commit, Verdict, accept_greedy, commit
from dspark_jax.decoding.statistics import Counters, Statistics

BLOCK, VOCABULARY = 4, 5
TOKEN = st.integers(0, VOCABULARY - 1)


def expected_round(
    choices: list[int], drafts: list[int], offered: int, stops: set[int]
) -> tuple[list[int], int, int, int]:
    """Tokens committed, and how many drafts count as offered, how many as accepted, and the bonus."""
    accepted = 0
    while accepted < offered and drafts[accepted] == choices[accepted]:
        accepted += 1
    tokens = [*drafts[:accepted], choices[accepted]]
    for end, token in enumerate(tokens, start=1):
        if token in stops and end <= accepted:
            return tokens[:end], end, end, 0
    return tokens, offered, accepted, 1


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    choices=st.lists(TOKEN, min_size=BLOCK + 1, max_size=BLOCK + 1),
    drafts=st.lists(TOKEN, min_size=BLOCK, max_size=BLOCK),
    offered=st.integers(0, BLOCK),
    stops=st.sets(TOKEN, max_size=2),
)
def test_round_follows_the_rules(choices: list[int], drafts: list[int], offered: int, stops: set[int]) -> None:
    logits = jnp.asarray(np.eye(VOCABULARY, dtype=np.float32)[choices])[None]
    verdict = accept_greedy(logits, jnp.asarray([drafts]), jnp.asarray([offered]))
    padded = np.full((1, 3), -1)
    padded[0, : len(stops)] = sorted(stops)
    cut = commit(verdict, jnp.asarray([offered]), jnp.asarray(padded))

    tokens, counted, accepted, bonus = expected_round(choices, drafts, offered, stops)
    assert verdict.tokens[0, : int(cut.tokens[0])].tolist() == tokens
    assert (int(cut.offered[0]), int(cut.accepted[0]), int(cut.bonus[0])) == (counted, accepted, bonus)
    assert bool(cut.stopped[0]) == (tokens[-1] in stops)


def test_ties_go_to_the_lowest_id() -> None:
    logits = jnp.asarray([[[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]])
    verdict = accept_greedy(logits, jnp.asarray([[1]]), jnp.asarray([1]))
    assert verdict.tokens.tolist() == [[1, 0]]
    assert verdict.accepted.tolist() == [1]


def test_a_draft_that_was_not_offered_is_rejected_unseen() -> None:
    logits = jnp.asarray(np.eye(3, dtype=np.float32)[[1, 2]])[None]
    assert accept_greedy(logits, jnp.asarray([[1]]), jnp.asarray([0])).accepted.tolist() == [0]


def cut_of(offered: list[int], accepted: list[int], bonus: list[int]) -> Commit:
    arrays = [jnp.asarray(values, jnp.int32) for values in (offered, accepted, bonus)]
    return Commit(arrays[1] + arrays[2], *arrays, stopped=arrays[2] == 0)


def test_counters_and_rates_of_a_worked_example() -> None:
    """Two sequences, two rounds: (offered, accepted) = (3, 2) and (1, 1, stopped), then (2, 0) and a finished one."""
    counters = Counters.zeros(batch=2, block=3)
    both, first = jnp.asarray([True, True]), jnp.asarray([True, False])
    counters = counters.count(both, both, cut_of([3, 1], [2, 1], [1, 0]))
    counters = counters.count(first, both, cut_of([2, 3], [0, 3], [1, 1]))
    statistics = Statistics.of(counters)
    assert statistics.rounds == 3
    assert (statistics.offered_drafts, statistics.accepted_drafts, statistics.bonus_tokens) == (6, 3, 2)
    assert statistics.accepted_length == 5 / 3
    assert statistics.offering_rounds == [3, 2, 1]
    assert statistics.reached_rounds == [3, 1, 1]
    assert statistics.accepting_rounds == [2, 1, 0]
    assert statistics.prefix_acceptance_per_offering_round == [2 / 3, 1 / 2, 0.0]
    assert statistics.conditional_acceptance_per_reached_round == [2 / 3, 1.0, 0.0]
    assert statistics.accepted_drafts_per_offered_draft == 3 / 6
    assert counters.allowed_rounds.tolist() == [2, 1]


def test_rates_without_a_denominator_are_none() -> None:
    statistics = Statistics.of(Counters.zeros(batch=1, block=2))
    assert statistics.accepted_length == 0.0
    assert statistics.accepted_drafts_per_offered_draft is None
    assert statistics.prefix_acceptance_per_offering_round == [None, None]


def test_verdict_is_bounded_by_the_block() -> None:
    logits = jnp.zeros((2, 3, 4))
    verdict: Verdict = accept_greedy(logits, jnp.zeros((2, 2), jnp.int32), jnp.asarray([2, 1]))
    assert verdict.accepted.tolist() == [2, 1]
