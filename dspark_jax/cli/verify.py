"""`dspark verify`: how far two drafters are from each other."""

from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from dspark_jax.checkpoint.verify import Comparison, Row
from dspark_jax.checkpoint.verify import verify as compare
from dspark_jax.cli.terminal import RESULT, bytes_bar, print_json


def verify(
    a: Annotated[Positional[Path], arg(metavar="A")],
    b: Annotated[Positional[Path], arg(metavar="B")],
    *,
    json: bool = False,
) -> int:
    """Compare two drafters value by value; exit code 1 if they differ.

    Values are decoded to float32. Relative RMS is that of the difference, by that of A.

    Args:
        a: Checkpoint folder or GGUF file of llama.cpp or ds4.
        b: Another.
        json: Print one JSON object instead of the table.
    """
    with bytes_bar("comparing") as progress:
        comparison = compare(a, b, progress)
    if json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison)
    return 0 if comparison.same else 1


def print_comparison(comparison: Comparison) -> None:
    """A row for each tensor, and the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("tensor", no_wrap=True)
    for header in ("in A", "in B"):
        table.add_column(header, no_wrap=True)
    for header in ("max|A|", "max|diff|", "relative RMS"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for row in comparison.rows:
        table.add_row(Text(row.name), *(type or "" for type in row.types), *_numbers(row), _mark(row))
    RESULT.print(table)
    style = "bold green" if comparison.same else "bold red"
    RESULT.print(Text(f"\n{'✓' if comparison.same else '✗'} {comparison.verdict}", style=style), soft_wrap=True)


def _numbers(row: Row) -> list[str]:
    return ["" if value is None else f"{value:.3g}" for value in (row.largest, row.max_abs, row.relative_rms)]


def _mark(row: Row) -> Text:
    return Text("✓", style="green") if row.exact else Text(f"✗ {row.fault or ''}", style="bold red")
