"""What every product and every rounding in this project means."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(axes: str, *operands: jax.Array) -> jax.Array:
    """`jnp.einsum` accumulated in float32: bfloat16 products are exact, float32 ones are taken at full precision.

    The cotangent is rounded to the operands' dtype: a product of float32 and bfloat16 would be taken in float32, at a
    fraction of the speed, for a derivative that ends as bfloat16 anyway.
    """
    return jnp.einsum(axes, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _contract_forward(axes: str, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return contract(axes, *operands), operands


def _contract_backward(axes: str, operands: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    _, pull = jax.vjp(partial(jnp.einsum, axes, precision=jax.lax.Precision.HIGHEST), *operands)
    return pull(cotangent.astype(operands[0].dtype))


contract.defvjp(_contract_forward, _contract_backward)


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds to `dtype`. In a fusion XLA may drop a cast to bfloat16 and back, but not `reduce_precision`."""
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def straight_through(rounding: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`rounding(x)`, of the shape and dtype of `x`, with the derivative of `x` (Bengio et al., arXiv:1308.3432)."""
    return _with_derivative_of(x, rounding(jax.lax.stop_gradient(x)))


@jax.custom_jvp
def _with_derivative_of(x: jax.Array, rounded: jax.Array) -> jax.Array:
    del x
    return rounded


@_with_derivative_of.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]
