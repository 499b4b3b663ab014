"""What the operation means, and the path on machines without a kernel for it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.block_scaled import BlockScaled
from pallas_kernels.fp8_linear.reference import fp8_linear as matmul
from pallas_kernels.rounding import round_to


def mxfp4_experts(
    x: jax.Array,
    picks: jax.Array,
    weights: jax.Array,
    live: jax.Array,
    gate: BlockScaled,
    up: BlockScaled,
    down: BlockScaled,
    limit: float,
    hidden_input: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Weighted sum of the picked experts of each row.

    Experts are visited one by one in ascending order, each with all rows, so that a row's sum has one order whatever
    the other rows pick; an expert that no live row picked is not decoded.

    Args:
        x: float32 or bfloat16 [N, d], as the gate and up matrices see it.
        picks: int32 [N, k], distinct experts of each row.
        weights: float32 [N, k], multiplied into the hidden vector before the down matrix.
        live: bool [N]; a dead row wakes no expert and gets zeros.
        gate, up: logical shape [E, f, d].
        down: logical shape [E, d, f].
        limit: clamps the up product to +-limit and the gate product to at most limit.
        hidden_input: maps the rounded hidden vector [N, f] to what the down matrix sees.

    Returns:
        float32 [N, d]. Products are rounded to the dtype of `x`; sums are float32.
    """
    experts = gate.shape[0]
    awake = jnp.zeros(experts, bool).at[jnp.where(live[:, None], picks, experts)].set(True, mode="drop")
    slots = min(experts, picks.size)
    visits = jnp.argsort(~awake, stable=True)[:slots]  # awake experts first, both groups ascending

    def visit(expert: jax.Array) -> jax.Array:
        own = [
            jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), matrices)
            for matrices in (gate, up, down)
        ]
        chosen = (picks == expert) & live[:, None]
        weight = jnp.sum(jnp.where(chosen, weights, 0), axis=-1)
        return jnp.where(
            jnp.any(chosen, axis=-1, keepdims=True), _expert(x, weight, own[0], own[1], own[2], limit, hidden_input), 0
        )

    def add(total: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(awake[expert], lambda: total + visit(expert), lambda: total), None

    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), visits)
    return total


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, +-limit), in float32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def _expert(
    x: jax.Array,
    weight: jax.Array,
    gate: BlockScaled,
    up: BlockScaled,
    down: BlockScaled,
    limit: float,
    hidden_input: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    hidden = swiglu(round_to(matmul(x, gate), x.dtype), round_to(matmul(x, up), x.dtype), limit)
    hidden = round_to(weight[:, None] * hidden, x.dtype)
    return round_to(matmul(hidden_input(hidden), down), x.dtype).astype(jnp.float32)
