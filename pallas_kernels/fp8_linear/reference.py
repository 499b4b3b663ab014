"""What the operation means, and the path on machines without a kernel for it."""

import jax

from pallas_kernels.block_scaled import BlockScaled, Master
from pallas_kernels.fake_quant import LINEAR_BLOCK, fake_e4m3
from pallas_kernels.precision import contract


def grouped_fp8_linear(x: jax.Array, weight: BlockScaled | Master, quantised: bool = False) -> jax.Array:
    """Rows times packed FP8 matrices that lie on top of each other; each has rows of its own.

    Args:
        x: float32 or bfloat16 [..., groups, in].
        weight: "e4m3", logical shape [groups * out, in], packed or in training.
        quantised: `x` first goes through E4M3 with one power of two for 128 channels.

    Returns:
        float32 [..., groups, out], accumulated in float32. Differentiable with respect to `x`, and to a matrix in
        training.
    """
    groups, columns = x.shape[-2:]
    matrices = weight.decode(x.dtype).reshape(groups, -1, columns)
    return contract("...gi,goi->...go", fake_e4m3(x, LINEAR_BLOCK) if quantised else x, matrices)
