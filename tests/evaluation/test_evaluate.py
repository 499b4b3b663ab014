"""`dspark evaluate`: what it decodes and counts, that it goes on where it was, and what it refuses."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from conftest import Dspark
from random_model import random_model
from tiny_configs import CONFIGS

import dspark_jax
from dspark_jax.cli import evaluate as command
from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.decoding.trace import Round
from dspark_jax.evaluation.decode import cut
from dspark_jax.evaluation.temperature_scaling import Temperatures

TINY_A = Path(__file__).parents[1] / "golden" / "tiny-a"
BUDGET, PROMPTS = 20, 6
FILES = {"rounds.jsonl", "report.json", "report.html", "temperatures.json"}


# The budget ----------------------------------------------------------------------------------------------------------


def completion(finish_reason: Any, *rounds: tuple[int, int, int]) -> Completion:
    """Of rounds of 3 drafts at most: offered, accepted, tokens."""
    begins = np.cumsum([0, *(tokens for *_, tokens in rounds)]).tolist()
    traced = [Round(begin, *counts, [0.0] * counts[0]) for begin, counts in zip(begins, rounds, strict=False)]
    tokens = list(range(begins[-1]))
    return Completion(tokens, finish_reason, Statistics.of_rounds(traced, 3), None, None, traced)


def test_the_last_round_counts_whole_and_its_tokens_are_cut() -> None:
    ours = cut(completion("length", (3, 3, 4), (3, 2, 3), (3, 0, 1)), budget=6, block=3)
    assert (ours.tokens, ours.finish_reason) == ([0, 1, 2, 3, 4, 5], "length")
    assert ours.rounds is not None and [one.begin for one in ours.rounds] == [0, 4]
    assert (ours.statistics.rounds, ours.statistics.accepted_length) == (2, 3.5)
    assert ours.statistics.accepting_rounds == [2, 2, 1]


@pytest.mark.parametrize(("budget", "reason"), [(6, "length"), (7, "stop"), (8, "stop")])
def test_a_stop_id_behind_the_budget_is_none(budget: int, reason: str) -> None:
    ours = cut(completion("stop", (3, 3, 4), (3, 3, 3)), budget=budget, block=3)
    assert ours.finish_reason == reason and len(ours.tokens) == min(budget, 7)
    assert ours.statistics.rounds == 2, "in both cases the round began within the budget"


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    dspark_jax.save(random_model(CONFIGS["two-streams"]), folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("prompts") / "prompts.jsonl", np.random.default_rng(1)
    rows = [
        {"id": i, "prompt_ids": rng.integers(0, 96, 5).tolist(), "category": ["maths", "chat"][i % 2], "stop_ids": []}
        for i in range(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Programs that are compiled quickly, where bits are not the question."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


Command = Callable[..., tuple[str, ...]]


@pytest.fixture
def arguments(small: Path, prompts: Path) -> Command:
    def of(out: Path, *more: str) -> tuple[str, ...]:
        files = ("--checkpoint", str(small), "--prompts", str(prompts), "--out", str(out))
        settings = ("--max-new-tokens", str(BUDGET), "--batch-size", "3", "--numerics", "float32")
        return ("evaluate", *files, *settings, "--temperatures", "0", "5", "--samples", "2", *more)

    return of


def records(out: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, (out / "rounds.jsonl").read_text().splitlines())


@pytest.mark.usefixtures("quick")
def test_an_evaluation_from_prompts_to_report(arguments: Command, dspark: Dspark, tmp_path: Path) -> None:
    """Whole, then killed in the middle of a line and started again: the same, and nothing is decoded twice."""
    out = tmp_path / "whole"
    ran = dspark(*arguments(out, "--json"))
    assert (ran.code, ran.err) == (0, "")
    told = json.loads(ran.out)
    assert {path.name for path in out.iterdir()} == FILES
    assert told["new_completions"] == 3 * PROMPTS

    report = json.loads((out / "report.json").read_text())
    for run, temperature, samples in zip(report["runs"], (0.0, 5.0), (1, 2), strict=True):
        ours = [record for record in records(out) if record["settings"]["temperature"] == temperature]
        assert run["completions"] == len(ours) == samples * PROMPTS
        rounds = [one for record in ours for one in zip(*record["rounds"].values(), strict=True)]
        assert all(begin < BUDGET for begin, *_ in rounds)
        length = sum(tokens for _, _, _, tokens, _ in rounds) / len(rounds)
        assert run["overall"]["accepted_length"]["value"] == pytest.approx(length)
        assert {name: part["prompts"] for name, part in run["by_category"].items()} == {"maths": 3, "chat": 3}
        assert all(len(record["tokens"]) == BUDGET for record in ours)
    assert any(sum(record["rounds"]["tokens"]) > BUDGET for record in records(out)), "a last round counts whole"
    seeds = {(record["id"], record["settings"]["temperature"], record["settings"]["seed"]) for record in records(out)}
    assert len(seeds) == 3 * PROMPTS

    model = report["ran"]["model"]
    assert Temperatures.load(out / "temperatures.json", 3, model).dataset == "prompts.jsonl, temperature 5"

    again = tmp_path / "again"
    again.mkdir()
    whole = (out / "rounds.jsonl").read_bytes()
    (again / "rounds.jsonl").write_bytes(whole[: len(whole) // 2])
    kept = whole[: len(whole) // 2].count(b"\n")
    assert json.loads(dspark(*arguments(again, "--json")).out)["new_completions"] == 3 * PROMPTS - kept
    assert sorted((again / "rounds.jsonl").read_bytes().splitlines()) == sorted(whole.splitlines())
    second = json.loads((again / "report.json").read_text())
    assert second["runs"] == report["runs"]

    finished = dspark(*arguments(out))
    assert "temperature 5" in finished.out and str(out / "report.html") in finished.out
    refused = dspark(*arguments(out, "--seed", "7"))
    assert refused.code == 2 and "has seed 0 and this job 7; name another --out" in refused.err
    assert (out / "rounds.jsonl").read_bytes() == whole


def test_a_target_that_is_not_finite_is_named(
    arguments: Command, small: Path, dspark: Dspark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: one completion is marked by a loop that met a number which is none."""

    def broken(model: Any, requests: Any, *_: Any) -> Any:
        yield from ((number, completion("length", (3, 1, 2))) for number in range(1, len(requests)))
        yield 0, replace(completion("length", (3, 1, 2)), finish_reason="not_finite")

    monkeypatch.setattr(command, "decode", broken)
    ran = dspark(*arguments(tmp_path / "out"))
    assert ran.code == 2 and "not finite in 1 of 18 completions, first in that of id 0" in ran.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"rounds.jsonl"}


@pytest.mark.parametrize(
    ("row", "options", "complaint"),
    [
        ({}, ("--draft-tokens", "0"), "draft_tokens is 0, so no draft is offered and there is nothing to evaluate"),
        ({}, ("--temperatures", "1", "1"), r"temperatures are [1.0, 1.0]; expected at least one, and each once."),
        ({}, ("--temperatures", "-1"), "temperature is -1.0; expected a number of at least 0."),
        ({}, ("--samples", "0"), "samples is 0; expected an integer of at least 1."),
        ({}, ("--batch-size", "0"), "batch_size is 0; expected an integer of at least 1."),
        ({}, ("--max-new-tokens", "-1"), "max_new_tokens is -1; expected an integer of at least 0."),
        ({"temperature": 0.5}, (), "the line of id 1 has temperature 0.5, and every line is evaluated at the"),
        ({"category": 7}, (), "line 1: category is 7; expected the name of a kind of prompts"),
        ({"samples": -1}, (), "line 1: samples is -1; expected an integer of at least 1."),
        ({"max_new_tokens": "many"}, (), "line 1: max_new_tokens is 'many'; expected an integer of at least 0."),
        ({"top_p": 2}, (), "line 1: top_p is 2; expected a number from 0 to 1."),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    row: dict[str, Any], options: tuple[str, ...], complaint: str, dspark: Dspark, tmp_path: Path
) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    path.write_text(json.dumps({"id": 1, "prompt_ids": [1, 2]} | row) + "\n")
    ran = dspark("evaluate", "--checkpoint", str(TINY_A), "--prompts", str(path), "--out", str(out), *options)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert complaint in ran.err
    assert not out.exists()


def test_a_checkpoint_without_a_drafter_is_refused(dspark: Dspark, tmp_path: Path) -> None:
    config = json.loads((TINY_A / "config.json").read_text())
    target = {name: value for name, value in config.items() if not name.startswith("dspark_")}
    (tmp_path / "config.json").write_text(json.dumps(target))
    ran = dspark("evaluate", "--checkpoint", str(tmp_path), "--prompts", "x.jsonl", "--out", str(tmp_path / "out"))
    assert ran.code == 2 and "has no drafter to evaluate; name a checkpoint that has one." in ran.err


def test_a_file_in_the_folders_place_is_refused(arguments: Command, dspark: Dspark, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    ran = dspark(*arguments(tmp_path / "out"))
    assert ran.code == 2 and "out: cannot be made a folder (File exists); name another --out." in ran.err
