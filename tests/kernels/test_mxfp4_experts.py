"""The layer of experts: slots by brute force, its kernel on a machine of ours against float64, and as an operation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pallas_machine
import pytest
from experts_oracle import (
    BF16,
    E4M3,
    LIMIT,
    Rows,
    error,
    hidden_of,
    matrices,
    numbers,
    of_pairs,
    outputs_of,
    rounded,
    rows_of,
    seen,
    typical_error,
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh

from pallas_kernels import hopper
from pallas_kernels.block_scaled import BlockScaled, Master, Matrix
from pallas_kernels.fake_quant import fake_e4m3
from pallas_kernels.mxfp4_experts import Matrices, mosaic, mxfp4_experts, ptx, reference, slots, work
from pallas_kernels.partition import Partition

ON_GPU = jax.default_backend() == "gpu"
KERNEL = 1e-3  # relative, of vectors of bfloat16 that were rounded at the same points
LAST_BIT = 2.0**-7  # of one number, which a vector may hardly differ from
MUST = 3e-3  # of the whole operation
STEP = 2e-2  # where the last bit of a number that was rounded on the way may decide about a step of e4m3


@pytest.fixture
def random() -> np.random.Generator:
    """Different in every run; a test that fails shows the seed."""
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


# Slots ---------------------------------------------------------------------------------------------------------------


def most_slots(pairs: int, experts: int) -> int:
    """That so many pairs can take: one for each expert, and one for every eight of the others."""
    begun = min(experts, pairs)
    return begun + (pairs - begun) // 8


def sorted_by_blocks(picks: np.ndarray, live: np.ndarray, experts: int, blocks: int) -> list[np.ndarray]:
    """What each block notes of the slots: experts [B, 8], pairs [B, 8, 8] and the count of all [B, 1]."""
    kinds = [jax.ShapeDtypeStruct((blocks, size), jnp.int32) for size in slots.SIZES]

    def body(picks_: Any, live_: Any, *refs: Any) -> None:
        (*outs, noted, scratch), block = refs, jax.lax.axis_index("block")
        starts = np.cumsum([0, *slots.SIZES])
        fields = slots.Slots(*(noted.at[pl.ds(int(i), n)] for i, n in zip(starts, slots.SIZES, strict=False)))
        text = slots.sort(picks.size, picks.shape[1], experts, 4)
        hopper.run(text, picks=picks_, live=live_, block=block, scratch=scratch, **fields._asdict())
        for out, field in zip(outs, fields, strict=True):
            out.array[block] = field.array

    experts_, pairs, count = pallas_machine.kernel(
        body,
        out_type=kinds,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((sum(slots.SIZES),), jnp.int32),
            plgpu.SMEM((4 * slots.scratch_words(picks.size, experts),), jnp.uint8),
        ],
        compiler_params=None,
    )(picks.reshape(-1), live)
    return [experts_, pairs.reshape(blocks, slots.SLOTS, slots.ROWS), count]


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
@pytest.mark.usefixtures("here")
class TestSlots:
    @pytest.mark.parametrize(
        ("count", "picks", "experts"), [(1, 6, 8), (6, 2, 5), (40, 1, 3), (30, 4, 64), (96, 6, 256)]
    )
    def test_blocks_know_theirs(self, random, count: int, picks: int, experts: int) -> None:
        """Of ragged and empty groups, of all rows on one expert, of none, with picks that are no expert."""
        for favourite in (-1, 0, experts - 1, experts):
            chosen = random.integers(-1, experts + 2, (count, picks))
            chosen = np.where(random.random(chosen.shape) < random.random(), favourite, chosen).astype(np.int32)
            live = random.random(count) < random.choice([0, 0.5, 1])
            want = []
            for expert in range(experts):
                pairs = np.flatnonzero((chosen == expert) & live[:, None])
                want += [(expert, [*pairs[i : i + 8], *[-1] * 8][:8]) for i in range(0, len(pairs), 8)]
            assert len(want) <= most_slots(chosen.size, experts)
            blocks = max(3, -(-len(want) // (slots.SLOTS - 1)))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(slots, "BLOCKS", blocks)
                noted = sorted_by_blocks(chosen, live, experts, blocks)
            for block, (experts_, pairs_, total) in enumerate(zip(*noted, strict=True)):
                first, end = (block * len(want) // blocks, -(-(block + 1) * len(want) // blocks))
                got = [(e, list(p)) for e, p in zip(experts_, pairs_, strict=True)]
                assert total == len(want) and end - first <= slots.SLOTS
                assert got[: end - first] == want[first:end]
                assert (pairs_[max(0, len(want) - first) :] == -1).all()


def test_there_is_room_for_the_most_that_the_kernel_takes() -> None:
    assert most_slots(mosaic.MOST_PAIRS, mosaic.MOST_EXPERTS) <= (slots.SLOTS - 1) * slots.BLOCKS
    least = work.WARPGROUPS * mosaic._parts_bytes(work.Shape(2048, 2048, 6, 6, 8, LIMIT, False))
    assert least >= 4 * slots.scratch_words(mosaic.MOST_PAIRS, mosaic.MOST_EXPERTS)


@pytest.mark.parametrize("tiles", [32, 64, 128])
def test_blocks_share_the_tiles(tiles: int) -> None:
    """Of any number of slots that there may be: nobody leaves one out, or has more slots than it notes."""
    block = jnp.arange(slots.BLOCKS + 1, dtype=jnp.int32)
    most = most_slots(mosaic.MOST_PAIRS, mosaic.MOST_EXPERTS)
    counts = np.arange(most + 1, dtype=np.int32)
    bounds = np.asarray(jax.vmap(lambda count: work.first_tile(block, count, tiles))(counts))
    first, end = bounds[:, :-1], bounds[:, 1:]
    some = end > first
    assert (bounds[:, 0] == 0).all() and (bounds[:, -1] == counts * tiles).all() and (end >= first).all()
    begun = np.arange(slots.BLOCKS) * counts[:, None] // slots.BLOCKS
    assert (first // tiles == begun)[some].all() and ((end - 1) // tiles - begun < slots.SLOTS)[some].all()


# The kernel, on a machine of ours ------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU, with three blocks."""
    monkeypatch.setattr(plgpu, "kernel", pallas_machine.kernel)
    use_blocks(monkeypatch, 3)


def use_blocks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (mosaic, work, slots):
        monkeypatch.setattr(module, "BLOCKS", count)


gate_up, down, layer = (f.__wrapped__ for f in (mosaic.gate_up, mosaic.down, mosaic.mxfp4_experts))  # not compiled


def split(x: np.ndarray, pairs: list[int], quantised: bool = False) -> np.ndarray:
    """What products see of the rows of a slot, two pairs a row: float64 [8, columns], by where it has to lie."""
    columns = x.shape[1]
    groups, parts_bytes = columns // 128, 4 * columns

    def body(x: Any, shares: Any, parts_seen: Any, notes_seen: Any, parts: Any, notes: Any, *others: Any) -> None:
        noted, weights = others
        noted.array[...] = [[-1] * 8, pairs]
        result = {"loaded": hopper.registers(ptx.LOADED, jnp.uint32)}
        place = {
            "pairs": noted,
            "slot": 1,
            "weights": weights,
            "place": jax.lax.axis_index("warpgroup"),
            "notes": notes,
        }
        hopper.run(ptx.ask(groups, 4, 2), rows=x, shares=shares, **place)
        (loaded,) = hopper.run(ptx.take(groups), result, **place)
        hopper.run(ptx.split(groups, parts_bytes, quantised), loaded=loaded, parts=parts, notes=notes)
        parts_seen.array[...], notes_seen.array[...] = parts.array, notes.array

    kinds = [((4, parts_bytes), jnp.uint8), ((4, ptx.NOTES // 8, 8), jnp.float32)]
    parts, notes = pallas_machine.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*kind) for kind in kinds],
        grid=(1,),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=[
            *(plgpu.SMEM(*kind) for kind in kinds),
            plgpu.SMEM((2, 8), jnp.int32),
            plgpu.SMEM((4, ptx.TILE, ptx.CHUNK_BYTES), jnp.uint8),
        ],
        compiler_params=None,
    )(x, np.arange(2 * len(x), dtype=np.float32))
    assert (notes[:, 0].view(np.int32) == pairs).all() and (notes[:, 2] == np.maximum(pairs, 0)).all()
    pieces = parts.reshape(4, 2, -1, 8, 8, 16)  # warpgroups, hi and lo, 128 columns each, rows, pieces
    row, piece = np.arange(8)[:, None], np.arange(8)
    pieces = pieces[:, :, :, row, piece ^ row].view(E4M3).astype(np.float64).sum(axis=1)
    values = pieces.reshape(4, -1, 8, 4, 2, 16).transpose(2, 0, 1, 3, 5, 4)  # of 32 columns, even ones before odd ones
    return (values.reshape(8, 4, -1) * notes[:, 1].T[..., None] / 64).reshape(8, columns)  # e2m1 reads as 2^-6 of it


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
@pytest.mark.usefixtures("here")
class TestSplit:
    PAIRS = (9, 3, -1, 0, 5, -1, 12, 7)  # of two picks a row: rows 4, 1, none, 0, 2, none, 6, 3

    def rows(self, random: np.random.Generator, columns: int) -> np.ndarray:
        x = random.standard_normal((7, columns)) * np.exp2(random.integers(-20, 20, (7, 1)))
        x[0, 5] = 300 * np.abs(x[0]).max()
        x[1] *= np.exp2(random.integers(-30, 0, columns))
        x[2] = 0
        x[3] = np.exp2(random.integers(-8, 9, columns)) * 1.9921875  # of eight significant bits, just below a power
        return x.astype(BF16)

    @pytest.mark.parametrize("columns", [2048, 4096])
    def test_is_near_in_units_of_the_largest(self, random, columns: int) -> None:
        x = self.rows(random, columns)
        got, want = split(x, [*self.PAIRS]), x.astype(np.float64)
        for place, pair in enumerate(self.PAIRS):
            row = want[pair // 2] if pair >= 0 else np.zeros(columns)
            parts, theirs = got[place].reshape(4, -1), row.reshape(4, -1)  # each warpgroup has a power of two
            largest = np.abs(theirs).max(axis=1, keepdims=True)
            assert (np.abs(parts - theirs) <= largest * 2.0**-16).all()
            assert (parts == theirs)[np.abs(theirs) >= largest * 2.0**-8].all()

    def test_quantises_like_the_reference(self, random) -> None:
        x = self.rows(random, 4096)
        x[4, 128:256] = 1e-5  # below the floor of the largest magnitude
        x[6, 256:384] = np.ldexp(448, -3)  # which is just within its power of two
        got, want = split(x, [*self.PAIRS], quantised=True), seen(x, quantised=True)
        np.testing.assert_array_equal(want, np.asarray(jax.jit(fake_e4m3, static_argnums=1)(x, 128), np.float64))
        for place, pair in enumerate(self.PAIRS):
            parts, theirs = got[place].reshape(4, -1), (want[pair // 2] * (pair >= 0)).reshape(4, -1)
            largest = np.abs(theirs).max(axis=1, keepdims=True)
            assert (np.abs(parts - theirs) <= largest * 2.0**-16).all()
            assert (parts == theirs)[np.abs(theirs) >= largest * 2.0**-13].all()

    @pytest.mark.parametrize("quantised", [False, True])
    @pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
    def test_a_row_that_is_not_finite_poisons_itself(self, random, worst: float, quantised: bool) -> None:
        x = self.rows(random, 2048)
        clean = split(x, [*self.PAIRS], quantised)
        x[1, 700] = worst  # among the columns of warpgroup 1
        got = split(x, [*self.PAIRS], quantised)
        assert np.isnan(got[1, 512:1024]).all()
        got[1, 512:1024] = clean[1, 512:1024]
        np.testing.assert_array_equal(got, clean)


def extremes(random: np.random.Generator, width: int) -> tuple[np.ndarray, Matrices]:
    """Hidden vectors of two rows, and a down matrix in whose quarters scales are 0, 1, random, and 254 for a group."""
    hidden = random.standard_normal((2, 2048))
    hidden[:, 3] = 20
    hidden[1] *= 2.0**-20
    experts = matrices(random, 1, width, 2048)
    payload, scales = map(np.array, (experts.down.payload, experts.down.scales))
    zero, one, any_, high = np.split(scales[0], 4)
    zero[...], one[...], high[...] = 0, 1, 127
    any_[...] = random.integers(100, 140, any_.shape)
    any_[-1, 0] = 255
    high[:, 5] = 254
    payload[0, -width // 4 :, 80:96] &= 0x99  # up to 0.5, so that 2^127 times their sums is finite
    return hidden.astype(BF16), experts._replace(down=BlockScaled(jnp.asarray(payload), jnp.asarray(scales), "e2m1"))


def check_extremes(got: np.ndarray, hidden: np.ndarray, experts: Matrices) -> None:
    assert isinstance(experts.down, BlockScaled)
    want = rounded(hidden.astype(np.float64) @ numbers(experts.down)[0].T)
    (zero, one, any_, high), quarters = np.split(np.asarray(got, np.float64), 4, axis=1), np.split(want, 4, axis=1)
    assert (zero == 0).all()  # what is exact would be 2^-127 of the sums
    assert error(one[:1], quarters[1][:1]) < LAST_BIT
    assert not np.isfinite(any_[:, -1]).any() and np.isfinite(any_[:, :-1]).all()
    assert error(any_[:, :-1], quarters[2][:, :-1]) < LAST_BIT
    assert error(high[1:], quarters[3][1:]) < LAST_BIT


RAGGED = [[2, 4]] * 9 + [[0, 2], [3, -1]]  # 4 and -1 are no expert, and the last row will be dead
ALIVE = np.arange(11) < 10


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
@pytest.mark.usefixtures("here")
class TestKernel:
    @pytest.mark.parametrize("quantised", [False, True])
    def test_gate_up(self, random, quantised: bool) -> None:
        """At the width of Flash, for few hidden channels: ragged groups, sleeping experts, more than a slot for one."""
        rows, experts = rows_of(random, RAGGED, 4096, ALIVE), matrices(random, 4, 4096, 128)
        out = gate_up(*rows, experts, LIMIT, quantised)
        got, want = of_pairs(out, rows), hidden_of(rows, *map(numbers, experts[:2]), quantised)
        there = np.asarray((rows.picks >= 0) & (rows.picks < 4) & rows.live[:, None])
        assert typical_error(got[there], want[there]) < KERNEL and error(got[there], want[there]) < LAST_BIT
        assert (got[~there].view(np.uint16) == 0xFFFF).all(), "what belongs to no slot is left alone"

    @pytest.mark.parametrize("quantised", [False, True])
    def test_down(self, random, quantised: bool) -> None:
        rows, experts = rows_of(random, RAGGED, 256, ALIVE), matrices(random, 4, 256, 2048)
        hidden = random.standard_normal((11, 2, 2048)).astype(BF16)
        out = down(hidden.reshape(22, -1), rows.picks, rows.live, experts, quantised)
        got, want = of_pairs(out, rows), outputs_of(rows, hidden, numbers(experts.down), quantised)
        there = np.asarray((rows.picks >= 0) & (rows.picks < 4) & rows.live[:, None])
        assert typical_error(got[there], want[there]) < KERNEL and error(got[there], want[there]) < LAST_BIT
        assert (got[~there].view(np.uint16) == 0xFFFF).all()

    def test_reads_picks_and_weights_as_numbers(self, random) -> None:
        rows, experts = rows_of(random, [[1, 0], [0, 1]], 2048), matrices(random, 2, 2048, 128)
        coarse = rows._replace(picks=rows.picks.astype(jnp.int8), weights=rows.weights.astype(jnp.bfloat16))
        same = rows._replace(weights=coarse.weights.astype(jnp.float32))
        np.testing.assert_array_equal(gate_up(*coarse, experts, LIMIT), gate_up(*same, experts, LIMIT))

    def test_a_block_goes_through_eight_slots(self, random) -> None:
        """The second of three blocks: of twenty from the seventh to the fourteenth, of these two not all tiles."""
        rows, experts = rows_of(random, [[expert] for expert in range(20)], 2048), matrices(random, 20, 2048, 256)
        got, want = of_pairs(gate_up(*rows, experts, LIMIT), rows), hidden_of(rows, *map(numbers, experts[:2]))
        assert error(got, want) < KERNEL

    def test_a_slot_begins_within_a_block(self, random, monkeypatch) -> None:
        """At the width of Flash: its rows come to the place of a chunk while the tile's other one is under way."""
        use_blocks(monkeypatch, 5)  # the second of which has one tile of the first slot
        rows, experts = rows_of(random, [[expert] for expert in range(4)], 4096), matrices(random, 4, 4096, 128)
        got, want = of_pairs(gate_up(*rows, experts, LIMIT), rows), hidden_of(rows, *map(numbers, experts[:2]))
        assert error(got, want) < KERNEL

    def test_a_block_begins_with_the_last_tile_of_a_slot(self, random, monkeypatch) -> None:
        """The second of five: its second tile, which is fetched from the start, needs other rows."""
        use_blocks(monkeypatch, 5)
        rows, experts = rows_of(random, [[expert] for expert in range(4)], 256), matrices(random, 4, 256, 2048)
        hidden = random.standard_normal((4, 1, 2048)).astype(BF16)
        out = down(hidden.reshape(4, -1), rows.picks, rows.live, experts)
        assert error(of_pairs(out, rows), outputs_of(rows, hidden, numbers(experts.down))) < KERNEL

    def test_all_codes_and_extreme_scales(self, random) -> None:
        hidden, experts = extremes(random, 256)
        check_extremes(down(hidden, jnp.zeros((2, 1), jnp.int32), jnp.ones(2, bool), experts), hidden, experts)

    def test_a_row_keeps_its_bits_whatever_the_others_hold(self, random) -> None:
        experts = matrices(random, 2, 2048, 128)
        rows = rows_of(random, [[1], [1], [0], [1], [0]], 2048)

        def run(rows: Rows) -> np.ndarray:
            return np.asarray(gate_up(*rows, experts, LIMIT))

        got = run(rows)
        flipped = run(Rows(*(operand[::-1] for operand in rows)))
        np.testing.assert_array_equal(flipped[::-1], got)
        others = jnp.full_like(rows.x, jnp.nan).at[3].set(rows.x[3])
        among_nan = run(rows._replace(x=others, picks=jnp.ones_like(rows.picks)))
        np.testing.assert_array_equal(among_nan[3], got[3])
        assert np.isnan(np.delete(among_nan, 3, axis=0)).all()
        alone = run(rows._replace(live=jnp.arange(5) == 3))
        np.testing.assert_array_equal(alone[3], got[3])

    @pytest.mark.parametrize(
        ("name", "right", "wrong"),
        [
            ("ask", "xor.b32 a, a, lane;", "mov.b32 a, lane;"),  # pieces of rows come elsewhere
            ("take", "cp.async.wait_group 0;", ""),  # rows are read before they are there
            ("split", "xor.b32 piece, piece, row;", ""),  # rows without their swizzle
            (
                "multiply",
                "shl.b32 e1, scales0, 15;",
                "shl.b32 e1, scales0, 23;",
            ),  # some groups with the scales of others
            ("multiply", f"{1 << 30 | 4096 >> 4}", f"{1 << 30 | 1024 >> 4}"),  # parts are sought where others lie
        ],
    )
    def test_would_see_a_fault(self, random, monkeypatch, name: str, right: str, wrong: str) -> None:
        block = getattr(ptx, name)
        monkeypatch.setattr(ptx, name, lambda *arguments: block(*arguments).replace(right, wrong))
        rows, experts = rows_of(random, [[0]] * 3, 2048), matrices(random, 1, 2048, 128)
        got = gate_up(*rows, experts, LIMIT)
        assert not error(of_pairs(got, rows), hidden_of(rows, *map(numbers, experts[:2]))) < 0.1

    @pytest.mark.parametrize("wait", ["bar.sync 9, 512;", "bar.sync bar, 512;"])  # for the sums, for free memory
    def test_would_see_that_warpgroups_do_not_wait(self, random, monkeypatch, wait: str) -> None:
        finish = ptx.finish
        monkeypatch.setattr(ptx, "finish", lambda *a: finish(*a).replace(wait, wait.replace("sync", "arrive")))
        rows, experts = rows_of(random, [[0]] * 3, 2048), matrices(random, 1, 2048, 128)
        try:
            got = gate_up(*rows, experts, LIMIT)
        except AssertionError:  # nobody comes any more, or words that are being written are read
            return
        assert not error(of_pairs(got, rows), hidden_of(rows, *map(numbers, experts[:2]))) < 0.1

    @pytest.mark.parametrize("method", ["read", "begin"])
    def test_would_see_that_warps_do_not_wait(self, random, monkeypatch, method: str) -> None:
        """Whose place is fetched again: that of a chunk, or that of a block's first rows."""
        waits = getattr(work.Work, method)

        def hurries(*arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hopper, "warpgroup_barrier", lambda: None)
                return waits(*arguments)

        monkeypatch.setattr(work.Work, method, hurries)
        rows, experts = rows_of(random, [[0]] * 9, 2048), matrices(random, 1, 2048, 128)
        with pytest.raises(AssertionError, match="just"):
            gate_up(*rows, experts, LIMIT)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
@pytest.mark.usefixtures("here")
class TestLayer:
    def test_against_float64(self, random) -> None:
        """Both products in one launch; what dead rows and picks of no expert leave undefined goes nowhere."""
        rows = rows_of(random, [[1, 2], [5, 1], [0, 1], [-1, 0]], 2048, [True, True, False, True])
        experts = matrices(random, 2, 2048, 2048)
        hidden = hidden_of(rows, *map(numbers, experts[:2]))
        got, want = layer(*rows, experts, LIMIT), outputs_of(rows, hidden, numbers(experts.down)).sum(axis=1)
        assert typical_error(got, want) < MUST and error(got, want) < LAST_BIT
        assert (got[2] == 0).all()

    def test_of_no_live_row_is_zeros(self, random) -> None:
        rows = rows_of(random, [[0], [0]], 2048, False)
        assert (layer(*rows, matrices(random, 1, 2048, 2048), LIMIT) == 0).all()

    def test_would_see_that_blocks_do_not_wait_for_each_other(self, random, monkeypatch) -> None:
        monkeypatch.setattr(hopper, "grid_wait", lambda *_: None)
        rows, experts = rows_of(random, [[0]], 2048), matrices(random, 1, 2048, 2048)
        assert np.isnan(layer(*rows, experts, LIMIT)).any()


# The operation -------------------------------------------------------------------------------------------------------


def abstract(
    rows: int, dtype: Any = jnp.bfloat16, width: int = 4096, hidden: int = 2048, picks: int = 6, count: int = 256
) -> list[Any]:
    """x, picks, weights, live and experts, by default as in Flash."""

    def stack(out: int, columns: int) -> BlockScaled:
        shapes = (count, out, columns // 2), (count, out, columns // 32)
        return BlockScaled(*(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes), "e2m1")

    kinds = [((rows, width), dtype), ((rows, picks), jnp.int32), ((rows, picks), jnp.float32), ((rows,), jnp.bool)]
    experts = Matrices(stack(hidden, width), stack(hidden, width), stack(width, hidden))
    return [*(jax.ShapeDtypeStruct(*kind) for kind in kinds), experts]


class TestOperation:
    @pytest.mark.parametrize(
        ("operands", "reason"),
        [
            (abstract(6, jnp.float32), "activations are float32, not bfloat16"),
            (
                abstract(6, width=1024),
                "activations have 1024 channels, and the kernel takes multiples of 2048 up to 4096",
            ),
            (abstract(6, width=6144), "activations have 6144 channels"),
            (abstract(6, hidden=3072), "hidden vectors have 3072 channels"),
            (abstract(513), "these are 3078 pairs of a row and an expert, and it takes 1 to 3072"),
            (abstract(0), "these are 0 pairs"),
            (abstract(6, count=513), "there are 513 experts, and it takes up to 512"),
        ],
    )
    def test_says_why_the_kernel_is_not_for_it(self, operands: list[Any], reason: str) -> None:
        with pytest.raises(ValueError, match=f"mxfp4_experts has no kernel for these operands: {reason}"):
            jax.eval_shape(partial(mxfp4_experts, limit=LIMIT, implementation="mosaic"), *operands)
        assert jax.eval_shape(partial(mxfp4_experts, limit=LIMIT), *operands).shape == operands[0].shape

    @pytest.mark.parametrize(
        "kind",
        [
            lambda shape: Master(jax.ShapeDtypeStruct(shape, jnp.float32), "e2m1"),
            lambda shape: BlockScaled(
                jax.ShapeDtypeStruct(shape, jnp.uint8),
                jax.ShapeDtypeStruct((shape[0], shape[1] // 128, shape[2] // 128), jnp.uint8),
                "e4m3",
            ),
        ],
        ids=["in training", "e4m3"],
    )
    def test_experts_that_are_not_packed_so_have_no_kernel(self, kind: Callable[[tuple[int, ...]], Matrix]) -> None:
        *rows, experts = abstract(6)
        others = Matrices(*(kind(matrix.shape) for matrix in experts))
        with pytest.raises(ValueError, match="it takes experts that are packed as e2m1, and these are in training"):
            jax.eval_shape(partial(mxfp4_experts, limit=LIMIT, implementation="mosaic"), *rows, others)

    @pytest.mark.parametrize("quantised", [False, True])
    def test_through_xla_is_the_reference(self, random, quantised: bool) -> None:
        """To the bit, and near float64; NaN in dead rows goes nowhere."""
        rows, experts = rows_of(random, RAGGED, 256, ALIVE), matrices(random, 4, 256, 128)
        hidden = hidden_of(rows, *map(numbers, experts[:2]), quantised, rounds=True)
        want = outputs_of(rows, hidden, numbers(experts.down), quantised).sum(axis=1)
        ask = partial(mxfp4_experts, limit=LIMIT, quantised=quantised, implementation="xla")
        got = jax.jit(ask)(*rows, experts)
        assert error(got, want) < MUST
        plain = jax.jit(partial(reference.mxfp4_experts, limit=LIMIT, quantised=quantised))(*rows, experts)
        np.testing.assert_array_equal(got, plain)

    def test_the_kernel_has_the_gradient_of_the_reference(self, random, monkeypatch) -> None:
        rows = rows_of(random, [[1, 0], [4, 1], [0, 1]], 256, [True, True, False])
        experts = matrices(random, 2, 256, 128)
        x = jnp.nan_to_num(rows.x)  # whose derivative would be NaN times zero

        def stand_in(*arguments: Any, **options: Any) -> jax.Array:
            """Of the kernel, whose results are right but have no derivative."""
            return reference.mxfp4_experts(*jax.lax.stop_gradient(arguments), **options)

        def loss(x: jax.Array, weights: jax.Array, implementation: Any) -> jax.Array:
            operands = (operand[None] for operand in rows._replace(x=x, weights=weights))  # of more axes than two
            out = mxfp4_experts(*operands, experts, LIMIT, implementation=implementation)
            return jnp.sum(jnp.sin(out))

        monkeypatch.setattr(mosaic, "mxfp4_experts", stand_in)
        monkeypatch.setattr(mosaic, "refusal", lambda *operands: None)  # of such small matrices
        derivative = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        ours, theirs = (derivative(x, rows.weights, implementation) for implementation in ("mosaic", "xla"))
        assert all(error(a, np.asarray(b, np.float64)) < 1e-3 for a, b in zip(ours, theirs, strict=True))
        assert all(jnp.abs(gradient[:2]).max() > 0 and (gradient[2] == 0).all() for gradient in ours)

    @pytest.mark.parametrize(("rows", "quantised"), [(6, False), (6, True), (192, False)])
    def test_lowers_for_cuda_at_the_shapes_of_flash(self, rows: int, quantised: bool) -> None:
        ask = partial(mxfp4_experts, limit=10.0, quantised=quantised, implementation="mosaic")
        lowered = jax.jit(ask).trace(*abstract(rows)).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("custom_call @mosaic_gpu") == 1

    def test_its_gradient_lowers_too(self) -> None:
        *rows, experts = abstract(6)

        def loss(x: jax.Array, picks: Any, weights: Any, live: Any, experts: Matrices) -> jax.Array:
            return jnp.sum(mxfp4_experts(x, picks, weights, live, experts, 10.0, implementation="mosaic"))

        traced = jax.jit(jax.grad(loss, (0, 2))).trace(*rows, experts)
        assert [kind.shape for kind in traced.out_info] == [(6, 4096), (6, 6)]
        traced.lower(lowering_platforms=("cuda",))

    def test_lowers_on_a_mesh_whose_devices_hold_some_of_the_experts(self) -> None:
        partition = Partition(Mesh(np.reshape(jax.devices("cpu"), (2, 4)), ("data", "expert")), ("data",), ("expert",))
        ask = partial(mxfp4_experts, limit=10.0, partition=partition, implementation="mosaic")
        for rows in (12, 1024):  # 6144 pairs, half of which are a device's
            lowered = jax.jit(ask).trace(*abstract(rows)).lower(lowering_platforms=("cuda",))
            assert "mosaic_gpu" in lowered.as_text() and "all_reduce" in lowered.as_text()


# The GPU -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flash() -> tuple[Matrices, list[np.ndarray]]:
    """Sixteen experts of the width of Flash; and as numbers, of the down matrices the first 64 rows."""
    experts = matrices(np.random.default_rng(), 16, 4096, 2048)
    assert isinstance(experts.down, BlockScaled)
    some = BlockScaled(experts.down.payload[:, :64], experts.down.scales[:, :64], "e2m1")
    return experts, [numbers(matrix, np.float32) for matrix in (experts.gate, experts.up, some)]


def some_rows(random: np.random.Generator, count: int) -> Rows:
    """Of which a quarter is dead, if they are more than one; half of them pick expert 3 first."""
    picks = np.stack([random.permutation(16)[:6] for _ in range(count)])
    for row in range(0, count, 2):
        picks[row, np.flatnonzero(picks[row] == 3)] = 16
        picks[row, 0] = 3
    return rows_of(random, picks, 4096, np.arange(count) % 4 != 1)


def poison() -> None:
    """Fills memory that is free with NaN, so that what a kernel does not write shows."""
    jax.block_until_ready([jnp.full(1 << 24, jnp.nan) for _ in range(16)])


@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU, and JAX_PLATFORMS=cuda,cpu")
class TestOnGPU:
    @pytest.mark.parametrize(("count", "quantised"), [(1, False), (6, False), (6, True), (48, False), (192, False)])
    def test_against_float64(self, random, flash, count: int, quantised: bool) -> None:
        """XLA as well, which rounds gate and up in any case; and both in all columns."""
        experts, (gate, up, down) = flash
        rows = some_rows(random, count)
        poison()
        ask = jax.jit(mxfp4_experts, static_argnames=("limit", "quantised", "implementation"))
        both = {}
        for implementation, rounds in (("mosaic", quantised), ("xla", True)):
            got = np.asarray(ask(*rows, experts, limit=LIMIT, quantised=quantised, implementation=implementation))
            hidden = hidden_of(rows, gate, up, quantised, rounds)
            want = outputs_of(rows, hidden, down, quantised).sum(axis=1)
            assert error(got[:, :64], want) < (STEP if quantised else MUST)
            assert (got[~np.asarray(rows.live)] == 0).all()
            both[implementation] = got.astype(np.float64)
        assert error(both["mosaic"], both["xla"]) < STEP

    @pytest.mark.parametrize("count", [6, 48])
    def test_a_row_keeps_its_bits_whatever_the_others_hold(self, random, flash, count: int) -> None:
        experts, _ = flash
        rows = some_rows(random, count)
        run = jax.jit(partial(mxfp4_experts, limit=LIMIT, implementation="mosaic"))
        got = np.asarray(run(*rows, experts))
        for _ in range(10):
            np.testing.assert_array_equal(run(*rows, experts), got)
        order = random.permutation(count)
        np.testing.assert_array_equal(run(*(operand[order] for operand in rows), experts), got[order])
        others = jnp.full_like(rows.x, jnp.nan).at[2].set(rows.x[2])
        among_nan = np.asarray(run(*rows._replace(x=others, live=jnp.ones_like(rows.live)), experts))
        np.testing.assert_array_equal(among_nan[2], got[2])
        assert np.isnan(np.delete(among_nan, 2, axis=0)).all()
        alone = run(*rows._replace(x=others, live=jnp.arange(count) == 2), experts)
        np.testing.assert_array_equal(alone[2], got[2])

    def test_the_halves_do_what_the_layer_does(self, random, flash) -> None:
        experts, _ = flash
        rows = rows_of(random, random.integers(0, 16, (13, 1)), 4096)
        hidden = mosaic.gate_up(*rows, experts, LIMIT)
        whole = mosaic.mxfp4_experts(*rows, experts, LIMIT)
        np.testing.assert_array_equal(
            np.asarray(mosaic.down(hidden, rows.picks, rows.live, experts), np.float32), whole
        )

    def test_all_codes_and_extreme_scales(self, random) -> None:
        hidden, experts = extremes(random, 2048)
        out = mosaic.down(jnp.asarray(hidden), jnp.zeros((2, 1), jnp.int32), jnp.ones(2, bool), experts)
        check_extremes(out, hidden, experts)
