"""What the operations mean, and the path on machines without a kernel for them."""

import jax

from pallas_kernels.block_scaled import Matrix, decoded_product
from pallas_kernels.fake_quant import LINEAR_BLOCK, fake_e4m3
from pallas_kernels.precision import contract


def fp8_linear(x: jax.Array, weight: Matrix, quantised: bool = False) -> jax.Array:
    """Rows times a packed FP8 matrix.

    Args:
        x: float32 or bfloat16 [..., in].
        weight: "e4m3", logical shape [out, in], packed or in training.
        quantised: `x` first goes through E4M3 with one power of two for 128 channels.

    Returns:
        float32 [..., out], accumulated in float32. Differentiable with respect to `x`, and to a matrix in training.
    """
    return decoded_product(_seen(x, quantised), weight)


def grouped_fp8_linear(x: jax.Array, weight: Matrix, quantised: bool = False) -> jax.Array:
    """Rows times packed FP8 matrices that lie on top of each other, each of which has rows of its own.

    Args:
        x: float32 or bfloat16 [..., groups, in].
        weight: "e4m3", logical shape [groups * out, in], packed or in training.
        quantised: as for `fp8_linear`.

    Returns:
        float32 [..., groups, out], like that of `fp8_linear`.
    """
    matrices = weight.decode(x.dtype).reshape(x.shape[-2], -1, x.shape[-1])
    return contract("...gi,goi->...go", _seen(x, quantised), matrices)


def _seen(x: jax.Array, quantised: bool) -> jax.Array:
    return fake_e4m3(x, LINEAR_BLOCK) if quantised else x
