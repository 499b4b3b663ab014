"""What a thread block does in the expert kernel: products in tiles, with weights that are fetched ahead."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.mxfp4_experts import ptx
from pallas_kernels.mxfp4_experts.ptx import CHUNK_BYTES, GROUP, TILE
from pallas_kernels.mxfp4_experts.slots import BLOCKS, Slots

WARPGROUPS = 4
THREADS = WARPGROUPS * hopper.WARPGROUP
STAGES = 4
"""Chunks of 8 KB that a warpgroup has under way: 128 KB of weights for a multiprocessor."""
EARLY = 2
"""Of them those of the second product that are asked for before all blocks have met."""
SCALE_BYTES = 4096
"""Of a warpgroup: of two tiles of the largest width."""
SWIZZLED: Any = (plgpu.TilingTransform((8, CHUNK_BYTES)), plgpu.SwizzleTransform(CHUNK_BYTES))  # type: ignore[abstract]
"""How chunks lie in shared memory: 128 bytes a row, in which the 16-byte piece j of row r is at j xor r mod 8."""


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
        weights: uint8 [places, 64, 128], chunks.
        scales: uint8 [places, 64, groups], of tiles.
        weights_there, scales_there: barriers of those places.
        numbers: float32, the scales of the chunk in work, see `ptx.read`.
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
        tiles, block = self.slots.count[0] * self.product.tiles, lax.axis_index("block")
        return _div(block * tiles, BLOCKS), _div((block + 1) * tiles, BLOCKS)

    def slot(self, tile: jax.Array) -> jax.Array:
        """Of a tile of the block, by the block's own numbers, which begin at 0."""
        return _div(tile, self.product.tiles) - _div(self.range[0], self.product.tiles)

    def expert(self, tile: jax.Array) -> jax.Array:
        """Of a tile."""
        return self.slots.experts[self.slot(tile)]

    def fetch(self, index: jax.Array | int, chunk: int) -> None:
        """Starts the copies of a chunk of this warpgroup, with the first one of a tile its scales; `index` of tiles."""
        product, memory, warpgroup = self.product, self.memory, self.warpgroup
        tile = self.range[0] + index
        here = pl.ds(_rem(tile, product.tiles) * product.rows, product.rows)
        column, place = warpgroup * product.chunks + chunk, self.place(index, chunk)

        @pl.when(tile < self.range[1])
        def _() -> None:
            expert = self.expert(tile)
            for number, (payload, scales) in enumerate(self.matrices):
                there = pl.ds(number * product.rows, product.rows)
                if chunk == 0:
                    groups, ring = pl.ds(warpgroup * product.groups, product.groups), self.scales_place(index)
                    source, target = scales.at[expert, here, groups], memory.scales.at[ring, there]
                    plgpu.copy_gmem_to_smem(source, target, memory.scales_there.at[ring])
                source = payload.at[expert, here, pl.ds(column * CHUNK_BYTES, CHUNK_BYTES)]
                plgpu.copy_gmem_to_smem(source, memory.weights.at[place, there], memory.weights_there.at[place])

    def fetch_first(self, first: int, end: int) -> None:
        """Of the chunks that the ring takes before any is used, some."""
        for place in range(first, end):
            self.fetch(*divmod(place, self.product.chunks))

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
        block = ptx.load(self.product.groups, WARPGROUPS, self.product.picks)
        operands: dict[str, Any] = {"rows": self.rows, "pairs": self.slots.pairs, "shares": self.shares, "slot": slot}
        (loaded,) = hopper.run(block, {"loaded": hopper.registers(ptx.LOADED, jnp.uint32)}, **operands)
        return loaded

    def split(self, loaded: jax.Array) -> None:
        """Makes them the rows in work."""
        hopper.warpgroup_barrier()  # the notes of the slot before have been read
        block = ptx.split(self.product.groups, self.parts_bytes, self.product.quantised)
        hopper.run(block, loaded=loaded, parts=self.memory.parts, notes=self.memory.notes)
        hopper.warpgroup_barrier()

    def run(self, count: jax.Array, fetched: int = 0) -> None:
        """All tiles of the block; `count` tiles were done, and some chunks fetched, before."""
        loaded = self.load(jnp.int32(0))  # before the weights, behind which it would wait for microseconds
        self.fetch_first(fetched, STAGES)
        self.split(loaded)
        product, (first, last) = self.product, self.range

        def one_tile(index: jax.Array, slot_before: jax.Array) -> jax.Array:
            slot = self.slot(first + index)
            pl.when(slot != slot_before)(lambda: self.split(self.load(slot)))
            plgpu.barrier_wait(self.memory.scales_there.at[self.scales_place(index)])
            sums = None
            for chunk in range(product.chunks):
                codes = self.read(index, chunk)
                self.fetch(index + product.tiles_ahead, chunk)
                sums = self.multiply(codes, chunk, sums)
            block = ptx.finish(WARPGROUPS, product.outputs, product.limit, product.quantised)
            numbers: dict[str, Any] = {"count": count + index, "tile": _rem(first + index, product.tiles)}
            hopper.run(block, sums=sums, partial=self.memory.partial, notes=self.memory.notes, out=self.out, **numbers)
            return slot

        lax.fori_loop(0, last - first, one_tile, jnp.int32(0))

    def read(self, index: jax.Array, chunk: int) -> jax.Array:
        """A chunk, whose place is free afterwards; its scales are the numbers in work."""
        memory, place = self.memory, self.place(index, chunk)
        plgpu.barrier_wait(memory.weights_there.at[place])
        (codes,) = hopper.run(
            ptx.read(chunk, self.product.groups),
            {"codes": hopper.registers(ptx.CODES, jnp.uint32)},
            weights=(memory.weights, SWIZZLED),
            place=place,
            scales=memory.scales,
            scales_place=self.scales_place(index),
            numbers=memory.numbers,
        )
        hopper.warpgroup_barrier()  # for its place, for the numbers, and for `ptx.finish`
        return codes

    def multiply(self, codes: jax.Array, chunk: int, sums: jax.Array | None) -> jax.Array:
        """The sums with those of another chunk."""
        block = ptx.multiply(chunk, self.product.groups, self.parts_bytes, sums is None)
        operands: dict[str, Any] = {} if sums is None else {"sums": sums}
        result = {"sums": hopper.registers(4, jnp.float32)}
        operands |= {"parts": self.memory.parts, "numbers": self.memory.numbers, "warpgroup": self.warpgroup}
        (sums,) = hopper.run(block, result, codes=codes, **operands)
        return sums


def _div(number: jax.Array, divisor: int) -> jax.Array:
    """Of numbers that are not negative, for which `//` would make provision."""
    return lax.div(number, jnp.int32(divisor))


def _rem(number: jax.Array | int, divisor: int) -> jax.Array:
    """As `_div`."""
    return lax.rem(jnp.int32(number), jnp.int32(divisor))
