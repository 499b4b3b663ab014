"""From arrays back to official files, byte for byte."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from dspark_jax.checkpoint.layout import Entry, layout
from dspark_jax.checkpoint.safetensors import DTYPES
from dspark_jax.checkpoint.write import write_folder
from dspark_jax.errors import CheckpointError
from dspark_jax.model.model import PARTS, Model, Part, abstract_model


def save(model: Model, directory: str | Path) -> None:
    """Writes a model in the official layout: a shard for each layer and stage, an index and `config.json`.

    One part alone is saved with the whole configuration, so it is loaded with `parts`, too. The folder appears under
    its name only when it is whole.

    Raises:
        CheckpointError: `directory` exists and is not empty, or a drafter from a GGUF file holds values that the layout
            has no exact place for.
    """
    _refuse_other_numbers(model)
    write_folder(directory, model.config.to_dict(), _shards(model))


def _refuse_other_numbers(model: Model) -> None:
    """What was read from a file that had rounded it to other numbers would have to be rounded again."""
    parts: list[Part] = [part for part in PARTS if getattr(model, part) is not None]
    expected = jax.tree.leaves_with_path(abstract_model(model.config, model.numerics, parts))
    for (path, leaf), (expected_path, kind) in zip(jax.tree.leaves_with_path(model), expected, strict=False):
        if (path, leaf.dtype) != (expected_path, kind.dtype):
            name = jax.tree_util.keystr(expected_path, simple=True, separator=".").partition(".value")[0]
            raise CheckpointError(
                f"{name} holds values that were rounded to another number type, by the GGUF file that they come from, "
                "and the official layout would round them once more; save the model of the checkpoint itself."
            )


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
