"""The layer of experts in one launch, for Hopper GPUs: every packed weight is read once and decoded in registers."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.block_scaled import BlockScaled, Matrix
from pallas_kernels.mxfp4_experts import ptx
from pallas_kernels.mxfp4_experts.ptx import CHUNK_BYTES, TILE
from pallas_kernels.mxfp4_experts.reference import Matrices
from pallas_kernels.mxfp4_experts.slots import BLOCKS, SIZES, Slots, sort
from pallas_kernels.mxfp4_experts.work import (
    STAGES,
    SWIZZLED,
    THREADS,
    WARPGROUPS,
    Memory,
    Shape,
    Work,
    products_of,
)

MOST_PAIRS = 3072
"""By choice, those of 512 rows that pick six experts each: an expert is read once for every eight of its rows, and XLA
decodes it once."""
MOST_EXPERTS = 512
"""By choice: with the most pairs, slots and what it takes to sort them have room to spare."""
LARGEST_WIDTH = 4096
"""Columns whose two parts fit into shared memory beside the weights; nothing is left of its 227 KB then."""
WIDTH_STEP = 2048
"""Columns of which each warpgroup has a chunk: fewer scales than theirs do not make the 16 bytes of a TMA copy."""


def refusal(x: jax.Array, picks: jax.Array, experts: Matrices) -> str | None:
    """Why the kernel does not take x [..., d] and picks [..., k], as a clause; None if it does."""
    if not all(isinstance(matrix, BlockScaled) and matrix.format == "e2m1" for matrix in experts):
        return "it takes experts that are packed as e2m1, and these are in training or not packed so"
    if x.dtype != jnp.bfloat16:
        return f"activations are {x.dtype}, not bfloat16"
    count, hidden, width = experts.gate.shape
    for name, size in (("activations", width), ("hidden vectors", hidden)):
        if size % WIDTH_STEP or size > LARGEST_WIDTH:
            return f"{name} have {size} channels, and the kernel takes multiples of {WIDTH_STEP} up to {LARGEST_WIDTH}"
    if not 1 <= picks.size <= MOST_PAIRS:
        return f"these are {picks.size} pairs of a row and an expert, and it takes 1 to {MOST_PAIRS}"
    if count > MOST_EXPERTS:
        return f"there are {count} experts, and it takes up to {MOST_EXPERTS}"
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
    """`reference.mxfp4_experts` for operands that `refusal` does not name, two things apart.

    A row's picks are added in one order of their own, and gate and up are rounded only where they are `quantised`, too.
    """
    _, outputs = layer(_shape(picks, experts, limit, quantised))(x, *_flat(picks, live, weights), *_arrays(*experts))
    outputs = outputs.reshape(*picks.shape, -1).astype(jnp.float32)
    wanted = live[:, None] & (picks >= 0) & (picks < experts.gate.shape[0])
    return jnp.sum(jnp.where(wanted[..., None], outputs, 0), axis=1)


@partial(jax.jit, static_argnames=("limit", "quantised"))
def gate_up(
    x: jax.Array,
    picks: jax.Array,
    weights: jax.Array,
    live: jax.Array,
    experts: Matrices,
    limit: float,
    quantised: bool = False,
) -> jax.Array:
    """The first half of the layer alone: weight * SwiGLU for every live pair of a row and an expert.

    Returns:
        bfloat16 [N * k, f], undefined for other pairs.
    """
    kernel = _half(_shape(picks, experts, limit, quantised), first=True)
    return kernel(x, *_flat(picks, live, weights), *_arrays(experts.gate, experts.up))[0]


@partial(jax.jit, static_argnames=("quantised",))
def down(hidden: jax.Array, picks: jax.Array, live: jax.Array, experts: Matrices, quantised: bool = False) -> jax.Array:
    """The second half alone: bfloat16 [N * k, f], a hidden vector for every pair, to bfloat16 [N * k, d]."""
    no_shares = jnp.zeros(picks.shape, jnp.float32)  # which this half ignores
    kernel = _half(_shape(picks, experts, 0.0, quantised), first=False)
    return kernel(hidden, *_flat(picks, live, no_shares), *_arrays(experts.down))[0]


def _flat(picks: jax.Array, live: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As the kernel takes them, which reads their bytes whatever their dtype."""
    return picks.reshape(-1).astype(jnp.int32), live, weights.reshape(-1).astype(jnp.float32)


def _arrays(*matrices: Matrix) -> list[jax.Array]:
    """Payload and scales of each."""
    packed = [matrix for matrix in matrices if isinstance(matrix, BlockScaled)]
    return [array for matrix in packed for array in (matrix.payload, matrix.scales)]


def _shape(picks: jax.Array, experts: Matrices, limit: float, quantised: bool) -> Shape:
    count, hidden, width = experts.gate.shape
    return Shape(width, hidden, picks.shape[1], picks.size, count, limit, quantised)


def layer(shape: Shape) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel: f(x, picks, live, shares, and payload and scales of gate, up and down) -> (hidden, outputs).

    x bfloat16 [N, d], picks int32 [P], live bool [N] and shares float32 [P]; hidden [P, f] and outputs [P, d] are
    bfloat16, for every live pair of a row and an expert, and undefined for the others.

    The blocks stay for both products. In either, a block goes through its tiles and its four warpgroups share the
    columns: each fetches its weights for itself, some chunks ahead, multiplies them, and the four sums of a tile are
    added in a fixed order. Between the products all blocks wait for each other, with the first weights of the second
    one under way.
    """

    def body(*refs: Any) -> None:
        (x, picks, live, shares, *matrices, hidden, outputs), scratch = refs[:12], refs[12:]
        barrier = pl.get_global(plgpu.SemaphoreType.REGULAR)
        slots = _sorted(shape, picks, live, scratch)
        work = _work(shape, True, matrices[:4], x, shares, hidden, slots, scratch)
        after = _work(shape, False, matrices[4:], hidden, shares, outputs, slots, scratch)
        work.start()
        work.run(jnp.int32(0))
        hopper.grid_arrive(barrier, THREADS)
        after.copy(0, 0)
        hopper.grid_wait(barrier, BLOCKS, THREADS)
        after.ask(0)
        after.run(work.range[1] - work.range[0])

    return _kernel(body, shape, shape.hidden, shape.width)


def _half(shape: Shape, first: bool) -> Callable[..., tuple[jax.Array]]:
    """One product as a kernel: f(rows, picks, live, shares, and payload and scales of its matrices) -> (out,)."""
    arrays = 4 if first else 2

    def body(rows: Any, picks: Any, live: Any, shares: Any, *refs: Any) -> None:
        matrices, out, scratch = refs[:arrays], refs[arrays], refs[arrays + 1 :]
        slots = _sorted(shape, picks, live, scratch)
        work = _work(shape, first, matrices, rows, shares, out, slots, scratch)
        work.start()
        work.run(jnp.int32(0))

    return _kernel(body, shape, shape.hidden if first else shape.width)


def _sorted(shape: Shape, picks: Any, live: Any, scratch: Sequence[Any]) -> Slots:
    """Has the pairs sorted; what the block has to know of them lies behind the notes."""
    *_, parts, notes, _ = scratch
    starts = accumulate((ptx.NOTES * WARPGROUPS, *SIZES))
    slots = Slots(*(notes.at[pl.ds(start, size)] for start, size in zip(starts, SIZES, strict=False)))
    block = sort(shape.pairs, shape.picks, shape.experts, WARPGROUPS)
    hopper.run(block, picks=picks, live=live, block=lax.axis_index("block"), scratch=parts, **slots._asdict())
    return slots


def _work(
    shape: Shape, first: bool, matrices: Sequence[Any], rows: Any, shares: Any, out: Any, slots: Slots, scratch: Any
) -> Work:
    """The first product or the second one, which share all memory but their barriers."""
    weights, scales, *barriers, numbers, parts, notes, partial = scratch
    number = 0 if first else 1
    weights_there, scales_there = barriers[2 * number : 2 * number + 2]
    memory = Memory(weights, scales[number], weights_there, scales_there, numbers, parts, notes, partial)
    pairs = list(zip(matrices[::2], matrices[1::2], strict=True))
    return Work(products_of(shape)[number], pairs, rows, shares, out, slots, memory, _parts_bytes(shape))


def _parts_bytes(shape: Shape) -> int:
    return 2 * ptx.ROWS * max(shape.width, shape.hidden) // WARPGROUPS


def _kernel(body: Callable[..., None], shape: Shape, *outputs: int) -> Callable[..., Any]:
    """Of bfloat16 outputs, so many channels for every pair."""
    products = products_of(shape)
    places = WARPGROUPS * STAGES
    scales = [plgpu.SMEM((WARPGROUPS * p.scale_places, TILE, p.groups), jnp.uint8) for p in products]
    barriers = [
        plgpu.Barrier(num_arrivals=product.matrices, num_barriers=count)
        for product in products
        for count in (places, WARPGROUPS * product.scale_places)
    ]
    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((shape.pairs, size), jnp.bfloat16) for size in outputs),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((places, TILE, CHUNK_BYTES), jnp.uint8, transforms=SWIZZLED),
            plgpu.RefUnion(*scales),
            *barriers,
            plgpu.SMEM((WARPGROUPS * ptx.NUMBERS,), jnp.float32),
            plgpu.SMEM((WARPGROUPS, _parts_bytes(shape)), jnp.uint8),
            plgpu.SMEM((ptx.NOTES * WARPGROUPS + sum(SIZES),), jnp.int32),
            plgpu.SMEM((WARPGROUPS * ptx.ROWS, ptx.PITCH), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
