"""How far two drafters are from each other, each in a checkpoint folder or a GGUF file: tensor by tensor, in float32.

A folder's numbers are decoded here by tables and products of their own. Conversion and loading go through `formats`, so
that a fault there is a difference here.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.gguf.drafter import DrafterFile
from dspark_jax.checkpoint.gguf.layout import Piece, bare, pieces, places, scale_rows
from dspark_jax.checkpoint.gguf.metadata import facts, settings
from dspark_jax.checkpoint.load import Progress, account
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.formats.ggml import Values
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of
from pallas_kernels.block_scaled import BLOCKS

Shape = tuple[int, ...]


class Drafter(Protocol):
    """A drafter's tensors by official name."""

    shapes: dict[str, Shape]
    settings: dict[str, list[Any]]
    """What drafting needs and weights do not tell; see `gguf.metadata.settings`."""

    def type_of(self, name: str) -> str:
        """Number type of a tensor."""

    def values(self, name: str, piece: Piece) -> Values:
        """A piece of a tensor, float32."""


@dataclass(frozen=True)
class Row:
    """One tensor of both, or of one of them.

    Attributes:
        name: official name, for experts one of the whole stack.
        types: number types in A and in B; None where it is not there.
        fault: what keeps the two from being compared: another shape, or absence.
        max_abs: largest |A - B|; None if there is a fault.
        relative_rms: root of sum (A - B)^2 / sum A^2, 0 if both are 0; None if there is a fault.
        largest: largest |A|.
    """

    name: str
    types: tuple[str | None, str | None]
    fault: str | None = None
    max_abs: float | None = None
    relative_rms: float | None = None
    largest: float | None = None

    @property
    def exact(self) -> bool:
        """Whether every value is the same."""
        return self.max_abs == 0.0


@dataclass(frozen=True)
class Comparison:
    """Two drafters side by side.

    Attributes:
        a, b: where they lie.
        rows: of every tensor.
        settings: clauses on the settings that differ.
        max_abs, relative_rms: over all tensors that can be compared.
    """

    a: str
    b: str
    rows: tuple[Row, ...]
    settings: tuple[str, ...]
    max_abs: float
    relative_rms: float

    @property
    def same(self) -> bool:
        """Whether every tensor is in both and exact, and all settings are the same."""
        return all(row.exact for row in self.rows) and not self.settings

    @property
    def verdict(self) -> str:
        """A sentence."""
        count, exact = len(self.rows), sum(row.exact for row in self.rows)
        if self.same:
            return f"The same drafter: all {count} tensors are exact, max|diff| = {self.max_abs:.1f}."
        faults = sum(row.fault is not None for row in self.rows)
        told = f", {faults} cannot be compared" if faults else ""
        settings = "".join(f"; {clause}" for clause in self.settings)
        return (
            f"Not the same: {exact} of {count} tensors are exact, {count - exact - faults} differ{told}; max|diff| = "
            f"{self.max_abs:.3g}, relative RMS {self.relative_rms:.3g} over all{settings}."
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rows = [asdict(row) | {"exact": row.exact} for row in self.rows]
        return asdict(self) | {"rows": rows, "same": self.same, "verdict": self.verdict}


def verify(a: str | Path, b: str | Path, progress: Progress | None = None) -> Comparison:
    """Compares the drafters of two checkpoint folders or GGUF files.

    Args:
        a, b: the one is the measure of the other's relative error.
        progress: told about the values compared, in bytes of float32.

    Raises:
        ConfigError, CheckpointError: one of them is damaged, or holds a type that cannot be decoded.
        RequestError: a folder's configuration has no drafter that a GGUF file could hold.
    """
    first, second = open_drafter(Path(a)), open_drafter(Path(b))
    faults = {name: _fault(name, first, second) for name in first.shapes | second.shapes}
    total = 4 * sum(math.prod(first.shapes[name]) for name, fault in faults.items() if not fault)
    rows, whole, done = [], _Sums(), 0
    for name, fault in faults.items():
        types = (_type(name, first), _type(name, second))
        if fault:
            rows.append(Row(name, types, fault))
            continue
        sums = _Sums()
        for piece in pieces(first.shapes[name]):
            values = first.values(name, piece)
            sums += _Sums.of(values, second.values(name, piece))
            done += values.nbytes
            if progress is not None:
                progress(done, total)
        rows.append(Row(name, types, None, sums.max_abs, sums.relative_rms, sums.largest))
        whole += sums
    differing = tuple(
        f"{what} {first.settings[what]} in A and {second.settings[what]} in B"
        for what in first.settings
        if first.settings[what] != second.settings[what]
    )
    return Comparison(str(a), str(b), tuple(rows), differing, whole.max_abs, whole.relative_rms)


@dataclass(frozen=True)
class _Sums:
    """Of a part of the values: largest |A - B| and |A|, and sums of the squares of both."""

    max_abs: float = 0.0
    largest: float = 0.0
    error: float = 0.0
    square: float = 0.0

    @classmethod
    def of(cls, a: Values, b: Values) -> "_Sums":
        flat = a.reshape(-1)
        largest, square = float(np.abs(a).max()), float(np.einsum("i,i->", flat, flat, dtype=np.float64))
        if np.array_equal(a, b):
            return cls(0.0, largest, 0.0, square)
        difference = a.astype(np.float64) - b
        return cls(float(np.abs(difference).max()), largest, float(np.vdot(difference, difference)), square)

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            max(self.max_abs, other.max_abs),
            max(self.largest, other.largest),
            self.error + other.error,
            self.square + other.square,
        )

    @property
    def relative_rms(self) -> float:
        return math.sqrt(self.error / self.square) if self.square else math.inf if self.error else 0.0


def open_drafter(path: Path) -> Drafter:
    """The drafter of a folder, or of a file.

    Raises:
        as `verify`.
    """
    return _FolderDrafter(path) if path.is_dir() else _FileDrafter(path)


def _fault(name: str, a: Drafter, b: Drafter) -> str | None:
    shapes = a.shapes.get(name), b.shapes.get(name)
    if None in shapes:
        return f"only in {'A' if shapes[0] else 'B'}"
    return None if shapes[0] == shapes[1] else f"shape {list(shapes[0] or ())} in A and {list(shapes[1] or ())} in B"


def _type(name: str, drafter: Drafter) -> str | None:
    return drafter.type_of(name) if name in drafter.shapes else None


class _FileDrafter:
    def __init__(self, path: Path) -> None:
        self._file = DrafterFile(path)
        self.shapes = {name: info.shape for name, info in self._file.tensors.items()}
        self.settings = settings(self._file.metadata, self._file.spelling)

    def type_of(self, name: str) -> str:
        return self._file.tensors[name].type.name

    def values(self, name: str, piece: Piece) -> Values:
        return self._file.values(name, piece)


class _FolderDrafter:
    def __init__(self, path: Path) -> None:
        config = ModelConfig.from_file(path / "config.json")
        self._path, self._folder, found = path, CheckpointFolder.open(path), places(config, path)
        entries = tuple(entry for place in found for entry in place.entries)
        account(entries, self._folder, abstract_model(config, numerics_of("float32")))
        self._places = {place.official: place for place in found}
        self.shapes = {place.official: bare(place.shape) for place in found}
        self.settings = settings(facts(config, "entrpi"), "entrpi")

    def type_of(self, name: str) -> str:
        place = self._places[name]
        return {"I8": "MXFP4", "F8_E4M3": "FP8"}.get(place.entries[0].dtype, place.entries[0].dtype)

    def values(self, name: str, piece: Piece) -> Values:
        values = self._values(name, piece)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._path}: tensor {name} holds NaN or infinity; expected finite values. A shard is damaged: fetch "
                "it again."
            )
        return values

    def _values(self, name: str, piece: Piece) -> Values:
        place = self._places[name]
        if isinstance(piece, int):
            codes, scales = (self._folder.read(entry.names[piece]).view(np.uint8) for entry in place.entries)
            self._folder.release()
            return _fp4_values(codes, scales)
        parts = [self._folder.read(entry.names[0]) for entry in place.entries]
        self._folder.release()
        if len(parts) == 1:
            return parts[0].reshape(self.shapes[name])[piece].astype(np.float32)
        codes, scales = (part.view(np.uint8) for part in parts)
        return _fp8_values(codes[piece], scales[scale_rows(piece)])


def _e4m3_value(code: int) -> float:
    """NaN for the two codes that are it."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    magnitude = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -magnitude if code & 128 else magnitude


_E4M3 = np.array([_e4m3_value(code) for code in range(256)], np.float32)
_E2M1 = [sign * magnitude for sign in (1, -1) for magnitude in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
_E2M1_PAIRS = np.array([(_E2M1[code & 15], _E2M1[code >> 4]) for code in range(256)], np.float32)
_POWERS = np.array([*(math.ldexp(1, code - 127) for code in range(255)), math.nan], np.float32)


def _fp8_values(codes: np.ndarray, scales: np.ndarray) -> Values:
    rows, columns = (np.arange(size) // block for size, block in zip(codes.shape, BLOCKS["e4m3"], strict=True))
    with np.errstate(over="ignore"):
        return _E4M3[codes] * _POWERS[scales][rows[:, None], columns]


def _fp4_values(codes: np.ndarray, scales: np.ndarray) -> Values:
    pairs = _E2M1_PAIRS[codes].reshape(*scales.shape, BLOCKS["e2m1"][1])
    with np.errstate(over="ignore"):
        return (pairs * _POWERS[scales][..., None]).reshape(len(codes), -1)
