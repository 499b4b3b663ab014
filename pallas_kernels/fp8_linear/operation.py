"""The operation as models call it."""

from functools import partial

import jax

from pallas_kernels.block_scaled import BlockScaled, Master
from pallas_kernels.fp8_linear import mosaic, reference
from pallas_kernels.implementation import Implementation, choose


def fp8_linear(
    x: jax.Array, weight: BlockScaled | Master, quantised: bool = False, implementation: Implementation | None = None
) -> jax.Array:
    """Rows times a packed FP8 matrix.

    Args:
        x: float32 or bfloat16 [..., in].
        weight: "e4m3", logical shape [out, in], packed or in training.
        quantised: `x` first goes through E4M3 with one power of two for 128 channels.
        implementation: see `choose`.

    Returns:
        float32 [..., out].
    """
    return grouped_fp8_linear(x[..., None, :], weight, quantised, implementation)[..., 0, :]


def grouped_fp8_linear(
    x: jax.Array, weight: BlockScaled | Master, quantised: bool = False, implementation: Implementation | None = None
) -> jax.Array:
    """Rows times packed FP8 matrices that lie on top of each other; `reference.grouped_fp8_linear` is what it means.

    Args:
        x, weight, quantised: as for the reference.
        implementation: see `choose`.

    Returns:
        float32 [..., groups, out].
    """
    chosen = choose(implementation, "fp8_linear", mosaic.refusal(x, weight))
    if chosen == "xla" or isinstance(weight, Master):
        return reference.grouped_fp8_linear(x, weight, quantised)
    return _kernel(x, weight, quantised)


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
