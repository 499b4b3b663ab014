"""Documents to batches, each found by its number: whoever goes on with training asks for the next step's.

Rows are shuffled anew in every epoch, from the seed and the number of the epoch; what does not fill a batch at the
end of an epoch is left out of it. So the position in the data is one integer, the step.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import grain
import numpy as np

from dspark_jax.data.document import Corpus, Document
from dspark_jax.data.example import Example, Features
from dspark_jax.data.packing import Row, one_a_row, pack, padding_share
from dspark_jax.errors import RequestError, check_count

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)  # batches with features are large: few ahead


class Batches:
    """Examples of equal shape, by step.

    Padded: a document a row. Packed: as many documents as fit, numbered by `Example.document`, none of them split;
    which documents share a row is the same in every epoch. Packed rows need cached features: a V4 target cannot keep
    the documents of a row apart, since the entries into which it compresses tokens straddle their borders.

    Attributes:
        corpus: the documents.
        length: tokens of a row.
        batch_size: rows of a batch.
        packed: several documents may share a row.
        seed: of the shuffling.
        rows: in the corpus's order.
    """

    def __init__(self, corpus: Corpus, *, length: int, batch_size: int, packed: bool = False, seed: int = 0) -> None:
        """Plans the rows; no document is read.

        Args:
            corpus: with features (a cache) or without (the step computes them).
            length: tokens of a row.
            batch_size: rows of a batch.
            packed: let documents share rows.
            seed: 0 to 2^32 - 1.

        Raises:
            RequestError: a document is longer than a row, or all of them do not fill a batch.
        """
        self.corpus, self.packed, self.seed = corpus, packed, seed
        self.length, self.batch_size = check_count(length, "length"), check_count(batch_size, "batch_size")
        lengths = corpus.lengths
        if len(lengths) and lengths.max() > length:
            raise RequestError(
                f"document {lengths.argmax()} has {lengths.max()} tokens and a row {length}; make the rows longer, or "
                "read the documents with a smaller max_length."
            )
        self.rows = pack(lengths, length) if packed else one_a_row(lengths)
        if len(self.rows) < batch_size:
            raise RequestError(
                f"{len(lengths)} documents fill {len(self.rows)} rows, and a batch has {batch_size}; give more data, "
                "or make the batches smaller."
            )
        shuffled = grain.MapDataset.source(self.rows).seed(seed).shuffle()
        self._plans = shuffled.batch(batch_size, drop_remainder=True, batch_fn=list).repeat()

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return len(self.rows) // self.batch_size

    @property
    def padding_share(self) -> float:
        """Part of all rows' tokens that belongs to no document."""
        return padding_share(self.corpus.lengths, self.rows, self.length)

    def plan(self, step: int) -> list[Row]:
        """Which documents the rows of a step hold, any step from 0 on."""
        return self._plans[step]

    def __getitem__(self, step: int) -> Example:
        """The example of a step, any step from 0 on, epoch after epoch; its leaves are numpy arrays."""
        return assemble(self.corpus, self.plan(step), self.length)

    def starting_at(self, step: int) -> Iterator[Example]:
        """The examples of this and all later steps, without end; a few are read ahead."""
        examples = self._plans.map(lambda plan: assemble(self.corpus, plan, self.length))
        return iter(examples[step:].to_iter_dataset(READ))


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
