"""What the commands share: where output goes, progress on stderr, one-line warnings and errors."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

RESULT = Console(highlight=False)
STATUS = Console(stderr=True, highlight=False)

_DESCRIPTION = TextColumn("{task.description}", markup=False)


def print_json(value: Any) -> None:
    """Prints one JSON value on stdout; what JSON has no number for (NaN, infinity) becomes null."""
    print(json.dumps(_finite(value), ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def print_error(sentence: str) -> None:
    """Prints `dspark: sentence` on stderr as one line, however long."""
    STATUS.print(Text.assemble(("dspark: ", "bold red"), sentence), soft_wrap=True)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Inside, a Python warning is one line on stderr without the source line that raised it."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        STATUS.print(Text.assemble(("dspark: warning: ", "bold yellow"), str(message)), soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; the function it yields takes the bytes done and the bytes in all."""
    with _progress(BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def steps_bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar; the function it yields takes the step's name, the steps done and the steps in all."""
    with _progress(BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda step, done, total: bar.update(task, description=f"{what}: {step}", completed=done, total=total)


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """For work on the device, which cannot report how far it is: a spinner and the time elapsed."""
    with _progress() as bar:
        bar.add_task(what, total=None)
        yield


def _progress(*columns: ProgressColumn) -> Progress:
    """A transient display on stderr, and none where stderr is not a terminal."""
    return Progress(
        SpinnerColumn(),
        _DESCRIPTION,
        *columns,
        TimeElapsedColumn(),
        console=STATUS,
        transient=True,
        disable=not STATUS.is_terminal,
    )
