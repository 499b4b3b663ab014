"""Which blocks a step trains on: anchors drawn from each row, and what their slots must predict.

The rules are those of DeepSpec, with packed documents kept apart. Slot j of the block at anchor a stands at position
a + j, predicts token a + 1 + j, and is told by the Markov head that token a + j came before; the target's own
distribution for it is that of row a + j.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.data.example import Example


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Blocks of g slots at A anchors a row.

    Attributes:
        anchors: int32 [B, A], index in the row, ascending; 0 where there are fewer candidates than blocks.
        kept: bool [B, A], false for those.
        rows: int32 [B, A, g], index of each slot: of the token before its label, and of the target's row.
        previous: int32 [B, A, g], the token before the label.
        labels: int32 [B, A, g], what the slot must predict; arbitrary where not supervised.
        supervised: bool [B, A, g], a contiguous prefix of every block.
    """

    anchors: jax.Array
    kept: jax.Array
    rows: jax.Array
    previous: jax.Array
    labels: jax.Array
    supervised: jax.Array


def draw_blocks(key: jax.Array, example: Example, anchors: int, size: int) -> Blocks:
    """Draws `anchors` blocks of `size` slots from every row, uniformly without replacement."""
    batch, length = example.ids.shape
    draws = jax.random.uniform(key, (batch, length - 1), jnp.float32)
    return blocks_at(example, *choose_anchors(draws, candidates(example), anchors), size)


def candidates(example: Example) -> jax.Array:
    """bool [B, T-1]: positions that may be anchors, being supervised like their successor in the same document."""
    return (
        example.supervised[:, :-1]
        & example.supervised[:, 1:]
        & (example.document[:, :-1] == example.document[:, 1:])
        & (example.document[:, :-1] >= 0)
    )


def choose_anchors(draws: jax.Array, candidates: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The candidates with the smallest draws, in ascending order of position.

    Args:
        draws: float32 [B, T-1] in [0, 1).
        candidates: bool [B, T-1].

    Returns:
        anchors int32 [B, count] and kept bool [B, count], as in `Blocks`.
    """
    length = draws.shape[1]
    draws = jnp.where(candidates, draws, jnp.inf)
    draws = jnp.pad(draws, [(0, 0), (0, max(count - length, 0))], constant_values=jnp.inf)
    order = jnp.argsort(draws, axis=1)[:, :count].astype(jnp.int32)
    chosen = jnp.isfinite(jnp.take_along_axis(draws, order, axis=1))
    anchors = jnp.sort(jnp.where(chosen, order, length), axis=1)
    kept = anchors < length
    return jnp.where(kept, anchors, 0), kept


def blocks_at(example: Example, anchors: jax.Array, kept: jax.Array, size: int) -> Blocks:
    """The blocks at given anchors: int32 and bool [B, A]."""
    rows = anchors[..., None] + jnp.arange(size, dtype=jnp.int32)
    targets = rows + 1
    inside = targets < example.ids.shape[1]
    same = take(example.document, targets) == take(example.document, anchors)[..., None]
    supervised = kept[..., None] & inside & same & take(example.supervised, targets)
    return Blocks(
        anchors=anchors,
        kept=kept,
        rows=jnp.minimum(rows, example.ids.shape[1] - 1),
        previous=take(example.ids, rows),
        labels=take(example.ids, targets),
        supervised=jnp.cumprod(supervised, axis=-1, dtype=jnp.int32).astype(bool),
    )


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """[B, T, ...] at int32 [B, ...] -> [B, ..., ...]; an index beyond the row reads its last value."""
    return jax.vmap(lambda values, index: values.at[index].get(mode="clip"))(values, index)
