"""What is recorded of each round, against the official evaluation loop; and that it costs nothing unless wanted."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from table_models import Tables

from dspark_jax import ModelConfig, Sampling
from dspark_jax.decoding.loop import decode
from dspark_jax.decoding.state import State, initial_state
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden" / "training"
RUNS = ("greedy", "greedy_budget1", "greedy_budget7", "greedy_stop_as_final", "greedy_stop_in_drafts")
BLOCK = 5


# The official evaluation loop ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "loop.safetensors")


@pytest.fixture(scope="module")
def traced(golden: dict[str, np.ndarray]) -> State:
    """The greedy runs in one batch, with room for the last round of each, which the official code does not cut."""
    drafter = golden["drafter_hidden"] @ golden["lm_head"].T
    hidden, before = np.split(golden["confidence_weight"][0], [golden["drafter_hidden"].shape[-1]])
    confidence = (golden["drafter_hidden"] @ hidden + golden["confidence_bias"], golden["markov_w1"] @ before)
    tables = Tables(golden["target_table"], drafter, golden["markov_w1"] @ golden["markov_w2"].T, confidence)
    prompts = np.stack([golden[f"{run}/output_ids"][:6] for run in RUNS])  # the official first token needs no round
    stops = np.full((len(RUNS), 2), -1)
    for row, run in zip(stops, RUNS, strict=True):
        row[: len(golden[f"{run}/stop_ids"])] = golden[f"{run}/stop_ids"]
    budgets = np.array([golden[f"{run}/setting"][2] + BLOCK for run in RUNS], np.int32)
    tokens, lengths = np.pad(prompts, [(0, 0), (0, 70)]), np.full(len(RUNS), prompts.shape[1], np.int32)
    sampling = Sampling.of(len(RUNS), max_new_tokens=budgets, stop_ids=stops)
    return jax.device_get(tables.decode(tokens, lengths, sampling))


@pytest.mark.parametrize("run", RUNS)
def test_rounds_are_those_of_the_official_loop(run: str, traced: State, golden: dict[str, np.ndarray]) -> None:
    row, prompt_length = RUNS.index(run), 6
    assert traced.trace is not None
    budget = int(golden[f"{run}/setting"][2])
    ours = [entry for entry in traced.trace.rounds(row, prompt_length) if entry.begin < budget]
    expected = {
        name: golden[f"{run}/rounds/{name}"] for name in ("position", "effective", "accepted", "counted", "confidence")
    }
    assert [entry.begin + prompt_length - 1 for entry in ours] == expected["position"].tolist()
    assert [entry.offered for entry in ours] == expected["effective"].tolist()
    assert [entry.accepted for entry in ours] == expected["accepted"].tolist()
    assert [entry.tokens for entry in ours] == expected["counted"].tolist()
    for entry, confidence in zip(ours, expected["confidence"], strict=True):
        np.testing.assert_allclose(entry.confidence, confidence[: entry.offered], atol=1e-5)


def test_the_runs_show_what_makes_a_difference(traced: State, golden: dict[str, np.ndarray]) -> None:
    """Among them are a round that ends inside its drafts and a last round that the budget would cut."""
    assert golden["greedy_stop_in_drafts/rounds/terminated"].any()
    counted = golden["greedy_budget7/rounds/counted"]
    assert 1 + counted.sum() > golden["greedy_budget7/setting"][2] > 1 + counted[:-1].sum()
    assert traced.counters.rounds[RUNS.index("greedy_stop_in_drafts")] == 3


# The price -----------------------------------------------------------------------------------------------------------


def test_a_trace_that_nobody_asked_for_is_in_no_program() -> None:
    model = abstract_model(ModelConfig.tiny(), PRESETS["float32"])

    def shapes(trace: bool) -> set[tuple[int, ...]]:
        tokens, lengths = jnp.zeros((2, 64), jnp.int32), jnp.ones(2, jnp.int32)
        state = jax.eval_shape(lambda: initial_state(model, tokens, lengths, trace=trace))
        program = jax.make_jaxpr(decode)(model, model.setting(64), state)
        [loop] = [equation for equation in program.jaxpr.eqns if equation.primitive.name == "while"]
        [draft] = [
            equation
            for equation in loop.params["body_jaxpr"].jaxpr.eqns
            if equation.primitive.name == "cond" and (2, BLOCK, 96) in {out.aval.shape for out in equation.outvars}
        ]
        return {out.aval.shape for out in (*loop.outvars, *draft.outvars) if out.aval.dtype == jnp.float32}

    assert {(2, BLOCK), (2, 64, BLOCK)} <= shapes(trace=True)
    assert not {(2, BLOCK), (2, 64, BLOCK)} & shapes(trace=False)
