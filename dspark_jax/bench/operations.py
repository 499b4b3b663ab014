"""The operations that `bench_kernel` times, by their names on the command line."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.bench.case import Case, Operation, Shape, draw_matrix, stored_bytes
from dspark_jax.bench.experts import Down, Experts, GateUp
from dspark_jax.bench.sparse import FLASH
from dspark_jax.config import ModelConfig
from dspark_jax.errors import RequestError, check_count
from pallas_kernels.block_scaled import BlockScaled
from pallas_kernels.fp8_linear import fp8_linear, reference
from pallas_kernels.hyper_connection import Constants, write_then_read
from pallas_kernels.hyper_connection import reference as reference_site
from pallas_kernels.implementation import Implementation

Site = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Streams, what was read, post and comb."""


@dataclass(frozen=True)
class Fp8Linear(Case):
    """Rows times a matrix [out, in], another one in every call."""

    operation = "fp8-linear"

    shape: Shape
    quantised: bool = False

    def __str__(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}, {self.rows} rows{', quantised' if self.quantised else ''}"

    @property
    def bytes(self) -> int:
        """Of the matrix."""
        return stored_bytes("e4m3", self.shape)

    def draw(self, key: jax.Array, calls: int) -> tuple[jax.Array, tuple[BlockScaled, ...]]:
        """Rows bfloat16 [rows, in]."""
        for_x, *for_weights = jax.random.split(key, 1 + calls)
        x = jax.random.normal(for_x, (self.rows, self.shape[1]), jnp.bfloat16)
        return x, tuple(draw_matrix(key, "e4m3", self.shape) for key in for_weights)

    def apply(self, x: jax.Array, operands: BlockScaled, implementation: Implementation) -> jax.Array:
        """As models call it: float32 [rows, out]."""
        return fp8_linear(x, operands, self.quantised, implementation)

    def reference(self, x: jax.Array, operands: BlockScaled) -> jax.Array:
        """What `pallas_kernels` says it is."""
        return reference.fp8_linear(x, operands, self.quantised)


class SiteWeights(NamedTuple):
    """Of one hyper-connection, all float32: `fn` [m, n*d], `base` [m] and `scale` [3]."""

    fn: jax.Array
    base: jax.Array
    scale: jax.Array


@dataclass(frozen=True)
class HyperConnection(Case):
    """A site: the update with what the half-block before gave, mix, Sinkhorn, and what the next half-block reads.

    A half-block gives what it has read. Inputs and outputs are streams [rows, n, d], what was read [rows, d], and how
    it is written back, [rows, n] and [rows, n, n].
    """

    operation = "hyper-connection"

    config: ModelConfig = field(default=FLASH, repr=False)

    def __str__(self) -> str:
        return f"{self.rows} rows"

    @property
    def bytes(self) -> int:
        """Of the float32 projection, and of the bfloat16 streams, read and written."""
        n, d = self.config.hc_mult, self.config.hidden_size
        return (2 + n) * n * n * d * 4 + 2 * self.rows * n * d * 2

    def draw(self, key: jax.Array, calls: int) -> tuple[Site, tuple[SiteWeights, ...]]:
        """Streams and what was read in bfloat16, the rest float32."""
        n, d = self.config.hc_mult, self.config.hidden_size
        for_streams, *keys = jax.random.split(key, 2 + calls)
        streams = jax.random.normal(for_streams, (self.rows, n, d), jnp.bfloat16)
        first, *sites = (_draw_site(key, n, d) for key in keys)
        return (streams, *reference_site.read(streams, *first, self._constants)), tuple(sites)

    def apply(self, x: Site, operands: SiteWeights, implementation: Implementation) -> Site:
        """As models call it."""
        streams, y, post, comb = x
        return write_then_read(y, streams, post, comb, *operands, self._constants, implementation=implementation)

    def reference(self, x: Site, operands: SiteWeights) -> Site:
        """What `pallas_kernels` says it is."""
        streams, y, post, comb = x
        written = reference_site.write(y, streams, post, comb)
        return (written, *reference_site.read(written, *operands, self._constants))

    def next_input(self, x: Site, y: Site) -> Site:
        """What a site gives goes on to the next one."""
        return y

    @property
    def _constants(self) -> Constants:
        return Constants(self.config.rms_norm_eps, self.config.hc_sinkhorn_iters, self.config.hc_eps)


def _draw_site(key: jax.Array, n: int, d: int) -> SiteWeights:
    m = (2 + n) * n
    for_fn, for_base = jax.random.split(key)
    fn = jax.random.normal(for_fn, (m, n * d)) / math.sqrt(n * d)
    return SiteWeights(fn, jax.random.normal(for_base, (m,)), jnp.ones(3))


_EXPERTS: dict[Operation, Callable[[int, int], Case]] = {case.operation: case for case in (GateUp, Down, Experts)}
_OPTIONS: dict[Operation, set[str]] = {name: {"live"} for name in _EXPERTS} | {
    Fp8Linear.operation: {"shape", "quantised"}
}


def cases(
    operation: Operation,
    live: Sequence[int] = (),
    rows: Sequence[int] = (),
    shapes: Sequence[Shape] = (),
    quantised: bool = False,
) -> list[Case]:
    """An operation at every combination of what is asked for; where nothing is, at the shapes of DeepSeek-V4-Flash.

    Args:
        operation: which.
        live: numbers of live experts.
        rows: numbers of token rows, for experts of each live one.
        shapes: [out, in] of FP8 matrices.
        quantised: whether their rows go through E4M3 first.

    Raises:
        RequestError: an option is not the operation's, or a number cannot be.
    """
    given = {"live": live, "shape": shapes, "quantised": quantised}
    for name, value in given.items():
        if value and name not in _OPTIONS.get(operation, ()):
            others = ", ".join(other for other, options in _OPTIONS.items() if name in options)
            raise RequestError(f"--{name} is not an option of {operation}, but of {others}; leave it out.")
    for count in rows:
        check_count(count, "rows")
    if operation in _EXPERTS:
        return [_EXPERTS[operation](count, number) for number in live or (6, 36, 120) for count in rows or (8,)]
    if operation == Fp8Linear.operation:
        shapes = shapes or ((8192, 4096), (32768, 1024))
        return [Fp8Linear(count, shape, quantised) for shape in shapes for count in rows or (1, 6)]
    return [HyperConnection(count) for count in rows or (1, 6)]
