"""What every product and every rounding in this project means."""

import jax
import jax.numpy as jnp


def contract(axes: str, *operands: jax.Array) -> jax.Array:
    """`jnp.einsum` accumulated in float32: bfloat16 products are exact, float32 ones are taken at full precision."""
    return jnp.einsum(axes, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds to `dtype`. In a fusion XLA may drop a cast to bfloat16 and back, but not `reduce_precision`."""
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


@jax.custom_jvp
def straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded`, with the derivative of `x`; both of one shape and dtype (Bengio et al. 2013, arXiv:1308.3432)."""
    del x
    return rounded


@straight_through.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]
