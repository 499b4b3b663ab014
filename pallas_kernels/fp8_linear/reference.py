"""What the operation means, and the path on machines without a kernel for it."""

import jax

from pallas_kernels.block_scaled import BlockScaled, decoded_product


def fp8_linear(x: jax.Array, weight: BlockScaled) -> jax.Array:
    """Rows times a packed FP8 matrix.

    Args:
        x: float32 or bfloat16 [..., in].
        weight: "e4m3", logical shape [out, in].

    Returns:
        float32 [..., out], accumulated in float32. Differentiable with respect to `x`.
    """
    return decoded_product(x, weight)
