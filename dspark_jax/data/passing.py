"""A feature cache that passes by: a part of it is on disk at a time."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from dspark_jax.data.assemble import assemble
from dspark_jax.data.batches import Batches
from dspark_jax.data.cache_format import DIGEST, INDEX_FILE, Facts, digest_of
from dspark_jax.data.cache_reader import FeatureCache
from dspark_jax.data.cache_writer import CacheWriter
from dspark_jax.data.capture import capture
from dspark_jax.data.document import Progress
from dspark_jax.data.example import Example
from dspark_jax.errors import check_count
from dspark_jax.model.model import Model


class PassingCache:
    """Examples with cached features where the disk holds a part of the cache at a time.

    A part is captured, trained on and deleted. The examples are those of the same `Batches` over a whole cache, step by
    step, so that training may go on from any step, and change between the two.

    Attributes:
        batches: over documents without features.
    """

    def __init__(
        self,
        model: Model,
        batches: Batches,
        directory: Path,
        facts: Facts,
        *,
        steps: int,
        batch_size: int,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Plans it; nothing is computed.

        Args:
            model: with a target.
            batches: over documents without features, packed or not.
            directory: for the parts; made if it is not there.
            facts: see `cache_format.facts_of_run`.
            steps: of a part. On disk are the documents of so many steps.
            batch_size: documents of which features are computed side by side.
            progress: takes the tokens of a part that are captured, and all of them.

        Raises:
            RequestError: `steps` or `batch_size` is below 1.
        """
        self.batches, self._model, self._directory, self._facts = batches, model, directory, facts
        self._steps, self._batch_size = check_count(steps, "steps"), check_count(batch_size, "batch_size")
        self._progress = progress

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.batches.steps_per_epoch

    def starting_at(self, step: int) -> Iterator[Example]:
        """The examples of this and all later steps, without end. A part is deleted before the next one is captured.

        Raises:
            CacheError: a part of another run lies in the folder.
        """
        while True:
            part = step // self._steps
            self._delete_others(part)
            yield from self._examples_of(part, step)
            step = (part + 1) * self._steps

    def delete(self) -> None:
        """Removes what is on disk, at the end of a run."""
        self._delete_others(part=None)

    def _examples_of(self, part: int, step: int) -> Iterator[Example]:
        """Those of a part from a step on. Its files are mapped no longer when this returns, so that they can go."""
        steps = range(part * self._steps, (part + 1) * self._steps)
        numbers = sorted(set(chain(*(row for some in steps for row in self.batches.plan(some)))))
        cache = self._part(part, numbers)
        place = {number: local for local, number in enumerate(numbers)}
        for current in range(step, steps.stop):
            plan = [tuple(place[number] for number in row) for row in self.batches.plan(current)]
            yield assemble(cache, plan, self.batches.length)

    def _part(self, part: int, numbers: Sequence[int]) -> FeatureCache:
        directory, corpus = self._name(part), self.batches.corpus
        facts = self._facts | {DIGEST: digest_of(corpus[number] for number in numbers)}
        with CacheWriter(directory, facts) as writer:
            capture(self._model, corpus, numbers, writer, self._batch_size, self._progress)
        return FeatureCache(directory)

    def _name(self, part: int) -> Path:
        return self._directory / f"part-{part:06d}"

    def _delete_others(self, part: int | None) -> None:
        for index in self._directory.glob(f"part-[0-9]*/{INDEX_FILE}"):  # a folder of caches, and nobody else's
            if part is None or index.parent != self._name(part):
                shutil.rmtree(index.parent)
