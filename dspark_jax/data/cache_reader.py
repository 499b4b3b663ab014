"""A feature cache on disk as a corpus of documents with features, read through memory maps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.data.cache_format import (
    FIELDS,
    HIDDEN,
    INDEX_FILE,
    MANIFEST_FILE,
    PINNED,
    RECORD,
    WRITE_AGAIN,
    Facts,
    bytes_per_token,
    check_facts,
    counts,
    digest_of,
    facts_of_manifest,
    shard_name,
    shard_sizes,
    starts,
)
from dspark_jax.data.document import Document
from dspark_jax.data.example import Features
from dspark_jax.errors import CacheError


class FeatureCache:
    """The documents of a cache, ours or one that DeepSpec wrote.

    Attributes:
        directory: the folder.
        facts: what the manifest says about the run that wrote it.
        records: the index, [N] of `RECORD`.
    """

    def __init__(self, directory: Path) -> None:
        """Opens a whole cache: index and sizes of all files are checked, no sample is read.

        Raises:
            CacheError: unfinished, or files that are damaged, truncated or out of order.
        """
        self.directory = directory
        path = directory / MANIFEST_FILE
        manifest = read_manifest(directory)
        self.facts = facts_of_manifest(manifest, str(path))
        self.records = read_records(directory, self.facts)
        self._sizes = shard_sizes(self.records, self.facts)
        for field, expected in counts(self.records, self.facts).items():
            if manifest.get(field) != expected:
                raise CacheError(
                    f"{path}: {field} is {manifest.get(field)!r}; {INDEX_FILE} has {expected!r}, {WRITE_AGAIN}."
                )
        for shard, size in enumerate(self._sizes):
            check_size(directory / shard_name(shard), size)
        self._shards: dict[int, np.memmap] = {}

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens of every document."""
        return self.records["length"].astype(np.int64)

    @property
    def bytes(self) -> int:
        """What index and shards take on disk."""
        return self.records.nbytes + sum(self._sizes)

    def __len__(self) -> int:
        """Documents."""
        return len(self.records)

    def __getitem__(self, number: int) -> Document:
        """A document; ids, mask and features are views of the mapped file and read when used.

        Raises:
            CacheError: bytes that no writer writes: a loss mask that is not 0 and 1, an id outside the vocabulary.
            IndexError: there is no such document.
        """
        row = self.records[number]
        shard, length = int(row["shard"]), int(row["length"])
        if shard not in self._shards:
            self._shards[shard] = np.memmap(self.directory / shard_name(shard), np.uint8, mode="r")
        ends = [*(int(row[field]) for field in FIELDS[1:]), int(row[FIELDS[0]]) + length * bytes_per_token(self.facts)]
        parts = {
            field: np.asarray(self._shards[shard][int(row[field]) : end])
            for field, end in zip(FIELDS, ends, strict=True)
        }
        ids, supervised = parts["ids"].view("<i4"), parts["supervised"]
        limit = self.facts.get("vocab_size", 1 << 31)  # DeepSpec's manifest does not say it
        if (supervised > 1).any() or (ids < 0).any() or (ids >= limit).any():
            raise CacheError(
                f"{self.directory / shard_name(shard)}: sample {number} has ids outside the vocabulary, or a loss mask "
                f"that is not 0 and 1; the file is damaged: {WRITE_AGAIN}."
            )
        taps, hidden = (parts[field].view(HIDDEN).reshape(length, -1) for field in ("taps", "hidden"))
        return Document(ids, supervised.view(bool), Features(taps, hidden))

    def check_run(self, facts: Mapping[str, Any]) -> None:
        """Refuses to be trained on by another model's drafter.

        Args:
            facts: `facts_of_run` of the checkpoint.

        Raises:
            CacheError: fingerprint, layers, width or vocabulary differ. A cache of DeepSpec has no fingerprint.
        """
        check_facts(self.facts, facts, PINNED, str(self.directory))

    def check_documents(self) -> None:
        """Reads all ids and loss masks, and compares them with the manifest's digest; DeepSpec's has none.

        Raises:
            CacheError: they differ.
        """
        found = {"documents": digest_of(self[number] for number in range(len(self)))}
        if "documents" in self.facts and found != {"documents": self.facts["documents"]}:
            raise CacheError(
                f"{self.directory}: its documents have the digest {found['documents']} and the manifest says "
                f"{self.facts['documents']}; shards are damaged or exchanged: {WRITE_AGAIN}."
            )


def read_manifest(directory: Path) -> Facts:
    """The manifest of a whole cache.

    Raises:
        CacheError: there is none, or it is damaged.
    """
    path = directory / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        state = "unfinished" if (directory / INDEX_FILE).exists() else "no feature cache"
        raise CacheError(
            f"{directory}: has no {MANIFEST_FILE}, so it is {state}; start `dspark data cache` again, or name another."
        ) from error
    except OSError as error:
        raise CacheError(f"{path}: cannot be read ({error.strerror}); name the folder of a feature cache.") from error
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{path}: is not JSON ({error}); {WRITE_AGAIN}.") from error
    if not isinstance(manifest, dict):
        raise CacheError(f"{path}: is {type(manifest).__name__}; expected an object, {WRITE_AGAIN}.")
    return manifest


def read_records(directory: Path, facts: Facts) -> np.ndarray:
    """The index, [N] of `RECORD`: numbers dense from 0, samples side by side from the start of every shard.

    Raises:
        CacheError: naming the first record that is not where it must be.
    """
    path = directory / INDEX_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CacheError(f"{path}: cannot be read ({error.strerror}); {WRITE_AGAIN}.") from error
    if len(content) % RECORD.itemsize:
        raise CacheError(f"{path}: has {len(content)} bytes; expected a multiple of {RECORD.itemsize}, {WRITE_AGAIN}.")
    records = np.frombuffer(content, RECORD)
    wrong = np.flatnonzero(records != expected_records(records, facts))
    if len(wrong):
        raise CacheError(
            f"{path}: record {wrong[0]} is {records[wrong[0]].tolist()}; expected samples numbered from 0 that lie "
            f"side by side in shards numbered from 0, {WRITE_AGAIN}."
        )
    return records


def expected_records(records: np.ndarray, facts: Facts) -> np.ndarray:
    """The records as they must be, given lengths, and at which samples a shard begins."""
    expected, count = np.empty_like(records), len(records)
    lengths = records["length"].astype(np.uint64)
    begins = np.diff(records["shard"].astype(np.int64), prepend=-1) != 0
    before = np.cumsum(lengths) - lengths  # tokens in front of the sample, in all shards
    in_shard = before - np.maximum.accumulate(np.where(begins, before, 0))
    expected["number"], expected["length"] = np.arange(count), lengths
    expected["shard"] = np.cumsum(begins) - 1
    size = np.uint64(bytes_per_token(facts))
    for field, start in zip(FIELDS, starts(lengths, in_shard * size, facts), strict=True):
        expected[field] = start
    return expected


def check_size(path: Path, expected: int) -> None:
    """Refuses a file of another size.

    Raises:
        CacheError: it has another, or is not there.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CacheError(f"{path}: cannot be read ({error.strerror}); {WRITE_AGAIN}.") from error
    if found != expected:
        raise CacheError(f"{path}: has {found} bytes; {INDEX_FILE} says {expected}, {WRITE_AGAIN}.")
