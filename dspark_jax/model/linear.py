"""Matrix products and norms that all layers share."""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.model.numerics import Numerics
from dspark_jax.model.rows import Setting
from dspark_jax.model.weights import Packed
from pallas_kernels.fp8_linear import fp8_linear
from pallas_kernels.precision import contract


def project(x: jax.Array, weight: nnx.Param | jax.Array) -> jax.Array:
    """An unquantised matrix: [..., in] times [out, in] -> float32 [..., out], accumulated in float32."""
    return contract("...i,oi->...o", x, weight[...].astype(x.dtype))


def linear(x: jax.Array, weight: Packed, setting: Setting) -> jax.Array:
    """A quantised matrix: [..., in] -> activations [..., out]."""
    numerics = setting.numerics
    return numerics.round(
        fp8_linear(x, weight.get_value(), numerics.quantise_linear_inputs, setting.linear_implementation)
    )


def rms_norm(x: jax.Array, weight: nnx.Param, eps: float, numerics: Numerics) -> jax.Array:
    """RMSNorm over the last axis in float32, times the weight, rounded once."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return numerics.round(y * weight[...].astype(jnp.float32))
