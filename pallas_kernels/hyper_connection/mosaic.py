"""A site as one kernel for Hopper GPUs: update of the streams, projection, Sinkhorn and collapse in one launch.

Every channel of the result needs mixing values that depend on every channel of every stream, so a site is two passes
with a reduction between them. A cluster of blocks keeps both in one launch: each block owns a slice of the channels,
of all streams, and the partial products cross from block to block through distributed shared memory.

    block of a cluster            warpgroup of a block            warp of a warpgroup
    d / blocks channels           8 of the 24 rows of fn          2 of the 8

A cluster takes a few token rows. Which and how many changes nothing in a row's arithmetic: its sums always run over
pieces of 128 channels, then lanes, then blocks, each in a fixed order.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.hyper_connection.reference import Constants

Ref = Any  # of Pallas, which has no public type for what `.at` gives

N = 4  # streams; mixing values come in groups of as many: one reads, one writes, N mix
GROUPS = 2 + N
SLOTS = 8  # groups that blocks exchange: the mixing values, the sum of squares, and padding to one value a lane
WARPGROUPS = 3
SHARE = GROUPS // WARPGROUPS
BLOCKS = 8  # of a cluster, as many as every Hopper GPU can place together
CLUSTERS = MULTIPROCESSORS // BLOCKS  # that run at once
PIECE = 128  # channels that a warp multiplies at a time, four a lane
AHEAD = 8  # pieces of fn under way before a block waits for new streams

_WHOLE_WARPGROUP = (plgpu.Replicated(4),)
# [SHARE, N, PIECE]: warps split the values of a group and lanes the channels, so that no sum crosses warps.
_PRODUCTS = plgpu.Layout.TILED(plgpu.Tiling(((SHARE, N, PIECE), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
# [rows, SLOTS, N]: one value a lane.
_EXCHANGE = plgpu.Layout.TILED(
    plgpu.Tiling(((SLOTS, N), (1,))), warp_dims=_WHOLE_WARPGROUP, lane_dims=(-3, -2), vector_dim=-1
)


def _row_a_lane(*shape: int) -> Any:
    """[rows, ..., N]: all of a row in one lane, so that no sum of a row crosses lanes."""
    lanes = (plgpu.Replicated(32 // shape[0]), -len(shape))
    return plgpu.Layout.TILED(plgpu.Tiling((shape,)), warp_dims=_WHOLE_WARPGROUP, lane_dims=lanes, vector_dim=-1)


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: `blocks` of a cluster share the channels of `rows` token rows (2 or 4)."""

    blocks: int
    rows: int


def tiling(total: int) -> Tiling:
    """For `total` token rows: the fewest rows a cluster with which all clusters run at once, but at most 4.

    More rows a cluster read fn less often, but the body is unrolled over them: at the size of V4-Flash a kernel takes
    4, 9 and 18 s to lower and compile for 2, 4 and 8 rows, and a model has two for every number of rows that it runs.
    By estimate 8 rows would save 4 us of a site of 192 rows and 26 us of one of 512, 1 and 6 % of a step, which then
    reads nearly all experts: thousands of steps would pass before the wait is won back.
    """
    return Tiling(blocks=BLOCKS, rows=2 if total <= 2 * CLUSTERS else 4)


def refusal(streams: jax.Array) -> str | None:
    """Why the kernel does not take these streams [..., n, d], as a clause; None if it does."""
    n, d = streams.shape[-2:]
    if n != N:
        return f"it takes {N} streams, and these are {n}"
    if d % (BLOCKS * PIECE):
        return f"it takes multiples of {BLOCKS * PIECE} channels, and these are {d}"
    return None


@functools.partial(jax.jit, static_argnames=("constants", "tiling"))  # so that a model lowers it once
def site(
    streams: jax.Array,
    update: tuple[jax.Array, jax.Array, jax.Array] | None,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    constants: Constants,
    tiling: Tiling,
) -> tuple[jax.Array, ...]:
    """`reference.read` of streams [t, 4, d], or with an update (y, post, comb) of what `reference.write` makes of them.

    d is a multiple of 128 * tiling.blocks.

    Returns:
        The new streams, if there is an update, then x, post and comb.
    """
    rows, blocks = tiling.rows, tiling.blocks
    total, _, d = streams.shape
    tiles, channels = pl.cdiv(total, rows), d // blocks
    pieces = [(j, pl.ds(c, PIECE)) for j in range(N) for c in range(0, channels, PIECE)]

    def body(
        *refs: Ref, partial: Ref, mixed: Ref, reading: Ref, exchanged: Ref, finished: Ref, ready: Ref, **new: Ref
    ) -> None:
        streams, *update, fn, base, scale = refs[: 7 if new else 4]
        *written, x, post, comb = refs[7 if new else 4 :]
        warpgroup, block, tile = (lax.axis_index(name) for name in ("warpgroup", "block", "tile"))
        here = pl.ds(block * channels, channels)
        groups = pl.ds(warpgroup * SHARE, SHARE)

        def number(r: int | jax.Array) -> jax.Array:
            """Rows of the last tile that do not exist compute the last row again, and write the same bits again."""
            return jnp.minimum(tile * rows + r, total - 1)

        def slice_of(r: int | jax.Array) -> Ref:
            return new["renewed"].at[r] if new else streams.at[number(r), :, here]

        def weight(piece: tuple[int, Any]) -> jax.Array:
            j, channels_of_piece = piece
            return _load(fn.at[groups, :, j, here].at[:, :, channels_of_piece], _PRODUCTS)

        ahead = [weight(piece) for piece in pieces[:AHEAD]] if new else []
        weights = itertools.chain(ahead, map(weight, pieces[len(ahead) :]))
        if new:

            def write(r: jax.Array) -> None:
                y, before, post, comb = (ref.at[number(r)] for ref in (update[0], streams, *update[1:]))
                _write(y.at[here], before.at[:, here], post, comb, [slice_of(r), written[0].at[number(r), :, here]])

            _share_rows(rows, warpgroup, WARPGROUPS, write)
            plgpu.barrier_arrive(new["updated"])
            plgpu.barrier_wait(new["updated"])

        _project([slice_of(r) for r in range(rows)], pieces, weights, partial, groups)
        plgpu.barrier_arrive(exchanged)

        @pl.when(warpgroup == 0)
        def mix() -> None:
            plgpu.barrier_wait(exchanged)
            mixed[...] = _sum_of_blocks(partial, blocks)
            plgpu.barrier_arrive(finished)
            squares = _load(mixed.at[:, GROUPS], _row_a_lane(rows, N))  # the same N times
            factor = lax.rsqrt(squares / (N * d) + constants.norm_eps)
            reading[...] = _sigmoid(_logits(mixed.at[:, 0], base.at[0], scale[0], factor)) + constants.eps
            plgpu.barrier_arrive(ready)

            @pl.when(block == 0)
            def mix_streams() -> None:
                own = pl.ds(tile * rows, rows)
                post[own] = 2 * _sigmoid(_logits(mixed.at[:, 1], base.at[1], scale[1], factor))
                logits = _logits(mixed.at[:, pl.ds(2, N)], base.at[pl.ds(2, N)], scale[2], factor)
                comb[own] = _sinkhorn(logits, constants.iterations, constants.eps)

            plgpu.barrier_wait(finished)  # a block must not end while others read its memory

        @pl.when(warpgroup > 0)
        def collapse() -> None:
            plgpu.barrier_wait(ready)

            def collapse_row(r: jax.Array) -> None:
                _collapse(slice_of(r), reading.at[r], x.at[number(r), here])

            _share_rows(rows, warpgroup - 1, WARPGROUPS - 1, collapse_row)

    results = [
        jax.ShapeDtypeStruct((total, d), streams.dtype),
        jax.ShapeDtypeStruct((tiles * rows, N), jnp.float32),
        jax.ShapeDtypeStruct((tiles * rows, N, N), jnp.float32),
    ]
    scratch: dict[str, Any] = {
        "partial": plgpu.SMEM((rows, SLOTS, N), jnp.float32),
        "mixed": plgpu.SMEM((rows, SLOTS, N), jnp.float32),
        "reading": plgpu.SMEM((rows, N), jnp.float32),
        "exchanged": plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=WARPGROUPS),
        "finished": plgpu.ClusterBarrier(collective_axes=("block",)),
        "ready": plgpu.Barrier(),
    }
    if update:
        results.insert(0, jax.ShapeDtypeStruct(streams.shape, streams.dtype))
        scratch["renewed"] = plgpu.SMEM((rows, N, channels), streams.dtype)
        scratch["updated"] = plgpu.Barrier(num_arrivals=WARPGROUPS)
    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(tiles,),
        grid_names=("tile",),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    *others, post, comb = kernel(streams, *(update or ()), fn.reshape(GROUPS, N, N, d), base.reshape(GROUPS, N), scale)
    return (*others, post[:total], comb[:total])


def _write(y: Ref, streams: Ref, post: Ref, comb: Ref, destinations: list[Ref]) -> None:
    """The streams [N, channels] of one row after a layer whose output is y [channels]."""
    output = y[...].astype(jnp.float32)
    before = [streams[j].astype(jnp.float32) for j in range(N)]
    for k in range(N):
        mixed = _sum(comb[j, k] * before[j] for j in range(N))
        after = (post[k] * output + mixed).astype(streams.dtype)
        for destination in destinations:
            destination[k] = after


def _project(
    slices: list[Ref], pieces: list[tuple[int, Any]], weights: Iterator[jax.Array], partial: Ref, groups: Any
) -> None:
    """Products of a block's channels with the rows of fn of this warpgroup, and the sum of their squares."""
    products: list[Any] = [None] * len(slices)
    squares: list[Any] = [None] * len(slices)
    for (j, piece), weight in zip(pieces, weights, strict=True):
        for r, streams in enumerate(slices):
            value = _load(streams.at[j, piece], _PRODUCTS.reduce((0, 1))).astype(jnp.float32)
            products[r] = _add(products[r], weight * lax.broadcast_in_dim(value, weight.shape, [2]))
            squares[r] = _add(squares[r], value * value)
    for r in range(len(slices)):
        partial[r, groups] = jnp.sum(products[r], axis=2)
        # Each warp holds all channels; it takes the place of one value of a group, where the sum may be stored.
        repeated = plgpu.layout_cast(_spread(squares[r], (N, PIECE), 0), _PRODUCTS.reduce(0))
        partial[r, GROUPS] = jnp.sum(repeated, axis=1)


def _sum_of_blocks(partial: Ref, blocks: int) -> jax.Array:
    """The sums of [rows, SLOTS, N] over the cluster, in the order of the blocks."""
    peers = (partial if blocks == 1 else plgpu.cluster_ref(partial, {"block": peer}) for peer in range(blocks))
    return _sum(_load(theirs, _EXCHANGE) for theirs in peers)


def _logits(mixed: Ref, base: Ref, scale: jax.Array, factor: jax.Array) -> jax.Array:
    """mixed [rows, ..., N] times the RMS factors [rows, N] and the scale, plus the base [..., N]."""
    layout = _row_a_lane(*mixed.shape)
    value = _load(mixed, layout)
    if value.ndim == 3:
        factor = _spread(factor, value.shape, 1)
    return value * factor * scale + _spread(_load(base, layout.reduce(0)), value.shape, 0)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def _sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """`reference.sinkhorn` with reciprocals."""

    def normalise(c: jax.Array, axis: int) -> jax.Array:
        return c * _spread(_reciprocal(jnp.sum(c, axis=axis) + eps), c.shape, axis)

    def rows_then_columns(_: jax.Array, c: jax.Array) -> jax.Array:
        return normalise(normalise(c, 2), 1)

    shifted = jnp.exp(logits - _spread(jnp.max(logits, axis=2), logits.shape, 2))
    softmax = shifted * _spread(_reciprocal(jnp.sum(shifted, axis=2)), logits.shape, 2)
    return lax.fori_loop(0, iterations - 1, rows_then_columns, normalise(softmax + eps, 1))


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of what is positive and not tiny, in one instruction; a division is a subroutine of a dozen."""
    return lax.rsqrt(x * x)


def _collapse(streams: Ref, reading: Ref, x: Ref) -> None:
    """What a half-block reads of one row: streams [N, channels] -> x [channels]."""
    x[...] = _sum(reading[j] * streams[j].astype(jnp.float32) for j in range(N)).astype(x.dtype)


def _share_rows(rows: int, worker: jax.Array, workers: int, work: Callable[[jax.Array], None]) -> None:
    """This worker's part of `rows` rows: every `workers`-th."""
    turns = (rows - worker + workers - 1) // workers
    lax.fori_loop(0, turns, lambda i, _: work(worker + i * workers), None)


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    """In their order."""
    return functools.reduce(operator.add, terms)


def _add(total: Any, term: jax.Array) -> jax.Array:
    return term if total is None else total + term


def _spread(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """`x` repeated along a new axis."""
    return lax.broadcast_in_dim(x, shape, [i for i in range(len(shape)) if i != axis])


def _load(ref: Ref, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
