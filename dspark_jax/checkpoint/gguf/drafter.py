"""A drafter's GGUF file under the checkpoint's own names, whichever program it was made for."""

import re
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.gguf.file import GGUFFile, TensorInfo
from dspark_jax.checkpoint.gguf.layout import Piece, Spelling, bare, rows
from dspark_jax.checkpoint.gguf.metadata import ARCHITECTURES, DS4
from dspark_jax.errors import CheckpointError
from dspark_jax.formats.ggml import TYPES, Bytes, Values


class DrafterFile:
    """A GGUF file that holds a DSpark drafter.

    Attributes:
        path: the file.
        metadata: key -> value.
        spelling: of its names.
        tensors: official name as in `layout.Place` -> what the file says of the tensor, its shape made `bare`.
            A name that no drafter has is left as it is.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads and checks the header.

        Raises:
            CheckpointError: as `GGUFFile`; or the file is of an architecture that is no DSpark drafter's, holds none
                of its tensors, or holds one under the checkpoint's name.
        """
        self._file = GGUFFile(path)
        self.path, self.metadata = self._file.path, self._file.metadata
        self.spelling = self._spelling()
        numbers = (re.match(r"(?:blk|dspark|mtp)\.(\d+)\.", name) for name in self._file.tensors)
        stages = len({match[1] for match in numbers if match})
        official = {names[self.spelling]: official for official, _, names in rows(stages)}
        self._check_names(official)
        self.tensors = {
            official.get(name, name): TensorInfo(info.type, bare(info.shape), info.start)
            for name, info in self._file.tensors.items()
        }

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.bytes for info in self.tensors.values())

    def stored(self, name: str) -> Bytes:
        """A read-only view of a tensor as it is stored: uint8 [..., bytes of a row]."""
        return self._file.read(self.tensors[name])

    def values(self, name: str, piece: Piece) -> Values:
        """A piece of a tensor, float32.

        Raises:
            CheckpointError: this package does not read its type, or it holds NaN or infinity.
        """
        type = self.tensors[name].type
        if type.decode is None:
            readable = ", ".join(type.name for type in TYPES.values() if type.decode)
            raise CheckpointError(
                f"{self.path}: tensor {name} is {type.name}, which this package does not decode; expected one of "
                f"{readable}. Make the file with one of these types."
            )
        values = type.decode(self.stored(name)[piece])
        self._file.release()
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self.path}: tensor {name} ({type.name}) holds NaN or infinity; expected finite values. The file is "
                "damaged: fetch it again."
            )
        return values

    def _check_names(self, official: dict[str, str]) -> None:
        found = self._file.tensors.keys()
        if not found & official.keys():
            raise CheckpointError(f"{self.path}: holds no tensor of a drafter; name the file of a DSpark drafter.")
        for spelled, name in official.items():
            if name in found and name != spelled:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has the checkpoint's name; expected {spelled} in files of this kind. "
                    "Convert it again."
                )

    def _spelling(self) -> Spelling:
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES.values():
            known = " or ".join(sorted(set(ARCHITECTURES.values())))
            raise CheckpointError(
                f"{self.path}: is of architecture {architecture!r}; expected {known}; name the file of a DSpark "
                "drafter."
            )
        if architecture != DS4:
            return "llama.cpp"
        return "upstream" if any(key.startswith("dspark.") for key in self.metadata) else "entrpi"
