"""How each sequence draws its tokens: its settings, the distributions they make, and its random numbers.

Randomness is counted, not consumed: a draw depends on the key, the sequence's seed, the absolute position it decides
and the stream it belongs to, and on nothing else. So a sequence draws the same numbers alone and in any batch, and a
position that is drafted again after a rejection is decided by numbers that no committed token has seen.
"""

from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dspark_jax.config import LARGEST_INTEGER

GREEDY_BELOW = 1e-5  # lower temperatures are zero
_GENERATOR = "threefry2x32"  # whatever the caller's key is made of: its draws do not depend on the batch


class Stream(IntEnum):
    """What a random number is for; the streams of one position are independent."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Settings of a batch, one a sequence. They are data: other values compile nothing.

    Attributes:
        temperature: float32 [B]; below 1e-5 a sequence is greedy, whatever the rest says.
        top_k: int32 [B], keeps the k likeliest tokens and all as likely as the last of them; 0 keeps every token.
        top_p: float32 [B], of those keeps the likeliest that together have this share, and all as likely as the last
            of them; 1 keeps every token.
        seed: uint32 [B].
        max_new_tokens: int32 [B].
        draft_tokens: int32 [B], drafts to offer in a round; more than the trained block is the block.
        greedy_drafts: bool [B], the drafter proposes its likeliest tokens instead of drawing them: fewer are accepted.
        stop_ids: int32 [B, S]; -1 stops nothing.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    max_new_tokens: jax.Array
    draft_tokens: jax.Array
    greedy_drafts: jax.Array
    stop_ids: jax.Array

    @classmethod
    def of(
        cls,
        batch: int,
        *,
        temperature: ArrayLike = 0.0,
        top_k: ArrayLike = 0,
        top_p: ArrayLike = 1.0,
        seed: ArrayLike = 0,
        max_new_tokens: ArrayLike = 64,
        draft_tokens: ArrayLike = LARGEST_INTEGER,
        greedy_drafts: ArrayLike = False,
        stop_ids: ArrayLike = -1,
    ) -> "Sampling":
        """Settings of `batch` sequences from one value for all of them, or an array with one for each.

        Values that are not JAX arrays stay on the host; `stop_ids` is one id, [S] for all, or [B, S].
        """

        def column(value: ArrayLike, dtype: jax.typing.DTypeLike, *shape: int) -> jax.Array:
            library = jnp if isinstance(value, jax.Array) else np
            return library.broadcast_to(library.asarray(value, dtype), (batch, *shape))

        return cls(
            column(temperature, jnp.float32),
            column(top_k, jnp.int32),
            column(top_p, jnp.float32),
            column(seed, jnp.uint32),
            column(max_new_tokens, jnp.int32),
            column(draft_tokens, jnp.int32),
            column(greedy_drafts, jnp.bool_),
            column(stop_ids, jnp.int32, *(np.shape(stop_ids)[-1:] or (1,))),
        )

    @property
    def greedy(self) -> jax.Array:
        """bool [B]."""
        return self.temperature < GREEDY_BELOW

    @property
    def draws_drafts(self) -> jax.Array:
        """bool [B], whether drafts are drawn; where not, the distribution they come from is one-hot."""
        return ~(self.greedy | self.greedy_drafts)


def target_probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """What a sequence samples from: float32 logits [B, T, V] -> probabilities [B, T, V], one-hot where it is greedy."""
    greedy = sampling.greedy[:, None, None]
    cut = ~greedy & ((sampling.top_k > 0) | (sampling.top_p < 1))[:, None, None]
    whole = _softmax(logits, sampling)
    truncated = jax.lax.cond(jnp.any(cut), _truncate, lambda whole, _: whole, whole, sampling)
    sampled = jnp.where(cut, truncated, whole)  # renormalising a whole row would let its neighbours decide its last bit
    return jnp.where(greedy, _one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]), sampled)


def draft_probabilities(logits: jax.Array, drafts: jax.Array, sampling: Sampling) -> jax.Array:
    """What the drafts were drawn from: float32 logits [B, g, V] -> [B, g, V], one-hot where they were not drawn.

    It is not truncated: a draft that the target may not emit is rejected.
    """
    drawn = sampling.draws_drafts[:, None, None]
    return jnp.where(drawn, _softmax(logits, sampling), _one_hot(drafts, logits.shape[-1]))


def _softmax(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Softmax of float32 [B, T, V] at each sequence's temperature."""
    return jax.nn.softmax(tempered(logits, sampling), axis=-1)


def tempered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [B, ..., V] over the sequence's temperature; unchanged where it is greedy."""
    temperature = jnp.where(sampling.greedy, 1, sampling.temperature)
    return logits / temperature.reshape(-1, *[1] * (logits.ndim - 1))


def _one_hot(ids: jax.Array, size: int) -> jax.Array:
    """int [...] -> float32 [..., size]."""
    return jax.nn.one_hot(ids, size, dtype=jnp.float32)


def _truncate(probabilities: jax.Array, sampling: Sampling) -> jax.Array:
    """Top-k, then top-p on what it left, renormalised: [B, T, V] -> [B, T, V]."""
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, probabilities.shape[-1])[:, None, None]
    kept = _keep_likeliest(probabilities, jnp.ones_like(probabilities), top_k.astype(jnp.float32))
    total = jnp.sum(kept, axis=-1, keepdims=True)
    share = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)[:, None, None]
    kept = _keep_likeliest(kept, kept, share * total)
    return kept / jnp.sum(kept, axis=-1, keepdims=True)


def _keep_likeliest(probabilities: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Zeroes what is less likely than the largest cut above which `weights` add up to `need`; at least one is kept.

    The cut is found bit by bit, since the bits of non-negative floats order like the floats: no vocabulary is sorted.
    """
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)
    largest = jnp.max(bits, axis=-1, keepdims=True)

    def try_bit(number: jax.Array, cut: jax.Array) -> jax.Array:
        tried = cut | jnp.left_shift(jnp.int32(1), 30 - number)
        enough = jnp.sum(jnp.where(bits >= tried, weights, 0), axis=-1, keepdims=True) >= need
        return jnp.where(enough, tried, cut)

    cut = jax.lax.fori_loop(0, 31, try_bit, jnp.zeros_like(largest))
    return jnp.where(bits >= jnp.minimum(cut, largest), probabilities, 0)


def row_keys(key: jax.Array, seed: jax.Array) -> jax.Array:
    """The random key of each sequence, uint32 [B, 2], from one key of any kind and the seeds, uint32 [B]."""
    base = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl=_GENERATOR)
    return jax.vmap(lambda seed: jax.random.key_data(jax.random.fold_in(base, seed)))(seed)


def uniforms(keys: jax.Array, positions: jax.Array, stream: Stream) -> jax.Array:
    """Numbers in [0, 1) for absolute positions int32 [B, T]: float32 [B, T]."""
    draw = jax.vmap(lambda key, position: jax.random.uniform(_key(key, position, stream)), in_axes=(None, 0))
    return jax.vmap(draw)(keys, positions)


def draw(keys: jax.Array, positions: jax.Array, stream: Stream, logits: jax.Array) -> jax.Array:
    """One token a sequence from the softmax of float32 logits [B, V], for absolute positions int32 [B]: int32 [B]."""

    def one(key: jax.Array, position: jax.Array, logits: jax.Array) -> jax.Array:
        return jax.random.categorical(_key(key, position, stream), logits)

    return jax.vmap(one)(keys, positions, logits).astype(jnp.int32)


def _key(key: jax.Array, position: jax.Array, stream: Stream) -> jax.Array:
    key = jax.random.wrap_key_data(key, impl=_GENERATOR)
    return jax.random.fold_in(jax.random.fold_in(key, position), stream)
