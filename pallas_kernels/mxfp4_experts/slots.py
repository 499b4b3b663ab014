"""Which rows meet which expert: pairs of a row and one of its picks, in slots of up to eight that share an expert.

Slots are numbered by expert, and within one by the order of its pairs. Every block sorts all pairs for itself, which
takes it a microsecond or one and a half, and notes the few slots that it works on.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pallas_kernels.hopper import FIRST_NAMED_BARRIER, MULTIPROCESSORS, WARPGROUP, vector

BLOCKS = MULTIPROCESSORS
"""Of the grid. They have to run at once: between the products they wait for each other."""
ROWS = 8
"""Token rows of a slot: the N side of wgmma."""
SLOTS = 8
"""At most of a block, one for each of the warps that look for them. Ranges of blocks overlap at their ends, so that all
of them may have seven times their number."""
_AT_ONCE = 4  # pairs of a lane, whose loads do not wait for each other
_VECTOR = 4  # counts of experts that a lane loads at once, so that fewer lanes of a warp meet in a bank


class Slots(NamedTuple):
    """What a block notes in shared memory, int32.

    Attributes:
        experts: [8], of each of its slots.
        pairs: [64], eight for each slot, numbers row * k + pick; -1 for none.
        count: [1], of the slots of all blocks.
    """

    experts: Any
    pairs: Any
    count: Any


SIZES = Slots(SLOTS, SLOTS * ROWS, 1)
"""Of the fields."""


def sort(pairs: int, picks: int, experts: int, warpgroups: int) -> str:
    """Sorts the live pairs, and notes the slots of this block; for all warpgroups together.

    Slot number s is this block's number s - block * count // BLOCKS. A count for each expert gives its first slot; for
    each of the block's slots a warp then goes through all pairs in their order and keeps those whose turn it is.

    Operands: `picks`, int32 in global memory, what is no number of an expert being none; `live`, there, a byte for each
    row; `block`, its number; `scratch` in shared memory, `scratch_words`; the fields of `Slots`.

    Args:
        pairs: in all.
        picks: of a row.
        experts: E.
        warpgroups: of a block.
    """
    threads, counted = warpgroups * WARPGROUP, _counted(experts)
    each = counted // 32
    turns = range(0, pairs, threads)
    together = f"bar.sync {FIRST_NAMED_BARRIER}, {threads};"
    registers = f"""
        .reg .b32 thread, lane, warp, a, alive, pair, keys, own, ends, count, first, slot, rest, expert, leader;
        .reg .b32 seen, there, before, place, at, zero, none, key<{max(len(turns), _AT_ONCE)}>, used<{each}>;
        .reg .b64 from, byte; .reg .pred p, q, mine;
        mov.u32 thread, %tid.x; and.b32 lane, thread, 31; shr.u32 warp, thread, 5;
        add.u32 keys, $scratch, {4 * counted}; mov.b32 zero, 0; mov.b32 none, -1;
        """
    parts = [
        registers,
        *_load(turns, pairs, picks, experts),
        *_clear(threads, counted),
        together,
        *_count(turns, pairs),
        together,
        *_place(each),
        *_find(each),
        *_keep(pairs),
        f"DONE: {together}",
    ]
    return "\n".join(parts)


def scratch_words(pairs: int, experts: int) -> int:
    """That `sort` needs: a count for each expert, and what each pair picks."""
    return _counted(experts) + pairs


def _counted(experts: int) -> int:
    """Experts and what makes them so many vectors for each lane of a warp; nobody picks those behind the last one."""
    return -(-experts // (32 * _VECTOR)) * 32 * _VECTOR


def _load(turns: range, pairs: int, picks: int, experts: int) -> Iterator[str]:
    """key = the expert of every pair, none for one that is not wanted; a pair in each turn."""
    for turn, begin in enumerate(turns):
        yield f"""
            add.u32 pair, thread, {begin}; setp.lt.u32 p, pair, {pairs}; mov.b32 key{turn}, none; mov.b32 alive, 0;
            mul.wide.u32 byte, pair, 4; add.u64 from, $picks, byte; @p ld.global.u32 key{turn}, [from];
            div.u32 a, pair, {picks}; cvt.u64.u32 byte, a; add.u64 from, $live, byte; @p ld.global.u8 alive, [from];
            setp.ne.u32 q, alive, 0; setp.lt.u32 mine, key{turn}, {experts}; and.pred mine, mine, q;
            selp.b32 key{turn}, key{turn}, none, mine;
            """


def _clear(threads: int, counted: int) -> Iterator[str]:
    """No expert is counted, and no slot holds a pair."""
    for begin in range(0, counted, threads):
        yield f"""
            add.u32 a, thread, {begin}; setp.lt.u32 p, a, {counted}; mad.lo.u32 a, a, 4, $scratch;
            @p st.shared.u32 [a], zero;
            """
    yield f"setp.lt.u32 p, thread, {SIZES.pairs}; mad.lo.u32 a, thread, 4, $pairs; @p st.shared.u32 [a], none;"


def _count(turns: range, pairs: int) -> Iterator[str]:
    """The pairs of each expert; keys go where all can see them."""
    for turn, begin in enumerate(turns):
        yield f"""
            add.u32 pair, thread, {begin}; setp.lt.u32 p, pair, {pairs}; mad.lo.u32 a, pair, 4, keys;
            @p st.shared.u32 [a], key{turn}; setp.ne.u32 p, key{turn}, none; mad.lo.u32 a, key{turn}, 4, $scratch;
            @p red.shared.add.u32 [a], 1;
            """


def _place(each: int) -> Iterator[str]:
    """used = slots of each of a lane's experts, own = of all of them, ends = of those of the lanes before, too.

    DONE for warps that look for no slot.
    """
    yield f"""
        setp.ge.u32 p, warp, {SLOTS}; @p bra DONE;
        mov.b32 own, 0; mul.lo.u32 expert, lane, {each}; mad.lo.u32 a, expert, 4, $scratch;
        """
    for i in range(0, each, _VECTOR):
        used = vector(f"used{i + j}" for j in range(_VECTOR))
        yield f"ld.shared.v{_VECTOR}.u32 {used}, [a + {4 * i}];"
    for i in range(each):
        yield f"""
            add.u32 used{i}, used{i}, {ROWS - 1}; shr.u32 used{i}, used{i}, {ROWS.bit_length() - 1};
            add.u32 own, own, used{i};
            """
    yield "mov.b32 ends, own;"
    for distance in (1, 2, 4, 8, 16):
        yield f"""
            shfl.sync.up.b32 a, ends, {distance}, 0, 0xFFFFFFFF; setp.ge.u32 p, lane, {distance};
            @p add.u32 ends, ends, a;
            """
    yield (
        "shfl.sync.idx.b32 count, ends, 31, 31, 0xFFFFFFFF; setp.eq.u32 p, thread, 0; @p st.shared.u32 [$count], count;"
    )


def _find(each: int) -> Iterator[str]:
    """expert = that of the warp's slot, and rest = how many of its slots come before; DONE for warps without one."""
    yield f"""
        mul.lo.u32 first, $block, count; div.u32 first, first, {BLOCKS}; add.u32 slot, first, warp;
        setp.ge.u32 p, slot, count; @p bra DONE;
        setp.lt.u32 p, slot, ends; vote.sync.ballot.b32 a, p, 0xFFFFFFFF; popc.b32 leader, a;
        sub.u32 leader, 32, leader; sub.u32 rest, ends, own; sub.u32 rest, slot, rest; setp.eq.u32 p, 0, 0;
        """  # it lies before the end of all lanes but the first ones
    for i in range(each):
        yield f"""
            setp.ge.u32 q, rest, used{i}; and.pred p, p, q;
            @p sub.u32 rest, rest, used{i}; @p add.u32 expert, expert, 1;
            """
    yield """
        shfl.sync.idx.b32 expert, expert, leader, 31, 0xFFFFFFFF; shfl.sync.idx.b32 rest, rest, leader, 31, 0xFFFFFFFF;
        mad.lo.u32 a, warp, 4, $experts; setp.eq.u32 p, lane, 0; @p st.shared.u32 [a], expert;
        """


def _keep(pairs: int) -> Iterator[str]:
    """Notes those pairs of the expert that are in the warp's slot."""
    yield f"""
        mul.lo.u32 rest, rest, {ROWS}; mov.b32 seen, 0; mov.b32 pair, lane; mad.lo.u32 at, warp, {4 * ROWS}, $pairs;
        mov.b32 before, 1; shl.b32 before, before, lane; sub.u32 before, before, 1;
        NEXT: mad.lo.u32 a, pair, 4, keys;
        """
    for i in range(_AT_ONCE):
        yield f"""
            add.u32 place, pair, {32 * i}; setp.lt.u32 p, place, {pairs}; mov.b32 key{i}, none;
            @p ld.shared.u32 key{i}, [a + {4 * 32 * i}];
            """
    for i in range(_AT_ONCE):
        yield f"""
            setp.eq.u32 mine, key{i}, expert; vote.sync.ballot.b32 there, mine, 0xFFFFFFFF;
            and.b32 a, there, before; popc.b32 a, a; add.u32 place, seen, a; sub.u32 place, place, rest;
            setp.lt.u32 p, place, {ROWS}; and.pred mine, mine, p; mad.lo.u32 a, place, 4, at;
            add.u32 place, pair, {32 * i}; @mine st.shared.u32 [a], place;
            popc.b32 a, there; add.u32 seen, seen, a;
            """
    yield f"add.u32 pair, pair, {32 * _AT_ONCE}; sub.u32 a, pair, lane; setp.lt.u32 p, a, {pairs}; @p bra NEXT;"
