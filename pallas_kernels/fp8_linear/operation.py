"""The operation as models call it."""

import jax

from pallas_kernels.block_scaled import BlockScaled, Master
from pallas_kernels.fp8_linear import reference
from pallas_kernels.implementation import Implementation, choose


def fp8_linear(
    x: jax.Array, weight: BlockScaled | Master, quantised: bool = False, implementation: Implementation | None = None
) -> jax.Array:
    """Rows times a packed FP8 matrix; `reference.fp8_linear` is what it means.

    Args:
        x, weight, quantised: as for the reference.
        implementation: see `choose`.

    Returns:
        float32 [..., out].
    """
    choose(implementation, "fp8_linear", "it is not written yet")
    return reference.fp8_linear(x, weight, quantised)
