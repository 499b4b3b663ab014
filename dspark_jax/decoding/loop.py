"""Prefill and the decoding loop: pure functions on a `State`, made to be called inside `jax.jit`.

A round drafts from the anchor, runs anchor and drafts through the target, and commits what the target agrees with
plus one token of its own. Every round has `1 + block` rows a sequence, whatever is drafted: plain decoding is the
same program with one live row, so greedy output has the same bits for every draft length.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from dspark_jax.decoding.accept import accept_greedy, commit
from dspark_jax.decoding.state import State
from dspark_jax.model.cache import DrafterCache, write
from dspark_jax.model.drafter import draft_step, remember
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import lm_logits, target_step
from dspark_jax.model.weights import Target


def prefill(model: Model, setting: Setting, state: State, chunk: int) -> State:
    """Runs the prompts, all but their last tokens, through the target and into the drafter's context.

    Args:
        state: as `initial_state` made it.
        chunk: rows of a step, static. Its bits are promised for one chunk size; any size gives the same values.
    """
    todo = state.length - 1

    def step(number: jax.Array, state: State) -> State:
        first = number * chunk
        ids = state.tokens.at[:, first + jnp.arange(chunk, dtype=jnp.int32)].get(mode="clip")
        rows = Rows(ids, jnp.full_like(todo, first), jnp.clip(todo - first, 0, chunk))
        passed = target_step(_target(model), model.vocabulary, rows, state.target, setting)
        return replace(state, target=passed.cache, drafter=_remember(model, setting, state.drafter, passed.taps, rows))

    return jax.lax.fori_loop(0, -(-jnp.max(todo) // chunk), step, state)


def decode(model: Model, setting: Setting, state: State, draft_tokens: jax.Array, stop_ids: jax.Array) -> State:
    """Decodes greedily until every sequence has stopped or spent its budget.

    Args:
        state: prefilled.
        draft_tokens: int32 [B], drafts to offer in a round, 0 to the trained block.
        stop_ids: int32 [S], -1 stops nothing.
    """
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.done),
        lambda state: decode_round(model, setting, state, draft_tokens, stop_ids),
        state,
    )


def decode_round(model: Model, setting: Setting, state: State, draft_tokens: jax.Array, stop_ids: jax.Array) -> State:
    """One round of every running sequence: draft, verify, accept, commit. Arguments as for `decode`."""
    active = ~state.done
    # The bonus needs a place in the budget, too.
    allowed = jnp.where(active, jnp.clip(draft_tokens, 0, state.limit - state.length - 1), 0)
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
    drafts, offered = _propose(model, setting, state, anchor, allowed)

    start = state.length - 1
    rows = Rows(jnp.concatenate([anchor[:, None], drafts], axis=1), start, jnp.where(active, 1 + offered, 0))
    passed = target_step(_target(model), model.vocabulary, rows, state.target, setting)
    logits = lm_logits(model.vocabulary, passed.hidden)
    finite = state.finite & jnp.all(jnp.isfinite(logits) | ~rows.live[..., None], axis=(1, 2))
    verdict = accept_greedy(logits, drafts, offered)
    kept = replace(rows, count=jnp.where(active, 1 + verdict.accepted, 0))
    drafter = _remember(model, setting, state.drafter, passed.taps, kept)

    cut = commit(verdict, offered, stop_ids)
    count = jnp.where(active, cut.tokens, 0)
    row = jnp.arange(rows.ids.shape[1], dtype=jnp.int32)
    tokens = write(state.tokens, state.length[:, None] + row, verdict.tokens, row < count[:, None])
    length = state.length + count
    return State(
        tokens=tokens,
        length=length,
        limit=state.limit,
        done=state.done | cut.stopped | (length >= state.limit) | ~finite,
        finite=finite,
        target=passed.cache,
        drafter=drafter,
        counters=state.counters.count(active, allowed > 0, cut),
    )


def _propose(
    model: Model, setting: Setting, state: State, anchor: jax.Array, allowed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Drafts int32 [B, g] and how many of them are offered, int32 [B].

    A draft whose logits are not finite is no draft: it ends the offer. The drafter is not run in a round in which no
    sequence may draft.
    """
    shape = (anchor.shape[0], model.block_size)
    if model.drafter is None:
        return jnp.zeros(shape, jnp.int32), jnp.zeros_like(allowed)
    drafter = model.drafter

    def draft() -> tuple[jax.Array, jax.Array]:
        step = draft_step(drafter, model.vocabulary, state.drafter, anchor, state.length - 1, allowed > 0, setting)
        sound = jnp.all(jnp.isfinite(step.logits), axis=-1)
        return step.ids, jnp.sum(jnp.cumprod(sound.astype(jnp.int32), axis=1), axis=1)

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(shape, jnp.int32), jnp.zeros_like(allowed)

    drafts, sound = jax.lax.cond(jnp.any(allowed > 0), draft, nothing)
    return drafts, jnp.minimum(allowed, sound)


def _remember(model: Model, setting: Setting, cache: DrafterCache, taps: jax.Array, rows: Rows) -> DrafterCache:
    return remember(model.drafter, cache, taps, rows, setting) if model.drafter is not None else cache


def _target(model: Model) -> Target:
    assert model.target is not None, "decoding needs a target"
    return model.target
