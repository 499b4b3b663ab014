"""The DSpark drafter: one bidirectional pass over a block, then a short sequential chain over its slots.

Slot 0 holds the anchor and slots 1 ... g-1 a noise token; slot i stands at position anchor + i and predicts the token
after it. Keys are the context, computed from taps of committed tokens only, and the block itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from dspark_jax.model.attention import Source, attend, latents, output, queries
from dspark_jax.model.block import block
from dspark_jax.model.cache import DrafterCache, ring_positions, write_ring
from dspark_jax.model.hyper_connections import collapse_streams
from dspark_jax.model.linear import linear, project, rms_norm
from dspark_jax.model.rope import angles_at
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import embed, lm_logits
from dspark_jax.model.weights import Attention, Drafter, Vocabulary

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


def main_features(weights: Drafter, taps: jax.Array, setting: Setting) -> jax.Array:
    """Taps [B, T, taps_width] -> the features that all stages read, activations [B, T, d]."""
    x = linear(taps, weights.main_proj, setting.numerics)
    return rms_norm(x, weights.main_norm, setting.config.rms_norm_eps, setting.numerics)


def remember(weights: Drafter, cache: DrafterCache, taps: jax.Array, rows: Rows, setting: Setting) -> DrafterCache:
    """Writes the context keys of the live rows; rejected rows must be dead here, so there is nothing to roll back."""
    features = main_features(weights, taps, setting)
    angles = angles_at(setting.rope.plain, rows.positions)
    return DrafterCache(
        tuple(
            write_ring(ring, rows, latents(stage.attn, features, angles, setting))
            for ring, stage in zip(cache.stages, weights.stages, strict=True)
        )
    )


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
    config = setting.config
    assert config.drafter is not None
    size = config.drafter.block_size
    noise = jnp.full((anchor.shape[0], size - 1), config.drafter.noise_token_id, jnp.int32)
    ids = jnp.concatenate([anchor[:, None], noise], axis=1)
    rows = Rows(ids, position, jnp.where(live, size, 0).astype(jnp.int32))
    streams, stages = embed(vocabulary, ids, setting), []
    for stage, context in zip(weights.stages, cache.stages, strict=True):
        attention = partial(_block_attention, stage.attn, context=context, rows=rows, setting=setting)
        streams, _, _ = block(stage, streams, ids, rows.live, attention, setting)
        stages.append(streams)
    hidden = collapse_streams(weights.hc_head, streams, setting)
    base = lm_logits(vocabulary, rms_norm(hidden, weights.norm, config.rms_norm_eps, setting.numerics))
    drafts, logits, confidence = _markov_chain(weights, anchor, hidden, base, choose)
    return DraftStep(drafts, logits, base, confidence, hidden, tuple(stages))


def _block_attention(
    weights: Attention, x: jax.Array, context: jax.Array, rows: Rows, setting: Setting
) -> tuple[jax.Array, None]:
    """Every slot sees the same keys: the filled slots of the context ring and the whole block, later slots too."""
    angles = angles_at(setting.rope.plain, rows.positions)
    _, query = queries(weights, x, angles, setting)
    filled = ring_positions(context.shape[1], rows.start - 1) >= 0
    shape = (x.shape[0], x.shape[1])
    sources = [
        Source(context, jnp.broadcast_to(filled[:, None], (*shape, context.shape[1]))),
        Source(latents(weights, x, angles, setting), jnp.ones((*shape, x.shape[1]), bool)),
    ]
    mixed, _ = attend(query, sources, weights.attn_sink[...], setting)
    return output(weights, mixed, angles, setting), None


def _markov_chain(
    weights: Drafter, anchor: jax.Array, hidden: jax.Array, base_logits: jax.Array, choose: Choose
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses drafts left to right; each is biased by the token before it.

    Returns:
        Drafts int32 [B, g], their logits float32 [B, g, V], and confidence logits float32 [B, g].
    """

    def extend(
        previous: jax.Array, slot: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        number, slot_hidden, slot_logits = slot
        embedding = weights.markov_w1[...][previous].astype(jnp.float32)
        logits = slot_logits + project(embedding, weights.markov_w2)
        both = jnp.concatenate([slot_hidden.astype(jnp.float32), embedding], axis=-1)
        chosen = choose(logits, number)
        return chosen, (chosen, logits, project(both, weights.confidence)[:, 0])

    numbers = jnp.arange(hidden.shape[1], dtype=jnp.int32)
    slots = (numbers, jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(base_logits, 0, 1))
    _, chain = jax.lax.scan(extend, anchor, slots)
    drafts, logits, confidence = (jnp.swapaxes(values, 0, 1) for values in chain)
    return drafts, logits, confidence
