"""One pre-training run of the target, from random weights to a checkpoint folder, in a given time.

A run is minutes and is not resumed; started again, it starts anew. Its schedule is fixed once steps have been timed.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.save import save
from dspark_jax.checkpoint.tokenizer import TOKENIZER_FILE
from dspark_jax.checkpoint.write import new_folder
from dspark_jax.jobs.json_lines import to_line
from dspark_jax.model.model import Model
from dspark_jax.training.parameters import Parameters, masters, release, weights_of
from dspark_jax.training.step import TrainingState
from dspark_jax.training.tiny_v4.pretrain import (
    Plan,
    Report,
    initial_state,
    rows_of_step,
    target_loss,
    train_steps,
)

DISPATCH = 20  # steps of one program
TIMED = 3  # dispatches behind the first, which compiles, whose time decides how many steps there will be
VALIDATE_EVERY = 25  # dispatches
VALIDATION_STEPS = 4  # batches of a validation
RESERVE = 30.0  # seconds at the end, for what is not training

CHECKPOINT, METRICS = "checkpoint", "metrics.jsonl"

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Budget:
    """When a run ends: after a number of steps, or, where that is None, when the time is used up.

    Attributes:
        steps: in all, rounded up to whole dispatches.
        seconds: from the start of the run, compiling included.
    """

    steps: int | None
    seconds: float


def train_target(
    model: Model, train: np.ndarray, validation: np.ndarray, plan: Plan, budget: Budget, log: Log
) -> Model:
    """Trains target and vocabulary of a model; its drafter keeps its values.

    Args:
        model: with random weights.
        train: integers [N], tokens of all documents.
        validation: as `train`.
        log: gets the metrics of every dispatch.
    """
    frozen = dataclasses.replace(model, drafter=None)
    names = tuple(name for name, _ in weights_of(frozen))
    state = jax.jit(lambda model: initial_state(masters(model, names), plan))(frozen)
    stream, held_out = jnp.asarray(train), jnp.asarray(validation)
    parameters = state.parameters
    for done, parameters, report in _dispatches(state, frozen, stream, plan, budget):
        metrics = summary(report)
        if done.number % VALIDATE_EVERY == 0 or done.last:
            losses = [
                _validate(parameters, frozen, held_out, jnp.int32(step), plan) for step in range(VALIDATION_STEPS)
            ]
            metrics |= {"validation": float(np.mean(losses))}
        log({"step": done.steps, "of": done.total, "seconds": round(done.seconds, 1)} | metrics)
    return jax.jit(release)(model, parameters)


@partial(jax.jit, static_argnames="plan")
def _validate(parameters: Parameters, model: Model, stream: jax.Array, step: jax.Array, plan: Plan) -> jax.Array:
    return target_loss(parameters, model, rows_of_step(stream, step, plan))[1].cross_entropy


@dataclass(frozen=True)
class Done:
    """How far a run is: dispatches and steps taken, steps in all (None while unknown), seconds since the start."""

    number: int
    steps: int
    total: int | None
    seconds: float

    @property
    def last(self) -> bool:
        """Whether no step is left."""
        return self.total is not None and self.steps >= self.total


def _dispatches(
    state: TrainingState, model: Model, stream: jax.Array, plan: Plan, budget: Budget
) -> Iterator[tuple[Done, Parameters, Report]]:
    """Runs to the end of the budget; what is yielded is given up to the next dispatch."""
    start = time.monotonic()
    total, number, timed_from = budget.steps, 0, start
    while total is None or number * DISPATCH < total:
        # Until the number of steps is known the rate is still rising, and does not depend on it.
        whole = jnp.float32(total if total is not None else 1e9)
        state, report = train_steps(state, model, stream, whole, plan, DISPATCH)
        jax.block_until_ready(report)
        number += 1
        now = time.monotonic()
        if number == 1:
            timed_from = now
        if total is None and number == 1 + TIMED:
            total = steps_that_fit(number, (now - timed_from) / TIMED, budget.seconds - RESERVE - (now - start))
        yield Done(number, number * DISPATCH, total, now - start), state.parameters, report


def steps_that_fit(dispatches: int, seconds_each: float, seconds_left: float) -> int:
    """Steps of a run of which some dispatches are done, so that the others fit into the time left."""
    return DISPATCH * (dispatches + max(int(seconds_left / seconds_each), 0))


def summary(report: Report) -> dict[str, float]:
    """The mean of a dispatch's losses; the last and largest of what may run away."""
    losses = report.losses
    return {
        "loss": float(jnp.mean(losses.cross_entropy)),
        "indexer": float(jnp.mean(losses.indexer)),
        "gradient_norm": float(jnp.max(report.gradient_norm)),
        "largest_load": max(float(jnp.max(load[-1])) for load in losses.loads),
        "rate": float(report.rate[-1]),
    }


def write_checkpoint(model: Model, tokenizer: str, directory: Path) -> None:
    """Writes a checkpoint with its tokenizer; it appears under its name only when it is whole.

    Raises:
        CheckpointError: `directory` exists and is not empty.
    """
    with new_folder(directory) as work:
        save(model, work)
        (work / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")


def append_to(path: Path) -> Log:
    """A log that appends lines of JSON to a file and prints them."""

    def log(metrics: dict[str, Any]) -> None:
        line = to_line(metrics)
        print(line, flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    return log
