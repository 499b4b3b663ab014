"""A run of fine-tuning in a folder: steps, checkpoints, a log, and going on after a kill.

    OUT/run.json          what the run depends on; another run may not go on in its folder
    OUT/metrics.jsonl     one line a step
    OUT/checkpoints/N     masters and moments after N steps, written by Orbax and renamed when whole

A step depends on the state before it, the data of its number and the recipe alone, so a run that was killed and went on
ends, on a CPU, with the bits of one that was not. GPUs add some gradients in any order, unless XLA is told to be
deterministic (`XLA_FLAGS=--xla_gpu_deterministic_ops=true`).
"""

import dataclasses
import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from dspark_jax.data.assemble import refuse_packed
from dspark_jax.data.example import Examples
from dspark_jax.data.files import replace
from dspark_jax.errors import NotFiniteError, RequestError, RunError, check_count
from dspark_jax.jobs.json_lines import parse_object, read_lines, to_line
from dspark_jax.model.model import Model
from dspark_jax.placement import partition_of, place_rows
from dspark_jax.training.parameters import Parameters
from dspark_jax.training.step import Recipe, Report, TrainingState, initial_state, train_step

CONTRACT, METRICS, CHECKPOINTS, LOCK = "run.json", "metrics.jsonl", "checkpoints", ".lock"
KEPT = 2  # checkpoints: the last one, and the one before it should the disk lose that

Record = dict[str, Any]
"""A line of the log: step, from 0, and what was measured before its move."""


def train(
    model: Model,
    examples: Examples,
    recipe: Recipe,
    directory: Path,
    facts: dict[str, Any],
    *,
    save_every: int = 500,
    report: Callable[[Record], None] = lambda record: None,
) -> Parameters:
    """Trains, or goes on with, the run of a folder.

    Args:
        model: with a drafter, and with a target unless the examples have features.
        examples: by step.
        recipe: of the run.
        directory: of the run; made if it is not there.
        facts: JSON values that the run depends on besides its recipe: model, numerics, data. A folder whose run has
            other ones is refused.
        save_every: steps between two checkpoints; the last step makes one, too.
        report: told about every step.

    Returns:
        The masters after the last step.

    Raises:
        RunError: the folder holds another run, or one that another process works on.
        NotFiniteError: the loss or its gradient is not finite. The checkpoints before it stay.
        RequestError: a recipe that makes no sense, or packed rows without features.
    """
    save_every, partition = check_count(save_every, "save_every"), partition_of(model)
    contract = facts_of(recipe) | facts
    check_contract(directory, contract)
    with _claimed(directory), _checkpoints(directory, writing=True) as checkpoints:
        replace(directory / CONTRACT, [(json.dumps(contract, indent=2) + "\n").encode()])
        state = initial_state(model, recipe)
        if checkpoints.latest is not None:
            wanted = _abstract(state)
            del state  # there may be no room for two
            with _damage_explained(directory):
                state = checkpoints.load(abstract_state=wanted)
        first = int(state.step)
        with _log(directory, first) as log:
            for step, example in zip(range(first, recipe.steps), examples.starting_at(first), strict=False):
                if example.features is None:
                    refuse_packed(example)
                state, measured = train_step(state, model, place_rows(example, partition), recipe, partition)
                record = record_of(step, measured)
                if not np.isfinite([record["loss"], record["gradient_norm"]]).all():
                    raise NotFiniteError(_not_finite(step, record, directory))
                log(record)
                report(record)
                if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
                    if not _finite(state.parameters):
                        raise NotFiniteError(_not_finite(step, record, directory))
                    checkpoints.save(step + 1, state, overwrite=True)
    return state.parameters


def load_parameters(directory: Path) -> tuple[int, Parameters]:
    """Steps taken and masters of the last checkpoint of a run.

    Raises:
        RunError: there is none.
    """
    if not (directory / CONTRACT).is_file():
        raise RunError(f"{directory}: holds no {CONTRACT}; name the folder of a run of `dspark train`.")
    none = RunError(f"{directory}: its run has no checkpoint yet; let `dspark train` go on.")
    if not (directory / CHECKPOINTS).is_dir():  # Orbax would make it
        raise none
    from orbax.checkpoint import v1 as ocp

    with _checkpoints(directory, writing=False) as checkpoints:
        if checkpoints.latest is None:
            raise none
        with _damage_explained(directory):
            stored = checkpoints.metadata().metadata
            here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])  # of all memories the largest
            wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), stored)
            wanted["optimiser"] = jax.tree.map(lambda leaf: ocp.PLACEHOLDER, wanted["optimiser"])
            state = checkpoints.load(abstract_state=wanted)
    return int(state["step"]), state["parameters"]


def read_contract(directory: Path) -> dict[str, Any]:
    """What the run of a folder depends on.

    Raises:
        RunError: there is no run, or its file is damaged.
    """
    path = directory / CONTRACT
    try:
        return parse_object(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); name the folder of a run.") from error
    except RequestError as error:
        raise RunError(f"{error} Restore it, or start a run in another folder.") from error


def read_log(directory: Path) -> list[Record]:
    """The lines of a run's log, by step.

    Raises:
        RunError: there is none.
    """
    path = directory / METRICS
    try:
        return [parse_object(line, f"{path} line {number}") for number, line in read_lines(path)]
    except RequestError as error:
        raise RunError(f"{error} It is written anew when a run starts.") from error


def facts_of(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON values."""
    return {"recipe": json.loads(json.dumps(dataclasses.asdict(recipe)))}


def check_contract(directory: Path, facts: dict[str, Any]) -> None:
    """Compares what a run depends on with what the run of a folder does, if that has a checkpoint to go on from.

    Raises:
        RunError: naming the first fact that differs; or the folder is another kind of folder, or there are several
            processes, which could not share it.
    """
    if jax.process_count() > 1:
        raise RunError("training runs in one process, over all of its devices; start a single one.")
    if directory.is_dir() and not (directory / CONTRACT).exists():
        foreign = sorted(path.name for path in directory.iterdir() if path.name != LOCK)
        if foreign:
            raise RunError(f"{directory}: holds {foreign[0]} and no run; name a folder that does not exist yet.")
    if not any((directory / CHECKPOINTS).glob("[0-9]*")):
        return
    known, wanted = dict(_flat(read_contract(directory))), dict(_flat(facts))
    for name in known | wanted:
        if known.get(name) != wanted.get(name):
            raise RunError(
                f"{directory}: its run has {name} {known.get(name)!r} and this one {wanted.get(name)!r}; give it the "
                "old value, or start in another folder."
            )


def record_of(step: int, report: Report) -> Record:
    """A report as JSON values."""
    report = jax.device_get(report)
    measured = {
        field.name: getattr(report.metrics, field.name).tolist() for field in dataclasses.fields(report.metrics)
    }
    rates = {name: float(getattr(report, name)) for name in ("gradient_norm", "learning_rate")}
    return {"step": step} | measured | rates


def _flat(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """The folder, made if it is not there and locked against a second process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("w")
    except OSError as error:
        raise RunError(f"{directory}: cannot be made or written ({error.strerror}); name another folder.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"{directory}: another process trains in it; wait for it, or name another.") from error
        yield


def _checkpoints(directory: Path, *, writing: bool) -> Any:
    """Those of a run; only who holds its lock removes what a killed process left, which a live one may be writing."""
    from orbax.checkpoint import v1 as ocp  # takes seconds, which commands that train nothing should not

    policies = ocp.training
    return ocp.training.Checkpointer(
        (directory / CHECKPOINTS).resolve(),
        save_decision_policy=policies.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=policies.preservation_policies.LatestN(KEPT),
        cleanup_tmp_directories=writing,
    )


@contextmanager
def _damage_explained(directory: Path) -> Iterator[None]:
    """Orbax raises whatever its many parts do."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"{directory / CHECKPOINTS}: the last checkpoint cannot be read ({reason[:200]}); delete its folder to go "
            "on from the one before it."
        ) from error


def _abstract(state: TrainingState) -> TrainingState:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


@contextmanager
def _log(directory: Path, first: int) -> Iterator[Callable[[Record], None]]:
    """Appends lines; those of steps that are taken once more, and a torn last one, are cut off first."""
    path = directory / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines[:first] if line.endswith(b"\n")]
    if len(kept) < len(lines):
        replace(path, kept)
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield lambda record: print(to_line(record), file=file)


@jax.jit
def _finite(parameters: Parameters) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(master)) for master in parameters.values()]))


def _not_finite(step: int, record: Record, directory: Path) -> str:
    return (
        f"{directory}: step {step} has loss {record['loss']} and gradient norm {record['gradient_norm']}, and one of "
        "them or the move is not finite; lower the learning rate or the confidence's weight, and use another folder."
    )
