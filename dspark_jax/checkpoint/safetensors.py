"""Reads safetensors files through a memory map, in every storage type of the official checkpoint.

The `safetensors` library cannot read F8_E4M3 or F8_E8M0 into numpy, hence this reader. The format
(https://huggingface.co/docs/safetensors): eight bytes with the header's length, the header (JSON: tensor name -> dtype,
shape and `data_offsets`), then the bytes of all tensors without gaps. What the header can tell is checked on opening.
"""

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from dspark_jax.errors import CheckpointError

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
FETCH_AGAIN = "it is damaged or incomplete: fetch it again"

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000  # the format's own; a damaged length must not make us read gigabytes of weights as JSON
METADATA = "__metadata__"
NUMPY_MAX_RANK = 64
NUMPY_MAX_BYTES = 2**63 - 1  # counts an axis of size 0 as 1, so that an empty tensor can break it, too


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header of its file describes it.

    Attributes:
        dtype: storage type under its safetensors name, a key of `DTYPES`.
        shape: sizes of the axes; `()` for a scalar.
        start: its first byte, counted from the beginning of the file.
        stop: the byte after its last, counted the same way.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A safetensors file, opened and checked but not yet mapped: the first `read` maps it.

    Attributes:
        path: the file.
        tensors: what the header says of each tensor, in the header's order.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the header and checks it against itself and against the size of the file.

        Raises:
            CheckpointError: the file cannot be read, is cut short, or its header contradicts the format.
        """
        self.path = Path(path)
        self.tensors, self._size = _read_header(self.path)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of one tensor, of the dtype and shape in `tensors[name]`; only touched pages are read.

        The view need not be aligned to its dtype, and keeps the whole file mapped for as long as it lives.

        Raises:
            CheckpointError: no such tensor, or the file is no longer the one that was opened.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r} (it holds {len(self.tensors)} others).")
        info = self.tensors[name]
        return np.ndarray(info.shape, DTYPES[info.dtype], buffer=self._bytes, offset=info.start)

    def release(self) -> None:
        """Lets go of the mapping: what was read from it no longer counts as memory of the process, once no view lives.

        The next `read` maps the file again.
        """
        self.__dict__.pop("_bytes", None)

    @cached_property
    def _bytes(self) -> np.ndarray:
        """The whole file, uint8, read-only."""
        try:
            mapped = np.memmap(self.path, np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: emptied since it was opened
            raise CheckpointError(f"{self.path}: cannot be mapped any more ({error}); put the file back.") from error
        if mapped.size != self._size:
            raise CheckpointError(
                f"{self.path}: held {self._size} bytes when it was opened and holds {mapped.size} now; "
                "leave a checkpoint alone while it is being read."
            )
        return mapped


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object in which no name may stand twice; `where` begins every refusal.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, or a name that stands twice.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}); {FETCH_AGAIN}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {short_repr(value)}; {FETCH_AGAIN}.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's pairs as a dict; json itself would keep the last of two values and drop the first in silence."""
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"name {name!r} appears twice")
        unique[name] = value
    return unique


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], int]:
    """The checked tensors of a file and the file's size in bytes."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            _check_length(path, length, size)
            text = file.read(length)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); name a safetensors file.") from error
    header = parse_object(text, f"{path}: the header")
    data_start = LENGTH_BYTES + length
    tensors = {
        name: _tensor_info(f"{path}: tensor {name!r}", entry, data_start)
        for name, entry in header.items()
        if name != METADATA
    }
    _check_layout(path, tensors, data_start, size)
    return tensors, size


def _check_length(path: Path, length: int, size: int) -> None:
    if size < LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: holds {size} bytes, expected at least the {LENGTH_BYTES} of the header's length; {FETCH_AGAIN}."
        )
    limit = min(size - LENGTH_BYTES, HEADER_LIMIT)
    if length > limit:
        raise CheckpointError(
            f"{path}: the first bytes promise a header of {length} bytes, expected at most {limit} in a file "
            f"of {size} bytes; it is no safetensors file (a Git LFS pointer?), or {FETCH_AGAIN}."
        )


def _tensor_info(where: str, entry: Any, data_start: int) -> TensorInfo:
    """Checks one entry of the header, all by itself; `where` begins every refusal."""
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{where}: expected an object of dtype, shape and data_offsets, found {short_repr(entry)}; {FETCH_AGAIN}."
        )
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where}: dtype is {short_repr(dtype)}, expected one of {', '.join(DTYPES)}; "
            "store the tensor in one of these, or fetch the file again."
        )
    itemsize = DTYPES[dtype].itemsize
    if not _are_sizes(shape) or not _fits_numpy(shape, itemsize):
        raise CheckpointError(f"{where}: shape is {short_repr(shape)}, expected a list of sizes; {FETCH_AGAIN}.")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: data_offsets is {short_repr(offsets)}, expected two byte positions; {FETCH_AGAIN}."
        )
    start, stop = offsets
    expected = math.prod(shape) * itemsize
    if stop - start != expected:
        raise CheckpointError(
            f"{where}: {dtype} of shape {shape} takes {expected} bytes, but data_offsets {offsets} enclose "
            f"{stop - start}; {FETCH_AGAIN}."
        )
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _fits_numpy(shape: list[int], itemsize: int) -> bool:
    return len(shape) <= NUMPY_MAX_RANK and math.prod(max(size, 1) for size in shape) * itemsize <= NUMPY_MAX_BYTES


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """Tensors must follow one another from the header to the end of the file without overlap or gap."""
    position, previous = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != position:
            fault = "overlaps with" if info.start < position else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name!r} {fault} {previous}: it starts at byte {info.start - data_start} of the data, "
                f"expected {position - data_start}; {FETCH_AGAIN}."
            )
        position, previous = info.stop, f"tensor {name!r}"
    if position != size:
        fault = "is cut short" if size < position else "holds more than its header describes"
        raise CheckpointError(
            f"{path}: {fault}: expected {position} bytes (where {previous} ends), found {size}; {FETCH_AGAIN}."
        )
