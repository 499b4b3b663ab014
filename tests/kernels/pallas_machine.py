"""Runs kernels that are made of `hopper.run` on the CPU: their bodies in Python, a thread for each warpgroup.

What a body calls of Pallas and JAX is replaced while it runs, its numbers are those of NumPy, and its PTX runs on
`ptx_machine`.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from ptx_machine import THREADS, Block, GaveUpError, Memory, Turn, Warpgroup, swizzled

from pallas_kernels import hopper

WHOLE_BYTES = 1 << 26


@dataclass(frozen=True)
class Ref:
    """An array in one of the memories.

    Attributes:
        memory: which.
        kind: of an address there, 32 bits in shared and 64 in global memory.
        array: as if nothing were tiled or swizzled.
        tiled: where its bytes lie, if they are.
    """

    memory: Memory
    kind: type
    array: np.ndarray
    tiled: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def address(self) -> np.generic:
        return self.kind(self.memory.address(self.array))

    @property
    def at(self) -> "View":
        return View(self)

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    @property
    def spots(self) -> np.ndarray:
        """Where its bytes lie."""
        if self.tiled is not None:
            return self.tiled
        assert self.array.flags.c_contiguous
        return int(self.address) + np.arange(self.array.nbytes).reshape(self.shape)

    def write(self, values: np.ndarray | int) -> None:
        """Bytes, where they lie."""
        self.memory.bytes[self.spots] = values


@dataclass(frozen=True)
class View:
    ref: Ref

    def __getitem__(self, index: Any) -> Ref:
        parts = index if isinstance(index, tuple) else (index,)
        parts = tuple(slice(p.start, p.start + p.size) if isinstance(p, pl.Slice) else int(p) for p in parts)
        tiled = None if self.ref.tiled is None else self.ref.tiled[parts]
        return Ref(self.ref.memory, self.ref.kind, self.ref.array[parts], tiled)


@dataclass
class TransferBarrier:
    """Opens when so many copies that count on it are there; they are as late as they may be."""

    arrivals: int
    copies: list[tuple[Ref, Ref]] = field(default_factory=list)

    def copy(self, source: Ref, target: Ref) -> None:
        assert len(self.copies) < self.arrivals, "its last phase has not been waited for"
        assert source.shape == target.shape and source.array.dtype == np.uint8
        assert source.shape[-1] % 16 == 0 and source.address % 16 == 0 and target.spots.min() % 128 == 0
        target.write(0xFF)  # nobody may look from now on
        self.copies.append((source, target))

    def wait(self) -> None:
        assert len(self.copies) == self.arrivals, "waits for ever"
        for source, target in self.copies:
            target.write(source.array)
        self.copies.clear()


def kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: Sequence[int],
    grid_names: Sequence[str],
    num_threads: int,
    thread_name: str,
    scratch_types: Sequence[Any],
    compiler_params: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel`, as a function of arrays that runs here. Its results begin as NaN."""

    def call(*operands: Any) -> Any:
        whole = Memory(WHOLE_BYTES)
        arrays = [np.asarray(operand) for operand in operands]
        inputs = [Ref(whole, np.uint64, whole.place(array.shape, array.dtype)) for array in arrays]
        for ref, array in zip(inputs, arrays, strict=True):
            ref.array[...] = array
        outputs = jax.tree.map(lambda kind: Ref(whole, np.uint64, whole.place(kind.shape, kind.dtype)), out_type)
        semaphore = Ref(whole, np.uint64, whole.place((1,), np.uint32))
        semaphore.array[...] = 0
        here = threading.local()

        def run(block: Block, scratch: list[Any], index: dict[str, int]) -> None:
            here.index, here.warpgroup = index, Warpgroup(block, index[thread_name])
            with turn:
                try:
                    body(*inputs, *jax.tree.leaves(outputs), *scratch)
                except BaseException:
                    turn.failed = True
                    raise
                finally:
                    turn.leave()

        turn = Turn(grid[0] * num_threads)
        warpgroups = []
        for block_number in range(grid[0]):
            block = Block(whole, turn)
            scratch = [_scratch(block.shared, kind) for kind in scratch_types]
            for number in range(num_threads):
                warpgroups.append((block, scratch, {grid_names[0]: block_number, thread_name: number}))
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(warpgroups)) as pool:
            _replace(patch, here, semaphore)
            errors = [done.exception() for done in [pool.submit(run, *warpgroup) for warpgroup in warpgroups]]
        for error in errors:
            if error and not isinstance(error, GaveUpError):
                raise error
        return jax.tree.map(lambda ref: ref.array, outputs)

    return call


def _scratch(shared: Memory, kind: Any) -> Any:
    if isinstance(kind, plgpu.Barrier):
        return SimpleNamespace(at=[TransferBarrier(kind.num_arrivals) for _ in range(*kind.num_barriers)])
    if isinstance(kind, plgpu.RefUnion):
        common = shared.place(kind.shape, np.uint8)
        sizes = [int(np.prod(ref.shape)) * ref.dtype.itemsize for ref in kind.refs]
        arrays = [common[:size].view(ref.dtype).reshape(ref.shape) for size, ref in zip(sizes, kind.refs, strict=True)]
        return [Ref(shared, np.uint32, array) for array in arrays]
    ref = Ref(shared, np.uint32, shared.place(kind.shape, kind.dtype))
    if not kind.transforms:
        return ref
    tiling, swizzle = kind.transforms
    (rows, columns), (*others, all_rows, all_columns) = tiling.tiling, kind.shape
    assert swizzle.swizzle == columns == 128, "a tile is as wide as its pattern"
    tiles = ref.spots.reshape(*others, all_rows // rows, all_columns // columns, rows, columns)
    return replace(ref, tiled=swizzled(np.swapaxes(tiles, -3, -2).reshape(kind.shape)))


def _replace(patch: pytest.MonkeyPatch, here: Any, semaphore: Ref) -> None:
    """What bodies call."""

    def fori_loop(lower: int, upper: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        for index in range(int(lower), int(upper)):
            carry = body(np.int32(index), carry)
        return carry

    def run(text: str, results: Any = None, **operands: Any) -> list[np.ndarray]:
        plain = {name: value[0] if isinstance(value, tuple) else value for name, value in operands.items()}
        bits = {name: value.address if isinstance(value, Ref) else value for name, value in plain.items()}
        counts = {name: int(np.prod(kind.shape)) // THREADS for name, kind in (results or {}).items()}
        return here.warpgroup.run(text, bits, counts)

    def warp_map(f: Callable[[Any], None]) -> None:
        for warp in range(4):
            f(np.int32(warp))

    def copy(source: Ref, target: Ref, barrier: TransferBarrier) -> None:
        barrier.copy(source, target)
        here.warpgroup.block.races.copy(target.spots[..., ::4], here.index["warpgroup"])

    patch.setattr(hopper, "run", run)
    patch.setattr(hopper, "warpgroup_barrier", lambda: here.warpgroup.meet())
    patch.setattr(plgpu, "copy_gmem_to_smem", copy)
    patch.setattr(plgpu, "warp_map", warp_map)
    patch.setattr(plgpu, "barrier_wait", lambda barrier: barrier.wait())
    patch.setattr(pl, "get_global", lambda _: semaphore)
    patch.setattr(pl, "when", lambda condition: lambda f: f() if condition else None)
    patch.setattr(jax.lax, "axis_index", lambda name: np.int32(here.index[name]))
    patch.setattr(jax.lax, "fori_loop", fori_loop)
    patch.setattr(jax.lax, "rem", np.fmod)
    patch.setattr(jax.lax, "div", np.floor_divide)
    patch.setattr(jnp, "int32", np.int32)
    patch.setattr(jnp, "minimum", np.minimum)
    patch.setattr(jnp, "where", np.where)
