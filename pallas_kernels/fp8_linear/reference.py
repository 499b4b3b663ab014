"""What the operation means, and the path on machines without a kernel for it."""

import jax
import jax.numpy as jnp

from pallas_kernels.block_scaled import BlockScaled


def fp8_linear(x: jax.Array, weight: BlockScaled) -> jax.Array:
    """Rows times a packed matrix, decoded to the dtype of the rows (exact for bfloat16, too).

    Args:
        x: float32 or bfloat16 [..., in].
        weight: logical shape [out, in].

    Returns:
        float32 [..., out], accumulated in float32. Differentiable with respect to `x`.
    """
    return jnp.einsum(
        "...i,oi->...o",
        x,
        weight.decode(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
