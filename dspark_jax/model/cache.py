"""Caches addressed by absolute position: rolling back is not advancing the length.

A ring keeps position p in slot `p mod R`. A row may need the `span` newest positions up to its own, and a step of at
most `width` rows may be rolled back to its first, so R = span + width - 1 slots suffice: a rejected row lies in a
slot that its true token overwrites before anybody may read it, and until then its slot stands for a position outside
every window.

One primitive writes everything: `write`, a scatter that drops dead rows.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.config import OVERLAP_RATIO, ModelConfig, halves
from dspark_jax.model.numerics import Numerics
from dspark_jax.model.rows import Rows

ENTRY_BLOCK = 1024  # the indexer scores this many entries at a time; longer entry caches are a multiple of it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Compressed:
    """State of one compressor.

    Attributes:
        ring: float32 [B, R, 2, w], projected values and gates of the newest positions, in one or two halves.
        entries: [B, N, D], entry i pools the tokens of window i; never rolled back, only hidden and rewritten.
    """

    ring: jax.Array
    entries: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """State of one target layer.

    Attributes:
        window: [B, R, D], latent vectors of the newest positions.
        attention: entries that queries attend to, if the layer compresses.
        index: entries that the indexer scores, if the layer has one.
    """

    window: jax.Array
    attention: Compressed | None
    index: Compressed | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetCache:
    """State of the target, a `LayerCache` a layer."""

    layers: tuple[LayerCache, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrafterCache:
    """State of the drafter: for each stage the context keys, [B, W, D]. Only committed rows enter it."""

    stages: tuple[jax.Array, ...]


@dataclass(frozen=True)
class View:
    """What the rows of one step may read of a ring.

    Attributes:
        values: [B, S, ...].
        positions: int32 [B, S], absolute position of each slot; negative where there is none.
        ring_size: slots of the ring at the front of `values`.
        chunk_start: int32 [B], the position from which on rows lie behind the ring; None if all are in it.
    """

    values: jax.Array
    positions: jax.Array
    ring_size: int
    chunk_start: jax.Array | None

    def at(self, positions: jax.Array) -> jax.Array:
        """Values at absolute positions: int32 [B, ...] -> [B, ..., rest of the value]. Absent ones are arbitrary."""
        slots = positions % self.ring_size
        if self.chunk_start is not None:
            behind = positions - _expand(self.chunk_start, positions.ndim)
            slots = jnp.where(behind >= 0, self.ring_size + behind, slots)
        return jax.vmap(lambda values, slots: values.at[slots].get(mode="clip"))(self.values, slots)


def write(cache: jax.Array, slots: jax.Array, values: jax.Array, keep: jax.Array) -> jax.Array:
    """Sets cache[b, slots[b, t]] = values[b, t] where keep[b, t].

    Rows that are not kept aim at distinct slots past the end and are dropped, so indices are unique.

    Args:
        cache: [B, S, ...].
        slots: int32 [B, T], distinct among the kept rows of a sequence.
        values: [B, T, ...].
        keep: bool [B, T].
    """
    if keep.shape[1] == 1:  # XLA turns a scatter of one row into a select over the cache; a dropped row prevents it
        slots, values, keep = (jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2)) for x in (slots, values, keep))
    beyond = cache.shape[1] + jnp.arange(slots.shape[1], dtype=jnp.int32)
    slots = jnp.where(keep, slots, beyond)
    # Mapped over sequences and not indexed by them, so that XLA sees that none reads or writes another device's.
    return jax.vmap(lambda cache, slots, values: cache.at[slots].set(values, mode="drop", unique_indices=True))(
        cache, slots, values
    )


def write_ring(ring: jax.Array, rows: Rows, values: jax.Array) -> jax.Array:
    """Writes the live rows by position; of more rows than the ring holds only the newest are kept."""
    size = ring.shape[1]
    newest = rows.positions > rows.last[:, None] - size
    return write(ring, rows.positions % size, values, rows.live & newest)


def ring_positions(size: int, last: jax.Array) -> jax.Array:
    """The position that each slot stands for once `last` [B] is the newest written one: int32 [B, size]."""
    slots = jnp.arange(size, dtype=jnp.int32)
    return last[:, None] - (last[:, None] - slots) % size


def append(ring: jax.Array, rows: Rows, values: jax.Array, span: int) -> tuple[jax.Array, View]:
    """Writes the live rows into `ring` and says what they may read, where each needs `span` positions up to its own.

    A step that fits is written first and then read from the same ring, so that the order of summation depends on
    positions alone and a row has the same bits whichever row of a step it is. A longer step (prefill) would overwrite
    what its first rows need: it reads the old ring and its own rows behind it.
    """
    size = ring.shape[1]
    written = write_ring(ring, rows, values)
    if values.shape[1] <= size - span + 1:
        return written, View(written, ring_positions(size, rows.last), size, None)
    positions = jnp.concatenate(
        [ring_positions(size, rows.start - 1), jnp.where(rows.live, rows.positions, -1)], axis=1
    )
    return written, View(jnp.concatenate([ring, values], axis=1), positions, size, rows.start)


def pooled_span(ratio: int) -> int:
    """Tokens that one entry pools."""
    return halves(ratio) * ratio


def entry_slots(capacity: int, ratio: int) -> int:
    """Entries that `capacity` positions can complete, rounded up to whole blocks of the indexer."""
    entries = -(-capacity // ratio)
    return entries if entries <= ENTRY_BLOCK else -(-entries // ENTRY_BLOCK) * ENTRY_BLOCK


def target_cache(config: ModelConfig, numerics: Numerics, batch: int, capacity: int, width: int) -> TargetCache:
    """An empty cache for positions below `capacity` and steps of up to `width` rows that may be rolled back."""

    def compressed(ratio: int, head_dim: int) -> Compressed:
        ring = (batch, pooled_span(ratio) + width - 1, 2, halves(ratio) * head_dim)
        entries = (batch, entry_slots(capacity, ratio), head_dim)
        return Compressed(jnp.zeros(ring, jnp.float32), jnp.zeros(entries, numerics.activations))

    def layer(ratio: int) -> LayerCache:
        window = jnp.zeros((batch, config.sliding_window + width - 1, config.head_dim), numerics.activations)
        return LayerCache(
            window,
            attention=compressed(ratio, config.head_dim) if ratio else None,
            index=compressed(ratio, config.index_head_dim) if ratio == OVERLAP_RATIO else None,
        )

    return TargetCache(tuple(layer(ratio) for ratio in config.layer_ratios))


def drafter_cache(config: ModelConfig, numerics: Numerics, batch: int) -> DrafterCache:
    """An empty cache of the drafter's context."""
    shape = (batch, config.sliding_window, config.head_dim)
    return DrafterCache(tuple(jnp.zeros(shape, numerics.activations) for _ in range(config.num_stages)))


def _expand(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))
