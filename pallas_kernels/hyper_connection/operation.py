"""The operations as models call them: through XLA or as one kernel, on one device or on a mesh."""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import PartitionSpec

from pallas_kernels.hyper_connection import mosaic, reference
from pallas_kernels.hyper_connection.reference import Constants
from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.partition import Partition

Update = tuple[jax.Array, jax.Array, jax.Array]


def read(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    constants: Constants,
    *,
    implementation: Implementation | None = None,
    partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a half-block reads, and how it writes; `reference.read` is what it means.

    Args:
        streams, fn, base, scale, constants: as for the reference.
        implementation: see `choose`.
        partition: None for one device; on a mesh every device takes its own rows.

    Raises:
        ValueError: "mosaic" was asked for and the kernel does not take these operands.
    """
    run = _site(streams, implementation, partition)
    x, post, comb = run(constants, streams, None, fn, base, scale)
    return x, post, comb


def write_then_read(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    constants: Constants,
    *,
    implementation: Implementation | None = None,
    partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`reference.write` of `y` [..., d], `post` and `comb`, and `read` of the streams that it gives: one launch.

    Returns:
        The new streams, and what `read` returns.
    """
    run = _site(streams, implementation, partition)
    written, x, post, comb = run(constants, streams, (y, post, comb), fn, base, scale)
    return written, x, post, comb


def _site(
    streams: jax.Array, implementation: Implementation | None, partition: Partition | None
) -> Callable[..., tuple[jax.Array, ...]]:
    if choose(implementation, "hyper_connection", mosaic.refusal(streams)) == "xla":
        return _reference  # which XLA splits over a mesh by itself
    if partition is None:
        return _kernel
    rows, whole = PartitionSpec(partition.rows_of(streams.shape[0])), PartitionSpec()

    def run(constants: Constants, *operands: jax.Array | Update | None) -> tuple[jax.Array, ...]:
        return jax.shard_map(
            partial(_kernel, constants),
            mesh=partition.mesh,
            in_specs=(rows, rows, whole, whole, whole),
            out_specs=rows,
            check_vma=False,  # a kernel's outputs do not say over which axes they vary
        )(*operands)

    return run


def _reference(
    constants: Constants,
    streams: jax.Array,
    update: Update | None,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, ...]:
    if update is None:
        return reference.read(streams, fn, base, scale, constants)
    y, post, comb = update
    streams = reference.write(y, streams, post, comb)
    return streams, *reference.read(streams, fn, base, scale, constants)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(
    constants: Constants,
    streams: jax.Array,
    update: Update | None,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, ...]:
    leading = streams.ndim - 2

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[leading:])

    rows, update = jax.tree.map(flat, (streams, update))
    results = mosaic.site(rows, update, fn, base, scale, constants, mosaic.tiling(rows.shape[0]))
    return tuple(x.reshape(*streams.shape[:leading], *x.shape[1:]) for x in results)


def _kernel_forward(constants: Constants, *operands: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    return _kernel(constants, *operands), operands


def _kernel_backward(
    constants: Constants, operands: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The gradient of the reference, whose forward pass it runs again."""
    _, pull = jax.vjp(partial(_reference, constants), *operands)
    return pull(cotangents)


_kernel.defvjp(_kernel_forward, _kernel_backward)
