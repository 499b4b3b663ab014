"""The layer of experts in one launch, for Hopper GPUs: every packed weight is read once and decoded in registers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_scaled import BlockScaled
from pallas_kernels import hopper
from pallas_kernels.hopper import registers
from pallas_kernels.mxfp4_experts import ptx as text
from pallas_kernels.mxfp4_experts.ptx import CHUNK_BYTES, GROUP, ROWS, TILE
from pallas_kernels.mxfp4_experts.reference import Matrices

BLOCKS = 132
"""Of the persistent grid, all of which run at once: the multiprocessors of an H100 or H200."""
WARPGROUPS = 4
STAGES = 4
"""Chunks of 8 KB that a warpgroup has under way: 128 KB of weights for a multiprocessor."""
SCALE_BYTES = 4096
"""Of a warpgroup: of two tiles of the largest width."""
LARGEST_WIDTH = 4096
"""Columns whose two parts fit into shared memory beside the weights."""
WIDTH_STEP = 2048
"""Columns of which each warpgroup has two chunks: fewer scales than theirs do not make the 16 bytes of a TMA copy."""


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


@partial(jax.jit, static_argnames=("limit", "quantised"))  # so that a model lowers it once for all its layers
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
    """What a kernel is compiled for.

    Attributes:
        width: d.
        hidden: f.
        picks: k, pairs of a row of `x`.
        pairs: in all.
        slots: at most.
        limit, quantised: as for the reference.
    """

    width: int
    hidden: int
    picks: int
    pairs: int
    slots: int
    limit: float
    quantised: bool


@dataclass(frozen=True)
class _Product:
    """One of the two products, cut into tiles of 64 matrix rows and a slot.

    Attributes:
        columns: of the matrices, of which each warpgroup has its share.
        outputs: of the product, in all.
        matrices: whose rows lie in a tile: gate and up, or down alone.
        picks: pairs of an input row.
        limit: of gate and up; None for a plain product.
        quantised: the input goes through E4M3.
    """

    columns: int
    outputs: int
    matrices: int
    picks: int
    limit: float | None
    quantised: bool

    @property
    def rows(self) -> int:
        """Of each matrix in a tile, which are also the outputs of a tile."""
        return TILE // self.matrices

    @property
    def tiles(self) -> int:
        """Of a slot."""
        return self.outputs // self.rows

    @property
    def groups(self) -> int:
        """Of a warpgroup's columns."""
        return self.columns // WARPGROUPS // GROUP

    @property
    def chunks(self) -> int:
        """Of a tile, for each warpgroup."""
        return self.groups // text.CHUNK_GROUPS

    @property
    def tiles_ahead(self) -> int:
        """How far ahead of their use chunks are fetched."""
        return STAGES // self.chunks

    @property
    def scale_places(self) -> int:
        """Of a warpgroup, a tile each: at least those ahead and the one in use; in bytes the same for both products."""
        return SCALE_BYTES // (TILE * self.groups)


def _products(shape: Shape) -> tuple[_Product, _Product]:
    up = _Product(shape.width, shape.hidden, 2, shape.picks, shape.limit, shape.quantised)
    down = _Product(shape.hidden, shape.width, 1, 1, None, shape.quantised)
    return up, down


class _Memory(NamedTuple):
    """Shared memory of a block. The first four are rings in which every warpgroup has places of its own.

    Attributes:
        weights: uint8 [places, 64, 128], chunks.
        scales: uint8 [places, 64, groups], of tiles.
        weights_there, scales_there: barriers of those places.
        parts, notes: of the slot in work, see `ptx.split`.
        partial: float32, sums of the warpgroups, see `ptx.finish`.
    """

    weights: Any
    scales: Any
    weights_there: Any
    scales_there: Any
    parts: Any
    notes: Any
    partial: Any


@dataclass(frozen=True)
class _Work:
    """A product as a block does it; every method is traced into the kernel.

    Attributes:
        product: which.
        matrices: its payloads and scales, in global memory.
        rows: bfloat16, what it is the product with.
        shares: float32, for each pair.
        out: bfloat16, for each pair.
        slots: as `Slots`, in global memory.
        memory: of the block.
        parts_bytes: in it, for a warpgroup.
    """

    product: _Product
    matrices: Sequence[tuple[Any, Any]]
    rows: Any
    shares: Any
    out: Any
    slots: Slots
    memory: _Memory
    parts_bytes: int

    @cached_property
    def warpgroup(self) -> jax.Array:
        """Its number; asked once, since the threads of a warp have to agree on it."""
        return lax.axis_index("warpgroup")

    @cached_property
    def range(self) -> tuple[jax.Array, jax.Array]:
        """The block's first tile, and the one after its last."""
        tiles = self.slots.experts[self.slots.pairs.shape[0]] * self.product.tiles
        block = lax.axis_index("block")
        return block * tiles // BLOCKS, (block + 1) * tiles // BLOCKS

    @cached_property
    def first_experts(self) -> list[jax.Array]:
        """Of the tiles that are fetched before any is used. Read early: under load, a number takes microseconds."""
        return [self.expert(self.range[0] + ahead) for ahead in range(self.product.tiles_ahead)]

    def slot(self, tile: jax.Array) -> jax.Array:
        """Of a tile; a slot, too, for tiles beyond the last."""
        return jnp.minimum(lax.div(tile, jnp.int32(self.product.tiles)), self.slots.pairs.shape[0] - 1)

    def expert(self, tile: jax.Array) -> jax.Array:
        """Of a tile."""
        return self.slots.experts[self.slot(tile)]

    def fetch(self, index: jax.Array | int, expert: jax.Array, chunk: int) -> None:
        """Starts the copies of a chunk of this warpgroup, with the first one of a tile its scales; `index` of tiles."""
        product, memory, warpgroup = self.product, self.memory, self.warpgroup
        tile = self.range[0] + index
        here = pl.ds(_rem(tile, product.tiles) * product.rows, product.rows)
        column, place = warpgroup * product.chunks + chunk, self.place(index, chunk)

        @pl.when(tile < self.range[1])
        def _() -> None:
            for number, (payload, scales) in enumerate(self.matrices):
                there = pl.ds(number * product.rows, product.rows)
                if chunk == 0:
                    groups, ring = pl.ds(warpgroup * product.groups, product.groups), self.scales_place(index)
                    source, target = scales.at[expert, here, groups], memory.scales.at[ring, there]
                    plgpu.copy_gmem_to_smem(source, target, memory.scales_there.at[ring])
                source = payload.at[expert, here, pl.ds(column * CHUNK_BYTES, CHUNK_BYTES)]
                plgpu.copy_gmem_to_smem(source, memory.weights.at[place, there], memory.weights_there.at[place])

    def fetch_first(self) -> None:
        """As many chunks as the ring takes."""
        for ahead, expert in enumerate(self.first_experts):
            for chunk in range(self.product.chunks):
                self.fetch(ahead, expert, chunk)

    def place(self, index: jax.Array | int, chunk: int) -> jax.Array:
        """In the ring of weights."""
        turn = _rem(index, self.product.tiles_ahead)
        return self.warpgroup * STAGES + turn * self.product.chunks + chunk

    def scales_place(self, index: jax.Array | int) -> jax.Array:
        """In the ring of scales."""
        places = self.product.scale_places
        return self.warpgroup * places + _rem(index, places)

    def load(self, slot: jax.Array) -> jax.Array:
        """Starts loading the rows of a slot into registers."""
        block = text.load(self.product.groups, WARPGROUPS, self.product.picks)
        operands = {"rows": self.rows, "pairs": self.slots.pairs, "shares": self.shares, "slot": slot}
        (loaded,) = hopper.run(block, {"loaded": registers(text.LOADED, jnp.uint32)}, **operands)
        return loaded

    def split(self, loaded: jax.Array) -> None:
        """Makes them the rows in work."""
        hopper.warpgroup_barrier()  # the notes of the slot before have been read
        block = text.split(self.product.groups, self.parts_bytes, self.product.quantised)
        hopper.run(block, loaded=loaded, parts=self.memory.parts, notes=self.memory.notes)
        hopper.warpgroup_barrier()

    def run(self, count: jax.Array) -> None:
        """All tiles of the block, whose first rows are in work; `count` tiles were done before."""
        product, (first, last) = self.product, self.range

        def one_tile(index: jax.Array, slot_before: jax.Array) -> jax.Array:
            slot = self.slot(first + index)
            pl.when(slot != slot_before)(lambda: self.split(self.load(slot)))
            expert = self.expert(first + index + product.tiles_ahead)
            plgpu.barrier_wait(self.memory.scales_there.at[self.scales_place(index)])
            sums = None
            for chunk in range(product.chunks):
                codes = self.read(index, chunk)
                self.fetch(index + product.tiles_ahead, expert, chunk)
                sums = self.multiply(codes, chunk, sums)
            block = text.finish(WARPGROUPS, product.outputs, product.limit)
            numbers = {"count": count + index, "tile": _rem(first + index, product.tiles)}
            hopper.run(
                block, sums=sums, partial=self.memory.partial, notes=self.memory.notes, out=self.out, **numbers
            )
            return slot

        lax.fori_loop(0, last - first, one_tile, self.slot(first))

    def read(self, index: jax.Array, chunk: int) -> jax.Array:
        """A chunk, whose place is free afterwards."""
        memory, place = self.memory, self.place(index, chunk)
        plgpu.barrier_wait(memory.weights_there.at[place])
        (codes,) = hopper.run(
            text.read(chunk, self.product.groups),
            {"codes": registers(text.CODES, jnp.uint32)},
            weights=(memory.weights, _SWIZZLED),
            place=place,
            scales=memory.scales,
            scales_place=self.scales_place(index),
        )
        hopper.warpgroup_barrier()
        return codes

    def multiply(self, codes: jax.Array, chunk: int, sums: jax.Array | None) -> jax.Array:
        """The sums with those of another chunk."""
        block = text.multiply(chunk, self.product.groups, self.parts_bytes, sums is None)
        operands = {} if sums is None else {"sums": sums}
        result = {"sums": registers(4, jnp.float32)}
        (sums,) = hopper.run(
            block, result, codes=codes, parts=self.memory.parts, warpgroup=self.warpgroup, **operands
        )
        return sums


_SWIZZLED = (plgpu.TilingTransform((8, CHUNK_BYTES)), plgpu.SwizzleTransform(CHUNK_BYTES))


def layer(shape: Shape) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel: f(x, shares, *slots, and payload and scales of gate, up and down) -> (hidden, outputs).

    x bfloat16 [N, d] and shares float32 [P]; hidden [P, f] and outputs [P, d] are bfloat16, for every pair of a slot,
    and undefined for the others.

    The blocks stay for both products. In either, a block goes through its tiles and its four warpgroups share the
    columns: each fetches its weights for itself, some chunks ahead, multiplies them, and the four sums of a tile are
    added in a fixed order. Between the products all blocks wait for each other, with the first weights of the second
    one under way.
    """
    up, down = _products(shape)

    def body(x, shares, experts, pairs, gate, gate_scales, up_payload, up_scales, *rest):  # noqa: ANN001, ANN002, ANN202
        down_payload, down_scales, hidden, outputs, *scratch = rest
        barrier = pl.get_global(plgpu.SemaphoreType.REGULAR)
        slots = Slots(experts, pairs)
        first, second = _memories(scratch)
        gate_up = (gate, gate_scales), (up_payload, up_scales)
        work = _Work(up, gate_up, x, shares, hidden, slots, first, _parts_bytes(shape))
        after = _Work(
            down, ((down_payload, down_scales),), hidden, shares, outputs, slots, second, _parts_bytes(shape)
        )
        _ = work.warpgroup, after.warpgroup, after.first_experts
        loaded = work.load(work.slot(work.range[0]))  # before the weights, behind which it would queue
        work.fetch_first()
        work.split(loaded)
        work.run(jnp.int32(0))
        hopper.warpgroup_barrier()
        hopper.run(text.SIGNAL, barrier=barrier)
        after.fetch_first()
        hopper.run(text.wait(BLOCKS * WARPGROUPS), barrier=barrier)
        hopper.warpgroup_barrier()
        after.split(after.load(after.slot(after.range[0])))
        after.run(work.range[1] - work.range[0])

    out = [jax.ShapeDtypeStruct((shape.pairs, size), jnp.bfloat16) for size in (shape.hidden, shape.width)]
    return _kernel(body, out, shape)


def _memories(scratch: Sequence[Any]) -> tuple[_Memory, _Memory]:
    """For the first and the second product, which share all but the barriers."""
    weights, scales, *barriers, parts, notes, partial = scratch
    first, second = (
        _Memory(weights, scales[i], *barriers[2 * i : 2 * i + 2], parts, notes, partial) for i in (0, 1)
    )
    return first, second


def _parts_bytes(shape: Shape) -> int:
    return 2 * ROWS * max(shape.width, shape.hidden) // WARPGROUPS


def _kernel(body: Callable[..., None], out: Sequence[jax.ShapeDtypeStruct], shape: Shape) -> Callable[..., Any]:
    products = _products(shape)
    places = WARPGROUPS * STAGES
    scales = [plgpu.SMEM((WARPGROUPS * p.scale_places, TILE, p.groups), jnp.uint8) for p in products]
    barriers = [
        plgpu.Barrier(num_arrivals=product.matrices, num_barriers=count)
        for product in products
        for count in (places, WARPGROUPS * product.scale_places)
    ]
    return plgpu.kernel(
        body,
        out_type=tuple(out),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((places, TILE, CHUNK_BYTES), jnp.uint8, transforms=_SWIZZLED),
            plgpu.RefUnion(*scales),
            *barriers,
            plgpu.SMEM((WARPGROUPS, _parts_bytes(shape)), jnp.uint8),
            plgpu.SMEM((WARPGROUPS * text.NOTES,), jnp.uint8),
            plgpu.SMEM((2 * WARPGROUPS * ROWS, text.PITCH), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def _rem(number: jax.Array | int, divisor: int) -> jax.Array:
    """Of numbers that are not negative, for which `%` would make provision."""
    return lax.rem(jnp.int32(number), jnp.int32(divisor))
