"""What `dspark inspect FILE.gguf` tells, from the header alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from dspark_jax.checkpoint.gguf.file import GGUFFile, TensorInfo, Value
from dspark_jax.cli.terminal import RESULT

MOST_VALUES = 8  # of an array that are told: a vocabulary has 129 280


@dataclass(frozen=True)
class Held:
    """A GGUF file's header."""

    file: str
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]

    def by_type(self) -> dict[str, tuple[int, int]]:
        """Number type -> tensors and bytes, the one of most bytes first."""
        sums: dict[str, tuple[int, int]] = {}
        for info in self.tensors.values():
            tensors, size = sums.get(info.type.name, (0, 0))
            sums[info.type.name] = tensors + 1, size + info.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; of a long array its beginning and its length."""
        return {
            "file": self.file,
            "metadata": {key: _json(value) for key, value in self.metadata.items()},
            "tensors": {
                name: {"type": info.type.name, "shape": list(info.shape), "bytes": info.bytes}
                for name, info in self.tensors.items()
            },
            "by_type": {name: {"tensors": count, "bytes": size} for name, (count, size) in self.by_type().items()},
        }


def inspect_gguf(file: Path) -> Held:
    """The facts about a file.

    Raises:
        CheckpointError: the file is damaged or no GGUF file.
    """
    opened = GGUFFile(file)
    return Held(str(file), opened.metadata, opened.tensors)


def print_gguf(held: Held) -> None:
    """Metadata, tensors, and a sum over the number types."""
    architecture = held.metadata.get("general.architecture", "without architecture")
    RESULT.print(Text.assemble((f"GGUF, {architecture}", "bold"), "  ", (held.file, "dim")), soft_wrap=True)
    _print("Metadata", ("key", "value"), ((key, _told(value)) for key, value in held.metadata.items()))
    _print("Tensors", ("name", "type", "shape", "bytes"), (_row(name, info) for name, info in held.tensors.items()))
    sums = held.by_type().items()
    _print("Types", ("type", "tensors", "bytes"), ((name, f"{count:,}", decimal(size)) for name, (count, size) in sums))
    size = sum(info.bytes for info in held.tensors.values())
    RESULT.print(f"\n{len(held.tensors)} tensors of {size:,} bytes")


def _row(name: str, info: TensorInfo) -> tuple[str, ...]:
    return name, info.type.name, " x ".join(map(str, info.shape)), f"{info.bytes:,}"


def _print(title: str, headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, header in enumerate(headers):
        table.add_column(header, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    RESULT.print(Text(f"\n{title}", style="bold"))
    RESULT.print(table)


def _json(value: Value) -> Any:
    if isinstance(value, np.ndarray | list) and len(value) > MOST_VALUES:
        return {"length": len(value), "first": _json(value[:MOST_VALUES])}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _told(value: Value) -> str:
    if isinstance(value, np.ndarray | list) and len(value) > MOST_VALUES:
        return f"{len(value):,} values: {', '.join(map(str, _json(value[:MOST_VALUES])))}, ..."
    return str(_json(value))
