"""The target: embeds rows, runs the layers, and returns what the LM head and the drafter read."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.model.attention import target_attention
from dspark_jax.model.block import block
from dspark_jax.model.cache import LayerCache, TargetCache
from dspark_jax.model.hyper_connections import collapse_streams
from dspark_jax.model.linear import project, rms_norm
from dspark_jax.model.moe import Routing
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.weights import Block, Target, Vocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerSeen:
    """Internals of one layer.

    Attributes:
        streams: activations [B, T, n, d] after the layer.
        routing: picks and weights of the experts, [B, T, k] each.
        index_picks: int32 [B, T, k] entries picked by the indexer, -1 for none; None in other layers.
        index_scores: float32 [B, T, k], what the indexer gave them, -inf for none.
        index_shares: float32 [B, T, H, k], what they got of each head's attention.
    """

    streams: jax.Array
    routing: Routing
    index_picks: jax.Array | None
    index_scores: jax.Array | None
    index_shares: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """Internals of a target step; XLA drops what nobody reads.

    Attributes:
        layers: one `LayerSeen` a layer.
        collapsed: activations [B, T, d] where the streams end, before the final norm.
    """

    layers: tuple[LayerSeen, ...]
    collapsed: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetStep:
    """What a step of the target returns.

    Attributes:
        hidden: activations [B, T, d], the LM head's input.
        taps: activations [B, T, taps_width], what the drafter reads; empty without a drafter.
        cache: with the live rows written.
        seen: internals.
    """

    hidden: jax.Array
    taps: jax.Array
    cache: TargetCache
    seen: Seen


def target_step(
    weights: Target, vocabulary: Vocabulary, rows: Rows, cache: TargetCache, setting: Setting
) -> TargetStep:
    """Runs the rows of one step; prefill, verification and cross-check are all this function."""
    config = setting.config
    tapped = config.drafter.target_layer_ids if config.drafter else ()
    streams = embed(vocabulary, rows.ids, setting)
    caches, taps, seen = [], [], []
    for number, layer in enumerate(weights.layers):
        ratio = config.layer_ratios[number]
        streams, layer_cache, layer_seen = layer_step(layer, streams, cache.layers[number], rows, ratio, setting)
        caches.append(layer_cache)
        seen.append(layer_seen)
        if number in tapped:
            taps.append(setting.numerics.round(jnp.mean(streams.astype(jnp.float32), axis=2)))
    collapsed = collapse_streams(weights.hc_head, streams, setting)
    hidden = rms_norm(collapsed, weights.norm, config.rms_norm_eps, setting.numerics)
    joined = jnp.concatenate(taps, axis=-1) if taps else hidden[..., :0]
    return TargetStep(hidden, joined, TargetCache(tuple(caches)), Seen(tuple(seen), collapsed))


def layer_step(
    weights: Block, streams: jax.Array, cache: LayerCache, rows: Rows, ratio: int, setting: Setting
) -> tuple[jax.Array, LayerCache, LayerSeen]:
    """One target layer: streams [B, T, n, d] and cache in, streams, cache and internals out."""
    streams, routing, (cache, picked) = block(
        weights,
        streams,
        rows.ids,
        rows.live,
        lambda x: target_attention(weights.attn, x, cache, rows, ratio, setting),
        setting,
    )
    index = (*picked.picks, picked.shares) if picked else (None, None, None)
    return streams, cache, LayerSeen(streams, routing, *index)


def embed(vocabulary: Vocabulary, ids: jax.Array, setting: Setting) -> jax.Array:
    """int32 [B, T] -> n equal streams, activations [B, T, n, d]."""
    x = setting.numerics.round(vocabulary.embed[...][ids])
    return jnp.repeat(x[:, :, None], setting.config.hc_mult, axis=2)


def lm_logits(vocabulary: Vocabulary, hidden: jax.Array) -> jax.Array:
    """Activations [..., d] -> float32 logits [..., V]."""
    return project(hidden, vocabulary.head)
