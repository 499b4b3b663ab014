"""What a measurement of operations tells."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_jax.bench.case import Case
from dspark_jax.bench.peer import PeerRun, PeerTiming
from pallas_kernels.implementation import Implementation

LARGEST_ERROR: dict[Implementation, float] = {"mosaic": 3e-3, "xla": 4e-3}
"""Relative, of bfloat16 results: rounding once makes 1.6e-3. XLA's experts also round what gate and up give: 3.5e-3."""


@dataclass(frozen=True)
class Measured:
    """A call of one implementation.

    Attributes:
        seconds: of the median chain, without what links its calls.
        spread_seconds: between the quartiles of the chains.
        link_seconds: what was taken off: the links, and the call's share of a launch and of a pass over other memory.
        error: ||y - reference|| / ||reference|| on random data of this run.
    """

    seconds: float
    spread_seconds: float
    link_seconds: float
    error: float


@dataclass(frozen=True)
class CaseReport:
    """An operation at a shape; the first implementation is the one that others are compared with.

    Attributes:
        case: operation and shape.
        measured: by implementation.
        peer: products of as many bytes by another package, on its own ceiling.
    """

    case: Case
    measured: dict[Implementation, Measured]
    peer: PeerTiming | None

    def right(self, name: Implementation) -> bool:
        """Whether a result can be taken for the operation's."""
        return self.measured[name].error <= LARGEST_ERROR[name]  # which NaN is not

    @property
    def speed_up(self) -> dict[str, float]:
        """How many times faster the first implementation is than each other one, and than the peer."""
        (_, first), *others = self.measured.items()
        seconds: dict[str, float] = {name: other.seconds for name, other in others}
        if self.peer:
            seconds["humming"] = self.peer.seconds
        return {name: other / first.seconds for name, other in seconds.items()}


@dataclass(frozen=True)
class KernelReport:
    """Operations that were timed in one process.

    Attributes:
        device: its kind.
        versions: of the packages.
        seed: of all random data.
        read_bytes_per_second: of a sum over a large array, the ceiling.
        cases: what was measured.
        peer: the process of the peer; None if it was not asked for.
    """

    device: str
    versions: dict[str, str]
    seed: int
    read_bytes_per_second: float
    cases: Sequence[CaseReport]
    peer: PeerRun | None

    @property
    def ok(self) -> bool:
        """Whether every result was right."""
        return all(report.right(name) for report in self.cases for name in report.measured)

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures as JSON values."""
        return {
            "device": self.device,
            "versions": self.versions,
            "seed": self.seed,
            "read_bytes_per_second": self.read_bytes_per_second,
            "peer": self.peer and {"versions": self.peer.versions, "read_bytes_per_second": self.peer.ceiling},
            "cases": [self._case(report) for report in self.cases],
            "ok": self.ok,
        }

    def _case(self, report: CaseReport) -> dict[str, Any]:
        size = report.case.bytes
        told: dict[str, dict[str, Any]] = {}
        for name, measured in report.measured.items():
            speed = _speed(size, measured.seconds, self.read_bytes_per_second)
            told[name] = dataclasses.asdict(measured) | {"right": report.right(name)} | speed
        if report.peer and self.peer:
            told["humming"] = dataclasses.asdict(report.peer) | _speed(size, report.peer.seconds, self.peer.ceiling)
        return report.case.to_dict() | {"measured": told, "speed_up": report.speed_up}

    def __str__(self) -> str:
        """A table, in which the peer's fraction is one of its own ceiling."""
        lines = [HEADERS]
        for report in self.cases:
            told = self._case(report)
            lines += [_line(f"{report.case.operation}, {report.case}", name, told) for name in told["measured"]]
        peer = f"; the peer read {_tera(self.peer.ceiling)}" if self.peer else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        ceiling = f"{self.device}, {versions}, seed {self.seed}: {_tera(self.read_bytes_per_second)} are read{peer}"
        return f"{ceiling}\n\n{_aligned(lines)}"


HEADERS = ["", "", "us", "+-", "MB", "speed", "of ceiling", "error", "so many times faster"]


def _line(title: str, name: str, told: dict[str, Any]) -> list[str]:
    measured = told["measured"][name]
    first = name == next(iter(told["measured"]))
    error = measured.get("error")
    return [
        title if first else "",
        name,
        f"{measured['seconds'] * 1e6:.1f}",
        f"{measured['spread_seconds'] * 1e6:.1f}",
        f"{told['bytes'] / 1e6:.1f}",
        _tera(measured["bytes_per_second"]),
        f"{measured['fraction_of_ceiling']:.2f}",
        "" if error is None else f"{error:.1e}{'' if measured['right'] else ' WRONG'}",
        ", ".join(f"{times:.2f} than {other}" for other, times in told["speed_up"].items()) if first else "",
    ]


def _tera(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e12:.3g} TB/s"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = (0, 1, len(widths) - 1)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _speed(size: int, seconds: float, ceiling: float) -> dict[str, float]:
    return {"bytes_per_second": size / seconds, "fraction_of_ceiling": size / seconds / ceiling}
