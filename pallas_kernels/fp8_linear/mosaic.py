"""The operation for few rows on Hopper GPUs: a weight goes once from GMEM to registers and into a product there.

Features are on the M side of wgmma and rows on its N side. A byte of the checkpoint is an e4m3 number, and one
instruction makes two of them float16; and bfloat16 rows, too, are float16 once they are divided, 128 columns at a time,
by powers of two of their own (but for what is below 2^-31 of the largest of the 128). So products are exact, the tensor
cores add up 128 columns in float32, and what is left to do for the scales of both is to multiply each such sum. The
powers of quantised rows are those of their quantisation.

Which column stands where along K is free as long as weights and rows agree. It is chosen so that a thread needs 16
neighbouring bytes of a row for four steps of wgmma, and copies to SMEM only what itself reads: weights need no barrier
and no tensor map, and a launch has little to set up. The latency hides behind the chunks that a warpgroup asks for
ahead of the one it multiplies.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.block_scaled import BLOCKS, BlockScaled, Matrix
from pallas_kernels.fp8_linear import ptx
from pallas_kernels.fp8_linear.plan import CHUNK, FEATURES, SLOT_BYTES, THREAD_BLOCKS, WARPGROUPS, Plan, plan_of

MOST_ROWS = 512  # by choice: every 32 rows are a pass over the weights, and XLA decodes them once


class _Place(NamedTuple):
    """Where a unit lies, int32 scalars: its first row, its matrix, its first feature among all, its slice."""

    row: jax.Array
    group: jax.Array
    feature: jax.Array
    slice: jax.Array


def refusal(x: jax.Array, weight: Matrix) -> str | None:
    """Why the kernel does not take x [..., groups, in] and weight [groups * out, in], as a clause; None if it does."""
    if not isinstance(weight, BlockScaled) or weight.format != "e4m3":
        return "it multiplies weights that are packed as e4m3, and these are in training or not packed so"
    *leading, groups, columns = x.shape
    rows, features = math.prod(leading), weight.shape[0] // groups
    if x.dtype != jnp.bfloat16:
        return f"it takes bfloat16 rows, and these are {x.dtype}"
    if features % BLOCKS["e4m3"][0] or columns % (CHUNK * WARPGROUPS):
        multiple = CHUNK * WARPGROUPS
        return f"it takes matrices of a multiple of 128 by one of {multiple}, and this is {features} x {columns}"
    if not 1 <= rows <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} rows, and these are {rows}"
    return None


@partial(jax.jit, static_argnums=2)  # so that a model lowers it once for all layers that ask for the same
def grouped_fp8_linear(x: jax.Array, weight: BlockScaled, quantised: bool) -> jax.Array:
    """bfloat16 [rows, groups, in] and "e4m3" [groups * out, in], for which there is no `refusal`.

    Returns:
        float32 [rows, groups, out].
    """
    rows, groups, columns = x.shape
    plan = plan_of(rows, groups, weight.shape[0] // groups, columns)
    sums = kernel(plan, quantised)(x, weight.payload, weight.scales)
    return reduce(jnp.add, [sums[number] for number in range(plan.slices)]).reshape(rows, groups, plan.features)


def kernel(plan: Plan, quantised: bool) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """f(x bfloat16 [rows, groups, columns], payload, scales) -> float32 [slices, rows, groups * features]."""
    blocks = min(THREAD_BLOCKS, plan.units)
    decoded = {"a": hopper.registers(ptx.FRAGMENTS, jnp.uint32), "scale": hopper.scalar(jnp.float32)}
    total = hopper.registers(plan.tile // 2, jnp.float32)

    def body(x: Any, payload: Any, scales: Any, out: Any, ring: Any, panel: Any, powers: Any, sums: Any) -> None:
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        first, last = block * plan.units // blocks, (block + 1) * plan.units // blocks
        ring, panel, powers = ring.at[warpgroup], panel.at[warpgroup], powers.at[warpgroup]
        matrix, rows = {"payload": payload, "scales": scales}, {"panel": panel, "powers": powers}

        def column(place: _Place, chunk: jax.Array) -> jax.Array:
            """Warpgroups take turns, so that together they read 512 bytes of a row."""
            return ((place.slice * plan.chunks + chunk) * WARPGROUPS + warpgroup) * CHUNK

        def fetch(number: jax.Array) -> None:
            """Asks for a chunk, numbered from the first one of the thread block."""
            unit, chunk = first + number // plan.chunks, number % plan.chunks
            place, slot, wanted = _place(plan, unit), ring.at[number % plan.ahead], (unit < last).astype(jnp.int32)
            where = {"feature": place.feature, "column": column(place, chunk), "wanted": wanted}
            hopper.run(ptx.fetch(plan), None, slot=slot, **matrix, **where)

        def multiply(number: jax.Array, chunk: jax.Array, t: jax.Array) -> jax.Array:
            a, scale = hopper.run(ptx.decode(plan), decoded, slot=ring.at[number % plan.ahead])
            fetch(number + plan.ahead)
            (t,) = hopper.run(ptx.multiply(plan), {"t": total}, **rows, a=a, scale=scale, chunk=chunk, t=t)
            return t

        def stage(place: _Place) -> None:
            where = {"row": place.row, "group": place.group, "column": column(place, jnp.int32(0))}
            hopper.run(ptx.stage(plan, quantised), None, x=x, **rows, **where)

        def work(index: jax.Array, carry: None) -> None:
            unit = first + index
            place = _place(plan, unit)
            pl.when((index > 0) & (unit % plan.units_of_panel == 0))(lambda: stage(place))
            (t,) = hopper.run(ptx.zeros(plan), {"t": total})
            t = jax.lax.fori_loop(0, plan.chunks, lambda chunk, t: multiply(index * plan.chunks + chunk, chunk, t), t)
            where = {"row": place.row, "feature": place.feature, "slice": place.slice}
            hopper.run(ptx.finish(plan), None, t=t, sums=sums.at[unit % 2], out=out, **where)

        fetch(jnp.int32(0))
        stage(_place(plan, first))  # now: behind all the weights of a ring, rows would wait for microseconds
        for number in range(1, plan.ahead):
            fetch(jnp.int32(number))
        jax.lax.fori_loop(0, last - first, work, None)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.slices, plan.rows, plan.groups * plan.features), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, plan.ahead, SLOT_BYTES), jnp.uint8),
            plgpu.SMEM((WARPGROUPS, plan.panel_size), jnp.float16),
            plgpu.SMEM((WARPGROUPS, plan.chunks * plan.tile), jnp.float32),
            plgpu.SMEM((2, plan.sums_size), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def _place(plan: Plan, unit: jax.Array) -> _Place:
    """Of units, features change fastest, then slices, then groups, then rows."""
    panel, tile = unit // plan.units_of_panel, unit % plan.units_of_panel
    group = panel // plan.slices % plan.groups
    return _Place(
        row=panel // (plan.slices * plan.groups) * plan.tile,
        group=group,
        feature=group * plan.features + tile * FEATURES,
        slice=panel % plan.slices,
    )
