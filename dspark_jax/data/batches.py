"""Documents to batches, each found by its number: whoever goes on with training asks for the next step's.

Rows are shuffled anew in every epoch, from the seed and the number of the epoch; what does not fill a batch at the
end of an epoch is left out of it. So the position in the data is one integer, the step.
"""

from collections.abc import Iterator

from dspark_jax.data.assemble import assemble
from dspark_jax.data.document import Corpus
from dspark_jax.data.example import Example
from dspark_jax.data.packing import Row, one_a_row, pack, padding_share
from dspark_jax.decoding.request import SEEDS
from dspark_jax.errors import RequestError, check_count


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
            RequestError: a number that cannot be; a document is longer than a row, or all of them do not fill a batch.
        """
        if not isinstance(seed, int) or not 0 <= seed < SEEDS:
            raise RequestError(f"seed is {seed!r}; expected an integer from 0 to {SEEDS - 1}.")
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
        import grain  # takes a second, which commands that read no data should not

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
        import grain

        examples = self._plans.map(lambda plan: assemble(self.corpus, plan, self.length))
        few_ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)  # batches with features are large
        return iter(examples[step:].to_iter_dataset(few_ahead))
