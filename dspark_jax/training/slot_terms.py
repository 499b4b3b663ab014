"""What the losses need of two distributions over the vocabulary, taken in chunks of it.

At 512 anchors of 5 slots one float32 tensor over 129 280 words takes 1.3 GB, and a loss on both distributions holds
several. Here logits exist for some blocks and a chunk of words at a time: one pass for the normalisers, the label and
the likeliest words, a second for the distance, and both again in the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.model.linear import project
from dspark_jax.model.weights import Drafter, Vocabulary

WORD_CHUNK, BLOCK_CHUNK = 16_384, 64

Logits = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""From the number of the chunk's first word to the logits of drafter and target, float32 [..., words] each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTerms:
    """Of the distributions p_d of the drafter and p_t of the target at temperature 1, for slots [...].

    Attributes:
        cross_entropy: float32, -log p_d(label).
        distance: float32, the sum over words of |p_d - p_t|; 0 to 2.
        draft_pick: int32, the likeliest word of p_d, ties to the lowest id.
        draft_top: float32, its probability.
        target_pick: int32, the same of p_t.
        target_top: float32.
    """

    cross_entropy: jax.Array
    distance: jax.Array
    draft_pick: jax.Array
    draft_top: jax.Array
    target_pick: jax.Array
    target_top: jax.Array

    @property
    def acceptance(self) -> jax.Array:
        """float32: the probability that a draft drawn from p_d is accepted, sum min(p_d, p_t)."""
        return jnp.clip(1 - self.distance / 2, 0, 1)


def slot_terms(
    weights: Drafter, vocabulary: Vocabulary, normed: jax.Array, latent: jax.Array, target: jax.Array, labels: jax.Array
) -> SlotTerms:
    """The terms of blocks; the two tables of the vocabulary are frozen, what the target says is a constant.

    Args:
        normed: activations [B, A, g, d], the LM head's input of the drafter.
        latent: float32 [B, A, g, r], the Markov head's.
        target: [B, A, g, d], the LM head's input of the target.
        labels: int32 [B, A, g].

    Returns:
        Terms [B, A, g].
    """
    head = jax.lax.stop_gradient(vocabulary.head[...])
    words = head.shape[0]
    size = min(words, WORD_CHUNK)

    def of_blocks(rows: tuple[jax.Array, ...]) -> SlotTerms:
        normed, latent, target, labels = rows

        def logits(first: jax.Array) -> tuple[jax.Array, jax.Array]:
            part = jax.lax.dynamic_slice_in_dim(head, first, size)
            bias = jax.lax.dynamic_slice_in_dim(weights.markov_head.markov_w2[...], first, size)
            return project(normed, part) + project(latent, bias), project(target, part)

        return terms_of_logits(logits, labels, words, size)

    rows = (normed, latent, jax.lax.stop_gradient(target).astype(normed.dtype), labels)
    batch, anchors, slots = labels.shape
    chunk = min(anchors, BLOCK_CHUNK)

    def in_chunks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, -anchors % chunk)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    terms = jax.lax.map(of_blocks, jax.tree.map(in_chunks, rows))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, slots)[:, :anchors], terms)


def terms_of_logits(logits: Logits, labels: jax.Array, words: int, size: int) -> SlotTerms:
    """The terms of slots [...] whose logits are made in chunks of `size` of all `words`, the last one overlapping."""
    firsts = jnp.minimum(jnp.arange(0, words, size, dtype=jnp.int32), words - size)
    fresh = jnp.arange(0, words, size, dtype=jnp.int32)  # where the words begin that no chunk before has had
    column = jnp.arange(size, dtype=jnp.int32)

    def chunk(first: jax.Array, begin: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(lambda values: jnp.where(first + column >= begin, values, -jnp.inf), logits(first))

    @jax.checkpoint
    def normalise(carry: tuple[_Running, _Running], span: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        draft, target = chunk(*span)
        return (carry[0].with_words(draft, span[0], labels), carry[1].with_words(target, span[0], labels)), None

    (draft, target), _ = jax.lax.scan(normalise, (_Running.none(labels), _Running.none(labels)), (firsts, fresh))

    @jax.checkpoint
    def compare(total: jax.Array, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        p, q = (running.probabilities(values) for running, values in zip((draft, target), chunk(*span), strict=True))
        return total + jnp.sum(jnp.abs(p - q), axis=-1), None

    distance, _ = jax.lax.scan(compare, jnp.zeros(labels.shape, jnp.float32), (firsts, fresh))
    return SlotTerms(
        cross_entropy=draft.log_sum - draft.label,
        distance=distance,
        draft_pick=draft.pick,
        draft_top=1 / draft.total,
        target_pick=target.pick,
        target_top=1 / target.total,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Running:
    """What is known of logits after some chunks: the best and where it is, sum of exp(logit - best), label's."""

    best: jax.Array
    pick: jax.Array
    total: jax.Array
    label: jax.Array

    @classmethod
    def none(cls, labels: jax.Array) -> "_Running":
        zero = jnp.zeros(labels.shape, jnp.float32)
        return cls(best=zero - jnp.inf, pick=jnp.zeros_like(labels), total=zero, label=zero)

    @property
    def log_sum(self) -> jax.Array:
        return self.best + jnp.log(self.total)

    def probabilities(self, values: jax.Array) -> jax.Array:
        return jnp.exp(values - self.best[..., None]) / self.total[..., None]

    def with_words(self, values: jax.Array, first: jax.Array, labels: jax.Array) -> "_Running":
        index = jnp.clip(labels - first, 0, values.shape[-1] - 1)
        found = jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
        here = (labels - first == index) & (found > -jnp.inf)
        frozen = jax.lax.stop_gradient(values)  # the best is a shift that cancels
        chunk_best, chunk_pick = jnp.max(frozen, axis=-1), jnp.argmax(frozen, axis=-1).astype(jnp.int32)
        best = jnp.maximum(self.best, chunk_best)
        return _Running(
            best=best,
            pick=jnp.where(chunk_best > self.best, first + chunk_pick, self.pick),
            total=self.total * jnp.exp(self.best - best) + jnp.sum(jnp.exp(values - best[..., None]), axis=-1),
            label=jnp.where(here, found, self.label),
        )
