"""Greedy verification: how many drafts stand, and what the target says after them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verdict(NamedTuple):
    """Outcome of one round.

    Attributes:
        tokens: int32 [B, 1+g], what the target emits after each row; up to row `accepted` these are the drafts
            themselves and then the bonus.
        accepted: int32 [B], leading drafts that equal the target's choice.
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


def accept_greedy(logits: jax.Array, drafts: jax.Array, offered: jax.Array) -> Verdict:
    """Accepts the leading drafts that equal the argmax (ties: lowest id) of the row before them.

    Args:
        logits: float32 [B, 1+g, V], of the anchor's row and the rows of the drafts.
        drafts: int32 [B, g].
        offered: int32 [B]; later drafts count as rejected without being looked at.
    """
    choice = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draft = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    agrees = (drafts == choice[:, :-1]) & (draft < offered[:, None])
    return Verdict(choice, jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1))


def commit(verdict: Verdict, offered: jax.Array, stop_ids: jax.Array) -> Commit:
    """Cuts a verdict after its first stop id.

    Args:
        verdict: accepted drafts and bonus; the budget must already have bounded `offered`.
        offered: int32 [B].
        stop_ids: int32 [S]; -1 stops nothing.
    """
    row = jnp.arange(verdict.tokens.shape[1], dtype=jnp.int32)
    stops = jnp.any(verdict.tokens[..., None] == stop_ids, axis=-1) & (row <= verdict.accepted[:, None])
    stopped = jnp.any(stops, axis=1)
    tokens = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32), verdict.accepted) + 1
    accepted = jnp.minimum(tokens, verdict.accepted)
    bonus = tokens - accepted
    return Commit(tokens, jnp.where(bonus == 1, offered, accepted), accepted, bonus, stopped)
