"""The operation as models call it: on one device, or on a mesh where every device runs the experts that it holds."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.mxfp4_experts import reference
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
    """
    choose(implementation, "mxfp4_experts", "it is not written yet")

    def run(x: jax.Array, picks: jax.Array, weights: jax.Array, live: jax.Array, experts: Matrices) -> jax.Array:
        def flat(values: jax.Array) -> jax.Array:
            return values.reshape(-1, values.shape[-1])

        rows = flat(x), flat(picks), flat(weights), live.reshape(-1)
        return reference.mxfp4_experts(*rows, experts, limit, quantised).reshape(x.shape)

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
