"""Writes a feature cache sample by sample, so that a killed writer goes on where it was and the bytes are the same.

A sample's bytes reach the disk before its index record does, and the manifest comes last. So whatever the moment of a
kill: the index names whole samples only, and what lies behind them is cut off at the next start.
"""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dspark_jax.data.cache_format import (
    HIDDEN,
    INDEX_FILE,
    MANIFEST_FILE,
    NAMES,
    RECORD,
    SHARD_BYTES,
    Facts,
    bytes_per_token,
    check_facts,
    facts_of_manifest,
    manifest,
    record,
    shard_name,
    shard_sizes,
)
from dspark_jax.data.cache_reader import expected_records, read_manifest
from dspark_jax.data.document import Document
from dspark_jax.data.files import replace
from dspark_jax.errors import CacheError

PLAN_FILE = "writing.json"
"""What an unfinished cache is going to be; a writer that goes on must want the same."""


class CacheWriter:
    """A cache that is being written, locked against a second writer.

    Attributes:
        directory: the folder.
        facts: what the manifest will say about the run that began it.
        samples: how many are on disk.
        finished: the cache is whole.
    """

    def __init__(self, directory: Path, facts: Facts, shard_bytes: int = SHARD_BYTES) -> None:
        """Begins a cache, or goes on with it; what a kill has torn is cut off.

        Args:
            directory: does not exist, is empty, or holds this cache, whole or in part.
            facts: see `facts_of_run` and `facts_of_data`; at least `target_layer_ids` and `hidden_size`.
            shard_bytes: a shard ends before the sample that would make it larger; one sample may be larger.

        Raises:
            CacheError: the folder holds something else or the cache of another run, is being written, or cannot be.
        """
        self.directory, self.facts, self._limit = directory, facts, shard_bytes
        self._shard = -1
        _prepare(directory)
        self._index = os.open(directory / INDEX_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _lock(self._index, directory)
            self.finished = (directory / MANIFEST_FILE).exists()
            if self.finished:
                found = facts_of_manifest(read_manifest(directory), str(directory / MANIFEST_FILE))
                self._agree(found, facts)
                self._records = os.fstat(self._index).st_size // RECORD.itemsize
                (directory / PLAN_FILE).unlink(missing_ok=True)
            else:
                self._plan()
                self._go_on()
        except BaseException:
            os.close(self._index)
            raise

    def __enter__(self) -> "CacheWriter":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the files, which unlocks the folder."""
        if self._shard >= 0:
            os.close(self._shard)
        os.close(self._index)

    @property
    def samples(self) -> int:
        """Documents that are there."""
        return self._records

    def append(self, document: Document) -> None:
        """Writes one document with its features, which are rounded to bfloat16.

        Raises:
            CacheError: its features are not those of this cache; or the disk is full.
        """
        content = self._content(document)
        if self._size and self._size + len(content) > self._limit:
            self._open(self._number + 1)
        row = record(self._records, self._number, len(document), self._size, self.facts)
        try:
            _write(self._shard, content)
            os.fdatasync(self._shard)
            _write(self._index, row.tobytes())
        except OSError as error:
            raise CacheError(
                f"{self.directory}: cannot be written ({error.strerror}); make room and start the command again."
            ) from error
        self._size += len(content)
        self._records += 1

    def finish(self) -> None:
        """Makes the cache whole: from now on it can be read."""
        records = np.frombuffer((self.directory / INDEX_FILE).read_bytes(), RECORD)
        os.fsync(self._index)
        replace(self.directory / MANIFEST_FILE, [manifest(self.facts, records)])
        (self.directory / PLAN_FILE).unlink()
        self.finished = True

    def _content(self, document: Document) -> bytes:
        features, length = document.features, len(document)
        width = self.facts["hidden_size"]
        assert features is not None, "a cache holds documents with features"
        shapes = [np.shape(features.taps), np.shape(features.hidden)]
        expected = [(length, width * len(self.facts["target_layer_ids"])), (length, width)]
        if shapes != expected:
            raise CacheError(f"{self.directory}: features have the shapes {shapes}; expected {expected} by its layers.")
        parts = (
            document.ids.astype("<i4"),
            np.ones(length, np.uint8),
            document.supervised.astype(np.uint8),
            np.asarray(features.taps).astype(HIDDEN),
            np.asarray(features.hidden).astype(HIDDEN),
        )
        return b"".join(part.tobytes() for part in parts)

    def _plan(self) -> None:
        """Writes the plan down, or goes on with the one that is written down."""
        path, plan = self.directory / PLAN_FILE, self.facts | {"shard_bytes": self._limit}
        if not path.exists():
            if os.fstat(self._index).st_size:
                raise CacheError(f"{self.directory}: holds {INDEX_FILE} and no {PLAN_FILE}; name another folder.")
            replace(path, [json.dumps(plan, indent=2, sort_keys=True).encode()])
            return
        try:
            found: dict[str, Any] = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise CacheError(f"{path}: is no JSON object ({error}); delete the folder and start again.") from error
        self._agree(found, plan)
        self.facts = {name: value for name, value in found.items() if name != "shard_bytes"}

    def _agree(self, found: Facts, wanted: Facts) -> None:
        fields = (found.keys() | wanted.keys()) - set(NAMES)
        check_facts(found, wanted, sorted(fields), str(self.directory))

    def _go_on(self) -> None:
        """Cuts index and shards back to the whole samples, and opens the last shard."""
        records = self._whole_records()
        self._records = len(records)
        os.ftruncate(self._index, records.nbytes)
        sizes = shard_sizes(records, self.facts)
        self._open(max(len(sizes) - 1, 0))
        os.ftruncate(self._shard, sizes[-1] if sizes else 0)
        self._size = sizes[-1] if sizes else 0
        for path in self.directory.glob("shard-*.bin"):
            if path.name > shard_name(self._number):
                path.unlink()

    def _whole_records(self) -> np.ndarray:
        """Records at the front of the index whose samples lie whole in their shards."""
        content = (self.directory / INDEX_FILE).read_bytes()
        records = np.frombuffer(content[: len(content) // RECORD.itemsize * RECORD.itemsize], RECORD)
        shards, shard = np.unique(records["shard"], return_inverse=True)
        sizes = np.array([self._size_of(int(number)) for number in shards], np.uint64)
        ends = records["ids"] + records["length"].astype(np.uint64) * np.uint64(bytes_per_token(self.facts))
        whole = (records == expected_records(records, self.facts)) & (ends <= sizes[shard])
        return records if whole.all() else records[: whole.argmin()]

    def _size_of(self, shard: int) -> int:
        path = self.directory / shard_name(shard)
        return path.stat().st_size if path.exists() else 0

    def _open(self, number: int) -> None:
        if self._shard >= 0:
            os.close(self._shard)
        self._number, self._size = number, 0
        path = self.directory / shard_name(number)
        self._shard = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def _prepare(directory: Path) -> None:
    """Makes the folder; refuses one that holds something else."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise CacheError(f"{directory}: cannot be used ({error.strerror}); name another folder.") from error
    if names and INDEX_FILE not in names:
        raise CacheError(f"{directory}: is not empty and holds no feature cache; name another folder.")


def _lock(index: int, directory: Path) -> None:
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise CacheError(f"{directory}: is being written by another process; wait for it, or name another.") from error


def _write(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
