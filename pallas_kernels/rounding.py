"""Rounding points that the compiler keeps."""

import jax
import jax.numpy as jnp


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds to `dtype`. In a fusion XLA may drop a cast to bfloat16 and back, but not `reduce_precision`."""
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
