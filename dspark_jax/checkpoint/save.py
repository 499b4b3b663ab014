"""From arrays back to official files, byte for byte."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from dspark_jax.checkpoint.layout import Entry, layout
from dspark_jax.checkpoint.safetensors import DTYPES
from dspark_jax.checkpoint.write import write_folder
from dspark_jax.model.model import Model


def save(model: Model, directory: str | Path) -> None:
    """Writes a model in the official layout: a shard for each layer and stage, an index and `config.json`.

    One part alone is saved with the whole configuration, so it is loaded with `parts`, too. The folder appears under
    its name only when it is whole.

    Raises:
        CheckpointError: `directory` exists and is not empty.
    """
    write_folder(directory, model.config.to_dict(), _shards(model))


def _shards(model: Model) -> Iterator[dict[str, np.ndarray]]:
    """Groups of tensors as the official release shards them; one group is in host memory at a time."""
    groups: dict[str, list[tuple[Entry, jax.Array]]] = {}
    for entry, leaf in zip(layout(model), jax.tree.leaves(model), strict=True):
        groups.setdefault(shard_key(entry.names[0]), []).append((entry, leaf))
    for key in sorted(groups, key=shard_order):
        yield {name: tensor for entry, leaf in groups[key] for name, tensor in tensors_of(entry, leaf)}


def tensors_of(entry: Entry, leaf: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
    """A leaf as the tensors that the file holds, each in the file's dtype: official name and array."""
    values = np.asarray(leaf)
    stack = values if entry.stacked else values[None]
    dtype = np.dtype(DTYPES[entry.dtype])
    for name, value in zip(entry.names, stack, strict=True):
        yield name, value.view(dtype) if values.dtype == np.uint8 else value.astype(dtype)


def shard_key(name: str) -> str:
    """The shard of a tensor in the official release: one for each layer and stage, and two for the rest."""
    head, *rest = name.split(".")
    if head in ("layers", "mtp"):
        return f"{head}.{rest[0]}"
    return "embed" if head == "embed" else "head"


def shard_order(key: str) -> tuple[int, int]:
    """Sorts shards as the official release numbers them."""
    group, _, number = key.partition(".")
    return ["embed", "layers", "head", "mtp"].index(group), int(number or 0)
