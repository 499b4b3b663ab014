"""The operation as models call it: on one device, or on a mesh where every device runs the experts that it holds."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec

from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.mxfp4_experts import mosaic, reference
from pallas_kernels.mxfp4_experts.reference import Matrices
from pallas_kernels.partition import Partition


def mxfp4_experts(
    x: jax.Array,
    picks: jax.Array,
    weights: jax.Array,
    live: jax.Array,
    experts: Matrices,
    limit: float,
    quantised: bool = False,
    partition: Partition | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Weighted sum of the picked experts of each row; `reference.mxfp4_experts` is what it means.

    Args:
        x: float32 or bfloat16 [..., d].
        picks: int32 [..., k].
        weights: float32 [..., k].
        live: bool [...].
        experts, limit, quantised: as for the reference.
        partition: None for one device. On a mesh a device visits only the experts of its own that its own rows picked,
            and what rows get from experts elsewhere is added in float32: no device reads another's experts.
        implementation: see `choose`.

    Returns:
        float32 [..., d].

    Raises:
        ValueError: the shapes of operands do not fit, or see `choose`.
    """
    _check_shapes(x, picks, weights, live, experts)

    def run(x: jax.Array, picks: jax.Array, weights: jax.Array, live: jax.Array, experts: Matrices) -> jax.Array:
        """On one device, of what it holds."""
        chosen = choose(implementation, "mxfp4_experts", mosaic.refusal(x, picks, experts))
        one_device = _kernel if chosen == "mosaic" else reference.mxfp4_experts

        def flat(values: jax.Array) -> jax.Array:
            return values.reshape(-1, values.shape[-1])

        rows = flat(x), flat(picks), flat(weights), live.reshape(-1)
        return one_device(*rows, experts, limit, quantised).reshape(x.shape)

    if partition is None:
        return run(x, picks, weights, live, experts)
    axes = partition.experts

    def run_shard(x: jax.Array, picks: jax.Array, weights: jax.Array, live: jax.Array, experts: Matrices) -> jax.Array:
        held = experts.gate.shape[0]
        own = picks - (held * jax.lax.axis_index(axes) if axes else 0)
        own = jnp.where((own >= 0) & (own < held), own, held)
        return jax.lax.psum(run(x, own, weights, live, experts), axes)

    rows, stack = PartitionSpec(partition.rows_of(x.shape[0])), PartitionSpec(axes)
    shards = jax.shard_map(
        run_shard,
        mesh=partition.mesh,
        in_specs=(rows, rows, rows, rows, stack),
        out_specs=rows,
        check_vma=False,  # a kernel's outputs do not say over which axes they vary
    )
    return shards(x, picks, weights, live, experts)


def _check_shapes(x: jax.Array, picks: jax.Array, weights: jax.Array, live: jax.Array, experts: Matrices) -> None:
    *rows, width = x.shape
    if [*picks.shape[:-1]] != rows or picks.shape != weights.shape or [*live.shape] != rows:
        raise ValueError(
            f"There are {rows} rows, and picks are {[*picks.shape]}, weights {[*weights.shape]}, live {[*live.shape]}; "
            "picks and weights have a last axis more than rows, and live has none."
        )
    count, hidden, _ = experts.gate.shape
    shapes = (count, hidden, width), (count, hidden, width), (count, width, hidden)
    if tuple(matrix.shape for matrix in experts) != shapes:
        told = ", ".join(f"{name} {[*matrix.shape]}" for name, matrix in experts._asdict().items())
        raise ValueError(f"Rows have {width} channels, and experts are {told}; expected {[*map(list, shapes)]}.")


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _kernel(
    x: jax.Array,
    picks: jax.Array,
    weights: jax.Array,
    live: jax.Array,
    experts: Matrices,
    limit: float,
    quantised: bool,
) -> jax.Array:
    run = partial(mosaic.mxfp4_experts, limit=limit, quantised=quantised)
    return sequential_vmap(run)(x, picks, weights, live, experts)  # of launches, each has a barrier of its own


def _kernel_forward(*operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _kernel(*operands), operands[:5]


def _kernel_backward(limit: float, quantised: bool, operands: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    x, picks, weights, live, experts = operands

    def layer(x: jax.Array, weights: jax.Array) -> jax.Array:
        return reference.mxfp4_experts(x, picks, weights, live, experts, limit, quantised)

    _, pull = jax.vjp(layer, x, weights)
    of_x, of_weights = pull(cotangent)
    return of_x, None, of_weights, None, None


_kernel.defvjp(_kernel_forward, _kernel_backward)
