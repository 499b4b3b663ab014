"""What a collection of documents is: how long, how much of it is supervised, and what rows of it waste."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspark_jax.data.document import Corpus
from dspark_jax.data.packing import one_a_row, pack, padding_share


@dataclass(frozen=True)
class Bin:
    """Documents of `first` to `last` tokens."""

    first: int
    last: int
    documents: int


@dataclass(frozen=True)
class Description:
    """What a collection of documents is.

    Attributes:
        documents: how many.
        tokens: in all.
        supervised: tokens that the drafter learns to predict.
        anchors: tokens that a block can start from.
        shortest: tokens of the shortest document; `median` and `longest` likewise.
        histogram: documents by length, in bins that double; those without documents at both ends are left out.
        row_length: tokens of a row, for the next three.
        rows_padded: rows with a document each.
        rows_packed: rows with as many documents as fit.
        padding_padded: part of the tokens in those rows that belongs to no document; `padding_packed` likewise.
    """

    documents: int
    tokens: int
    supervised: int
    anchors: int
    shortest: int
    median: float
    longest: int
    histogram: tuple[Bin, ...]
    row_length: int
    rows_padded: int
    rows_packed: int
    padding_padded: float
    padding_packed: float

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values, with the supervised share."""
        return asdict(self) | {"supervised_share": self.supervised / self.tokens}


def describe(corpus: Corpus, row_length: int) -> Description:
    """Describes documents of at most `row_length` tokens; reads ids and masks of all, and no features."""
    lengths = corpus.lengths
    padded, packed = one_a_row(lengths), pack(lengths, row_length)
    documents = [corpus[number] for number in range(len(corpus))]
    return Description(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        supervised=sum(int(np.count_nonzero(document.supervised)) for document in documents),
        anchors=sum(document.anchors for document in documents),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        histogram=_histogram(lengths),
        row_length=row_length,
        rows_padded=len(padded),
        rows_packed=len(packed),
        padding_padded=padding_share(lengths, padded, row_length),
        padding_packed=padding_share(lengths, packed, row_length),
    )


def _histogram(lengths: np.ndarray) -> tuple[Bin, ...]:
    """Bins of 1, 2 to 3, 4 to 7, 8 to 15 and so on tokens."""
    exponents = np.frexp(lengths)[1] - 1
    counts = np.bincount(exponents)
    return tuple(
        Bin(1 << exponent, (2 << exponent) - 1, int(counts[exponent]))
        for exponent in range(int(exponents.min()), len(counts))
    )
