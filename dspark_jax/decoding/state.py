"""The carry of the decoding loop. Every leaf of it is [B, ...], so that sequences are moved by indexing all leaves."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dspark_jax.decoding.sampling import Sampling, row_keys
from dspark_jax.decoding.statistics import Counters
from dspark_jax.decoding.trace import Trace
from dspark_jax.model.cache import DrafterCache, TargetCache, drafter_cache, target_cache
from dspark_jax.model.model import Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogProbs:
    """Logarithms of the probabilities of the new tokens, at the tokens' positions; 0 elsewhere.

    Attributes:
        target: float32 [B, S], under the target's own distribution: temperature 1, nothing cut.
        drawn: float32 [B, S], under the distribution the token was drawn from; 0 where a sequence is greedy.
    """

    target: jax.Array
    drawn: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A batch of sequences in the middle of decoding.

    Attributes:
        tokens: int32 [B, S], committed tokens at their positions; what lies behind them means nothing.
        prompt_length: int32 [B].
        length: int32 [B], committed length n. Token n-1 is the anchor: committed, not yet through the target.
        done: bool [B], sequences that write nothing more.
        stopped: bool [B], sequences that are done because of a stop id.
        finite: bool [B], false once a live row's logits were not; such a sequence is done.
        sampling: settings of the sequences.
        keys: uint32 [B, 2], their random keys.
        logprobs: None if nobody asked for them.
        trace: what each round did; None if nobody asked for it.
        target: valid for positions 0 ... n-2.
        drafter: valid for positions 0 ... n-2; without stages where there is no drafter.
        counters: what has happened so far.
    """

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    done: jax.Array
    stopped: jax.Array
    finite: jax.Array
    sampling: Sampling
    keys: jax.Array
    logprobs: LogProbs | None
    trace: Trace | None
    target: TargetCache
    drafter: DrafterCache
    counters: Counters

    @property
    def limit(self) -> jax.Array:
        """int32 [B], the length at which a sequence has spent its budget or its room."""
        room = self.tokens.shape[1] - self.prompt_length
        return self.prompt_length + jnp.minimum(self.sampling.max_new_tokens, room)


def initial_state(
    model: Model, tokens: jax.Array, length: jax.Array, logprobs: bool = False, trace: bool = False
) -> State:
    """The state before prefill: prompts committed, caches empty, no budget to spend until `with_settings` gives one.

    Args:
        tokens: int32 [B, S]; S is the capacity: prompt and new tokens together fit in it. It needs no room for a step
            more, since rows beyond the budget are dead and write nothing.
        length: int32 [B], prompt lengths, at least 1: the last token of a prompt is the first anchor.
        logprobs: whether to keep them.
        trace: whether to record the rounds.
    """
    batch, capacity = tokens.shape
    no, zeros = jnp.zeros(batch, bool), jnp.zeros(tokens.shape, jnp.float32)
    return State(
        tokens=tokens,
        prompt_length=length,
        length=length,
        done=~no,
        stopped=no,
        finite=~no,
        sampling=Sampling.of(batch, max_new_tokens=0),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        logprobs=LogProbs(zeros, zeros) if logprobs else None,
        trace=Trace.zeros(batch, capacity, model.block_size) if trace else None,
        target=target_cache(model.config, model.numerics, batch, capacity, model.step_width),
        drafter=drafter_cache(model.config, model.numerics, batch) if model.drafter else DrafterCache(()),
        counters=Counters.zeros(batch, model.block_size),
    )


def with_settings(state: State, sampling: Sampling, key: jax.Array) -> State:
    """A prefilled state with the settings of its sequences; `key` is a random key, the same for all."""
    state = replace(state, sampling=sampling, keys=row_keys(key, sampling.seed))
    return replace(state, done=state.length >= state.limit)


def pick(state: State, rows: ArrayLike) -> State:
    """The sequences int32 [R] of a state, in this order; one may be picked several times."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], state)


def insert(state: State, rows: ArrayLike, new: State) -> State:
    """Replaces the sequences int32 [R] of a state by those of another; a row past the end is dropped."""
    return jax.tree.map(lambda leaf, other: leaf.at[rows].set(other, mode="drop", unique_indices=True), state, new)


SMALLEST_CAPACITY = 64


def bucket(length: int) -> int:
    """The capacity for `length` positions: at most a quarter more, in few sizes, so that few programs are compiled."""
    step = max(SMALLEST_CAPACITY, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def coarse_bucket(length: int) -> int:
    """The capacity for `length` positions where sequences of many lengths share it: the next power of two."""
    return max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
