"""Writes a checkpoint folder in the official layout, shard by shard, and shows it under its name only when whole."""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dspark_jax.checkpoint.folder import INDEX_FILE
from dspark_jax.checkpoint.safetensors import DTYPES, METADATA
from dspark_jax.errors import CheckpointError

CONFIG_FILE = "config.json"
FILE_METADATA = {"format": "pt"}  # as torch's writer has it; loaders that look for it fail on a file without


def write_folder(directory: str | Path, config: dict[str, Any], shards: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Writes `config.json`, the index, and one `model-0000N-of-0000M.safetensors` for each mapping in `shards`.

    `shards` is consumed lazily; one shard is held at a time. Everything is written into a hidden folder beside
    `directory`, named `.NAME.*.partial`, and renamed at the end: under `directory` stands all of it or nothing.
    A killed run leaves its hidden folder behind, which nothing reads and which may be deleted.

    Args:
        directory: where the checkpoint shall stand; must not exist, or be an empty folder. Parents are created.
        config: contents of `config.json`.
        shards: tensor name -> array of a dtype in `DTYPES`, any memory layout; no empty mapping, no name twice.

    Raises:
        CheckpointError: `directory` is occupied, there is nothing to write, a tensor cannot be stored or comes twice,
            or the disk refuses. Exceptions from `shards` pass unchanged. In every case no file is left behind.
    """
    with new_folder(directory) as work:
        _write_contents(work, config, shards)


@contextmanager
def new_folder(directory: str | Path) -> Iterator[Path]:
    """A hidden folder beside `directory` to write into, which takes its name at the end, or is removed on an error.

    Raises:
        CheckpointError: `directory` is occupied, or the disk refuses to make or rename the folder.
    """
    target = Path(directory).resolve()  # a rename replaces an empty folder, but not a link to one
    _refuse_occupied(target)
    work = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with refusals_explained(work):
            work.mkdir(parents=True)
        yield work
        with refusals_explained(work):
            for path in (*work.iterdir(), work):
                _flush(path)
        with refusals_explained(target):
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def new_file(path: Path, overwrite: bool) -> Iterator[IO[bytes]]:
    """A hidden file beside `path` to write into, which takes its name at the end, or is removed on an error.

    Parents are created, and removed again on an error.

    Raises:
        CheckpointError: `path` is taken by something that is no file, or by one and `overwrite` is not set, be it from
            the beginning or meanwhile; or the disk refuses.
    """
    target = Path(os.path.realpath(path))  # `resolve` raises RuntimeError on a loop of links
    if os.path.lexists(target) and not os.path.isfile(target):
        raise CheckpointError(f"{path}: is there already and is no regular file; name another place.")
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(f"{path}: is there already; name another place, or ask for it to be overwritten.")
    work = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    made = [folder for folder in target.parents if not os.path.lexists(folder)]
    try:
        with refusals_explained(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            with work.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if not overwrite:
                target.touch(exist_ok=False)  # refuses where a rename replaces; not every file system has hard links
            work.rename(target)
    finally:
        for remove in (work.unlink, *(folder.rmdir for folder in made)):
            with suppress(OSError):  # it has its name, was never made, or is in use
                remove()


def shard_name(number: int, count: int) -> str:
    """The file name of a shard, counted from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def index(weight_map: Mapping[str, str], size: int) -> dict[str, Any]:
    """Contents of the index: tensor name -> file name, and the bytes of all tensors."""
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}


def _refuse_occupied(target: Path) -> None:
    with refusals_explained(target):
        occupied = os.path.lexists(target) and (not target.is_dir() or os.path.ismount(target) or any(target.iterdir()))
    if occupied:
        raise CheckpointError(
            f"{target}: is not empty, not a folder, or a mount point; name a folder that does not exist yet."
        )


def _write_contents(work: Path, config: dict[str, Any], shards: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Fills the hidden folder; the configuration comes first, so that one that is not JSON fails before any weights."""
    write_json(work / CONFIG_FILE, config)
    shard_of, sizes = _write_shards(work, shards)
    if not sizes:
        raise CheckpointError("expected at least one shard of tensors to write, found none.")
    names = {number: shard_name(number, len(sizes)) for number in range(1, len(sizes) + 1)}
    write_json(work / INDEX_FILE, index({tensor: names[number] for tensor, number in shard_of.items()}, sum(sizes)))
    with refusals_explained(work):
        for number, name in names.items():
            _unnumbered(work, number).rename(work / name)


def _write_shards(work: Path, shards: Iterable[Mapping[str, np.ndarray]]) -> tuple[dict[str, int], list[int]]:
    """Writes each shard under a name without the total, which is known only at the end.

    Returns:
        tensor name -> number of its shard, counted from 1; bytes of the tensors of each shard.
    """
    shard_of: dict[str, int] = {}
    sizes: list[int] = []
    for shard in shards:
        number = len(sizes) + 1  # enumerate would keep hold of the shard
        tensors = _storable(shard, number, shard_of)
        path = _unnumbered(work, number)
        with refusals_explained(path):
            save_file(tensors, path, metadata=FILE_METADATA)
            shutil.copymode(work / CONFIG_FILE, path)  # the library lets nobody but the owner read
        shard_of |= dict.fromkeys(tensors, number)
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        del shard, tensors  # the iterator builds the next shard now, and two need not fit in memory
    return shard_of, sizes


def _unnumbered(work: Path, number: int) -> Path:
    return work / f"shard-{number:05d}"


def _storable(shard: Mapping[str, np.ndarray], number: int, shard_of: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The tensors of a shard in C order: the library writes any other array's memory as it lies, without a word."""
    if not shard:
        raise CheckpointError(f"shard {number}: holds no tensors; leave it out.")
    for name in shard:
        if name in shard_of:
            raise CheckpointError(
                f"tensor {name!r} comes twice, in shards {shard_of[name]} and {number}; give it once."
            )
        if name == METADATA:
            raise CheckpointError(f"shard {number}: {METADATA!r} is the format's own name; give the tensor another.")
    tensors = {name: np.asarray(tensor, order="C") for name, tensor in shard.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            expected = ", ".join(str(dtype) for dtype in DTYPES.values())
            raise CheckpointError(f"shard {number}: tensor {name!r} is {tensor.dtype}, expected one of {expected}.")
    return tensors


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file.

    Raises:
        CheckpointError: the disk refuses.
    """
    text = json.dumps(value, indent=2) + "\n"
    with refusals_explained(path):
        path.write_text(text, encoding="utf-8")


def _flush(path: Path) -> None:
    """Sends a file or folder to the disk: a power cut after the final rename must not leave empty files behind it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def refusals_explained(path: Path) -> Iterator[None]:
    """Inside, what the disk refuses is a CheckpointError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: cannot be written ({reason}); make room, or name another place.") from error
