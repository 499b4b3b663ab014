"""Routed experts as `bench_kernel` times them: a layer as models call it, and its two halves expert by expert."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.bench.case import Case, Shape, draw_matrix, stored_bytes
from dspark_jax.bench.sparse import FLASH
from dspark_jax.config import ModelConfig
from dspark_jax.errors import RequestError
from pallas_kernels.block_scaled import Matrix, decoded_product
from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.mxfp4_experts import Matrices, mxfp4_experts, reference, swiglu
from pallas_kernels.mxfp4_experts.mosaic import down, gate_up, refusal
from pallas_kernels.precision import round_to


class Group(NamedTuple):
    """Operands of one matrix kind of some experts.

    Attributes:
        experts: the stacks of all experts.
        numbers: int32 [G], the live ones.
        weights: float32 [G, rows], the routing weight of each row.
        picks, live: of each row for a kernel, int32 [G * rows, 1] and bool [G * rows].
    """

    experts: Matrices
    numbers: jax.Array
    weights: jax.Array
    picks: jax.Array
    live: jax.Array


@dataclass(frozen=True)
class _ExpertsCase(Case):
    """`live` experts out of all, other ones in every call."""

    live: int
    config: ModelConfig = field(default=FLASH, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.live <= self.config.n_routed_experts:
            raise RequestError(f"{self.live} experts cannot be live; a layer has 1 to {self.config.n_routed_experts}.")

    def __str__(self) -> str:
        return f"{self.live} live x {self.rows} rows"

    @property
    def peer_shapes(self) -> tuple[Shape, ...]:
        return tuple((self.live * out, columns) for out, columns in self._shapes)

    @property
    def bytes(self) -> int:
        return sum(stored_bytes("e2m1", shape) for shape in self.peer_shapes)

    @property
    @abstractmethod
    def _shapes(self) -> tuple[Shape, ...]:
        """[out, in] of the matrices of one expert that are read, gate and up as one."""

    @property
    def _gate_up(self) -> Shape:
        return 2 * self.config.moe_intermediate_size, self.config.hidden_size

    @property
    def _down(self) -> Shape:
        return self.config.hidden_size, self.config.moe_intermediate_size

    def _draw_experts(self, key: jax.Array) -> Matrices:
        count, d, f = self.config.n_routed_experts, self.config.hidden_size, self.config.moe_intermediate_size
        shapes = (count, f, d), (count, f, d), (count, d, f)
        return Matrices(
            *(draw_matrix(key, "e2m1", shape) for key, shape in zip(jax.random.split(key, 3), shapes, strict=True))
        )

    def _draw_numbers(self, key: jax.Array, calls: int) -> Iterator[jax.Array]:
        """Which experts are live in each call: all experts in turn, in a random order."""
        order = jax.random.permutation(key, self.config.n_routed_experts)
        for call in range(calls):
            yield order[(call * self.live + jnp.arange(self.live)) % len(order)]

    def _draw_groups(self, key: jax.Array, calls: int, columns: int) -> tuple[jax.Array, tuple[Group, ...]]:
        for_x, for_experts, for_numbers, for_weights = jax.random.split(key, 4)
        x = jax.random.normal(for_x, (self.live, self.rows, columns), jnp.bfloat16)
        experts = self._draw_experts(for_experts)
        weights = jax.random.uniform(for_weights, x.shape[:2], minval=0.1, maxval=0.5)
        live = jnp.ones(weights.size, bool)

        def group(numbers: jax.Array) -> Group:
            return Group(experts, numbers, weights, jnp.repeat(numbers, self.rows)[:, None], live)

        return x, tuple(map(group, self._draw_numbers(for_numbers, calls)))


@dataclass(frozen=True)
class GateUp(_ExpertsCase):
    """Rows [G, rows, d] to hidden vectors [G, rows, f], with SwiGLU and the routing weight."""

    operation = "mxfp4-gate-up"

    @property
    def _shapes(self) -> tuple[Shape, ...]:
        return (self._gate_up,)

    def draw(self, key: jax.Array, calls: int) -> tuple[jax.Array, tuple[Group, ...]]:
        """Rows bfloat16 [G, rows, d]."""
        return self._draw_groups(key, calls, self.config.hidden_size)

    def apply(self, x: jax.Array, operands: Group, implementation: Implementation) -> jax.Array:
        """The kernel's half; XLA runs the reference."""
        refused = refusal(x, operands.picks, operands.experts)
        if choose(implementation, self.operation, refused) == "xla":
            return self.reference(x, operands)
        experts, _, weights, picks, live = operands
        rows, weights = x.reshape(-1, x.shape[-1]), weights.reshape(-1, 1)
        hidden = gate_up(rows, picks, weights, live, experts, self.config.swiglu_limit)
        return hidden.reshape(*x.shape[:2], -1)

    def reference(self, x: jax.Array, operands: Group) -> jax.Array:
        """One expert after the other; rounded to the dtype of `x` like the layer's reference."""

        def of_one(item: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            number, rows, weights = item
            gate, up = (_expert_product(rows, stack, number) for stack in operands.experts[:2])
            return round_to(weights[:, None] * swiglu(gate, up, self.config.swiglu_limit), rows.dtype)

        return jax.lax.map(of_one, (operands.numbers, x, operands.weights))


@dataclass(frozen=True)
class Down(_ExpertsCase):
    """Hidden vectors [G, rows, f] to outputs [G, rows, d]."""

    operation = "mxfp4-down"

    @property
    def _shapes(self) -> tuple[Shape, ...]:
        return (self._down,)

    def draw(self, key: jax.Array, calls: int) -> tuple[jax.Array, tuple[Group, ...]]:
        """Hidden vectors bfloat16 [G, rows, f]."""
        return self._draw_groups(key, calls, self.config.moe_intermediate_size)

    def apply(self, x: jax.Array, operands: Group, implementation: Implementation) -> jax.Array:
        """The kernel's half; XLA runs the reference."""
        refused = refusal(x, operands.picks, operands.experts)
        if choose(implementation, self.operation, refused) == "xla":
            return self.reference(x, operands)
        experts, _, _, picks, live = operands
        return down(x.reshape(-1, x.shape[-1]), picks, live, experts).reshape(*x.shape[:2], -1)

    def reference(self, x: jax.Array, operands: Group) -> jax.Array:
        """One expert after the other, rounded to the dtype of `x`."""

        def of_one(item: tuple[jax.Array, jax.Array]) -> jax.Array:
            number, rows = item
            return _expert_product(rows, operands.experts.down, number)

        return jax.lax.map(of_one, (operands.numbers, x))


def _expert_product(x: jax.Array, stack: Matrix, number: jax.Array) -> jax.Array:
    matrix = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), stack)
    return round_to(decoded_product(x, matrix), x.dtype)


class Routed(NamedTuple):
    """Operands of a layer: experts, their numbers int32 [N, k] and weights float32 [N, k], and live rows bool [N]."""

    experts: Matrices
    picks: jax.Array
    weights: jax.Array
    live: jax.Array


@dataclass(frozen=True)
class Experts(_ExpertsCase):
    """A whole layer, [N, d] to [N, d]: each row picks k of the live experts, and each live expert gets `rows` rows."""

    operation = "mxfp4-experts"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.live % self.config.num_experts_per_tok:
            k = self.config.num_experts_per_tok
            raise RequestError(f"{self.live} experts cannot be live; rows pick {k} each, so give a multiple of {k}.")

    @property
    def _shapes(self) -> tuple[Shape, ...]:
        return self._gate_up, self._down

    def draw(self, key: jax.Array, calls: int) -> tuple[jax.Array, tuple[Routed, ...]]:
        """Rows bfloat16 [N, d], N = G * rows / k."""
        for_x, for_experts, for_numbers, for_weights = jax.random.split(key, 4)
        k = self.config.num_experts_per_tok
        count = self.live * self.rows // k
        x = jax.random.normal(for_x, (count, self.config.hidden_size), jnp.bfloat16)
        weights = jax.random.uniform(for_weights, (count, k), minval=0.1, maxval=0.5)
        experts, live = self._draw_experts(for_experts), jnp.ones(count, bool)
        return x, tuple(
            Routed(experts, jnp.tile(numbers.reshape(-1, k), (self.rows, 1)), weights, live)
            for numbers in self._draw_numbers(for_numbers, calls)
        )

    def apply(self, x: jax.Array, operands: Routed, implementation: Implementation) -> jax.Array:
        """As models call it: float32 [N, d]."""
        experts, picks, weights, live = operands
        limit = self.config.swiglu_limit
        return mxfp4_experts(x, picks, weights, live, experts, limit, implementation=implementation)

    def reference(self, x: jax.Array, operands: Routed) -> jax.Array:
        """What `pallas_kernels` says it is."""
        experts, picks, weights, live = operands
        return reference.mxfp4_experts(x, picks, weights, live, experts, self.config.swiglu_limit)
