"""Documents side by side and one after the other: the arrays of an example."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from dspark_jax.data.document import Corpus, Document
from dspark_jax.data.example import Example, Features
from dspark_jax.data.packing import Row
from dspark_jax.errors import RequestError


def assemble(corpus: Corpus, plan: Sequence[Row], length: int) -> Example:
    """The example whose row b holds the documents `plan[b]`, one after the other; numpy leaves.

    It has features if all of its documents have; they are zero behind the last document.

    Args:
        corpus: where the documents are.
        plan: numbers of documents, one row after the other; a row may be empty.
        length: tokens of a row.
    """
    documents = [[corpus[number] for number in row] for row in plan]

    def filled(leaf: Callable[[Any], np.ndarray]) -> Any:
        """One array of every document in its place, and zeros behind the last."""
        first = leaf(next(chain(*documents)))
        out = np.zeros((len(plan), length, *first.shape[1:]), first.dtype)
        for row, some in zip(out, documents, strict=True):
            start = 0
            for document in some:
                row[start : start + len(document)] = leaf(document)
                start += len(document)
        return out

    features = None
    if all(document.features is not None for document in chain(*documents)):
        features = Features(filled(lambda it: it.features.taps), filled(lambda it: it.features.hidden))
    return Example(
        ids=filled(lambda it: it.ids),
        supervised=filled(lambda it: it.supervised),
        document=_numbers(documents, length),
        features=features,
    )


def _numbers(documents: Sequence[Sequence[Document]], length: int) -> Any:
    numbers = np.full((len(documents), length), -1, np.int32)
    for row, some in zip(numbers, documents, strict=True):
        own = np.repeat(np.arange(len(some), dtype=np.int32), [len(document) for document in some])
        row[: len(own)] = own
    return numbers


def refuse_packed(example: Example) -> None:
    """For who computes features of an example, which takes rows of one document each; outside `jax.jit`.

    Raises:
        RequestError: a row holds several documents.
    """
    packed = np.asarray(example.document).max(axis=1, initial=-1) > 0
    if packed.any():
        raise RequestError(
            f"row {packed.argmax()} holds several documents, which a target cannot keep apart: the entries into which "
            "it compresses tokens straddle their borders. Cache the features first, or do not pack."
        )
