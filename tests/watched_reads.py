"""What of a checkpoint is read: every slice of every tensor, against the slices that this process holds."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.layout import layout
from dspark_jax.model.model import Model

Bounds = tuple[tuple[int, int], ...]
Reads = dict[str, list[Bounds]]


class Watched:
    """A tensor that can only be sliced, and keeps account of the slices."""

    def __init__(self, values: np.ndarray, taken: list[Bounds]) -> None:
        self.values, self.taken = values, taken

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        self.taken.append(bounds(index, self.values.shape))
        return self.values[index]


@contextmanager
def watched_reads() -> Iterator[Reads]:
    """The slices of every tensor that are read within the context, in order."""
    taken: Reads = defaultdict(list)
    read = CheckpointFolder.read
    replacement: Any = lambda folder, name: Watched(read(folder, name), taken[name])  # noqa: E731
    CheckpointFolder.read = replacement  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        CheckpointFolder.read = read  # type: ignore[method-assign]


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def assert_only_own_slices_were_read(model: Model, reads: Reads) -> int:
    """Every slice that a device of this process holds was read, at most once a device, and nothing else.

    Returns:
        Number of tensors of which this process read nothing.
    """
    expected: Reads = defaultdict(list)
    for entry, leaf in zip(layout(model), jax.tree.leaves(model), strict=True):
        for shard in leaf.addressable_shards:
            index = bounds(shard.index, leaf.shape)
            names, rest = (entry.names[slice(*index[0])], index[1:]) if entry.stacked else (entry.names, index)
            for name in names:
                expected[name].append(rest)
    assert {name: set(slices) for name, slices in reads.items()} == {
        name: set(slices) for name, slices in expected.items()
    }
    assert all(len(slices) <= len(expected[name]) for name, slices in reads.items())
    return sum(name not in reads for entry in layout(model) for name in entry.names)
