"""The target's features of documents to disk."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.assemble import assemble
from dspark_jax.data.cache_writer import CacheWriter
from dspark_jax.data.document import Corpus, Document, Progress
from dspark_jax.data.example import Example, Features
from dspark_jax.data.features import target_features
from dspark_jax.model.model import Model
from dspark_jax.placement import fetch, partition_of, place_rows
from pallas_kernels.partition import Partition


def capture(
    model: Model,
    corpus: Corpus,
    numbers: Sequence[int],
    writer: CacheWriter,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> None:
    """Writes the documents with these numbers that the writer lacks, and finishes the cache.

    Batches are the same wherever a killed writer goes on, so that the bytes are, too.

    Args:
        model: with a target.
        corpus: without features.
        numbers: documents of the cache, in its order.
        writer: of this cache.
        batch_size: documents that run side by side.
        progress: takes the tokens done and the tokens in all.
    """
    lengths = corpus.lengths[np.array(numbers, np.int64)]
    total, length = int(lengths.sum()), int(corpus.lengths.max())  # of all, so that parts share a program
    ends = np.cumsum(lengths)
    progress(int(lengths[: writer.samples].sum()), total)
    first = writer.samples - writer.samples % batch_size
    for batch in () if writer.finished else range(first, len(numbers), batch_size):
        some = numbers[batch : batch + batch_size]
        plan = [(number,) for number in some] + [()] * (batch_size - len(some))
        features = features_of(model, assemble(corpus, plan, length))
        for row, number in enumerate(some):
            if batch + row >= writer.samples:
                writer.append(_with_features(corpus[number], features, row))
                progress(int(ends[batch + row]), total)
    if not writer.finished:
        writer.finish()


def features_of(model: Model, example: Example) -> Features:
    """Features of an example as a cache holds them: bfloat16, on the host."""
    partition = partition_of(model)
    return fetch(_rounded_features(model, place_rows(example, partition), partition))


@partial(jax.jit, static_argnames="partition")
def _rounded_features(model: Model, example: Example, partition: Partition | None) -> Features:
    features = target_features(model, example, partition)
    return Features(features.taps.astype(jnp.bfloat16), features.hidden.astype(jnp.bfloat16))


def _with_features(document: Document, features: Features, row: int) -> Document:
    own = Features(features.taps[row, : len(document)], features.hidden[row, : len(document)])
    return Document(document.ids, document.supervised, own)
