"""The carry of the decoding loop."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.decoding.statistics import Counters
from dspark_jax.model.cache import DrafterCache, TargetCache, drafter_cache, target_cache
from dspark_jax.model.model import Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A batch of sequences in the middle of decoding.

    Attributes:
        tokens: int32 [B, S], committed tokens at their positions; what lies behind them means nothing.
        length: int32 [B], committed length n. Token n-1 is the anchor: committed, not yet through the target.
        limit: int32 [B], the length at which a sequence has spent its budget.
        done: bool [B], sequences that write nothing more.
        finite: bool [B], false once a live row's logits were not; such a sequence is done.
        target: valid for positions 0 ... n-2.
        drafter: valid for positions 0 ... n-2; without stages where there is no drafter.
        counters: what has happened so far.
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    done: jax.Array
    finite: jax.Array
    target: TargetCache
    drafter: DrafterCache
    counters: Counters


def initial_state(model: Model, tokens: jax.Array, length: jax.Array, limit: jax.Array) -> State:
    """The state before prefill: prompts committed, caches empty.

    Args:
        tokens: int32 [B, S]; S, the capacity, has room for the longest limit and one step more.
        length: int32 [B], prompt lengths, at least 1: the last token of a prompt is the first anchor.
        limit: int32 [B].
    """
    batch, capacity = tokens.shape
    return State(
        tokens=tokens,
        length=length,
        limit=limit,
        done=length >= limit,
        finite=jnp.ones(batch, bool),
        target=target_cache(model.config, model.numerics, batch, capacity, model.step_width),
        drafter=drafter_cache(model.config, model.numerics, batch) if model.drafter else DrafterCache(()),
        counters=Counters.zeros(batch, model.block_size),
    )


def bucket(length: int, smallest: int = 64) -> int:
    """The capacity for `length` positions: at most a quarter more, in few sizes, so that few programs are compiled."""
    step = max(smallest, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step
