"""What a thread block does in the expert kernel: products in tiles, with weights that are fetched ahead."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.mxfp4_experts import ptx
from pallas_kernels.mxfp4_experts.ptx import CHUNK_BYTES, GROUP, SWIZZLE_BYTES, TILE
from pallas_kernels.mxfp4_experts.slots import BLOCKS, Slots

WARPGROUPS = 4
THREADS = WARPGROUPS * hopper.WARPGROUP
STAGES = 2
"""Chunks of 16 KB that a warpgroup has under way: 128 KB of weights for a multiprocessor."""
SCALE_BYTES = 4096
"""Of a warpgroup: of two tiles of the largest width."""
SWIZZLED: Any = (plgpu.TilingTransform((8, SWIZZLE_BYTES)), plgpu.SwizzleTransform(SWIZZLE_BYTES))  # type: ignore[abstract]
"""How chunks lie in shared memory: pieces of 8 rows by 128 bytes, swizzled, those of the same rows side by side."""


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        width: d.
        hidden: f.
        picks: k, pairs of a row of `x`.
        pairs: in all.
        experts: E.
        limit, quantised: as for the reference.
    """

    width: int
    hidden: int
    picks: int
    pairs: int
    experts: int
    limit: float
    quantised: bool


@dataclass(frozen=True)
class Product:
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
        return self.groups // ptx.CHUNK_GROUPS

    @property
    def tiles_ahead(self) -> int:
        """How many tiles ahead of its use a chunk is fetched."""
        return STAGES // self.chunks

    @property
    def second(self) -> tuple[int, int]:
        """The tile and the chunk that come to the second place of the ring at first."""
        return divmod(1, self.chunks)

    @property
    def scale_places(self) -> int:
        """Of a warpgroup, a tile each: at least those ahead and the one in use; in bytes the same for both products."""
        return SCALE_BYTES // (TILE * self.groups)


def products_of(shape: Shape) -> tuple[Product, Product]:
    """Gate and up, and down."""
    up = Product(shape.width, shape.hidden, 2, shape.picks, shape.limit, shape.quantised)
    down = Product(shape.hidden, shape.width, 1, 1, None, shape.quantised)
    return up, down


class Memory(NamedTuple):
    """Shared memory of a block. The first four are rings in which every warpgroup has places of its own.

    Attributes:
        weights: uint8 [places, 64, 256], chunks; for some time a slot's rows in the place of a chunk.
        scales: uint8 [places, 64, groups], of tiles.
        weights_there, scales_there: barriers of those places.
        numbers: float32, scales of the chunk in work, see `ptx.multiply`.
        parts, notes: of the slot in work, see `ptx.split`.
        partial: float32, sums of the warpgroups, see `ptx.finish`.
    """

    weights: Any
    scales: Any
    weights_there: Any
    scales_there: Any
    numbers: Any
    parts: Any
    notes: Any
    partial: Any


@dataclass(frozen=True)
class Work:
    """A product as a block does it; every method is traced into the kernel.

    Attributes:
        product: which.
        matrices: its payloads and scales, in global memory.
        rows: bfloat16, what the matrices are multiplied with.
        shares: float32, for each pair.
        out: bfloat16, for each pair.
        slots: of the block.
        memory: of the block.
        parts_bytes: in it, for a warpgroup.
    """

    product: Product
    matrices: Sequence[tuple[Any, Any]]
    rows: Any
    shares: Any
    out: Any
    slots: Slots
    memory: Memory
    parts_bytes: int

    @cached_property
    def warpgroup(self) -> jax.Array:
        """Its number; asked once, since the threads of a warp have to agree on it."""
        return lax.axis_index("warpgroup")

    @cached_property
    def range(self) -> tuple[jax.Array, jax.Array]:
        """The block's first tile, and the one after its last."""
        count, tiles, block = self.slots.count[0], self.product.tiles, lax.axis_index("block")
        return first_tile(block, count, tiles), first_tile(block + 1, count, tiles)

    def slot(self, tile: jax.Array) -> jax.Array:
        """Of a tile of the block, by the block's own numbers, which begin at 0."""
        return _div(tile, self.product.tiles) - _div(self.range[0], self.product.tiles)

    def expert(self, tile: jax.Array) -> jax.Array:
        """Of a tile."""
        return self.slots.experts[self.slot(tile)]

    def copy(self, index: jax.Array | int, chunk: int, wanted: jax.Array | bool = True) -> None:
        """Starts the copies of a chunk of this warpgroup, with the first one of a tile its scales; `index` of tiles."""
        product, memory, warpgroup = self.product, self.memory, self.warpgroup
        tile, end = self.range[0] + index, self.range[1]
        here = pl.ds(_rem(tile, product.tiles) * product.rows, product.rows)
        column, place = warpgroup * product.chunks + chunk, self.place(index, chunk)
        expert = self.expert(jnp.minimum(tile, end - 1))  # a warp by itself cannot look it up

        def start() -> None:
            for number, (payload, scales) in enumerate(self.matrices):
                there = pl.ds(number * product.rows, product.rows)
                if chunk == 0:
                    groups, ring = pl.ds(warpgroup * product.groups, product.groups), self.scales_place(index)
                    source, target = scales.at[expert, here, groups], memory.scales.at[ring, there]
                    plgpu.copy_gmem_to_smem(source, target, memory.scales_there.at[ring])
                source = payload.at[expert, here, pl.ds(column * CHUNK_BYTES, CHUNK_BYTES)]
                plgpu.copy_gmem_to_smem(source, memory.weights.at[place, there], memory.weights_there.at[place])

        plgpu.warp_map(lambda warp: pl.when((warp == 0) & (tile < end) & wanted)(start))

    def ask(self, index: jax.Array | int, wanted: jax.Array | bool = True) -> None:
        """Starts the copies of the rows of a tile's slot."""
        tile = self.range[0] + index
        operands: dict[str, Any] = {"rows": self.rows, "shares": self.shares} | self._rows_of(self.slot(tile), index)
        block = ptx.ask(self.product.groups, WARPGROUPS, self.product.picks)

        @pl.when((tile < self.range[1]) & wanted)
        def _() -> None:
            hopper.run(block, **operands)

    def fetch(self, index: jax.Array | int, chunk: int) -> None:
        """Starts the copies of what comes next to a place: a chunk, or before the first one of a slot its rows."""
        if chunk:
            self.copy(index, chunk)
        else:
            begins = _rem(self.range[0] + index, self.product.tiles) == 0
            self.copy(index, chunk, ~begins)
            self.ask(index, begins)

    def place(self, index: jax.Array | int, chunk: int) -> jax.Array:
        """In the ring of weights."""
        turn = _rem(index, self.product.tiles_ahead)
        return self.warpgroup * STAGES + turn * self.product.chunks + chunk

    def scales_place(self, index: jax.Array | int) -> jax.Array:
        """In the ring of scales."""
        places = self.product.scale_places
        return self.warpgroup * places + _rem(index, places)

    def begin(self, slot: jax.Array, index: jax.Array) -> None:
        """Splits the rows of a slot, which `ask` asked for, and fetches the chunk that belongs where they were."""
        result = {"loaded": hopper.registers(ptx.LOADED, jnp.uint32)}
        (loaded,) = hopper.run(ptx.take(self.product.groups), result, **self._rows_of(slot, index))
        hopper.warpgroup_barrier()  # for the place, and for notes of the slot before, which have been read
        pl.when(index == 0)(lambda: self.fetch(*self.product.second))
        pl.when(index > 0)(lambda: self.copy(index, 0))
        block = ptx.split(self.product.groups, self.parts_bytes, self.product.quantised)
        hopper.run(block, loaded=loaded, parts=self.memory.parts, notes=self.memory.notes)
        hopper.warpgroup_barrier()

    def _rows_of(self, slot: jax.Array, index: jax.Array | int) -> dict[str, Any]:
        """Operands of `ptx.ask` and `ptx.take` for a slot of which tile `index` is the block's first one.

        Its rows lie where that tile's first chunk will be. Those of the block's first slot lie in the second place, so
        that the first chunk is under way beside them.
        """
        place = jnp.where(index == 0, self.place(*self.product.second), self.place(index, 0))
        weights = self.memory.weights, SWIZZLED
        return {"pairs": self.slots.pairs, "slot": slot, "weights": weights, "place": place, "notes": self.memory.notes}

    def start(self) -> None:
        """Starts the copies of the first chunk and of the first rows."""
        self.copy(0, 0)
        self.ask(0)

    def run(self, count: jax.Array) -> None:
        """All tiles of the block; `count` were done before, and the first chunk and rows are under way."""
        product, (first, last) = self.product, self.range

        def one_tile(index: jax.Array, slot_before: jax.Array) -> jax.Array:
            slot = self.slot(first + index)
            pl.when(slot != slot_before)(partial(self.begin, slot, index))
            plgpu.barrier_wait(self.memory.scales_there.at[self.scales_place(index)])
            sums = None
            for chunk in range(product.chunks):
                codes = self.read(index, chunk)
                self.fetch(index + product.tiles_ahead, chunk)
                sums = self.multiply(codes, index, chunk, sums)
            block = ptx.finish(WARPGROUPS, product.outputs, product.limit, product.quantised)
            numbers: dict[str, Any] = {"count": count + index, "tile": _rem(first + index, product.tiles)}
            hopper.run(block, sums=sums, partial=self.memory.partial, notes=self.memory.notes, out=self.out, **numbers)
            return slot

        lax.fori_loop(0, last - first, one_tile, jnp.int32(-1))

    def read(self, index: jax.Array, chunk: int) -> jax.Array:
        """A chunk, whose place is free afterwards."""
        memory, place = self.memory, self.place(index, chunk)
        plgpu.barrier_wait(memory.weights_there.at[place])
        (codes,) = hopper.run(
            ptx.read(),
            {"codes": hopper.registers(ptx.CODES, jnp.uint32)},
            weights=(memory.weights, SWIZZLED),
            place=place,
        )
        hopper.warpgroup_barrier()  # for its place, and for `ptx.finish`
        return codes

    def multiply(self, codes: jax.Array, index: jax.Array, chunk: int, sums: jax.Array | None) -> jax.Array:
        """The sums with those of another chunk."""
        memory, operands = self.memory, {} if sums is None else {"sums": sums}
        (sums,) = hopper.run(
            ptx.multiply(chunk, self.product.groups, self.parts_bytes, sums is None),
            {"sums": hopper.registers(4, jnp.float32)},
            codes=codes,
            scales=memory.scales,
            scales_place=self.scales_place(index),
            numbers=memory.numbers,
            parts=memory.parts,
            warpgroup=self.warpgroup,
            **operands,
        )
        return sums


def first_tile(block: Any, count: Any, tiles: int) -> Any:
    """Of a block, in all `count` slots; it lies in slot block * count // BLOCKS, with which `slots.sort` begins.

    Blocks share the tiles evenly, a slot that begins among them counting as one tile more.
    """
    number = _div(block * count * (tiles + 1), BLOCKS)  # of tiles and beginnings before
    return number - _div(number + tiles, tiles + 1)  # without the beginnings


def _div(number: jax.Array, divisor: int) -> jax.Array:
    """Of numbers that are not negative, for which `//` would make provision."""
    return lax.div(number, jnp.int32(divisor))


def _rem(number: jax.Array | int, divisor: int) -> jax.Array:
    """As `_div`."""
    return lax.rem(jnp.int32(number), jnp.int32(divisor))
