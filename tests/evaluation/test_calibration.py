"""Reliability of confidence and its temperatures: DeepSeek's own figures, synthetic heads, files that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from round_logs import log_of
from safetensors.numpy import load_file

from dspark_jax.errors import CalibrationError, NotFiniteError
from dspark_jax.evaluation.calibration import Calibration, calibrate
from dspark_jax.evaluation.log import RoundLog
from dspark_jax.evaluation.temperature_scaling import GRID, Temperatures, held_out_logits, search

GOLDEN = Path(__file__).parents[1] / "golden" / "training"
COLUMNS = ("count", "ece", "auc", "brier", "prediction", "label")
LOOPS = ("greedy", "greedy_budget1", "greedy_budget7", "greedy_stop_as_final", "greedy_stop_in_drafts", "sampled")
LOOPS += ("sampled_stop",)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "calibration.safetensors")


@pytest.fixture(scope="module")
def log(golden: dict[str, np.ndarray]) -> RoundLog:
    accepted = np.minimum(golden["log/accept_prefix"].sum(axis=1), golden["log/effective"])
    return log_of(golden["log/effective"], accepted, golden["log/logits"])


def assert_positions(ours: Calibration, expected: np.ndarray) -> None:
    for name, column in zip(COLUMNS, expected.T, strict=True):
        np.testing.assert_allclose(getattr(ours, name), column, atol=1e-7, err_msg=name)


# The official figures ------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_official_code(log: RoundLog, golden: dict[str, np.ndarray]) -> None:
    ours = calibrate(log)
    assert_positions(ours, golden["metrics/per_position"])
    np.testing.assert_allclose(ours.reliability, golden["metrics/reliability"], atol=1e-7)
    np.testing.assert_allclose(ours.summary, golden["metrics/summary"], atol=1e-7)


def test_where_nothing_counts_figures_are_missing(golden: dict[str, np.ndarray]) -> None:
    offered = golden["all_accepted/effective"]
    ours = calibrate(log_of(offered, offered, golden["all_accepted/logits"]))
    assert_positions(ours, golden["all_accepted/per_position"])
    np.testing.assert_allclose(ours.summary, golden["all_accepted/summary"], atol=1e-7)


@pytest.mark.parametrize("run", LOOPS)
def test_whole_loops_are_those_of_the_official_code(run: str) -> None:
    loop = load_file(GOLDEN / "loop.safetensors")
    offered, accepted, confidence = (loop[f"{run}/rounds/{name}"] for name in ("effective", "accepted", "confidence"))
    assert_positions(calibrate(log_of(offered, accepted, confidence)), loop[f"{run}/calibration"])


# Temperatures --------------------------------------------------------------------------------------------------------


def test_the_search_is_that_of_the_recorded_one(log: RoundLog, golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(GRID, golden["sts/grid"], rtol=1e-14)
    temperatures, curves = search(log, golden["sts/grid"])
    np.testing.assert_allclose(curves, golden["sts/ece_curves"], atol=1e-13)
    assert temperatures.tolist() == golden["sts/temperatures"].tolist()


def overconfident(rounds: int, factors: list[float], seed: int = 0) -> RoundLog:
    """A head that knows each draft's chance exactly, and whose logits are too large by these factors."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(0.7, 1.2, (rounds, len(factors)))
    stands = rng.random(honest.shape) < 1 / (1 + np.exp(-honest))
    accepted = np.cumprod(stands, axis=1).sum(axis=1)
    return log_of(np.full(rounds, len(factors)), accepted, (honest * factors).astype(np.float32))


def test_an_overconfident_head_becomes_honest() -> None:
    factors = [2.0, 1.6, 2.5]
    log = overconfident(20_000, factors)
    before, scaled = calibrate(log), held_out_logits(log)
    assert scaled is not None
    after = calibrate(log, scaled)
    assert (after.ece < before.ece / 3).all()
    np.testing.assert_allclose(search(log).temperatures, factors, rtol=0.25)
    np.testing.assert_allclose(after.auc[0], before.auc[0], atol=1e-3, err_msg="order is kept at the first position")


def test_the_order_of_samples_changes_nothing(log: RoundLog) -> None:
    shuffled = log.where(np.random.default_rng(0).permutation(len(log)))
    assert search(shuffled).temperatures.tolist() == search(log).temperatures.tolist()
    assert calibrate(shuffled).summary == pytest.approx(calibrate(log).summary, abs=1e-12)


def test_held_out_temperatures_have_not_seen_their_prompts() -> None:
    """Two temperatures in use, each on half of the prompts and found on the other half."""
    log = replace(overconfident(400, [2.0]), prompt=np.arange(400) // 10)
    scaled = held_out_logits(log)
    assert scaled is not None
    used = np.round(log.confidence[:, 0] / scaled[:, 0], 9)
    low, high = np.unique(used)
    halves = [set(log.prompt[used == temperature].tolist()) for temperature in (low, high)]
    assert [len(half) for half in halves] == [20, 20] and not halves[0] & halves[1]
    assert search(log.where(used == low)).temperatures[0] == pytest.approx(high)
    assert search(log.where(used == high)).temperatures[0] == pytest.approx(low)
    assert all({prompt % 2 for prompt in half} == {0, 1} for half in halves), "kinds may alternate in a file"
    assert held_out_logits(log.where(log.prompt == 3)) is None


def test_positions_that_were_never_offered_keep_their_confidence() -> None:
    log = log_of([2] * 50, [2, 1] * 25, np.linspace(-2, 2, 250).reshape(50, 5).astype(np.float32))
    assert search(log).temperatures[2:].tolist() == [1, 1, 1]


def test_confidence_that_is_not_finite_is_named() -> None:
    log = log_of([2, 2, 0], [1, 0, 0], np.array([[0, np.nan], [0, 0], [np.nan, np.nan]], np.float32))
    for function in (calibrate, search):
        with pytest.raises(NotFiniteError, match="confidence is not finite in 1 of 3 rounds"):
            function(log)


# The file ------------------------------------------------------------------------------------------------------------


def test_a_file_of_temperatures_comes_back(log: RoundLog, tmp_path: Path) -> None:
    path = tmp_path / "temperatures.json"
    fitted = Temperatures.fit(log, "synthetic", "0123abcd")
    fitted.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert Temperatures.load(path, 5, "0123abcd") == fitted
    assert (fitted.num_samples, fitted.dataset) == (1600, "synthetic")
    assert fitted.ece_after is not None and fitted.ece_after < fitted.ece_before / 3
    scaled = calibrate(log, fitted.apply(log.confidence))
    np.testing.assert_allclose(scaled.ece, search(log).ece_curves.min(axis=1), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"temperatures": [1.0, 2.0]}, "for blocks of 2 drafts, and the model drafts 3"),
        ({"model": "other"}, "was fitted for the model 'other', and this one is 'ours'"),
        ({"temperatures": [1.0, float("nan"), 1.0]}, "expected finite numbers above 0"),
        ({"temperatures": [1.0, float("inf"), 1.0]}, "expected finite numbers above 0"),
        ({"temperatures": [1.0, 10**400, 1.0]}, "expected finite numbers above 0"),
        ({"temperatures": [1.0, 0, 1.0]}, "expected finite numbers above 0"),
        ({"temperatures": [1.0, -1.0, 1.0]}, "expected finite numbers above 0"),
        ({"temperatures": [1.0, True, 1.0]}, "expected finite numbers above 0"),
        ({"temperatures": [1.0, "1", 1.0]}, "expected finite numbers above 0"),
        ({"temperatures": 1.0}, "temperatures is 1.0; expected"),
        ({"model": None, "dataset": ...}, "has no dataset"),
    ],
)
def test_a_file_for_something_else_is_refused(change: dict, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "temperatures.json"
    sound = {"temperatures": [1.0, 1.2, 1], "dataset": "x", "num_samples": 9, "ece_before": 0.2, "ece_after": None}
    sound["model"] = "ours"
    path.write_text(json.dumps(sound))
    assert Temperatures.load(path, 3, "ours").temperatures == [1.0, 1.2, 1]
    path.write_text(json.dumps({name: value for name, value in (sound | change).items() if value is not ...}))
    with pytest.raises(CalibrationError, match=complaint) as refusal:
        Temperatures.load(path, 3, "ours")
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(("text", "complaint"), [("{", "is no JSON"), ("[]", "is list"), (None, "cannot be read")])
def test_a_file_of_something_else_is_refused(text: str | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "temperatures.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CalibrationError, match=complaint):
        Temperatures.load(path, 3, "ours")
