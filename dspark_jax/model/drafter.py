"""The DSpark drafter: one bidirectional pass over a block, then a short sequential chain over its slots.

Slot 0 holds the anchor and slots 1 ... g-1 a noise token; slot i stands at position anchor + i and predicts the token
after it. Keys are the context, computed from taps of committed tokens only, and the block itself. Decoding runs one
block of every sequence against rings of context; training runs many blocks of it against slices of the context.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.model.attention import Source, attend, latents, output, queries
from dspark_jax.model.block import block
from dspark_jax.model.cache import DrafterCache, ring_positions, write_ring
from dspark_jax.model.hyper_connections import collapse_streams
from dspark_jax.model.linear import linear, project, rms_norm
from dspark_jax.model.markov import embed_previous, markov_latent
from dspark_jax.model.rope import angles_at
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import embed, lm_logits
from dspark_jax.model.weights import Attention, Block, Drafter, Vocabulary

Choose = Callable[[jax.Array, jax.Array], jax.Array]
"""From the logits of one slot, float32 [B, V], and the slot's number, int32, to the drafts, int32 [B]."""


def likeliest(logits: jax.Array, slot: jax.Array) -> jax.Array:
    """The argmax, ties to the lowest id."""
    del slot
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftStep:
    """What one pass of the drafter returns, for g drafts a sequence.

    Attributes:
        ids: int32 [B, g], drafts for the positions after the anchor.
        logits: float32 [B, g, V], the distribution each draft was chosen from, Markov bias included.
        base_logits: float32 [B, g, V], without the Markov bias.
        confidence: float32 [B, g], logits of the probability that a draft survives if those before it do.
        hidden: activations [B, g, d], where the streams end, before the norm.
        stages: activations [B, g, n, d] after each stage.
    """

    ids: jax.Array
    logits: jax.Array
    base_logits: jax.Array
    confidence: jax.Array
    hidden: jax.Array
    stages: tuple[jax.Array, ...]


class Context(NamedTuple):
    """What the slots of a block see before it: `keys`, activations [B, S, D], where `usable`, bool [B, S]."""

    keys: jax.Array
    usable: jax.Array


def main_features(weights: Drafter, taps: jax.Array, setting: Setting) -> jax.Array:
    """Taps [B, T, taps_width] -> the features that all stages read, activations [B, T, d]."""
    x = linear(taps, weights.main_proj, setting)
    return rms_norm(x, weights.main_norm, setting.config.rms_norm_eps, setting.numerics)


def context_keys(weights: Drafter, taps: jax.Array, positions: jax.Array, setting: Setting) -> tuple[jax.Array, ...]:
    """For each stage the keys, values too, of context rows: taps [B, T, taps_width] -> activations [B, T, D]."""
    features = main_features(weights, taps, setting)
    angles = angles_at(setting.rope.plain, positions)
    return tuple(latents(stage.attn, features, angles, setting) for stage in weights.stages)


def remember(weights: Drafter, cache: DrafterCache, taps: jax.Array, rows: Rows, setting: Setting) -> DrafterCache:
    """Writes the context keys of the live rows; rejected rows must be dead here, so there is nothing to roll back."""
    keys = context_keys(weights, taps, rows.positions, setting)
    return DrafterCache(tuple(write_ring(ring, rows, new) for ring, new in zip(cache.stages, keys, strict=True)))


def draft_step(
    weights: Drafter,
    vocabulary: Vocabulary,
    cache: DrafterCache,
    anchor: jax.Array,
    position: jax.Array,
    live: jax.Array,
    setting: Setting,
    choose: Choose = likeliest,
) -> DraftStep:
    """Drafts a block.

    Args:
        anchor: int32 [B], the last committed token.
        position: int32 [B], its absolute position; the context is every position before it.
        live: bool [B]; the rows of other sequences wake no expert.
        choose: how a draft is chosen from its logits.
    """
    rows = block_rows(anchor, position, live, setting)
    streams, stages = embed(vocabulary, rows.ids, setting), []
    for stage, ring in zip(weights.stages, cache.stages, strict=True):
        context = Context(ring, ring_positions(ring.shape[1], position - 1) >= 0)
        streams = stage_step(stage, streams, context, rows, setting)
        stages.append(streams)
    hidden, normed = block_end(weights, streams, setting)
    base = lm_logits(vocabulary, normed)
    drafts, logits, confidence = _markov_chain(weights, anchor, hidden, normed, base, choose)
    return DraftStep(drafts, logits, base, confidence, hidden, tuple(stages))


def block_rows(anchor: jax.Array, position: jax.Array, live: jax.Array, setting: Setting) -> Rows:
    """The slots of a block for each anchor: int32 [B], its position int32 [B], and whether anybody wants it."""
    drafter = setting.config.drafter
    assert drafter is not None
    noise = jnp.full((anchor.shape[0], drafter.block_size - 1), drafter.noise_token_id, jnp.int32)
    ids = jnp.concatenate([anchor[:, None], noise], axis=1)
    return Rows(ids, position, jnp.where(live, drafter.block_size, 0).astype(jnp.int32))


def stage_step(weights: Block, streams: jax.Array, context: Context, rows: Rows, setting: Setting) -> jax.Array:
    """One stage: activations [B, g, n, d] of the slots in and out."""
    attention = partial(_block_attention, weights.attn, context=context, rows=rows, setting=setting)
    streams, _, _ = block(weights, streams, rows.ids, rows.live, attention, setting)
    return streams


def block_end(weights: Drafter, streams: jax.Array, setting: Setting) -> tuple[jax.Array, jax.Array]:
    """Where the streams end: activations [B, g, d] as the confidence head reads them, and normed for the LM head."""
    hidden = collapse_streams(weights.hc_head, streams, setting)
    return hidden, rms_norm(hidden, weights.norm, setting.config.rms_norm_eps, setting.numerics)


def confidence_logits(weights: Drafter, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """From the end of the streams [..., d] and the previous token's Markov embedding [..., r]: float32 [...]."""
    both = jnp.concatenate([hidden.astype(jnp.float32), embedding], axis=-1)
    return project(both, weights.confidence)[..., 0]


def _block_attention(
    weights: Attention, x: jax.Array, context: Context, rows: Rows, setting: Setting
) -> tuple[jax.Array, None]:
    """Every slot sees the same keys: the usable context and the whole block, later slots too."""
    angles = angles_at(setting.rope.plain, rows.positions)
    _, query = queries(weights, x, angles, setting)
    shape = (x.shape[0], x.shape[1])
    sources = [
        Source(context.keys, jnp.broadcast_to(context.usable[:, None], (*shape, context.usable.shape[1]))),
        Source(latents(weights, x, angles, setting), jnp.ones((*shape, x.shape[1]), bool)),
    ]
    mixed, _ = attend(query, sources, weights.attn_sink[...], setting)
    return output(weights, mixed, angles, setting), None


def _markov_chain(
    weights: Drafter, anchor: jax.Array, hidden: jax.Array, normed: jax.Array, base_logits: jax.Array, choose: Choose
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses drafts left to right; each is biased by the token before it.

    Returns:
        Drafts int32 [B, g], their logits float32 [B, g, V], and confidence logits float32 [B, g].
    """

    def extend(
        carry: tuple[jax.Array, jax.Array], slot: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        previous, state = carry
        number, slot_hidden, slot_normed, slot_logits = slot
        embedding = embed_previous(weights.markov_head, previous)
        latent, state = markov_latent(weights.markov_head, slot_normed, embedding, state)
        logits = slot_logits + project(latent, weights.markov_head.markov_w2)
        chosen = choose(logits, number)
        return (chosen, state), (chosen, logits, confidence_logits(weights, slot_hidden, embedding))

    numbers = jnp.arange(hidden.shape[1], dtype=jnp.int32)
    slots = (numbers, *(jnp.swapaxes(values, 0, 1) for values in (hidden, normed, base_logits)))
    start = (anchor, jnp.zeros((anchor.shape[0], weights.markov_head.markov_w1.shape[1]), jnp.float32))
    _, chain = jax.lax.scan(extend, start, slots)
    drafts, logits, confidence = (jnp.swapaxes(values, 0, 1) for values in chain)
    return drafts, logits, confidence
