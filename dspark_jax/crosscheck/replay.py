"""Runs the model over a record's sequences once, in batches, so that each kind of step is compiled once."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.crosscheck.record import Run
from dspark_jax.decoding.forward import Forward, forward
from dspark_jax.decoding.programs import start
from dspark_jax.decoding.state import State, bucket
from dspark_jax.model.cache import TargetCache, drafter_cache
from dspark_jax.model.drafter import DraftStep, draft_step, main_features, remember
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import lm_logits, target_step


@dataclass(frozen=True)
class Trace:
    """The target along one sequence of n tokens, as NumPy arrays with the batch axis gone.

    Attributes:
        logits: float32 [n, V].
        taps: [n, taps_width].
        streams: [L, n, hc_mult, d] after each layer.
        collapsed: [n, d].
        router_picks: for each layer int32 [n, k], ascending.
        router_weights: for each layer float32 [n, k], in the order of the picks.
        index_picks: layer -> int32 [n, k], ascending, -1 first.
    """

    logits: np.ndarray
    taps: np.ndarray
    streams: np.ndarray
    collapsed: np.ndarray
    router_picks: list[np.ndarray]
    router_weights: list[np.ndarray]
    index_picks: dict[int, np.ndarray]


def replay(model: Model, runs: dict[str, Run]) -> dict[str, Trace]:
    """Every sequence in one pass of the target, the shorter ones padded at the end, where nothing before it looks."""
    ids = np.zeros((len(runs), max(len(run.ids) for run in runs.values())), np.int32)
    for row, run in zip(ids, runs.values(), strict=True):
        row[: len(run.ids)] = run.ids
    out = forward(model, ids, internals=True)
    return {name: _trace(out, row, len(run.ids)) for row, (name, run) in enumerate(runs.items())}


def _trace(out: Forward, row: int, n: int) -> Trace:
    assert out.seen is not None
    one = jax.tree.map(lambda values: np.asarray(values[row, :n]), out)
    layers = one.seen.layers
    order = [np.argsort(layer.routing.picks, axis=-1) for layer in layers]
    return Trace(
        logits=one.logits,
        taps=one.taps,
        streams=np.stack([layer.streams for layer in layers]),
        collapsed=one.seen.collapsed,
        router_picks=[
            np.take_along_axis(layer.routing.picks, ascending, axis=-1)
            for layer, ascending in zip(layers, order, strict=True)
        ],
        router_weights=[
            np.take_along_axis(layer.routing.weights, ascending, axis=-1)
            for layer, ascending in zip(layers, order, strict=True)
        ],
        index_picks={
            number: np.sort(layer.index_picks, axis=-1)
            for number, layer in enumerate(layers)
            if layer.index_picks is not None
        },
    )


@dataclass(frozen=True)
class Steps:
    """Tokens fed one at a time after a prompt, through the decoding step: NumPy arrays over the fed tokens.

    Attributes:
        logits: float32 [n, V].
        taps: [n, taps_width].
        index_picks: layer -> int32 [n, k], ascending.
    """

    logits: np.ndarray
    taps: np.ndarray
    index_picks: dict[int, np.ndarray]


def feed(model: Model, runs: dict[str, Run]) -> dict[str, Steps]:
    """Prefills each prompt and feeds the rest one token a step, all sequences side by side."""
    lengths = np.array([len(run.prompt) for run in runs.values()], np.int32)
    ends = np.array([len(run.ids) for run in runs.values()], np.int32)
    capacity = bucket(int(ends.max()) + model.step_width)
    tokens = np.zeros((len(runs), capacity), np.int32)
    for row, run in zip(tokens, runs.values(), strict=True):
        row[: len(run.ids)] = run.ids
    setting = model.setting(capacity)
    state = start(model, setting, tokens, lengths)
    steps = int((ends - lengths).max()) + 1  # the last token of a prompt is a step, too: prefill stops before it
    logits, taps, picks = jax.tree.map(np.asarray, _feed(model, setting, state, ends, steps))
    return {
        name: Steps(
            logits[1 : 1 + len(run.rest), row],
            taps[1 : 1 + len(run.rest), row],
            {layer: np.sort(values[1 : 1 + len(run.rest), row], axis=-1) for layer, values in picks.items()},
        )
        for row, (name, run) in enumerate(runs.items())
    }


@partial(jax.jit, static_argnames="steps")
def _feed(
    model: Model, setting: Setting, state: State, ends: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array, dict[int, jax.Array]]:
    """Logits [steps, B, V], taps [steps, B, ...] and index picks of the first row of each decoding step."""
    assert model.target is not None
    target, first = model.target, state.length - 1

    def step(cache: TargetCache, number: jax.Array) -> tuple[TargetCache, tuple]:
        position = first + number
        token = jnp.take_along_axis(state.tokens, position[:, None], axis=1, mode="clip")
        ids = jnp.pad(token, [(0, 0), (0, model.block_size)])
        rows = Rows(ids, position, (position < ends).astype(jnp.int32))
        passed = target_step(target, model.vocabulary, rows, cache, setting)
        picks = {
            layer: seen.index_picks[:, 0]
            for layer, seen in enumerate(passed.seen.layers)
            if seen.index_picks is not None
        }
        logits = lm_logits(model.vocabulary, passed.hidden)[:, 0]
        return passed.cache, (logits, passed.taps[:, 0], picks)

    return jax.lax.scan(step, state.target, jnp.arange(steps, dtype=jnp.int32))[1]


@dataclass(frozen=True)
class DraftStart:
    """A place where the drafter is replayed.

    Attributes:
        taps: [n, taps_width], features of every position up to and including the last decoded one, n - 1.
        anchor: the token known to follow.
    """

    taps: np.ndarray
    anchor: int


def draft_at(model: Model, starts: list[DraftStart]) -> tuple[Any, np.ndarray]:
    """Drafts at every start, one batch row each: a `DraftStep` in NumPy, and features [B, d] of the last position."""
    window = model.config.sliding_window
    taps = np.zeros((len(starts), window, starts[0].taps.shape[-1]), starts[0].taps.dtype)
    for row, begin in zip(taps, starts, strict=True):
        newest = begin.taps[-window:]
        row[: len(newest)] = newest
    ends = np.array([len(begin.taps) for begin in starts], np.int32)
    counts = np.minimum(ends, window)
    rows = Rows(jnp.zeros(taps.shape[:2], jnp.int32), jnp.asarray(ends - counts), jnp.asarray(counts))
    anchors = jnp.asarray([begin.anchor for begin in starts], jnp.int32)
    setting = model.setting(bucket(int(ends.max()) + model.step_width))
    step, features = jax.tree.map(np.asarray, _draft(model, setting, jnp.asarray(taps), rows, anchors))
    return step, np.take_along_axis(features, counts[:, None, None] - 1, axis=1)[:, 0]


@jax.jit
def _draft(
    model: Model, setting: Setting, taps: jax.Array, rows: Rows, anchors: jax.Array
) -> tuple[DraftStep, jax.Array]:
    assert model.drafter is not None
    empty = drafter_cache(model.config, model.numerics, taps.shape[0])
    cache = remember(model.drafter, empty, taps, rows, setting)
    live = jnp.ones(anchors.shape, bool)
    step = draft_step(model.drafter, model.vocabulary, cache, anchors, rows.last + 1, live, setting)
    return step, main_features(model.drafter, taps, setting)
