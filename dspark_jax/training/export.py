"""A trained drafter back in the official layout: the source's folder with other bytes where something was trained.

A shard that holds trained tensors is copied and they are overwritten in their places, so that its header and all other
tensors keep their bytes. Other shards are linked where the file system allows it: the export of a drafter of a 160 GB
checkpoint takes the room of the drafter.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoint.fingerprint import PROVENANCE
from dspark_jax.checkpoint.folder import SHARD_PATTERN, SINGLE_FILE, CheckpointFolder
from dspark_jax.checkpoint.layout import layout
from dspark_jax.checkpoint.save import tensors_of
from dspark_jax.checkpoint.write import new_folder, refusals_explained, write_json
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of
from dspark_jax.training.parameters import Parameters, release, weights_of


def export(source: Path, parameters: Parameters, out: Path, provenance: dict[str, Any]) -> list[str]:
    """Writes the folder of a checkpoint anew, with trained weights.

    Args:
        source: the checkpoint from which the masters were taken.
        parameters: masters of weights of its drafter.
        out: must not exist, or be an empty folder; it appears when it is whole.
        provenance: JSON values for the file `training.json` beside the weights, which keeps the source's own, too.

    Returns:
        Official names of the tensors that were trained.

    Raises:
        CheckpointError: the source is damaged or is not the one that was trained, or `out` is occupied.
    """
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: lies in the folder of the source; name another place.")
    folder = CheckpointFolder.open(source)
    config = ModelConfig.from_file(source / "config.json")
    _check_names(config, parameters, source)
    names, digest = [], hashlib.sha256()
    with new_folder(out) as work:
        _copy(source, work)
        for name, values in trained_tensors(config, parameters):
            content = np.ascontiguousarray(values).view(np.uint8)
            digest.update(name.encode())
            digest.update(content.data)
            _overwrite(folder, name, values, work)
            names.append(name)
        earlier = source / PROVENANCE
        history = {"source": earlier.read_text(encoding="utf-8", errors="replace")} if earlier.exists() else {}
        write_json(work / PROVENANCE, provenance | {"trained_sha256": digest.hexdigest()} | history)
    return names


def trained_tensors(config: ModelConfig, parameters: Parameters) -> Iterator[tuple[str, np.ndarray]]:
    """Masters as the checkpoint stores them, official name and array, one weight encoded at a time."""
    abstract = abstract_model(config, numerics_of("float32"), parts=("drafter",))
    for name, master in parameters.items():
        released = release(abstract, {name: master})
        for entry, leaf in zip(layout(released), jax.tree.leaves(released), strict=True):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                yield from tensors_of(entry, leaf)


def _check_names(config: ModelConfig, parameters: Parameters, source: Path) -> None:
    known = {name for name, _ in weights_of(abstract_model(config, numerics_of("float32"), parts=("drafter",)))}
    foreign = sorted(set(parameters) - known)
    if foreign:
        raise CheckpointError(f"{source}: has no place for the trained weight {foreign[0]}; name the one you trained.")


def _copy(source: Path, work: Path) -> None:
    """All of the folder but what is hidden or describes the source's weights: shards as links, the rest as copies."""
    with refusals_explained(work):
        for path in sorted(source.iterdir()):
            if path.name.startswith((".", "README")) or path.name == PROVENANCE:
                continue
            if path.is_dir():
                shutil.copytree(path, work / path.name)
            elif fnmatchcase(path.name, SHARD_PATTERN) or path.name == SINGLE_FILE:
                _link(path.resolve(), work / path.name)
            else:
                shutil.copyfile(path, work / path.name)


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, link)


def _overwrite(folder: CheckpointFolder, name: str, values: np.ndarray, work: Path) -> None:
    """Puts a tensor in its place in the copy of its shard."""
    info, shard = folder.info(name), work / folder.file_of(name).name
    if values.shape != info.shape or values.nbytes != info.stop - info.start:
        raise CheckpointError(
            f"{folder.file_of(name)}: tensor {name} is {info.dtype} {list(info.shape)} there and was trained as "
            f"{values.dtype} {list(values.shape)}; name the checkpoint that was trained."
        )
    with refusals_explained(shard):
        if os.path.samefile(shard, folder.file_of(name)):
            _detach(shard)
        with shard.open("r+b") as file:
            file.seek(info.start)
            file.write(np.ascontiguousarray(values).view(np.uint8).data)


def _detach(shard: Path) -> None:
    """Makes a link a file of its own."""
    copy = shard.with_name(f"{shard.name}.copy")
    shutil.copyfile(shard, copy)
    copy.rename(shard)
