"""What the commands share: where output goes, progress on stderr, one-line warnings and errors."""

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import rich.progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from dspark_jax.decoding.stream import StreamProgress
from dspark_jax.jobs.json_lines import to_line

RESULT = Console(highlight=False)
STATUS = Console(stderr=True, highlight=False)

_DESCRIPTION = TextColumn("{task.description}", markup=False)


def print_json(value: Any) -> None:
    """Prints one JSON value on stdout; what JSON has no number for (NaN, infinity) becomes null."""
    print(to_line(value))


def print_error(sentence: str) -> None:
    """Prints `dspark: sentence` on stderr as one line, however long."""
    STATUS.print(Text.assemble(("dspark: ", "bold red"), sentence), soft_wrap=True)


def print_warning(sentence: str) -> None:
    """Prints `dspark: warning: sentence` on stderr as one line."""
    STATUS.print(Text.assemble(("dspark: warning: ", "bold yellow"), sentence), soft_wrap=True)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Inside, SIGTERM is what Ctrl-C is, so that what is half-written is removed; only a main thread can ask for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Inside, a Python warning is one line on stderr without the source line that raised it."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print_warning(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; the function it yields takes the bytes done and the bytes in all."""
    with _display(BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def tokens_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; the function it yields takes the tokens done and the tokens in all."""
    with _display(BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def steps_bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar; the function it yields takes the step's name, the steps done and the steps in all."""
    with _display(BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda step, done, total: bar.update(task, description=f"{what}: {step}", completed=done, total=total)


@contextmanager
def completions_bar(what: str, done: int, total: int) -> Iterator[Callable[[StreamProgress], None]]:
    """A progress bar of completions, with tokens a second since the first report and accepted length."""
    with _display(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}")) as bar:
        task = bar.add_task(what, total=total, completed=done, rates="")
        began: tuple[float, int] | None = None

        def report(progress: StreamProgress) -> None:
            nonlocal began
            now = time.perf_counter()
            began = since, tokens = began or (now, progress.tokens)
            speed = f"{(progress.tokens - tokens) / (now - since):.1f} tokens/s, " if now > since else ""
            rates = f"{speed}accepted length {progress.tokens / max(progress.rounds, 1):.2f}"
            bar.update(task, description="generating", completed=done + progress.completions, rates=rates)

        yield report


@contextmanager
def training_bar(steps: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A progress bar of training steps; the function it yields takes a step's record."""
    with _display(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"), TimeRemainingColumn()) as bar:
        task = bar.add_task("compiling", total=steps, rates="")

        def report(record: Mapping[str, Any]) -> None:
            rates = (
                f"loss {record['loss']:.3f}, accepted length {record['expected_length']:.2f} sampled, "
                f"{record['greedy_length']:.2f} greedy"
            )
            bar.update(task, description="training", completed=record["step"] + 1, rates=rates)

        yield report


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """For work on the device, which cannot report how far it is: a spinner and the time elapsed."""
    with _display() as bar:
        bar.add_task(what, total=None)
        yield


def _display(*columns: ProgressColumn) -> rich.progress.Progress:
    """A transient display on stderr, and none where stderr is not a terminal."""
    return rich.progress.Progress(
        SpinnerColumn(),
        _DESCRIPTION,
        *columns,
        TimeElapsedColumn(),
        console=STATUS,
        transient=True,
        disable=not STATUS.is_terminal,
    )
