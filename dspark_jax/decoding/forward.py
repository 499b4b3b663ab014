"""The target on given tokens: logits, taps and internals at every position."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.decoding.loop import PREFILL_CHUNK
from dspark_jax.decoding.request import check_prompt
from dspark_jax.decoding.state import bucket
from dspark_jax.errors import RequestError, check_count
from dspark_jax.model.cache import TargetCache, target_cache
from dspark_jax.model.model import Model
from dspark_jax.model.numerics import Numerics
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import Seen, lm_logits, target_step
from dspark_jax.placement import constrain_rows, place_rows, setting_of
from pallas_kernels.partition import Partition


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """What `forward` returns.

    Attributes:
        logits: float32 [B, T, V].
        taps: activations [B, T, taps_width], the target features that the drafter reads.
        seen: internals at every position if they were asked for, else None.
    """

    logits: jax.Array
    taps: jax.Array
    seen: Seen | None


def forward(model: Model, ids: jax.typing.ArrayLike, internals: bool = False, chunk: int = PREFILL_CHUNK) -> Forward:
    """Runs the target over whole sequences.

    Args:
        model: with a target.
        ids: int [B, T], token ids.
        internals: return streams, router and indexer picks of every layer, too.
        chunk: rows of one step; any size gives the same values up to rounding.

    Raises:
        RequestError: no target, `ids` not two-dimensional or outside the vocabulary, or `chunk` below 1.
    """
    if model.target is None:
        raise RequestError("forward needs a target, and this model was loaded with the drafter alone.")
    try:
        tokens = np.asarray(ids)
    except ValueError as error:
        raise RequestError("ids has rows of different lengths; pad them, or call forward for each.") from error
    if tokens.ndim != 2 or not tokens.shape[0]:
        raise RequestError(f"ids has shape {list(tokens.shape)}; expected [batch, tokens].")
    tokens = np.array([check_prompt(row, model.config.vocab_size, "ids") for row in tokens], np.int32)
    length = tokens.shape[1]
    capacity = bucket(length)
    width = min(check_count(chunk, "chunk"), capacity)
    setting, steps = setting_of(model, capacity), []
    cache = empty_cache(model.config, model.numerics, len(tokens), capacity, setting.partition)
    for first in range(0, length, width):
        piece = tokens[:, first : first + width]
        count = piece.shape[1]
        piece = np.pad(piece, [(0, 0), (0, width - count)])
        start, live = (jnp.full(len(piece), value, jnp.int32) for value in (first, count))
        rows = place_rows(Rows(jnp.asarray(piece), start, live), setting.partition)
        step, cache = forward_step(model, setting, rows, cache, internals)
        steps.append(jax.tree.map(lambda values, count=count: values[:, :count], step))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *steps)


@partial(jax.jit, static_argnums=range(5))
def empty_cache(
    config: ModelConfig, numerics: Numerics, batch: int, capacity: int, partition: Partition | None
) -> TargetCache:
    """A cache for steps that are never rolled back, each device's share made in its place."""
    return constrain_rows(target_cache(config, numerics, batch, capacity, width=1), partition)


@partial(jax.jit, static_argnames="internals", donate_argnames="cache")
def forward_step(
    model: Model, setting: Setting, rows: Rows, cache: TargetCache, internals: bool
) -> tuple[Forward, TargetCache]:
    """One step of the target with its logits, compiled once for a batch size, a step width and a capacity."""
    assert model.target is not None
    step = target_step(model.target, model.vocabulary, rows, cache, setting)
    logits = lm_logits(model.vocabulary, step.hidden)
    step_cache = constrain_rows(step.cache, setting.partition)  # as it came, so that its buffers are used again
    return Forward(logits, step.taps, step.seen if internals else None), step_cache
