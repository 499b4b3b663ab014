"""The drafter on blocks of known text: its slots' hidden vectors for all anchors at once."""

import jax
import jax.numpy as jnp

from dspark_jax.data.example import Example, Features
from dspark_jax.model.drafter import Context, block_end, block_rows, context_keys, stage_step
from dspark_jax.model.rows import Setting
from dspark_jax.model.target import embed
from dspark_jax.model.weights import Drafter, Vocabulary
from dspark_jax.training.blocks import Blocks, take


def draft_blocks(
    weights: Drafter, vocabulary: Vocabulary, example: Example, features: Features, blocks: Blocks, setting: Setting
) -> tuple[jax.Array, jax.Array]:
    """Runs the stages on blocks of A anchors a row, each as it would be drafted in decoding.

    Every block is a sequence of its own: the stages are those of decoding, and only the context differs, which is cut
    out of the row where decoding has a ring. Each stage is recomputed in the backward pass.

    Returns:
        Activations [B, A, g, d] twice: where the streams end, and normed as the LM head reads them.
    """
    taps = features.taps.astype(setting.numerics.activations)
    positions = example.positions
    contexts = context_keys(weights, taps, positions, setting)
    index, usable = context_window(example, blocks, setting.config.sliding_window)
    anchor, position = _flat(take(example.ids, blocks.anchors)), _flat(take(positions, blocks.anchors))
    rows = block_rows(anchor, position, _flat(blocks.kept), setting)
    streams = embed(vocabulary, rows.ids, setting)
    for stage, keys in zip(weights.stages, contexts, strict=True):
        context = Context(_flat(take(keys, index)), _flat(usable))
        streams = jax.checkpoint(stage_step)(stage, streams, context, rows, setting)
    shape = blocks.labels.shape
    hidden, normed = block_end(weights, streams, setting)
    return hidden.reshape(*shape, -1), normed.reshape(*shape, -1)


def context_window(example: Example, blocks: Blocks, window: int) -> tuple[jax.Array, jax.Array]:
    """The rows strictly before each anchor that all slots of its block see.

    Returns:
        Indices in the row, int32 [B, A, window], clipped, and which of them are rows of the anchor's document, bool.
    """
    index = blocks.anchors[..., None] + jnp.arange(-window, 0, dtype=jnp.int32)
    same = take(example.document, jnp.maximum(index, 0)) == take(example.document, blocks.anchors)[..., None]
    return jnp.maximum(index, 0), (index >= 0) & same & blocks.kept[..., None]


def _flat(values: jax.Array) -> jax.Array:
    """[B, A, ...] -> [B * A, ...]."""
    return values.reshape(-1, *values.shape[2:])
