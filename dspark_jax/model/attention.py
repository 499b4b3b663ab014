"""Attention: low-rank queries, one latent vector a position that is key and value of every head, and a sink.

A query attends to sources: its window, and in layers that compress also entries, all of them (HCA) or the indexer's
picks (CSA). Sources are scored separately and share one softmax; concatenating them would copy the caches.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.model.cache import LayerCache, append
from dspark_jax.model.compressor import compress, visible_entries
from dspark_jax.model.indexer import Picks, pick_entries
from dspark_jax.model.linear import linear, rms_norm
from dspark_jax.model.numerics import Numerics
from dspark_jax.model.rope import angles_at, rotate
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.weights import Attention
from pallas_kernels.fake_quant import fake_e4m3
from pallas_kernels.fp8_linear import grouped_fp8_linear
from pallas_kernels.precision import contract

KV_BLOCK = 64
"""Channels of one scale in quantised keys and entries."""


class Source(NamedTuple):
    """Keys, values too: activations [B, S, D] for all rows or [B, T, S, D] for each; `usable` is bool [B, T, S]."""

    keys: jax.Array
    usable: jax.Array


class Picked(NamedTuple):
    """What a row got from the entries that the indexer picked for it.

    Attributes:
        picks: the entries and their scores.
        shares: float32 [B, T, H, k], of each head's attention, the sink's share included in the whole.
    """

    picks: Picks
    shares: jax.Array


def target_attention(
    weights: Attention, x: jax.Array, cache: LayerCache, rows: Rows, ratio: int, setting: Setting
) -> tuple[jax.Array, tuple[LayerCache, Picked | None]]:
    """Causal attention of the target at absolute positions.

    Args:
        x: activations [B, T, d], normed.

    Returns:
        Activations [B, T, d]; and as one pair the cache with this step's live rows, and what the indexer picked if
        there is one.
    """
    config = setting.config
    angles = angles_at(setting.rope.of(ratio), rows.positions)
    latent_query, query = queries(weights, x, angles, setting)
    window, view = append(cache.window, rows, latents(weights, x, angles, setting), config.sliding_window)
    sources = [Source(view.values, in_window(view.positions, rows, config.sliding_window))]
    cache, picks = replace(cache, window=window), None
    if ratio:
        source, cache, picks = _entries(weights, x, latent_query, cache, rows, ratio, setting)
        sources.append(source)
    mixed, shares = attend(query, sources, weights.attn_sink[...], setting)
    picked = Picked(picks, shares[-1]) if picks is not None else None
    return output(weights, mixed, angles, setting), (cache, picked)


def _entries(
    weights: Attention,
    x: jax.Array,
    latent_query: jax.Array,
    cache: LayerCache,
    rows: Rows,
    ratio: int,
    setting: Setting,
) -> tuple[Source, LayerCache, Picks | None]:
    """Compresses this step's tokens; the entries to attend to, the cache with the new ones, and the indexer's picks."""
    assert weights.compressor is not None
    assert cache.attention is not None
    attention = compress(
        weights.compressor, x, cache.attention, rows, ratio, lambda entry: quantise_latent(entry, setting), setting
    )
    if weights.indexer is None:
        numbers = jnp.arange(attention.entries.shape[1], dtype=jnp.int32)
        source = Source(attention.entries, numbers < visible_entries(rows, ratio)[..., None])
        return source, replace(cache, attention=attention), None
    assert cache.index is not None
    picks, index = pick_entries(weights.indexer, x, latent_query, cache.index, rows, setting)
    source = Source(_gather(attention.entries, picks.entries), picks.entries >= 0)
    return source, replace(cache, attention=attention, index=index), picks


def in_window(positions: jax.Array, rows: Rows, window: int) -> jax.Array:
    """bool [B, T, S]: which slots, by the position they stand for, are in the window of each row."""
    key, query = positions[:, None, :], rows.positions[:, :, None]
    return (key >= 0) & (key <= query) & (key > query - window)


def queries(weights: Attention, x: jax.Array, angles: jax.Array, setting: Setting) -> tuple[jax.Array, jax.Array]:
    """Latent queries [B, T, q_lora_rank] and rotated queries [B, T, H, D]."""
    config, numerics = setting.config, setting.numerics
    latent = rms_norm(linear(x, weights.wq_a, setting), weights.q_norm, config.rms_norm_eps, numerics)
    query = linear(latent, weights.wq_b, setting).reshape(*x.shape[:2], config.num_attention_heads, config.head_dim)
    query = numerics.round(rotate(_unit_rms(query, config.rms_norm_eps, numerics), angles[:, :, None]))
    return latent, query


def _unit_rms(query: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    """RMS normalisation of each head without a weight, rounded after every operation like the official code."""

    def rounded(x: jax.Array) -> jax.Array:
        return numerics.round(x).astype(jnp.float32)

    query = query.astype(jnp.float32)
    mean = rounded(jnp.mean(rounded(query * query), axis=-1, keepdims=True))
    return numerics.round(query * rounded(numerics.rsqrt(rounded(mean + eps))))


def latents(weights: Attention, x: jax.Array, angles: jax.Array, setting: Setting) -> jax.Array:
    """Keys and values at once: [B, T, d] -> activations [B, T, D], normed, rotated, quantised by option."""
    numerics = setting.numerics
    latent = rms_norm(linear(x, weights.wkv, setting), weights.kv_norm, setting.config.rms_norm_eps, numerics)
    return quantise_latent(numerics.round(rotate(latent, angles)), setting)


def quantise_latent(latent: jax.Array, setting: Setting) -> jax.Array:
    """Simulates E4M3 on the channels without RoPE, if the numerics say so: activations [..., D] -> same."""
    if not setting.numerics.quantise_kv:
        return latent
    split = setting.config.head_dim - setting.config.qk_rope_head_dim
    return jnp.concatenate([fake_e4m3(latent[..., :split], KV_BLOCK), latent[..., split:]], axis=-1)


def attend(
    query: jax.Array, sources: Sequence[Source], sink: jax.Array, setting: Setting
) -> tuple[jax.Array, list[jax.Array]]:
    """Softmax attention over all sources; the sink, a logit a head, enters the denominator only.

    Args:
        query: activations [B, T, H, D].
        sink: float32 [H].

    Returns:
        Activations [B, T, H, D], zeros for a row that may see nothing; and the shares of each source, float32
        [B, T, H, S], which with the sink's sum to one.
    """
    scores = [
        jnp.where(source.usable[:, :, None], _scores(query, source.keys) * query.shape[-1] ** -0.5, -jnp.inf)
        for source in sources
    ]
    # Like the official kernel, the maximum leaves out the sink, which decides how shares round. A sink so far above all
    # scores that it overflows makes the output zero, which is its limit.
    largest = reduce(jnp.maximum, [jnp.max(score, axis=-1, keepdims=True) for score in scores])
    largest = jnp.where(largest > -jnp.inf, largest, sink[:, None])
    shares = [jnp.exp(score - largest) for score in scores]
    total = jnp.exp(sink[:, None] - largest) + sum(jnp.sum(share, axis=-1, keepdims=True) for share in shares)
    # The official kernel rounds the shares before this product, but sums them unrounded.
    rounded = [setting.numerics.round(share) for share in shares]
    mixed = sum(_mix(share, source.keys) for share, source in zip(rounded, sources, strict=True))
    return setting.numerics.round(mixed / total), [share / total for share in shares]


def output(weights: Attention, mixed: jax.Array, angles: jax.Array, setting: Setting) -> jax.Array:
    """Rotates back and projects in groups of heads: [B, T, H, D] -> activations [B, T, d]."""
    config, numerics = setting.config, setting.numerics
    mixed = numerics.round(rotate(mixed, angles[:, :, None], inverse=True))
    groups = mixed.reshape(*mixed.shape[:2], config.o_groups, -1)
    ranks = grouped_fp8_linear(groups, weights.wo_a.get_value(), implementation=setting.linear_implementation)
    return linear(numerics.round(ranks).reshape(*mixed.shape[:2], -1), weights.wo_b, setting)


def _scores(query: jax.Array, keys: jax.Array) -> jax.Array:
    """Float32 [B, T, H, S]. Keys are the left operand: a CPU would transpose, and so copy, a cache on the right."""
    axes = "bsk,bthk->bsth" if keys.ndim == 3 else "btsk,bthk->btsh"
    dots = contract(axes, keys, query)
    return jnp.moveaxis(dots, 1, -1) if keys.ndim == 3 else jnp.swapaxes(dots, 2, 3)


def _mix(shares: jax.Array, values: jax.Array) -> jax.Array:
    """Shares [B, T, H, S] times values of all rows or of each: float32 [B, T, H, D]."""
    axes = "bths,bsk->bthk" if values.ndim == 3 else "bths,btsk->bthk"
    return contract(axes, shares, values)


def _gather(entries: jax.Array, picks: jax.Array) -> jax.Array:
    """[B, N, D] and int32 [B, T, k] -> [B, T, k, D]; a missing pick reads entry 0 and is masked later."""
    return jax.vmap(lambda entries, picks: entries[picks])(entries, jnp.maximum(picks, 0))
