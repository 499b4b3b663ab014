"""How fast the device moves memory: what every other figure is a fraction of."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.bench.timing import Timing, time_in_turns

LARGE, SMALL = 1 << 31, 1 << 28
"""Bytes of the array that is read: many times any cache. The small one is for CPUs, and beside a model."""


@dataclass(frozen=True)
class BandwidthReport:
    """Bytes a second of large passes over memory on one device, medians; where a pass writes, too, both are counted.

    Attributes:
        device: its kind.
        array_bytes: of the bfloat16 array that each pass reads.
        read: a sum.
        read_write: one is added to every value.
        copy: values as they are.
        spread: of each of the three, between the quartiles of its times as a share of the median.
    """

    device: str
    array_bytes: int
    read: float
    read_write: float
    copy: float
    spread: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)


def bench_bandwidth() -> BandwidthReport:
    """Reads, changes and copies an array of 2 GB, on a CPU of 256 MB; the three take turns."""
    values = _values(_size())
    times = dict(zip(PASSES, time_in_turns(*(_program(name, values) for name in PASSES)), strict=True))
    speeds = {name: _bytes_per_second(name, values, timing) for name, timing in times.items()}
    return BandwidthReport(
        device=jax.devices()[0].device_kind,
        array_bytes=values.nbytes,
        **speeds,
        spread={name: timing.spread / timing.seconds for name, timing in times.items()},
    )


def read_bandwidth() -> float:
    """Bytes a second that the first device reads in a sum over a large array."""
    return _bandwidth("read", _size())


def copy_bandwidth() -> float:
    """Bytes a second that the first device moves in a copy, read and written bytes both counted."""
    return _bandwidth("copy", SMALL)


def read_all(values: jax.Array) -> jax.Array:
    """Reads every value once: any array -> float32 scalar."""
    return jnp.sum(values, dtype=jnp.float32)


PASSES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "read": read_all,
    "read_write": lambda values: values + 1,
    "copy": jnp.copy,
}


def _bandwidth(name: str, size: int) -> float:
    values = _values(size)
    [timing] = time_in_turns(_program(name, values))
    return _bytes_per_second(name, values, timing)


def _program(name: str, values: jax.Array) -> Callable[[], jax.Array]:
    run = jax.jit(PASSES[name])
    return lambda: run(values)


def _bytes_per_second(name: str, values: jax.Array, timing: Timing) -> float:
    return timing.per_second(values.nbytes if name == "read" else 2 * values.nbytes)


def _size() -> int:
    return LARGE if jax.default_backend() == "gpu" else SMALL


def _values(size: int) -> jax.Array:
    return jnp.ones(size // 2, jnp.bfloat16)
