"""What a drafter would get accepted along given text: blocks at many places of it, without a generation.

Context, anchor and earlier drafts are the text's own. So every place counts alike, and models are compared on the same
places; a generation visits the places that its own rounds lead to.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.example import Example
from dspark_jax.data.features import target_features
from dspark_jax.model.model import Model
from dspark_jax.training.blocks import draw_blocks
from dspark_jax.training.losses import Metrics, Objective, metrics
from dspark_jax.training.step import score_blocks


@dataclass(frozen=True)
class AlongText:
    """Means over blocks.

    Attributes:
        blocks: how many.
        greedy_length: accepted length with bonus if drafts are the drafter's likeliest words and the target takes its
            own likeliest.
        sampled_length: the same for sampling at temperature 1, by expected acceptance: 1 + sum of products.
    """

    blocks: int
    greedy_length: float
    sampled_length: float


def along_text(model: Model, examples: Iterable[Example], anchors: int = 64, seed: int = 0) -> AlongText:
    """Scores up to `anchors` blocks of every row, drawn from the seed.

    Args:
        model: with target and drafter, on one device.
        examples: padded rows; only supervised tokens count.
    """
    counted = []
    for number, example in enumerate(examples):
        found = _score(model, example, jax.random.fold_in(jax.random.key(seed), number), anchors)
        blocks = float(found.anchors) * len(example.ids)
        counted.append((blocks, blocks * float(found.greedy_length), blocks * float(found.expected_length)))
    blocks, greedy, sampled = np.sum(counted, axis=0)
    return AlongText(int(blocks), float(greedy / blocks), float(sampled / blocks))


@partial(jax.jit, static_argnames="anchors")
def _score(model: Model, example: Example, key: jax.Array, anchors: int) -> Metrics:
    example = Example(example.ids, example.supervised, example.document, target_features(model, example))
    blocks = draw_blocks(key, example, anchors, model.config.block_size)
    objective = Objective()
    terms, confidence = score_blocks(model, example, blocks, objective)
    return metrics(terms, confidence, blocks.labels, blocks.supervised, blocks.kept, objective)


def rows_of(stream: np.ndarray, row_tokens: int, batch: int) -> Iterable[Example]:
    """Text as rows, one after the other; what does not fill a batch at the end is left out."""
    count = len(stream) // (row_tokens * batch)
    for rows in stream[: count * batch * row_tokens].reshape(count, batch, row_tokens):
        ids = jnp.asarray(rows, jnp.int32)
        yield Example(ids, jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32), None)
