"""Prefill and the decoding loop: pure functions on a `State`, made to be called inside `jax.jit`.

A round drafts from the anchor, runs anchor and drafts through the target, and commits what the target agrees with
plus one token of its own. Every round has `1 + block` rows a sequence, whatever is drafted: plain decoding is the
same program with one live row, so greedy output has the same bits for every draft length.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from dspark_jax.decoding.accept import Commit, Proposal, Verdict, accept, commit, leading
from dspark_jax.decoding.sampling import Stream, draw, target_probabilities, tempered
from dspark_jax.decoding.state import LogProbs, State
from dspark_jax.decoding.trace import Trace
from dspark_jax.model.cache import DrafterCache, write
from dspark_jax.model.drafter import draft_step, likeliest, remember
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import lm_logits, target_step
from dspark_jax.model.weights import Target
from dspark_jax.placement import constrain_rows

PREFILL_CHUNK = 256


def prefill(model: Model, setting: Setting, state: State, chunk: int = PREFILL_CHUNK) -> State:
    """Runs the prompts, all but their last tokens, through the target and into the drafter's context.

    Args:
        state: as `initial_state` made it.
        chunk: rows of a step, static, at most the capacity. Its bits are promised for one chunk size; any size gives
            the same values.
    """
    todo, chunk = state.length - 1, min(chunk, state.tokens.shape[1])

    def step(number: jax.Array, state: State) -> State:
        first = number * chunk
        ids = state.tokens.at[:, first + jnp.arange(chunk, dtype=jnp.int32)].get(mode="clip")
        rows = Rows(ids, jnp.full_like(todo, first), jnp.clip(todo - first, 0, chunk))
        passed = target_step(_target(model), model.vocabulary, rows, state.target, setting)
        drafter = _remember(model, setting, state.drafter, passed.taps, rows)
        return constrain_rows(replace(state, target=passed.cache, drafter=drafter), setting.partition)

    return jax.lax.fori_loop(0, -(-jnp.max(todo) // chunk), step, state)


def decode(
    model: Model,
    setting: Setting,
    state: State,
    enough: jax.Array | None = None,
    rounds: jax.Array | None = None,
) -> State:
    """Decodes until every sequence has stopped or spent its budget, or one of two reasons to return earlier.

    Args:
        state: prefilled.
        enough: int32, return once this many sequences are done.
        rounds: int32, return after this many rounds.
    """
    batch = state.done.shape[0]
    enough = jnp.int32(batch) if enough is None else jnp.minimum(enough, batch)

    def goes_on(carry: tuple[State, jax.Array]) -> jax.Array:
        state, number = carry
        running = jnp.sum(state.done, dtype=jnp.int32) < enough
        return running if rounds is None else running & (number < rounds)

    def step(carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, number = carry
        return decode_round(model, setting, state), number + 1

    return jax.lax.while_loop(goes_on, step, (state, jnp.int32(0)))[0]


def decode_round(model: Model, setting: Setting, state: State) -> State:
    """One round of every running sequence: draft, verify, accept, commit."""
    active = ~state.done
    # The bonus needs a place in the budget, too.
    room = jnp.minimum(model.block_size, state.limit - state.length - 1)
    allowed = jnp.where(active, jnp.clip(state.sampling.draft_tokens, 0, room), 0)
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
    proposal = _propose(model, setting, state, anchor, allowed)

    start = state.length - 1
    ids = jnp.concatenate([anchor[:, None], proposal.ids], axis=1)
    rows = Rows(ids, start, jnp.where(active, 1 + proposal.offered, 0))
    passed = target_step(_target(model), model.vocabulary, rows, state.target, setting)
    logits = lm_logits(model.vocabulary, passed.hidden)
    verdict = accept(logits, proposal, state.sampling, state.keys, state.length)
    kept = replace(rows, count=jnp.where(active, 1 + verdict.accepted, 0))
    # Of the rows that decided something only: a rejected draft may be a token that the target cannot bear.
    finite = state.finite & jnp.all(jnp.isfinite(logits) | ~kept.live[..., None], axis=(1, 2))
    drafter = _remember(model, setting, state.drafter, passed.taps, kept)

    cut = commit(verdict, proposal.offered, state.sampling.stop_ids)
    length = state.length + jnp.where(active, cut.tokens, 0)
    slots = state.length[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)
    new = slots < length[:, None]
    state = replace(
        state,
        tokens=write(state.tokens, slots, verdict.tokens, new),
        length=length,
        done=state.done | cut.stopped | (length >= state.limit) | ~finite,
        stopped=state.stopped | (active & cut.stopped),
        finite=finite,
        logprobs=_log(state, logits, verdict, slots, new),
        trace=_trace(state, start, active, cut, proposal),
        target=passed.cache,
        drafter=drafter,
        counters=state.counters.count(active, allowed > 0, cut),
    )
    return constrain_rows(state, setting.partition)


def _propose(model: Model, setting: Setting, state: State, anchor: jax.Array, allowed: jax.Array) -> Proposal:
    """The drafts of a round. A draft whose logits are not finite is no draft: it ends the offer.

    The drafter is not run in a round in which no sequence may draft.
    """
    shape = (anchor.shape[0], model.block_size)
    nothing = Proposal(
        ids=jnp.zeros(shape, jnp.int32),
        logits=jnp.zeros((*shape, model.config.vocab_size), jnp.float32),
        offered=jnp.zeros_like(allowed),
        confidence=jnp.zeros(shape, jnp.float32) if state.trace else None,
    )
    if model.drafter is None:
        return nothing
    drafter, sampling = model.drafter, state.sampling

    def choose(logits: jax.Array, slot: jax.Array) -> jax.Array:
        best = likeliest(logits, slot)

        def drawn() -> jax.Array:
            ids = draw(state.keys, state.length + slot, Stream.DRAFT, tempered(logits, sampling))
            return jnp.where(sampling.draws_drafts, ids, best)

        return jax.lax.cond(jnp.any(sampling.draws_drafts), drawn, lambda: best)

    def draft() -> Proposal:
        step = draft_step(
            drafter, model.vocabulary, state.drafter, anchor, state.length - 1, allowed > 0, setting, choose
        )
        sound = jnp.all(jnp.isfinite(step.logits), axis=-1)
        return Proposal(step.ids, step.logits, leading(sound, allowed), step.confidence if state.trace else None)

    return jax.lax.cond(jnp.any(allowed > 0), draft, lambda: nothing)


def _log(state: State, logits: jax.Array, verdict: Verdict, slots: jax.Array, new: jax.Array) -> LogProbs | None:
    """The log-probabilities with those of this round's tokens, where they are wanted."""
    if state.logprobs is None:
        return None

    def of_tokens(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, verdict.tokens[..., None], axis=-1)[..., 0]

    # A second time after `accept`, whose probabilities exist only in batches that sample; nobody pays unless they ask.
    drawn = jnp.log(of_tokens(target_probabilities(logits, state.sampling)))
    return LogProbs(
        write(state.logprobs.target, slots, of_tokens(jax.nn.log_softmax(logits, axis=-1)), new),
        write(state.logprobs.drawn, slots, drawn, new),
    )


def _trace(state: State, anchor: jax.Array, active: jax.Array, cut: Commit, proposal: Proposal) -> Trace | None:
    """The trace with this round, where it is wanted."""
    if state.trace is None or proposal.confidence is None:
        return None
    return state.trace.record(anchor, active, cut, proposal.confidence)


def _remember(model: Model, setting: Setting, cache: DrafterCache, taps: jax.Array, rows: Rows) -> DrafterCache:
    return remember(model.drafter, cache, taps, rows, setting) if model.drafter is not None else cache


def _target(model: Model) -> Target:
    assert model.target is not None, "decoding needs a target"
    return model.target
