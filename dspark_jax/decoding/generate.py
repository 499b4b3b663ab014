"""Generation for people: lists of token ids in, lists and statistics out."""

import logging
import operator
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.loop import decode, prefill
from dspark_jax.decoding.state import State, bucket, initial_state
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.errors import NotFiniteError, RequestError, SilentDrafterError
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Setting

_log = logging.getLogger(__name__)

PREFILL_CHUNK = 256
POSITION_LIMIT = 1 << 24  # RoPE angles are float32 products; beyond this, positions are no longer exact
STOP_SLOTS = 8  # stop ids are padded to a multiple of this, so that their number compiles nothing


@dataclass(frozen=True)
class Completions:
    """What `generate` returns.

    Attributes:
        tokens: for each prompt the new token ids, a stop id included if one ended it.
        statistics: totals over all prompts.
    """

    tokens: list[list[int]]
    statistics: Statistics


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    draft_tokens: int | None = None,
    stop_ids: Sequence[int] | None = None,
) -> Completions:
    """Completes prompts greedily; drafting, verification and acceptance stay on the device until all are done.

    The tokens do not depend on `draft_tokens`: with the same batch size and capacity every draft length, 0 included,
    runs the same program, and its logits have the same bits.

    Args:
        model: with a target; without a drafter decoding is plain.
        prompts: token ids, one list a prompt, of any lengths.
        max_new_tokens: budget of each prompt.
        draft_tokens: drafts offered in a round; None for the trained block. More than the block is clamped with a
            warning, since a longer block than the trained one degrades every draft.
        stop_ids: ids that end a completion; None for the config's EOS, () for none.

    Raises:
        RequestError: no target, no prompt, an empty prompt, an id outside the vocabulary, a negative or absurd number.
        NotFiniteError: the target's logits are not finite.
        SilentDrafterError: the drafter was allowed to draft and never offered a finite draft.
    """
    if model.target is None:
        raise RequestError("generate needs a target, and this model was loaded with the drafter alone.")
    vocabulary = model.config.vocab_size
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; expected a list of lists of token ids.")
    ids = [check_prompt(prompt, vocabulary, f"prompt {i}") for i, prompt in enumerate(prompts)]
    if not ids:
        raise RequestError("there is no prompt; pass at least one list of token ids.")
    new_tokens = _count(max_new_tokens, "max_new_tokens")
    drafts = _draft_tokens(draft_tokens, model.block_size)
    stops = model.config.eos_token_id if stop_ids is None else check_ids(stop_ids, vocabulary, "stop_ids")
    _check_length(max(map(len, ids)) + new_tokens, model.config.max_position_embeddings)
    state = run(model, ids, [new_tokens] * len(ids), [drafts] * len(ids), stops)
    return _completions(state, ids)


def run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
    draft_tokens: Sequence[int],
    stop_ids: Sequence[int],
) -> State:
    """Prefill and decoding of one batch, with a budget and a draft length a sequence; returns the final state."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    limits = lengths + np.array(new_tokens, np.int32)
    capacity = bucket(int(limits.max()) + model.step_width)
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    stops = np.full(-(-max(len(stop_ids), 1) // STOP_SLOTS) * STOP_SLOTS, -1, np.int32)
    stops[: len(stop_ids)] = stop_ids
    setting = model.setting(capacity)
    chunk = min(PREFILL_CHUNK, capacity)
    state = start(model, setting, jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(limits), chunk)
    return finish(model, setting, state, jnp.asarray(draft_tokens, jnp.int32), jnp.asarray(stops))


@partial(jax.jit, static_argnames="chunk")
def start(model: Model, setting: Setting, tokens: jax.Array, length: jax.Array, limit: jax.Array, chunk: int) -> State:
    """A prefilled state, compiled once for a batch size, a capacity and a chunk; arguments as for `initial_state`."""
    return prefill(model, setting, initial_state(model, tokens, length, limit), chunk)


@partial(jax.jit, donate_argnames="state")
def finish(model: Model, setting: Setting, state: State, draft_tokens: jax.Array, stop_ids: jax.Array) -> State:
    """`decode`, compiled once for a batch size and a capacity."""
    return decode(model, setting, state, draft_tokens, stop_ids)


def check_ids(ids: Any, vocabulary: int, what: str) -> list[int]:
    """`ids` as a list of ints.

    Raises:
        RequestError: `what` holds something that is not an id below `vocabulary`.
    """
    try:
        values = [operator.index(i) for i in ids]
    except TypeError as error:
        raise RequestError(f"{what}: expected a list of token ids ({error}).") from error
    for value in values:
        if not 0 <= value < vocabulary:
            raise RequestError(f"{what}: token id {value} is outside the vocabulary; expected 0 to {vocabulary - 1}.")
    return values


def check_prompt(ids: Any, vocabulary: int, what: str) -> list[int]:
    """`ids` as a list of ints.

    Raises:
        RequestError: as `check_ids`, or `what` is empty.
    """
    values = check_ids(ids, vocabulary, what)
    if not values:
        raise RequestError(f"{what} is empty; give at least one token id.")
    return values


def _count(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise RequestError(f"{name} is {value!r}; expected an integer of at least 0.")
    return int(value)


def _check_length(length: int, trained: int) -> None:
    if length > POSITION_LIMIT:
        raise RequestError(f"prompt and max_new_tokens make {length} positions; expected at most {POSITION_LIMIT}.")
    if length > trained:
        _log.warning("prompt and max_new_tokens make %d positions; the model was made for %d", length, trained)


def _draft_tokens(wanted: int | None, block: int) -> int:
    if wanted is None:
        return block
    wanted = _count(wanted, "draft_tokens")
    if wanted and not block:
        raise RequestError(f"draft_tokens is {wanted}, but the model has no drafter; use 0.")
    if wanted > block:
        message = f"draft_tokens {wanted} is more than the trained block of {block}; {block} are used"
        warnings.warn(message, UserWarning, stacklevel=3)
    return min(wanted, block)


def _completions(state: State, prompts: Sequence[Sequence[int]]) -> Completions:
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    if not np.all(state.finite):
        broken = np.flatnonzero(~np.asarray(state.finite)).tolist()
        raise NotFiniteError(f"the target's logits are not finite for prompts {broken}; check its weights.")
    statistics = Statistics.of(state.counters)
    allowed_rounds = int(np.asarray(state.counters.allowed_rounds).sum())
    if allowed_rounds and not statistics.offered_drafts:
        raise SilentDrafterError(
            f"the drafter was allowed to offer drafts in {allowed_rounds} rounds and offered none: its logits are not "
            "finite. Check the drafter's weights, or generate with draft_tokens=0."
        )
    new = [row[len(prompt) : end].tolist() for row, prompt, end in zip(tokens, prompts, length, strict=True)]
    return Completions(new, statistics)
