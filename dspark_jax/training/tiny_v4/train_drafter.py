"""The drafter of tiny-v4, from random weights: half on what the target itself writes, half on the text it learnt from.

What it will be asked to draft is the target's own text, behind beginnings that the target has not seen; text alone
would teach it the certainty that the target has on sentences that it knows by heart.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.example import Example
from dspark_jax.decoding.generation import generate_fn
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.model.model import Model
from dspark_jax.training.parameters import release
from dspark_jax.training.step import Recipe, initial_state, train_step
from dspark_jax.training.tiny_v4.recipe import ROW_TOKENS
from dspark_jax.training.tiny_v4.tokenizer import END

PROMPT_TOKENS = 64
TEMPERATURES = (0.0, 0.7, 1.0, 1.0)  # in turn
LOG_EVERY = 50  # steps


@dataclass(frozen=True)
class DrafterPlan:
    """How the drafter is trained.

    Attributes:
        steps: of the run.
        batch: rows of a step, half of them the target's own.
        written: rows that the target writes before the first step, a multiple of `side_by_side`.
        side_by_side: of them at a time.
        anchors: blocks a row.
        learning_rate: its peak.
        seed: of everything random.
    """

    steps: int = 8000
    batch: int = 64
    written: int = 16384
    side_by_side: int = 1024
    anchors: int = 128
    learning_rate: float = 2e-3
    seed: int = 0


def train_drafter(
    model: Model, train: np.ndarray, validation: np.ndarray, plan: DrafterPlan, log: Callable[[dict[str, Any]], None]
) -> Model:
    """Trains the drafter of a model.

    Args:
        model: with a trained target.
        train: integers [N], the tokens that the target learnt from.
        validation: integers [M], tokens that it did not; rows of its own begin with some of them.
        log: gets the metrics of some steps.
    """
    rng = np.random.default_rng(plan.seed)
    started = time.monotonic()
    written, lengths = write_rows(model, validation, plan, rng)
    log({"written_tokens": int(lengths.sum()), "seconds": round(time.monotonic() - started, 1)})
    recipe = Recipe(
        steps=plan.steps,
        scope="full",
        anchors=plan.anchors,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
    )
    state = initial_state(model, recipe)
    for step in range(plan.steps):
        example = mixed_rows(written, lengths, train, plan.batch, rng)
        state, report = train_step(state, model, example, recipe)
        if step % LOG_EVERY == 0 or step + 1 == plan.steps:
            names = ("loss", "cross_entropy", "l1", "confidence", "expected_length", "greedy_length")
            measured = {name: float(getattr(report.metrics, name)) for name in names}
            log({"step": step, "seconds": round(time.monotonic() - started, 1)} | measured)
    return jax.jit(release)(model, state.parameters)


def write_rows(
    model: Model, stream: np.ndarray, plan: DrafterPlan, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that the target writes behind beginnings from a stream.

    Returns:
        int32 [written, ROW_TOKENS], and the length of each, int32 [written].
    """
    plain = dataclasses.replace(model, drafter=None)
    run = generate_fn(model.config, ROW_TOKENS)
    batch = plan.side_by_side
    rows, lengths = [], []
    for number in range(plan.written // batch):
        first = rng.integers(0, len(stream) - PROMPT_TOKENS, batch)
        prompts = jnp.asarray(stream[first[:, None] + np.arange(PROMPT_TOKENS)], jnp.int32)
        sampling = Sampling.of(
            batch,
            temperature=np.resize(np.array(TEMPERATURES, np.float32), batch),
            seed=number * batch + np.arange(batch, dtype=np.uint32),
            max_new_tokens=ROW_TOKENS - PROMPT_TOKENS,
            stop_ids=END,
        )
        lengths_in = jnp.full(batch, PROMPT_TOKENS, jnp.int32)
        done = run(plain, prompts, lengths_in, jax.tree.map(jnp.asarray, sampling), jax.random.key(plan.seed))
        rows.append(np.asarray(done.tokens))
        lengths.append(np.asarray(done.length))
    return np.concatenate(rows), np.concatenate(lengths)


def mixed_rows(
    written: np.ndarray, lengths: np.ndarray, train: np.ndarray, batch: int, rng: np.random.Generator
) -> Example:
    """A batch: half rows of the target's own, half pieces of the text."""
    own = rng.integers(0, len(written), batch // 2)
    first = rng.integers(0, len(train) - ROW_TOKENS, batch - batch // 2)
    text = train[first[:, None] + np.arange(ROW_TOKENS)].astype(np.int32)
    ids = np.concatenate([written[own], text])
    inside = np.arange(ROW_TOKENS) < np.concatenate([lengths[own], np.full(len(text), ROW_TOKENS)])[:, None]
    document = np.where(inside, np.int32(0), np.int32(-1))
    return Example(jnp.asarray(ids), jnp.asarray(inside), jnp.asarray(document), None)
