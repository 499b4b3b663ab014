"""What the operation means, and the path on machines without a kernel for it."""

import jax

from pallas_kernels.block_scaled import BlockScaled, Master, decoded_product
from pallas_kernels.fake_quant import LINEAR_BLOCK, fake_e4m3


def fp8_linear(x: jax.Array, weight: BlockScaled | Master, quantised: bool = False) -> jax.Array:
    """Rows times a packed FP8 matrix.

    Args:
        x: float32 or bfloat16 [..., in].
        weight: "e4m3", logical shape [out, in], packed or in training.
        quantised: `x` first goes through E4M3 with one power of two for 128 channels.

    Returns:
        float32 [..., out], accumulated in float32. Differentiable with respect to `x`, and to a matrix in training.
    """
    return decoded_product(fake_e4m3(x, LINEAR_BLOCK) if quantised else x, weight)
