"""The GGUF container, version 3: metadata by key, and tensors by name, whose bytes follow the header.

The reader of the PyPI package `gguf` makes an object of every element of every array (a vocabulary has 400 000), stops
at a type that it does not know without naming the tensor, and does not notice tensors that overlap; hence this reader,
and a writer made of the same definitions. The tests read what it writes with that package.

Metadata values are Python's bool and str, numpy scalars (float32, int32, uint32, ...), arrays of these, or lists of
str: their types are the file's types.
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.safetensors import FETCH_AGAIN
from dspark_jax.checkpoint.write import new_file
from dspark_jax.errors import CheckpointError
from dspark_jax.formats.ggml import TYPES, Bytes, Type

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
MOST_DIMENSIONS = 4
SCALARS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.float32)  # by number of their type
WIDE_SCALARS = (np.uint64, np.int64, np.float64)  # numbers 10 to 12
BOOL, STRING, ARRAY = 7, 8, 9
_DTYPES = {number: np.dtype(kind) for number, kind in (*enumerate(SCALARS), *enumerate(WIDE_SCALARS, start=10))}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}

Value = Any
"""See above."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it.

    Attributes:
        type: its number type.
        shape: sizes of the axes as numpy counts them, the slowest first; the file has them the other way round.
        start: its first byte, counted from the beginning of the file.
    """

    type: Type
    shape: tuple[int, ...]
    start: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in bytes."""
        return (*self.shape[:-1], self.type.row_bytes(self.shape[-1]))

    @property
    def bytes(self) -> int:
        """Bytes of all its values."""
        return math.prod(self.stored_shape)


class GGUFFile:
    """A GGUF file, its header read and checked.

    Attributes:
        path: the file.
        metadata: key -> value.
        tensors: name -> what the header says of it, in the header's order.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads and checks the header.

        Raises:
            CheckpointError: the file cannot be read, is no GGUF file, is cut short, holds a number type that this
                package does not know, names a key or a tensor twice, or has tensors that overlap.
        """
        self.path = Path(path)
        header = _Header(self.path, self._bytes)
        self.metadata = header.metadata()
        self.tensors = header.tensors(int(self.metadata.get(ALIGNMENT_KEY, ALIGNMENT)))

    def read(self, info: TensorInfo) -> Bytes:
        """A read-only view of a tensor as it is stored: uint8 [..., bytes of a row]. Only touched pages are read."""
        return self._bytes[info.start : info.start + info.bytes].reshape(info.stored_shape)

    def release(self) -> None:
        """Lets go of the mapping, so that what was read no longer counts as memory of the process."""
        self.__dict__.pop("_bytes", None)

    @cached_property
    def _bytes(self) -> np.memmap:
        try:
            if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
                raise ValueError("it is no regular file")
            return np.memmap(self.path, np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file, too
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.path}: cannot be read ({reason}); name a GGUF file.") from error


class _Header:
    """Reads the header from front to back."""

    def __init__(self, path: Path, content: np.memmap) -> None:
        self.path, self.content, self.position = path, content, 0
        magic = self._take(len(MAGIC), "the magic bytes")
        if magic != MAGIC:
            raise CheckpointError(f"{path}: begins with {magic!r}, expected {MAGIC!r}; it is no GGUF file.")
        version = int(self._scalar(np.dtype(np.uint32), "the version"))
        if version != VERSION:
            raise CheckpointError(
                f"{path}: is of GGUF version {version}, expected {VERSION} in little-endian order; convert it again."
            )
        self.tensor_count, self.key_count = (self._size(what) for what in ("the number of tensors", "that of keys"))

    def metadata(self) -> dict[str, Value]:
        """All keys and values."""
        values: dict[str, Value] = {}
        for _ in range(self.key_count):
            key = self._string("a key")
            if key in values:
                raise CheckpointError(f"{self.path}: key {key} appears twice; {FETCH_AGAIN}.")
            values[key] = self._value(self._type_number(key), key)
        alignment = values.get(ALIGNMENT_KEY, ALIGNMENT)
        if not isinstance(alignment, np.integer | int) or alignment < 1:
            raise CheckpointError(
                f"{self.path}: {ALIGNMENT_KEY} is {alignment!r}, expected a positive integer; {FETCH_AGAIN}."
            )
        return values

    def tensors(self, alignment: int) -> dict[str, TensorInfo]:
        """All tensors, none of which overlaps another or the end of the file."""
        relative: dict[str, TensorInfo] = {}
        for _ in range(self.tensor_count):
            name = self._string("a tensor's name")
            if name in relative:
                raise CheckpointError(f"{self.path}: tensor {name} appears twice; {FETCH_AGAIN}.")
            relative[name] = self._tensor(name, alignment)
        begin = _aligned(self.position, alignment)
        found = {name: TensorInfo(info.type, info.shape, begin + info.start) for name, info in relative.items()}
        previous, position = "the header", begin
        for name, info in sorted(found.items(), key=lambda item: (item[1].start, item[1].bytes)):
            if info.start < position:
                raise CheckpointError(f"{self.path}: tensor {name} overlaps {previous}; {FETCH_AGAIN}.")
            previous, position = f"tensor {name}", info.start + info.bytes
            if position > self.content.size:
                raise CheckpointError(
                    f"{self.path}: is cut short: tensor {name} ends at byte {position} and the file at "
                    f"{self.content.size}; {FETCH_AGAIN}."
                )
        return found

    def _tensor(self, name: str, alignment: int) -> TensorInfo:
        what = f"tensor {name}"
        dimensions = int(self._scalar(np.dtype(np.uint32), what))
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise CheckpointError(
                f"{self.path}: {what} has {dimensions} dimensions, expected 1 to {MOST_DIMENSIONS}; {FETCH_AGAIN}."
            )
        shape = tuple(self._size(what) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise CheckpointError(f"{self.path}: {what} has shape {list(shape)}, so no values; {FETCH_AGAIN}.")
        number, start = int(self._scalar(np.dtype(np.uint32), what)), self._size(what)
        if number not in TYPES:
            known = ", ".join(f"{type.name} ({type.number})" for type in TYPES.values())
            raise CheckpointError(
                f"{self.path}: {what} is of number type {number}, which this package does not know; expected one of "
                f"{known}."
            )
        type = TYPES[number]
        if shape[-1] % type.block:
            raise CheckpointError(
                f"{self.path}: {what} has rows of {shape[-1]} values, expected a multiple of the {type.block} of "
                f"{type.name}; {FETCH_AGAIN}."
            )
        if start % alignment:
            raise CheckpointError(
                f"{self.path}: {what} begins at byte {start} of the data, expected a multiple of {alignment}; "
                f"{FETCH_AGAIN}."
            )
        return TensorInfo(type, shape, start)

    def _value(self, number: int, key: str) -> Value:
        if number == STRING:
            return self._string(key)
        if number == ARRAY:
            return self._array(key)
        if number == BOOL:
            return self._take(1, key) != b"\0"
        return self._scalar(self._dtype(number, key), key)

    def _array(self, key: str) -> Value:
        number, count = self._type_number(key), self._size(key)
        if number == STRING:
            self._check(8 * count, key)
            return [self._string(key) for _ in range(count)]
        dtype = np.dtype(np.bool_) if number == BOOL else self._dtype(number, key)
        self._check(count * dtype.itemsize, key)
        self.position += count * dtype.itemsize
        return np.asarray(self.content[self.position - count * dtype.itemsize : self.position]).view(dtype)

    def _dtype(self, number: int, key: str) -> np.dtype[Any]:
        if number not in _DTYPES:
            raise CheckpointError(f"{self.path}: key {key} has a value of unknown type {number}; {FETCH_AGAIN}.")
        return _DTYPES[number]

    def _type_number(self, key: str) -> int:
        return int(self._scalar(np.dtype(np.uint32), key))

    def _string(self, what: str) -> str:
        text = self._take(self._size(what), what)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not valid UTF-8 ({error}); {FETCH_AGAIN}.") from error

    def _size(self, what: str) -> int:
        return int(self._scalar(np.dtype(np.uint64), what))

    def _scalar(self, dtype: np.dtype[Any], what: str) -> Any:
        return np.frombuffer(self._take(dtype.itemsize, what), dtype)[0]

    def _take(self, count: int, what: str) -> bytes:
        self._check(count, what)
        self.position += count
        return self.content[self.position - count : self.position].tobytes()

    def _check(self, count: int, what: str) -> None:
        if count > self.content.size - self.position:
            raise CheckpointError(
                f"{self.path}: is cut short: {what} takes {count} bytes from byte {self.position} on and the file has "
                f"{self.content.size}; {FETCH_AGAIN}."
            )


Contents = Callable[[str], Iterable[np.ndarray]]
"""From a tensor's name to its bytes, in pieces."""


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo], contents: Contents, overwrite: bool
) -> None:
    """Writes a file piece by piece, under another name until it is whole.

    Args:
        metadata: key -> value.
        tensors: name -> type and shape; data lie in this order.
        contents: asked for the tensors in the same order.
        overwrite: take the place of a file of this name.

    Raises:
        CheckpointError: `path` is taken, or the disk refuses. Exceptions from `contents` pass unchanged.
    """
    with new_file(path, overwrite) as file:
        header = b"".join(_header(metadata, tensors))
        file.write(header.ljust(_aligned(len(header), ALIGNMENT), b"\0"))
        for name, info in tensors.items():
            begin = file.tell()
            for piece in contents(name):
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
            written = file.tell() - begin
            assert written == info.bytes, f"{name}: {written} bytes in the place of {info.bytes}"
            file.write(bytes(_aligned(written, ALIGNMENT) - written))


def _header(metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo]) -> Iterator[bytes]:
    yield MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    for key, value in metadata.items():
        yield _packed_string(key) + _packed_value(value)
    start = 0
    for name, info in tensors.items():
        yield _packed_string(name) + struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))
        yield struct.pack("<IQ", info.type.number, start)
        start = _aligned(start + info.bytes, ALIGNMENT)


def _packed_value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _packed_string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ARRAY, _NUMBERS[value.dtype], value.size) + value.tobytes()
    if isinstance(value, Sequence):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_packed_string, value))
    return struct.pack("<I", _NUMBERS[value.dtype]) + value.tobytes()


def _packed_string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
