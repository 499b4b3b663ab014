"""The operations as models call them."""

from functools import partial

import jax

from pallas_kernels.block_scaled import BlockScaled, Matrix
from pallas_kernels.fp8_linear import mosaic, reference
from pallas_kernels.implementation import Implementation, choose


def fp8_linear(
    x: jax.Array, weight: Matrix, quantised: bool = False, implementation: Implementation | None = None
) -> jax.Array:
    """Rows times a packed FP8 matrix; `reference.fp8_linear` is what it means.

    Args:
        x, weight, quantised: as for the reference.
        implementation: see `choose`.

    Returns:
        float32 [..., out].
    """
    rows = x[..., None, :]
    if packed := _for_kernel(rows, weight, implementation):
        return _kernel(rows, packed, quantised)[..., 0, :]
    return reference.fp8_linear(x, weight, quantised)


def grouped_fp8_linear(
    x: jax.Array, weight: Matrix, quantised: bool = False, implementation: Implementation | None = None
) -> jax.Array:
    """Rows times packed FP8 matrices, each with rows of its own; `reference.grouped_fp8_linear` is what it means.

    Args:
        x, weight, quantised: as for the reference.
        implementation: see `choose`.

    Returns:
        float32 [..., groups, out].
    """
    if packed := _for_kernel(x, weight, implementation):
        return _kernel(x, packed, quantised)
    return reference.grouped_fp8_linear(x, weight, quantised)


def _for_kernel(x: jax.Array, weight: Matrix, implementation: Implementation | None) -> BlockScaled | None:
    """The weight if the kernel is to run."""
    chosen = choose(implementation, "fp8_linear", mosaic.refusal(x, weight))
    return weight if chosen == "mosaic" and isinstance(weight, BlockScaled) else None


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _kernel(x: jax.Array, weight: BlockScaled, quantised: bool) -> jax.Array:
    rows = x.reshape(-1, *x.shape[-2:])
    return mosaic.grouped_fp8_linear(rows, weight, quantised).reshape(*x.shape[:-1], -1)


def _kernel_forward(
    x: jax.Array, weight: BlockScaled, quantised: bool
) -> tuple[jax.Array, tuple[jax.Array, BlockScaled]]:
    return _kernel(x, weight, quantised), (x, weight)


def _kernel_backward(
    quantised: bool, operands: tuple[jax.Array, BlockScaled], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    x, weight = operands
    _, pull = jax.vjp(lambda x: reference.grouped_fp8_linear(x, weight, quantised), x)
    return pull(cotangent)[0], None


_kernel.defvjp(_kernel_forward, _kernel_backward)
