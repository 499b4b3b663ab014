"""How fast this machine's CPU encodes weights into the block formats of GGUF."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dspark_jax.bench.timing import Timing, time_in_turns
from dspark_jax.formats import q2_k, q4_k, q8_0

Format = Literal["q2_k", "q4_k", "q8_0"]

STACK = (256, 2048, 4096)
"""Shape of one of the nine stacks of routed experts of the drafter of DeepSeek-V4-Flash."""

SAMPLE = (512, 4096)

Encoder = Callable[[NDArray[np.float32]], NDArray[np.uint8]]

ENCODERS: dict[Format, Encoder] = {"q2_k": q2_k.encode, "q4_k": q4_k.encode, "q8_0": q8_0.encode}
PLAIN: dict[Format, Encoder] = {
    "q2_k": lambda values: q2_k.encode(values, search=False),
    "q4_k": lambda values: q4_k.encode(values, search=False),
}


@dataclass(frozen=True)
class FormatSpeed:
    """Of one format.

    Attributes:
        format: its name.
        values_per_second: encoded as ggml does, with its search where it has one.
        plain_values_per_second: the same without the search; None where there is none.
        spread: of the first, between the quartiles of its times as a share of the median.
    """

    format: Format
    values_per_second: float
    plain_values_per_second: float | None
    spread: float

    @property
    def stack_seconds(self) -> float:
        """Of a whole stack of experts."""
        return math.prod(STACK) / self.values_per_second


@dataclass(frozen=True)
class ConvertReport:
    """Formats against a copy: the ceiling of whatever reads float32 values and writes something.

    Attributes:
        values: of the Gaussian sample that is encoded.
        copy_values_per_second: float32 values copied by one core, in the same turns.
        speeds: of each format.
    """

    values: int
    copy_values_per_second: float
    speeds: tuple[FormatSpeed, ...]

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures as JSON values."""
        speeds = [dataclasses.asdict(speed) | {"stack_seconds": speed.stack_seconds} for speed in self.speeds]
        return dataclasses.asdict(self) | {"speeds": speeds, "stack": list(STACK)}


def bench_convert(formats: Sequence[Format]) -> ConvertReport:
    """Encodes a sample of a stack in every format, with and without search, and copies it; all take turns."""
    values = np.random.default_rng(0).standard_normal(SAMPLE, np.float32)
    programs: dict[tuple[str, bool], Callable[[], Any]] = {("copy", True): values.copy}
    for name in formats:
        programs[name, True] = _program(ENCODERS[name], values)
        if name in PLAIN:
            programs[name, False] = _program(PLAIN[name], values)
    times = dict(zip(programs, time_in_turns(*programs.values()), strict=True))
    return ConvertReport(
        values=values.size,
        copy_values_per_second=times["copy", True].per_second(values.size),
        speeds=tuple(_speed(name, values.size, times[name, True], times.get((name, False))) for name in formats),
    )


def _program(encode: Encoder, values: NDArray[np.float32]) -> Callable[[], Any]:
    return lambda: encode(values)


def _speed(name: Format, values: int, timing: Timing, plain: Timing | None) -> FormatSpeed:
    return FormatSpeed(
        format=name,
        values_per_second=timing.per_second(values),
        plain_values_per_second=plain.per_second(values) if plain else None,
        spread=timing.spread / timing.seconds,
    )
