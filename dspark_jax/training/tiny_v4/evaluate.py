"""How well a checkpoint predicts held-out text, in bits for each byte of it, on the path that decodes.

And whether its indexer has learnt anything: the same text with other entries in the place of the picks.
"""

import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import OVERLAP_RATIO
from dspark_jax.decoding.forward import forward
from dspark_jax.model import attention
from dspark_jax.model.cache import Compressed
from dspark_jax.model.compressor import visible_entries
from dspark_jax.model.indexer import Picks, pick_entries
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.weights import Indexer

Prefer = Callable[[int, tuple[int, ...]], jax.Array]
"""From the number of entries N and the shape [B, T] to how much a row would like each, float32 [N] or [B, T, N]."""

RULES: dict[str, Prefer] = {
    "recent": lambda entries, rows: jnp.arange(entries, dtype=jnp.float32),
    "oldest": lambda entries, rows: -jnp.arange(entries, dtype=jnp.float32),
    "random": lambda entries, rows: jax.random.uniform(jax.random.key(0), (*rows, entries)),
}
"""What may stand in the indexer's place; none of it looks at what an entry holds."""


def bits(model: Model, stream: np.ndarray, row_tokens: int, batch: int = 16) -> Iterator[tuple[int, float]]:
    """The bits that a stream takes, batch by batch.

    Rows of `row_tokens` tokens start every half a row. A row spends bits on the tokens of its second half only, so that
    each is predicted from at least half a row; the first row spends them on its first half, too.

    Args:
        stream: integers [N], tokens.
        row_tokens: tokens of a row, an even number.

    Yields:
        How many tokens were predicted and their bits; in all N - 1 tokens.
    """
    half = row_tokens // 2
    starts = np.arange(0, max(len(stream) - 1 - half, 1), half)
    for first in range(0, len(starts), batch):
        some = starts[first : first + batch]
        places = some[:, None] + np.arange(row_tokens + 1)
        rows = stream[np.minimum(places, len(stream) - 1)].astype(np.int32)
        counted = (places[:, 1:] < len(stream)) & ((places[:, 1:] > some[:, None] + half) | (some == 0)[:, None])
        spent = np.asarray(_bits_of_labels(forward(model, rows[:, :-1]).logits, jnp.asarray(rows[:, 1:])))
        yield int(counted.sum()), float(spent[counted].sum(dtype=np.float64))


@jax.jit
def _bits_of_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen) / jnp.log(2.0)


@contextlib.contextmanager
def picks_by(rule: str) -> Iterator[None]:
    """Inside, every layer with an indexer reads the visible entries that a rule of `RULES` likes best.

    The function itself is exchanged, because the model has no place for such a rule and needs none; programs that were
    compiled with it must not outlive the block.
    """
    prefer = RULES[rule]

    def pick(
        weights: Indexer, x: jax.Array, latent_query: jax.Array, cache: Compressed, rows: Rows, setting: Setting
    ) -> tuple[Picks, Compressed]:
        picks, cache = pick_entries(weights, x, latent_query, cache, rows, setting)
        count = cache.entries.shape[1]
        visible = jnp.arange(count) < visible_entries(rows, OVERLAP_RATIO)[..., None]
        liking = jnp.where(visible, prefer(count, rows.ids.shape), -jnp.inf)
        scores, entries = jax.lax.top_k(liking, picks.entries.shape[-1])
        return Picks(jnp.where(scores > -jnp.inf, entries, -1), scores), cache

    jax.clear_caches()
    try:
        with patch.object(attention, "pick_entries", pick):
            yield
    finally:
        jax.clear_caches()
