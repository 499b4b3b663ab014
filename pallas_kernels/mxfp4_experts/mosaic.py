"""The layer of experts in one launch, for Hopper GPUs: every packed weight is read once and decoded in registers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_scaled import BlockScaled
from pallas_kernels import hopper
from pallas_kernels.hopper import registers
from pallas_kernels.mxfp4_experts import ptx as text
from pallas_kernels.mxfp4_experts.ptx import CHUNK, GROUP, PITCH, ROWS, SCALES, TILE
from pallas_kernels.mxfp4_experts.reference import Matrices

BLOCKS = 132
"""Of the persistent grid, all of which run at once: the multiprocessors of an H100 or H200."""
WARPGROUPS = 4
STAGES = 4
"""Chunks of 8 KB that a warpgroup has under way: 128 KB of weights for a multiprocessor."""
LARGEST_WIDTH = 4096
"""Columns whose two parts fit into shared memory beside the weights."""
WIDTH_STEP = WARPGROUPS * CHUNK


class Slots(NamedTuple):
    """Pairs (a row and one of its picks) in groups of up to eight that share an expert.

    Attributes:
        experts: int32 [S + 1], the expert of each slot in ascending order, and the number of slots that are used.
        pairs: int32 [S, 8], numbers row * k + pick; -1 for none.
    """

    experts: jax.Array
    pairs: jax.Array


def slots_of(picks: jax.Array, live: jax.Array, experts: int) -> Slots:
    """Sorts the live pairs into slots.

    Args:
        picks: int32 [N, k]; what is no number of an expert is none.
        live: bool [N].
        experts: E.
    """
    size = picks.size
    wanted = live[:, None] & (picks >= 0) & (picks < experts)
    expert = jnp.where(wanted, picks, experts).reshape(-1)
    pair = jnp.arange(size, dtype=jnp.int32)
    number = jnp.arange(experts, dtype=jnp.int32)

    def count(condition: jax.Array, axis: int) -> jax.Array:
        return jnp.sum(condition, axis=axis, dtype=jnp.int32)

    used = -(-count(expert == number[:, None], 1) // ROWS)
    ends = jnp.sum(jnp.where(number <= number[:, None], used, 0), axis=1, dtype=jnp.int32)
    rank = count((expert == expert[:, None]) & (pair < pair[:, None]), 1)
    place = jnp.take(ends - used, expert, mode="clip") * ROWS + rank
    place = jnp.where(wanted.reshape(-1), place, -1)

    most = min(size, (size + (ROWS - 1) * min(experts, size)) // ROWS)
    slot = jnp.arange(most, dtype=jnp.int32)
    places = jnp.arange(most * ROWS, dtype=jnp.int32)
    pairs = jnp.max(jnp.where(place == places[:, None], pair, -1), axis=1).reshape(most, ROWS)
    return Slots(jnp.append(count(ends <= slot[:, None], 1), ends[-1]), pairs)


def refusal(x: jax.Array, experts: Matrices) -> str | None:
    """Why the kernel does not take these operands; None if it does."""
    if not isinstance(experts.gate, BlockScaled):
        return "experts in training are not packed"
    if x.dtype != jnp.bfloat16:
        return f"activations are {x.dtype}, not bfloat16"
    _, hidden, width = experts.gate.shape
    for name, size in (("activations", width), ("hidden vectors", hidden)):
        if size % WIDTH_STEP or size > LARGEST_WIDTH:
            return f"{name} have {size} channels, and the kernel takes multiples of {WIDTH_STEP} up to {LARGEST_WIDTH}"
    return None


def mxfp4_experts(
    x: jax.Array,
    picks: jax.Array,
    weights: jax.Array,
    live: jax.Array,
    experts: Matrices,
    limit: float,
    quantised: bool = False,
) -> jax.Array:
    """`reference.mxfp4_experts` for operands that `refusal` does not name; a row's picks are added in their order."""
    count, hidden, width = experts.gate.shape
    slots = slots_of(picks, live, count)
    shape = Shape(width, hidden, picks.shape[1], picks.size, len(slots.pairs), limit, quantised)
    packed = [array for matrix in experts for array in (matrix.payload, matrix.scales)]
    _, outputs = layer(shape)(x, weights.reshape(-1), *slots, *packed)
    outputs = outputs.reshape(*picks.shape, width).astype(jnp.float32)
    chosen = live[:, None] & (picks >= 0) & (picks < count)
    return jnp.sum(jnp.where(chosen[..., None], outputs, 0), axis=1)


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for: sizes of the layer, pairs of a row, slots at most, and `reference`'s settings."""

    width: int
    hidden: int
    picks: int
    pairs: int
    slots: int
    limit: float
    quantised: bool


@dataclass(frozen=True)
class _Product:
    """One of the two products, cut into tiles of 64 matrix rows and a slot; a block has a range of them.

    Attributes:
        columns: of the matrices.
        outputs: of the product, in all.
        rows: outputs of a tile: 32 where it holds gate and up, else 64.
        picks: pairs of an input row.
    """

    columns: int
    outputs: int
    rows: int
    picks: int

    @property
    def tiles(self) -> int:
        """Of a slot."""
        return self.outputs // self.rows

    @property
    def share(self) -> int:
        """Columns of a warpgroup."""
        return self.columns // WARPGROUPS

    @property
    def chunks(self) -> int:
        """Of a tile, for each warpgroup."""
        return self.share // CHUNK


_SWIZZLED = (plgpu.TilingTransform((8, CHUNK // 2)), plgpu.SwizzleTransform(CHUNK // 2))
_SUMS = {"sums": registers(4, jnp.float32)}


@cache
def layer(shape: Shape) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel: f(x, weights, *slots, and payload and scales of gate, up and down) -> (hidden, outputs).

    x bf16 [N, d], weights f32 [P]; hidden bf16 [P, f] and outputs bf16 [P, d] for every pair of a slot, and undefined
    for the others.

    The blocks stay for both products. In either, a block goes through its tiles and its four warpgroups share the
    columns: each fetches its weights for itself, some chunks ahead, multiplies them, and the four sums of a tile are
    added in a fixed order. Between the products all blocks wait for each other, with the first weights of the second
    one under way.
    """
    up = _Product(shape.width, shape.hidden, TILE // 2, shape.picks)
    down = _Product(shape.hidden, shape.width, TILE, 1)
    parts_bytes = 2 * ROWS * max(up.share, down.share)

    def body(x, weights, experts, pairs, gate, gate_s, up_w, up_s, down_w, down_s, hidden, outputs, *scratch):
        ring, ring_scales, parts, factors, partial, filled = scratch
        barrier = pl.get_global(plgpu.SemaphoreType.REGULAR)
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        used = experts[shape.slots]

        def run(product, halves, rows, out, count, wait):
            """All tiles of this block; `count` were done before, and `wait()` returns once the rows are there."""
            tiles = used * product.tiles
            first, last = block * tiles // BLOCKS, (block + 1) * tiles // BLOCKS

            def place(number):
                """In the ring, of a chunk of this warpgroup by its number in the product."""
                return warpgroup * STAGES + number % STAGES

            def fetch(tile, expert, number, chunk):
                row = tile % product.tiles * product.rows
                column = warpgroup * product.chunks + chunk
                at = place(number)
                for half, (payload, scales, offset) in enumerate(halves):
                    here, there = pl.ds(row + offset, 32), pl.ds(32 * half, 32)
                    bytes_, groups = pl.ds(column * (CHUNK // 2), CHUNK // 2), pl.ds(column // 2 * SCALES, SCALES)
                    plgpu.copy_gmem_to_smem(payload.at[expert, here, bytes_], ring.at[at, there], filled.at[at])
                    plgpu.copy_gmem_to_smem(scales.at[expert, here, groups], ring_scales.at[at, there], filled.at[at])

            def expert_of(tile):
                return experts[jnp.minimum(tile // product.tiles, shape.slots - 1)]

            def split(slot):
                groups = product.share // GROUP
                block_text = text.split(groups, WARPGROUPS, product.picks, parts_bytes, shape.quantised)
                hopper.run(block_text, rows=rows, pairs=pairs, slot=slot, parts=parts, factors=factors)
                hopper.warpgroup_barrier()

            for number in range(STAGES):
                tile = first + number // product.chunks
                pl.when(tile < last)(
                    lambda tile=tile, number=number: fetch(tile, expert_of(tile), number, number % product.chunks)
                )
            wait()

            def one_tile(index, slot_before):
                tile = first + index
                slot = tile // product.tiles
                pl.when(slot != slot_before)(lambda: split(slot))
                sums = None
                for chunk in range(product.chunks):
                    number = index * product.chunks + chunk
                    ahead, next_chunk = divmod(chunk + STAGES, product.chunks)
                    expert = expert_of(tile + ahead)
                    plgpu.barrier_wait(filled.at[place(number)])
                    before = {} if sums is None else {"sums": sums}
                    block_text = text.multiply(chunk, product.share // GROUP, parts_bytes, sums is None)
                    (sums,) = hopper.run(
                        block_text, _SUMS, weights=(ring, _SWIZZLED), scales=ring_scales, ring=place(number), parts=parts, **before
                    )
                    hopper.warpgroup_barrier()
                    pl.when(tile + ahead < last)(lambda: fetch(tile + ahead, expert, number, next_chunk))
                fused = {"share": weights} if product is up else {}
                hopper.run(
                    text.finish(WARPGROUPS, product.outputs, shape.limit if product is up else None),
                    sums=sums, count=count + index, partial=partial, factors=factors, pairs=pairs, slot=slot,
                    tile=tile % product.tiles, out=out, **fused,
                )
                return slot

            lax.fori_loop(0, last - first, one_tile, jnp.int32(-1))
            return count + last - first

        def hidden_is_there():
            hopper.warpgroup_barrier()
            pl.semaphore_signal(barrier, 1)
            pl.semaphore_wait(barrier, BLOCKS * WARPGROUPS, decrement=False)

        gate_up = (gate, gate_s, 0), (up_w, up_s, 0)
        count = run(up, gate_up, x, hidden, jnp.int32(0), lambda: None)
        run(down, ((down_w, down_s, 0), (down_w, down_s, 32)), hidden, outputs, count, hidden_is_there)

    chunks = WARPGROUPS * STAGES
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((shape.pairs, shape.hidden), jnp.bfloat16),
            jax.ShapeDtypeStruct((shape.pairs, shape.width), jnp.bfloat16),
        ),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((chunks, TILE, CHUNK // 2), jnp.uint8, transforms=_SWIZZLED),
            plgpu.SMEM((chunks, TILE, SCALES), jnp.uint8),
            plgpu.SMEM((WARPGROUPS, parts_bytes), jnp.uint8),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.SMEM((2 * WARPGROUPS * ROWS, PITCH), jnp.float32),
            plgpu.Barrier(num_arrivals=4, num_barriers=chunks),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
