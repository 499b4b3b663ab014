"""What the operation means, and the path on machines without a kernel for it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_scaled import Master, Matrix, decoded_product
from pallas_kernels.fake_quant import LINEAR_BLOCK, fake_e4m3
from pallas_kernels.precision import round_to


class Matrices(NamedTuple):
    """Experts, packed or plain or trained: `gate` and `up` [E, f, d], `down` [E, d, f]; without E for a single one."""

    gate: Matrix
    up: Matrix
    down: Matrix


def mxfp4_experts(
    x: jax.Array,
    picks: jax.Array,
    weights: jax.Array,
    live: jax.Array,
    experts: Matrices,
    limit: float,
    quantised: bool = False,
) -> jax.Array:
    """Weighted sum of the picked experts of each row.

    Experts are visited one by one in ascending order, each with all rows, so that a row's sum has one order whatever
    the other rows pick; an expert that no live row picked is not decoded.

    Args:
        x: float32 or bfloat16 [N, d].
        picks: int32 [N, k], distinct experts of each row; E, which may repeat, is none.
        weights: float32 [N, k], multiplied into the hidden vector before the down matrix.
        live: bool [N]; a dead row wakes no expert and gets zeros.
        experts: all E of them.
        limit: clamps the up product to +-limit and the gate product to at most limit.
        quantised: what the matrices see, `x` and the rounded hidden vector, first goes through E4M3 with one power of
            two for 128 channels.

    Returns:
        float32 [N, d]. Products are rounded to the dtype of `x`; sums are float32.
    """
    seen = fake_e4m3(x, LINEAR_BLOCK) if quantised else x
    count = experts.gate.shape[0]
    awake = jnp.zeros(count, bool).at[jnp.where(live[:, None], picks, count)].set(True, mode="drop")
    visits = jnp.argsort(~awake, stable=True)[: min(count, picks.size)]  # awake experts first, in ascending order

    @jax.checkpoint  # a gradient would otherwise keep every decoded expert, and with the condition inside, all stacks
    def contribution(number: jax.Array, expert: Matrices | None) -> jax.Array:
        def visit() -> jax.Array:
            chosen = (picks == number) & live[:, None]
            weight = jnp.sum(jnp.where(chosen, weights, 0), axis=-1)
            out = _one_expert(seen, weight, expert or _at(experts, number), limit, quantised)
            return jnp.where(jnp.any(chosen, axis=-1, keepdims=True), out, 0)

        return jax.lax.cond(awake[number], visit, lambda: jnp.zeros(x.shape, jnp.float32))

    def add(total: jax.Array, item: tuple[jax.Array, Matrices | None]) -> tuple[jax.Array, None]:
        return total + contribution(*item), None

    # The scan itself hands out masters, so that their gradients are stacked once: looked up by its number, every expert
    # would add a stack of zeros but for its own.
    trained = isinstance(experts.gate, Master)
    items = (jnp.arange(count, dtype=jnp.int32), experts) if trained else (visits.astype(jnp.int32), None)
    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), items)
    return total


def _at(experts: Matrices, number: jax.Array) -> Matrices:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), experts)


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, +-limit), in float32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def _one_expert(
    x: jax.Array,
    weight: jax.Array,
    expert: Matrices,
    limit: float,
    quantised: bool,
) -> jax.Array:
    gate = round_to(decoded_product(x, expert.gate), x.dtype)
    up = round_to(decoded_product(x, expert.up), x.dtype)
    hidden = round_to(weight[:, None] * swiglu(gate, up, limit), x.dtype)
    seen = fake_e4m3(hidden, LINEAR_BLOCK) if quantised else hidden
    return round_to(decoded_product(seen, expert.down), x.dtype).astype(jnp.float32)
