"""A checkpoint folder in the official layout: an index, and shards that are opened when first asked for."""

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.safetensors import FETCH_AGAIN, SafetensorsFile, TensorInfo, parse_object
from dspark_jax.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_PATTERN = "model-*.safetensors"


class CheckpointFolder:
    """The tensors of a folder by name, whichever file they lie in.

    Only the shards of the tensors asked for need to be there: the drafter can be loaded from a folder that holds the
    index and the drafter's own shards. Files that are neither index nor shard are ignored.

    Attributes:
        directory: the folder.
        names: every tensor name the folder promises.
    """

    def __init__(self, directory: Path, weight_map: Mapping[str, str]) -> None:
        """Use `open`; `weight_map` is the index's: tensor name -> file name."""
        self.directory = directory
        self.names = frozenset(weight_map)
        self._weight_map = weight_map
        self._shards: dict[str, SafetensorsFile] = {}

    @classmethod
    def open(cls, directory: str | Path) -> "CheckpointFolder":
        """Reads the folder's index, or, where there is none, the header of its single `model.safetensors`.

        Raises:
            CheckpointError: the folder cannot be listed, or has neither an index nor a single file; its index is
                damaged, points outside the folder, or never names a shard that lies there.
        """
        directory = Path(directory)
        files = _list(directory)
        shards = {file for file in files if fnmatchcase(file, SHARD_PATTERN)}
        if INDEX_FILE in files:
            weight_map = _read_index(directory / INDEX_FILE)
            _refuse_strays(directory, shards - set(weight_map.values()))
            return cls(directory, weight_map)
        if shards or SINGLE_FILE not in files:
            raise CheckpointError(
                f"{directory}: holds no {INDEX_FILE} and {len(shards)} shards ({SHARD_PATTERN}), expected an index, or "
                f"a single {SINGLE_FILE} and no shards; fetch the index, or name the folder of a checkpoint."
            )
        single = SafetensorsFile(directory / SINGLE_FILE)
        folder = cls(directory, dict.fromkeys(single.tensors, SINGLE_FILE))
        folder._shards[SINGLE_FILE] = single
        return folder

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, whether or not it is there.

        Raises:
            CheckpointError: the folder promises no such tensor.
        """
        if name not in self._weight_map:
            raise CheckpointError(f"{self.directory}: holds no tensor {name!r} (it holds {len(self.names)} others).")
        return self.directory / self._weight_map[name]

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor in its file; opens the shard, reads no weights.

        Raises:
            CheckpointError: no such tensor; its shard is absent, damaged, or not what the index says.
        """
        return self._shard_of(name).tensors[name]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in its mapped shard; see `SafetensorsFile.read`.

        Raises:
            CheckpointError: as `info`, or the shard changed under the reader.
        """
        return self._shard_of(name).read(name)

    def release(self) -> None:
        """Lets go of the mappings of all shards; see `SafetensorsFile.release`."""
        for shard in self._shards.values():
            shard.release()

    def _shard_of(self, name: str) -> SafetensorsFile:
        path = self.file_of(name)
        if path.name not in self._shards:
            if not os.path.isfile(path):
                raise CheckpointError(
                    f"{path}: is absent, but the index places tensor {name!r} there; fetch the shard."
                )
            shard = SafetensorsFile(path)
            self._check_against_index(shard)
            self._shards[path.name] = shard
        return self._shards[path.name]

    def _check_against_index(self, shard: SafetensorsFile) -> None:
        """Index and shard must name the same tensors; otherwise they come from different checkpoints."""
        file = shard.path.name
        lacking = sorted(
            name for name, place in self._weight_map.items() if place == file and name not in shard.tensors
        )
        if lacking:
            raise CheckpointError(
                f"{shard.path}: lacks {_enumerate(lacking)}, which the index places there; fetch shard and index again."
            )
        surplus = sorted(name for name in shard.tensors if self._weight_map.get(name) != file)
        if surplus:
            place = self._weight_map.get(surplus[0], "no shard at all")
            raise CheckpointError(
                f"{shard.path}: holds {_enumerate(surplus)}, which the index places in {place}; "
                "fetch shard and index again."
            )


def _list(directory: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(directory))
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{directory}: cannot be listed ({reason}); name the folder of a checkpoint.") from error


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name -> name of a file in the same folder."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); fetch it again.") from error
    weight_map = parse_object(text, f"{path}: the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected an object 'weight_map' of tensor names and file names; {FETCH_AGAIN}.")
    for name, file in weight_map.items():
        # A name with a separator could lead out of the folder. Links may: that is how download caches are built.
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{path}: places tensor {name!r} in {file!r}, expected the plain name of a file in the same folder; "
                f"{FETCH_AGAIN}."
            )
    return weight_map


def _refuse_strays(directory: Path, strays: set[str]) -> None:
    if strays:
        raise CheckpointError(
            f"{directory}: holds shard {min(strays)!r} that {INDEX_FILE} never names ({len(strays)} such shards); "
            "fetch the index again, or move shards of another checkpoint away."
        )


def _enumerate(names: list[str]) -> str:
    return f"tensor {names[0]!r}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
