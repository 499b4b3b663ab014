"""`dspark crosscheck compare`: this package's numbers against a record of PyTorch's."""

from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text
from tyro.conf import arg

from dspark_jax.cli.terminal import RESULT, print_json, steps_bar
from dspark_jax.crosscheck.compare import Report, Row
from dspark_jax.crosscheck.compare import compare as compare_record


def compare(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    record: Annotated[Path, arg(metavar="FILE")],
    json: bool = False,
) -> int:
    """Recompute what a record holds and compare key by key; exit code 1 on a mismatch.

    Args:
        checkpoint: Folder with config.json, the index and the shards.
        record: Safetensors file with the keys of a golden folder's expected.safetensors, all or some of them.
        json: Print one JSON object instead of the table.
    """
    with steps_bar("crosscheck") as progress:
        report = compare_record(checkpoint, record, progress)
    if json:
        print_json(report.to_dict())
    else:
        print_report(report)
    return 0 if report.ok else 1


def print_report(report: Report) -> None:
    """A row for each key, the keys left out, and the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("key", no_wrap=True)
    for header in ("max abs", "relative", "tolerance"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("ok", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for row in report.rows:
        numbers = (f"{value:.2g}" for value in (row.max_abs, row.relative))
        table.add_row(
            Text(row.key), *numbers, f"{row.tolerance:.2g}" if row.judged else "", _verdict(row), Text(row.note)
        )
    RESULT.print(table)
    if report.not_compared:
        RESULT.print(Text(f"\nnot compared: {', '.join(report.not_compared)}", style="dim"))
    RESULT.print()
    RESULT.print(_summary(report))


def _verdict(row: Row) -> Text:
    if not row.judged:
        return Text("not judged", style="dim")
    return Text("✓", style="green") if row.ok else Text("✗ differs", style="bold red")


def _summary(report: Report) -> Text:
    judged = [row for row in report.rows if row.judged]
    wrong = [row for row in judged if not row.ok]
    counts = f"{len(judged)} judged, {len(report.rows) - len(judged)} reported, {len(report.not_compared)} not compared"
    if report.ok:
        return Text(f"✓ all agree ({counts})", style="bold green")
    if not judged:
        return Text(f"✗ the record holds nothing to judge ({counts})", style="bold red")
    return Text(f"✗ {len(wrong)} of {len(judged)} differ ({counts})", style="bold red")
