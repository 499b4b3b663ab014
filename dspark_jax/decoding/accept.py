"""Verification: how many drafts stand, what the target says after them, and what of it is committed.

Greedy and sampled sequences follow one rule (chain rejection sampling, Leviathan et al. 2023): with p and q the
distributions of target and drafter, a draft x stands with probability min(1, p(x)/q(x)), the first that does not is
replaced by a draw from max(p - q, 0), and after the last one the target draws freely. Where p and q are one-hot this is
a comparison of two tokens, which is how batches without sampling compute it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import Sampling, Stream, draft_probabilities, draw, target_probabilities, uniforms

NO_MASS = 1e-8  # a residual lighter than this is rounding: p and q are equal
LEAST_CHANCE = 1e-8  # of a draft, by the drafter: what it drew cannot have been impossible


class Proposal(NamedTuple):
    """The drafts of one round.

    Attributes:
        ids: int32 [B, g].
        logits: float32 [B, g, V], what each was chosen from.
        offered: int32 [B]; later drafts count as rejected without being looked at.
        confidence: float32 [B, g], logits of the drafter's confidence; None if nobody asked for them.
    """

    ids: jax.Array
    logits: jax.Array
    offered: jax.Array
    confidence: jax.Array | None = None


class Verdict(NamedTuple):
    """Outcome of one round.

    Attributes:
        tokens: int32 [B, 1+g]; up to row `accepted` the drafts that stand and then the target's own token. What
            follows means nothing.
        accepted: int32 [B], leading drafts that stand.
    """

    tokens: jax.Array
    accepted: jax.Array


class Commit(NamedTuple):
    """What of a verdict is committed: all int32 [B] but `stopped`, bool [B].

    Attributes:
        tokens: number of tokens committed.
        offered: drafts that count as offered; those behind a stop id do not.
        accepted: drafts committed.
        bonus: 1 if the target's own token was committed too.
        stopped: a stop id was committed, as the last token.
    """

    tokens: jax.Array
    offered: jax.Array
    accepted: jax.Array
    bonus: jax.Array
    stopped: jax.Array


def accept(logits: jax.Array, proposal: Proposal, sampling: Sampling, keys: jax.Array, position: jax.Array) -> Verdict:
    """Accepts leading drafts so that tokens are distributed as if the target had drawn every one by itself.

    Args:
        logits: float32 [B, 1+g, V], of the anchor's row and the rows of the drafts.
        proposal: the drafts.
        sampling: settings of the sequences.
        keys: uint32 [B, 2].
        position: int32 [B], absolute position of the first draft.
    """
    return jax.lax.cond(
        jnp.all(sampling.greedy),
        lambda: accept_greedy(logits, proposal.ids, proposal.offered),
        lambda: accept_sampled(logits, proposal, sampling, keys, position),
    )


def accept_greedy(logits: jax.Array, drafts: jax.Array, offered: jax.Array) -> Verdict:
    """Accepts the leading drafts that equal the argmax (ties: lowest id) of the row before them.

    Args:
        logits: float32 [B, 1+g, V].
        drafts: int32 [B, g].
        offered: int32 [B].
    """
    choice = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return Verdict(choice, leading(drafts == choice[:, :-1], offered))


def accept_sampled(
    logits: jax.Array, proposal: Proposal, sampling: Sampling, keys: jax.Array, position: jax.Array
) -> Verdict:
    """Chain rejection sampling; arguments as for `accept`."""
    target = target_probabilities(logits, sampling)
    draft = draft_probabilities(proposal.logits, proposal.ids, sampling)
    row = jnp.arange(proposal.ids.shape[1], dtype=jnp.int32)
    noise = uniforms(keys, position[:, None] + row, Stream.ACCEPT)
    stands = noise * jnp.maximum(_at(draft, proposal.ids), LEAST_CHANCE) < _at(target[:, :-1], proposal.ids)
    accepted = leading(stands, proposal.offered)

    # Behind the last offered draft nothing was proposed, so nothing is taken from what the target may say there.
    draft = jnp.pad(jnp.where((row < proposal.offered[:, None])[..., None], draft, 0), [(0, 0), (0, 1), (0, 0)])
    whole, proposed = _row(target, accepted), _row(draft, accepted)
    residual = jnp.maximum(whole - proposed, 0)
    final = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > NO_MASS, residual, whole)
    token = draw(keys, position + accepted, Stream.FINAL, jnp.log(final))
    tokens = jnp.pad(proposal.ids, [(0, 0), (0, 1)])
    return Verdict(jnp.where(jnp.arange(tokens.shape[1]) == accepted[:, None], token[:, None], tokens), accepted)


def commit(verdict: Verdict, offered: jax.Array, stop_ids: jax.Array) -> Commit:
    """Cuts a verdict after its first stop id.

    Args:
        verdict: accepted drafts and bonus; the budget must already have bounded `offered`.
        offered: int32 [B].
        stop_ids: int32 [B, S]; -1 stops nothing.
    """
    row = jnp.arange(verdict.tokens.shape[1], dtype=jnp.int32)
    stops = jnp.any(verdict.tokens[..., None] == stop_ids[:, None], axis=-1) & (row <= verdict.accepted[:, None])
    stopped = jnp.any(stops, axis=1)
    tokens = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32), verdict.accepted) + 1
    accepted = jnp.minimum(tokens, verdict.accepted)
    bonus = tokens - accepted
    return Commit(tokens, jnp.where(bonus == 1, offered, accepted), accepted, bonus, stopped)


def leading(stands: jax.Array, offered: jax.Array) -> jax.Array:
    """How many offered drafts stand before the first that does not: bool [B, g], int32 [B] -> int32 [B]."""
    stands &= jnp.arange(stands.shape[1], dtype=jnp.int32) < offered[:, None]
    return jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _at(probabilities: jax.Array, ids: jax.Array) -> jax.Array:
    """[B, T, V] at int32 [B, T]: [B, T]."""
    return jnp.take_along_axis(probabilities, ids[..., None], axis=-1)[..., 0]


def _row(probabilities: jax.Array, number: jax.Array) -> jax.Array:
    """[B, T, V] at row int32 [B]: [B, V]."""
    return jnp.take_along_axis(probabilities, number[:, None, None], axis=1)[:, 0]
