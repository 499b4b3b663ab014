"""Seconds that programs take on the device: warm, many runs queued before the host looks, programs in turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import jax

QUEUED_SECONDS = 0.01  # runs queued before blocking take this together, a hundred times what a look at the clock does
MOST_QUEUED = 32
FEWEST_BATCHES, MOST_BATCHES = 5, 25
BUDGET_SECONDS = 0.5


@dataclass(frozen=True)
class Timing:
    """Of many timed batches, seconds of one run.

    Attributes:
        seconds: the median.
        spread: between the first and the third quartile.
    """

    seconds: float
    spread: float

    def per_second(self, amount: int) -> float:
        """How much of what a run does is done in a second."""
        return amount / self.seconds


def time_in_turns(*programs: Callable[[], Any]) -> list[Timing]:
    """How long each program takes. They take turns, so that a clock that slows down does so for all of them.

    Args:
        programs: dispatch work to the device, and return arrays that are ready when it is done.
    """
    queued, batches = [], MOST_BATCHES
    for program in programs:
        _seconds(program, 1)
        alone = _seconds(program, 1)
        queued.append(min(MOST_QUEUED, 1 + int(QUEUED_SECONDS / alone)))
        batches = min(batches, max(FEWEST_BATCHES, int(BUDGET_SECONDS / (alone * queued[-1]))))
    turns = [[_seconds(*pair) / pair[1] for pair in zip(programs, queued, strict=True)] for _ in range(batches)]
    return [_timing(runs) for runs in zip(*turns, strict=True)]


def _seconds(program: Callable[[], Any], runs: int) -> float:
    began = time.perf_counter()
    for _ in range(runs):
        last = program()  # the device runs them one after the other; what the others return makes room
    jax.block_until_ready(last)
    return time.perf_counter() - began


def _timing(runs: tuple[float, ...]) -> Timing:
    first, _, third = quantiles(runs, n=4)
    return Timing(median(runs), third - first)
