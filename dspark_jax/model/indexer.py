"""The indexer: scores the entries of a CSA layer for every row and picks the best ones.

Nothing is differentiable through which entries are picked. The indexer learns from the scores of those that are, and
what it learns stops at its inputs (DeepSeek-V3.2, arXiv:2512.02556).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import OVERLAP_RATIO
from dspark_jax.model.cache import ENTRY_BLOCK, Compressed
from dspark_jax.model.compressor import compress, visible_entries
from dspark_jax.model.linear import linear, project
from dspark_jax.model.numerics import Numerics
from dspark_jax.model.rope import angles_at, rotate
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.weights import Indexer
from pallas_kernels.fake_quant import fake_e2m1, hadamard
from pallas_kernels.partition import Partition, map_rows
from pallas_kernels.precision import contract

INDEX_BLOCK = 32
"""Channels of one scale in the indexer's quantised queries and entries."""


class Picks(NamedTuple):
    """The best entries of every row, the best one first.

    Attributes:
        entries: int32 [B, T, k], -1 where fewer are visible.
        scores: float32 [B, T, k], -inf where there is no entry.
    """

    entries: jax.Array
    scores: jax.Array


def pick_entries(
    weights: Indexer, x: jax.Array, latent_query: jax.Array, cache: Compressed, rows: Rows, setting: Setting
) -> tuple[Picks, Compressed]:
    """Picks up to `index_topk` visible entries for every row.

    Args:
        x: activations [B, T, d], the attention's input.
        latent_query: activations [B, T, q_lora_rank].

    Returns:
        The picks, and the cache with this step's entries.
    """
    x, latent_query = jax.lax.stop_gradient((x, latent_query))
    config, numerics = setting.config, setting.numerics
    heads, width = config.index_n_heads, config.index_head_dim
    cache = compress(weights.compressor, x, cache, rows, OVERLAP_RATIO, lambda e: _finish(e, numerics), setting)

    query = linear(latent_query, weights.wq_b, setting).reshape(*x.shape[:2], heads, width)
    angles = angles_at(setting.rope.compressed, rows.positions)[:, :, None]
    query = _finish(numerics.round(rotate(query, angles)), numerics)
    head_weights = numerics.round(project(x, weights.weights_proj)).astype(jnp.float32)
    head_weights = numerics.round(head_weights * (width * heads) ** -0.5)
    visible = visible_entries(rows, OVERLAP_RATIO)
    picks = top_entries(
        query, head_weights, cache.entries, visible, config.index_topk, numerics, partition=setting.partition
    )
    return picks, cache


def top_entries(
    query: jax.Array,
    head_weights: jax.Array,
    entries: jax.Array,
    visible: jax.Array,
    topk: int,
    numerics: Numerics,
    partition: Partition | None = None,
) -> Picks:
    """The best entries by sum_h w_h relu(q_h . k), ties to the lowest number.

    Entries are scored in blocks with a running top-k: at a million tokens all scores at once would take gigabytes.

    Args:
        query: activations [B, T, h, k].
        head_weights: activations [B, T, h].
        entries: activations [B, N, k]; N is at most ENTRY_BLOCK or a multiple of it.
        visible: int32 [B, T]; only entries below this number may be picked.

    Returns:
        min(topk, N) of them.
    """
    slots, topk = entries.shape[1], min(topk, entries.shape[1])
    size = min(slots, ENTRY_BLOCK)

    def merge(best: tuple[jax.Array, jax.Array], first: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        block = jax.lax.dynamic_slice_in_dim(entries, first, size, axis=1)
        numbers = first + jnp.arange(size, dtype=jnp.int32)
        scores = _scores(query, head_weights, block, numerics)
        scores = jnp.where(numbers < visible[..., None], scores, -jnp.inf)
        # Earlier entries come first and top_k is stable, so equal scores go to the lower number.
        scores = jnp.concatenate([best[0], scores], axis=-1)
        numbers = jnp.concatenate([best[1], jnp.broadcast_to(numbers, (*visible.shape, size))], axis=-1)
        scores, order = map_rows(lambda scores: jax.lax.top_k(scores, topk), scores, partition)
        return (scores, jnp.take_along_axis(numbers, order, axis=-1)), None

    shape = (*visible.shape, topk)
    best = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32))
    (scores, numbers), _ = jax.lax.scan(merge, best, jnp.arange(0, slots, size, dtype=jnp.int32))
    return Picks(jnp.where(scores > -jnp.inf, numbers, -1), scores)


def _scores(query: jax.Array, head_weights: jax.Array, entries: jax.Array, numerics: Numerics) -> jax.Array:
    """float32 [B, T, S]; rounded to the activation dtype after each operation, like the official einsum.

    Entries are the left operand: a CPU would transpose, and so copy, a cache on the right.
    """
    dots = contract("bsk,bthk->bsth", entries, query)
    positive = jax.nn.relu(numerics.round(dots)).astype(jnp.float32)
    weighted = numerics.round(positive * head_weights[:, None].astype(jnp.float32))
    scores = numerics.round(jnp.sum(weighted.astype(jnp.float32), axis=-1))
    return jnp.swapaxes(scores, 1, 2).astype(jnp.float32)


def _finish(x: jax.Array, numerics: Numerics) -> jax.Array:
    """Rotation and E2M1 simulation, for queries and entries alike; without the simulation the rotation cancels."""
    if not numerics.quantise_index:
        return x
    return fake_e2m1(numerics.round(hadamard(x)), INDEX_BLOCK)
