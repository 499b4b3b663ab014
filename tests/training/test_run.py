"""T6 of the training page: a run that is killed and goes on has the bits of one that was not; and who may go on."""

import fcntl
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import random_model
from training_case import Rows, example_of, tiny

from dspark_jax.data.example import Example
from dspark_jax.data.features import target_features
from dspark_jax.errors import NotFiniteError, RequestError, RunError
from dspark_jax.model.model import Model
from dspark_jax.training import run
from dspark_jax.training.losses import Objective
from dspark_jax.training.parameters import Parameters
from dspark_jax.training.run import Record, load_parameters, read_contract, read_log, train
from dspark_jax.training.step import Recipe

pytestmark = pytest.mark.usefixtures("quick")

CONFIG = tiny()
STEPS, SAVE_EVERY = 12, 4
RECIPE = Recipe(steps=STEPS, scope="heads", anchors=4, learning_rate=1e-3)
FACTS: dict[str, Any] = {"taps": [0], "data": {"digest": "a1", "packed": False}}


@pytest.fixture(scope="module")
def model(quick: None) -> Model:
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def whole(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    go_on(model, folder)
    return folder


def go_on(model: Model, folder: Path, report: Callable[[Record], None] = lambda record: None) -> Parameters:
    return train(model, Rows(CONFIG), RECIPE, folder, FACTS, save_every=SAVE_EVERY, report=report)


def metrics_of(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


class Killed(Exception):
    """What ends a run in this process."""


def killed_at(step: int) -> Callable[[Record], None]:
    def report(record: Record) -> None:
        if record["step"] == step:
            raise Killed

    return report


# Going on ------------------------------------------------------------------------------------------------------------


class TestResume:
    def test_the_log_has_a_line_a_step_and_the_folder_its_checkpoints(self, whole: Path) -> None:
        records = read_log(whole)
        assert [record["step"] for record in records] == list(range(STEPS))
        assert len({record["loss"] for record in records}) == STEPS
        assert records[3]["learning_rate"] > records[-1]["learning_rate"] > 0
        assert all(len(record["acceptance"]) == CONFIG.block_size for record in records)
        assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["12", "8"]
        assert read_contract(whole)["recipe"]["objective"]["decay"] == 4.0

    def test_killed_at_every_turn_it_ends_with_the_same_bits(self, model: Model, whole: Path, tmp_path: Path) -> None:
        """Before the first checkpoint, between two, right after one, and in the last step."""
        for step in (1, 6, 7, 11):
            with pytest.raises(Killed):
                go_on(model, tmp_path, killed_at(step))
            with (tmp_path / "metrics.jsonl").open("a") as log:
                log.write('{"step": 99, "lo')
        parameters = go_on(model, tmp_path)
        assert metrics_of(tmp_path) == metrics_of(whole)
        taken, expected = load_parameters(whole)
        assert taken == STEPS and set(expected) == set(parameters)
        for name, master in load_parameters(tmp_path)[1].items():
            np.testing.assert_array_equal(master, expected[name])
            np.testing.assert_array_equal(master, parameters[name])

    def test_a_process_that_dies_leaves_a_run_that_goes_on(self, model: Model, whole: Path, tmp_path: Path) -> None:
        step = random.Random(5).randrange(SAVE_EVERY, STEPS - 1)
        script = [sys.executable, str(Path(__file__).parent.parent / "dying_run.py"), str(tmp_path), str(step)]
        assert subprocess.run(script, check=False).returncode == 9
        assert metrics_of(tmp_path) == b"".join(metrics_of(whole).splitlines(keepends=True)[: step + 1])
        go_on(model, tmp_path)
        assert metrics_of(tmp_path) == metrics_of(whole)
        for name, master in load_parameters(tmp_path)[1].items():
            np.testing.assert_array_equal(master, load_parameters(whole)[1][name])

    def test_a_finished_run_stays_as_it_is(self, model: Model, whole: Path) -> None:
        before, told = metrics_of(whole), list[Record]()
        parameters = go_on(model, whole, told.append)
        assert told == [] and metrics_of(whole) == before
        for name, master in load_parameters(whole)[1].items():
            np.testing.assert_array_equal(master, parameters[name])

    def test_who_reads_a_run_leaves_a_checkpoint_alone_that_is_being_written(
        self, model: Model, tmp_path: Path
    ) -> None:
        with pytest.raises(Killed):
            go_on(model, tmp_path, killed_at(5))
        unfinished = tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp"
        unfinished.mkdir()
        assert load_parameters(tmp_path)[0] == 4
        assert unfinished.is_dir()
        go_on(model, tmp_path)
        assert not unfinished.is_dir(), "whoever writes cleans up"


# Refusals ------------------------------------------------------------------------------------------------------------


class TestRefusals:
    @pytest.mark.parametrize(
        ("recipe", "facts", "complaint"),
        [
            (
                replace(RECIPE, objective=Objective(decay=5.0)),
                FACTS,
                r"has recipe.objective.decay 4.0 and this one 5.0",
            ),
            (replace(RECIPE, scope="full"), FACTS, "has recipe.scope 'heads' and this one 'full'"),
            (replace(RECIPE, steps=13), FACTS, "has recipe.steps 12 and this one 13"),
            (RECIPE, FACTS | {"taps": [0, 1]}, r"has taps \[0\] and this one \[0, 1\]"),
            (RECIPE, FACTS | {"data": {"digest": "b2", "packed": False}}, "has data.digest 'a1' and this one 'b2'"),
            (RECIPE, {"taps": [0]}, "has data.digest 'a1' and this one None"),
            (RECIPE, FACTS | {"devices": 2}, "has devices None and this one 2; give it the old value, or start in"),
        ],
    )
    def test_another_run_may_not_go_on(
        self, whole: Path, model: Model, recipe: Recipe, facts: dict[str, Any], complaint: str
    ) -> None:
        before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
        with (
            pytest.MonkeyPatch.context() as patched,
            pytest.raises(RunError, match=complaint),
        ):
            patched.setattr(run, "initial_state", lambda model, recipe: None)  # it takes long, and is not needed
            train(model, Rows(CONFIG), recipe, whole, facts)
        assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before

    def test_a_second_process_is_refused(self, model: Model, whole: Path, tmp_path: Path) -> None:
        with (tmp_path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(RunError, match=r"another process trains in it; wait for it, or name another."):
                go_on(model, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]

    def test_a_folder_that_cannot_be_made(self, model: Model, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError, match=r"file/run: cannot be made or written \(Not a directory\); name another"):
            go_on(model, tmp_path / "file" / "run")

    def test_folders_without_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=r"holds no run.json; name the folder of a run"):
            load_parameters(tmp_path)
        with pytest.raises(RunError, match=r"run.json: cannot be read \(No such file or directory\); name the folder"):
            read_contract(tmp_path)
        (tmp_path / "run.json").write_text("{")
        with pytest.raises(RunError, match=r"run.json: is no JSON"):
            read_contract(tmp_path)
        with pytest.raises(RunError, match=r"its run has no checkpoint yet; let `dspark train` go on."):
            load_parameters(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
        (tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
        with pytest.raises(RunError, match="its run has no checkpoint yet"):
            load_parameters(tmp_path)

    @pytest.mark.parametrize("every", [0, -1, 1.5])
    def test_checkpoints_after_a_number_of_steps(self, model: Model, tmp_path: Path, every: Any) -> None:
        with pytest.raises(RequestError, match=f"save_every is {every}; expected an integer of at least 1."):
            train(model, Rows(CONFIG), RECIPE, tmp_path, FACTS, save_every=every)

    def test_packed_rows_without_features(self, model: Model, tmp_path: Path) -> None:
        class Packed(Rows):
            def starting_at(self, step: int) -> Iterator[Example]:
                for example in super().starting_at(step):
                    yield replace(example, document=jnp.where(jnp.arange(20) < 9, 0, example.document + 1))

        with pytest.raises(RequestError, match="row 0 holds several documents, which a target cannot keep apart"):
            train(model, Packed(CONFIG, features=False), RECIPE, tmp_path, FACTS)


# What is not finite --------------------------------------------------------------------------------------------------


class TestNotFinite:
    def test_it_stops_the_run_and_keeps_its_checkpoints(self, model: Model, whole: Path, tmp_path: Path) -> None:
        class Broken(Rows):
            def starting_at(self, step: int) -> Iterator[Example]:
                for number, example in enumerate(super().starting_at(step), step):
                    assert example.features is not None
                    bad = replace(example.features, taps=example.features.taps * (np.nan if number == 6 else 1.0))
                    yield replace(example, features=bad)

        with pytest.raises(NotFiniteError, match="step 6 has loss nan and gradient norm nan, and one of them"):
            train(model, Broken(CONFIG), RECIPE, tmp_path, FACTS, save_every=SAVE_EVERY)
        assert metrics_of(tmp_path) == b"".join(metrics_of(whole).splitlines(keepends=True)[:6])
        assert load_parameters(tmp_path)[0] == 4
        go_on(model, tmp_path)
        assert metrics_of(tmp_path) == metrics_of(whole), "with sound data it goes on"


# Where features come from --------------------------------------------------------------------------------------------


def test_features_on_the_fly_and_from_a_cache_have_the_same_losses(model: Model, tmp_path: Path) -> None:
    example = example_of(CONFIG, features=False)
    features = jax.jit(target_features)(model, example)

    class Cached(Rows):
        def starting_at(self, step: int) -> Iterator[Example]:
            while True:
                yield replace(example, features=features)

    class Fresh(Rows):
        def starting_at(self, step: int) -> Iterator[Example]:
            while True:
                yield example

    class Rounded(Rows):
        def starting_at(self, step: int) -> Iterator[Example]:
            while True:
                rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), features)
                yield replace(example, features=rounded)

    found = {}
    for rows in (Cached(CONFIG), Fresh(CONFIG), Rounded(CONFIG)):
        train(model, rows, RECIPE, tmp_path / type(rows).__name__, {})
        found[type(rows).__name__] = [record["loss"] for record in read_log(tmp_path / type(rows).__name__)]
    np.testing.assert_allclose(found["Fresh"], found["Cached"], rtol=1e-6)
    np.testing.assert_allclose(found["Rounded"], found["Cached"], rtol=1e-2)
    assert found["Rounded"] != found["Cached"]
