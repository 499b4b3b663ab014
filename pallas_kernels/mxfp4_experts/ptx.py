"""The arithmetic of the expert kernel, in PTX for the threads of one warpgroup.

`ask` asks for the bfloat16 rows of a slot, `take` brings them into registers and `split` makes them pairs of e4m3
numbers; `read` brings a chunk of weights into registers and `multiply` adds its products with the rows; `finish` adds
up the warpgroups and applies what follows a product. How numbers lie in registers and in shared memory is told where
they are.
"""

import math
from collections.abc import Iterator

from pallas_kernels.hopper import FIRST_NAMED_BARRIER, WARPGROUP, descriptor, float32, vector
from pallas_kernels.mxfp4_experts.slots import ROWS

TILE = 64
"""Matrix rows of a tile: the M side of wgmma."""
GROUP = 32
"""Columns that share a scale."""
CHUNK_GROUPS = 16
"""Groups of a tile that a warpgroup takes at once."""
CHUNK_BYTES = CHUNK_GROUPS * GROUP // 2
SWIZZLE_BYTES = 128
"""Of a chunk's rows, whose 16-byte piece j of row r is at j xor r mod 8; a chunk has such patterns side by side."""
SCALED_GROUPS = 8
"""Groups of a chunk whose scales are numbers at once."""
NUMBERS = TILE * SCALED_GROUPS
"""Float32 that a warpgroup has for them."""
NOTES = 4 * ROWS
"""Words that a warpgroup notes about the rows of its slots, see `split`."""
PITCH = TILE + 4
"""Floats between two token rows of partial sums, so that a warp's stores meet no bank twice."""

_PARTIAL = 4 * ROWS * PITCH  # bytes, of the partial sums of a warpgroup
_SELECT = "0xE2"  # lop3: of its first operand the bits that the second one has, of the third the others
_BATCH = 2  # groups whose products are under way while the next ones are decoded
_THREAD = "mov.u32 thread, %tid.x; and.b32 lane, thread, 31; shr.u32 warp, thread, 5; and.b32 warp, warp, 3;"


LOADED = 36
"""Registers of a thread in which `take` leaves two rows' words, pairs and shares."""
_PAIRS, _SHARES = 32, 34  # of them the first ones for pairs and for shares


def ask(groups: int, warpgroups: int, picks: int) -> str:
    """Asks for a slot's rows, of which a warp gets the warpgroup's columns of two.

    They come to the place of a chunk, two rows of each warp after those of the one before. Of a row, the 16-byte piece
    p comes to p xor p // 8 mod 4, so that neither copies nor lanes that read 64 bytes each meet a bank twice.

    Operands: `rows`, bfloat16 in global memory; `shares`, there, a float32 for every pair; `pairs` of `Slots`, and
    `slot`, its number there; `weights` in shared memory, a ring of chunks, of whose places this is number `place`;
    `notes`, there, to whose end the shares come, see `split`.

    Args:
        groups: of a warpgroup's columns, at most 32.
        warpgroups: that share a row.
        picks: pairs of a row.
    """
    row_bytes = 2 * groups * GROUP
    lines = [
        f"""
        .reg .b64 from, byte; {_spots(groups)}
        bfe.u32 a, lane, 3, 2; xor.b32 a, a, lane; mad.lo.u32 spot, a, 16, spot;
        """
    ]
    for half in (0, 1):
        lines.append(
            f"""
            setp.ge.s32 there, pair{half}, 0; and.pred leads, there, leader; mul.wide.s32 byte, pair{half}, 4;
            add.u64 from, $shares, byte; @leads cp.async.ca.shared.global [share + {4 * half}], [from], 4;
            div.u32 a, pair{half}, {picks}; mad.lo.u32 a, a, {warpgroups}, warpgroup;
            mul.wide.u32 byte, a, {row_bytes}; add.u64 from, $rows, byte; mul.wide.u32 byte, lane, 16;
            add.u64 from, from, byte;
            """
        )
        for first in range(0, row_bytes, 32 * 16):
            target = half * row_bytes + first
            lines.append(f"@there cp.async.cg.shared.global [spot + {target}], [from + {first}], 16;")
    lines.append("cp.async.commit_group;")
    return "\n".join(lines)


def take(groups: int) -> str:
    """What `ask` asked for, into registers, once it is there: a lane gets a group in each of its warp's rows.

    Rows that are missing become zeros.

    Operands: `pairs`, `slot`, `weights`, `place` and `notes` as for `ask`. Result: `loaded`.
    """
    lines = [
        f"""
        .reg .pred mine; {_spots(groups)} setp.lt.u32 mine, lane, {groups};
        mad.lo.u32 spot, lane, {2 * GROUP}, spot; bfe.u32 lane, lane, 1, 2; shl.b32 lane, lane, 4;
        cp.async.wait_group 0; bar.warp.sync 0xFFFFFFFF;
        """
    ]
    for half in (0, 1):
        share = f"$loaded{_SHARES + half}"
        lines.append(
            f"""
            mov.b32 $loaded{_PAIRS + half}, pair{half}; setp.ge.s32 there, pair{half}, 0; and.pred leads, there, leader;
            mov.b32 {share}, 0; @leads ld.shared.u32 {share}, [share + {4 * half}]; and.pred there, there, mine;
            """
        )
        lines += [f"mov.b32 $loaded{16 * half + i}, 0;" for i in range(16)]
        for i in range(4):
            four = vector(f"$loaded{16 * half + 4 * i + j}" for j in range(4))
            lines.append(f"xor.b32 a, lane, {16 * i}; add.u32 a, a, spot;")
            lines.append(f"@there ld.shared.v4.u32 {four}, [a + {half * 2 * groups * GROUP}];")
    lines.append("fence.proxy.async.shared::cta;")  # TMA will write where ordinary copies wrote
    return "\n".join(lines)


def _spots(groups: int) -> str:
    """A warp's two pairs, where their rows and shares come to, and who looks after the shares."""
    return f"""
        .reg .b32 thread, lane, warp, warpgroup, spot, share, a, pair<2>; .reg .pred there, leader, leads;
        {_THREAD} shr.u32 warpgroup, thread, 7; setp.eq.u32 leader, lane, 0;
        mad.lo.u32 a, $slot, {ROWS // 2}, warp; mad.lo.u32 a, a, 8, $pairs; ld.shared.v2.u32 {{pair0, pair1}}, [a];
        mad.lo.u32 spot, $place, {TILE * CHUNK_BYTES}, $weights; mad.lo.u32 spot, warp, {4 * groups * GROUP}, spot;
        mad.lo.u32 share, warpgroup, {4 * NOTES}, $notes; mad.lo.u32 share, warp, 8, share;
        add.u32 share, share, {4 * 3 * ROWS};
        """


def split(groups: int, parts_bytes: int, quantised: bool) -> str:
    """What `take` took as hi + lo, both e4m3, over a power of two for each row of this warpgroup's columns.

    hi has the upper four of a number's eight significant bits and lo the lower four. Numbers from 2^-9 of the largest
    on are exact so, smaller ones less than 2^-16 of the largest away. Rows that are missing become zeros; a row that is
    not finite gets a factor that is not a number.

    A lane stores its 16 even columns before its 16 odd ones, as the nibbles of a weight come. Where they lie: 8 rows of
    hi, then 8 of lo; of either 1024 bytes for every 128 columns, row after row, in which the 16-byte piece j of row r
    is at j xor r (the 128-byte swizzle).

    Operands: `loaded`; `parts` in shared memory, and `notes`, there, for each warpgroup the pairs of the slot, the
    factors of their rows and their shares, eight words each; behind them come the shares of the next slot.

    Args:
        groups: as for `ask`.
        parts_bytes: of shared memory between the parts of two warpgroups.
        quantised: the numbers first go through e4m3 with one power of two for 128 columns.
    """
    words = [[f"w{half}_{i}" for i in range(16)] for half in (0, 1)]
    lines = [
        f"""
        .reg .b32 thread, lane, warp, warpgroup, notes, parts, first, row, a, at, piece, back, e;
        .reg .b32 most, inverse, factor, {", ".join(words[0] + words[1])}, h<8>, l<8>, top<4>, rest<4>;
        .reg .b16 low, high, c<2>; .reg .f32 y<2>, scale, unscale; .reg .pred there, mine, leader, finite, up;
        {_THREAD} shr.u32 warpgroup, thread, 7; shl.b32 first, warp, 1; setp.eq.u32 leader, lane, 0;
        setp.lt.u32 mine, lane, {groups}; mad.lo.u32 parts, warpgroup, {parts_bytes}, $parts;
        mad.lo.u32 notes, warpgroup, {4 * NOTES}, $notes; mad.lo.u32 notes, first, 4, notes;
        """
    ]
    lines += [f"mov.b32 {word}, $loaded{i};" for i, word in enumerate(words[0] + words[1])]
    for half in (0, 1):
        lines += [f"mov.b32 {part}{i}, 0;" for part in "hl" for i in range(8)]
        lines.append(f"mov.b32 factor, 0; setp.ge.s32 there, $loaded{_PAIRS + half}, 0; @!there bra.uni STORE{half};")
        if quantised:
            lines.append(_quantise(words[half]))
        lines.append(_largest(words[half]))
        lines.append(
            f"""
            redux.sync.max.u32 most, most, 0xFFFFFFFF; shl.b32 most, most, 16; max.u32 most, most, 0x0D800000;
            and.b32 most, most, 0x7F800000; setp.ne.u32 finite, most, 0x7F800000; sub.u32 inverse, {261 << 23}, most;
            shr.u32 a, inverse, 16; or.b32 inverse, inverse, a;
            sub.u32 factor, most, {1 << 23}; selp.b32 factor, factor, 0x7FC00000, finite;
            """  # 2^7 over the row's power of two; back by 2^-7, and by 2^6 because e2m1 bits are read as e4m3 numbers
        )
        lines += [_part(words[half][4 * i : 4 * i + 4], i) for i in range(4)]
        lines.append(
            f"""
            STORE{half}:
            add.u32 row, first, {half}; mad.lo.u32 at, row, 128, parts; shr.u32 a, lane, 2; mad.lo.u32 at, a, 1024, at;
            and.b32 piece, lane, 3; shl.b32 piece, piece, 1; xor.b32 piece, piece, row;
            """
        )
        for even in (0, 4):
            lines.append("mad.lo.u32 a, piece, 16, at; xor.b32 piece, piece, 1;")
            for part, offset in (("h", 0), ("l", groups * GROUP * ROWS)):
                four = vector(f"{part}{even + i}" for i in range(4))
                lines.append(f"@mine st.shared.v4.u32 [a + {offset}], {four};")
        for i, note in enumerate((f"$loaded{_PAIRS + half}", "factor", f"$loaded{_SHARES + half}")):
            lines.append(f"@leader st.shared.u32 [notes + {4 * (i * ROWS + half)}], {note};")
    lines.append("fence.proxy.async.shared::cta;")  # the tensor cores read what ordinary stores wrote
    return "\n".join(lines)


def _largest(words: list[str]) -> str:
    """most = the largest magnitude of bfloat16 pairs, as bits."""
    lines = ["mov.b32 most, 0;"] + [f"max.NaN.xorsign.abs.bf16x2 most, most, {word};" for word in words]
    lines.append("and.b32 most, most, 0x7FFF7FFF; shr.u32 a, most, 16; max.u16x2 most, most, a;")
    return "\n".join([*lines, "and.b32 most, most, 0xFFFF;"])


def _part(words: list[str], index: int) -> str:
    """hi and lo of eight columns, four of each parity, in one register each.

    Either is converted with what lies behind it in a register, which at most decides a tie between subnormal numbers.
    """
    lines = []
    for i, word in enumerate(words):
        lines.append(f"mul.rn.bf16x2 {word}, {word}, inverse; and.b32 top{i}, {word}, 0xFFF0FFF0;")
        lines.append(f"sub.rn.bf16x2 rest{i}, {word}, top{i};")
    for part, source in (("h", "top"), ("l", "rest")):
        for odd in (0, 1):
            for pair in (0, 1):
                for i in (0, 1):
                    word = f"{source}{2 * pair + i}"
                    lines.append(f"mov.b32 y{i}, {word};" if odd else f"shl.b32 a, {word}, 16; mov.b32 y{i}, a;")
                lines.append(f"cvt.rn.satfinite.e4m3x2.f32 c{pair}, y1, y0;")
            lines.append(f"mov.b32 {part}{4 * odd + index}, {{c0, c1}};")
    return "\n".join(lines)


def _quantise(words: list[str]) -> str:
    """bfloat16 pairs through e4m3, with one power of two for the columns of four lanes."""
    lines = [_largest(words)]
    lines.append(
        f"""
        shfl.sync.bfly.b32 a, most, 1, 31, 0xFFFFFFFF; max.u32 most, most, a;
        shfl.sync.bfly.b32 a, most, 2, 31, 0xFFFFFFFF; max.u32 most, most, a; shl.b32 most, most, 16;
        mov.b32 y0, most; max.NaN.f32 y0, y0, {float32(1e-4)}; mul.rn.f32 y0, y0, {float32(1 / 448)}; mov.b32 e, y0;
        and.b32 a, e, 0x7FFFFF; and.b32 e, e, 0x7F800000; setp.ne.u32 up, a, 0; @up add.u32 e, e, 0x800000;
        mov.b32 scale, e; sub.u32 e, 0x7F000000, e; mov.b32 unscale, e;
        """  # ceil(log2) off the bits, as `power_of_two_scale_exponent`
    )
    for word in words:
        lines.append(
            f"""
            shl.b32 a, {word}, 16; mov.b32 y0, a; and.b32 a, {word}, 0xFFFF0000; mov.b32 y1, a;
            mul.f32 y0, y0, unscale; mul.f32 y1, y1, unscale; cvt.rn.satfinite.e4m3x2.f32 c0, y1, y0;
            cvt.rn.f16x2.e4m3x2 back, c0; mov.b32 {{low, high}}, back; cvt.f32.f16 y0, low; cvt.f32.f16 y1, high;
            mul.f32 y0, y0, scale; mul.f32 y1, y1, scale; cvt.rn.bf16x2.f32 {word}, y1, y0;
            """
        )
    return "\n".join(lines)


CODES = 2 * CHUNK_GROUPS
"""Registers of a thread in which `read` leaves its weights of a chunk, eight each."""


def read() -> str:
    """A thread's part of a chunk into registers: of rows r and r+8 of its warp's 16, bytes 4q to 4q+3 of each group.

    r is its lane over 4 and q the rest. That is just its part of the left operand of a k step of wgmma, low nibbles
    being the even columns, so that a weight is touched by one thread and once; and it is what ldmatrix gives, four
    matrices of eight rows by 16 bytes at once, of which a lane says where one row lies.

    Operands: `weights` in shared memory, a ring of chunks, of which this is number `place`. Result: `codes`.
    """
    pattern = 8 * SWIZZLE_BYTES
    lines = [
        f"""
        .reg .b32 thread, lane, warp, row, group, base, a;
        {_THREAD} mad.lo.u32 a, $place, 4, warp; mad.lo.u32 base, a, {16 * CHUNK_BYTES}, $weights;
        bfe.u32 a, lane, 3, 1; mad.lo.u32 base, a, {8 * CHUNK_BYTES}, base; and.b32 row, lane, 7;
        mad.lo.u32 base, row, {SWIZZLE_BYTES}, base; shr.u32 group, lane, 4; xor.b32 group, group, row;
        mad.lo.u32 base, group, 16, base;
        """
    ]
    for byte in range(0, SWIZZLE_BYTES, 2 * 16):  # of two groups
        lines.append(f"xor.b32 a, base, {byte};")
        for number in range(CHUNK_BYTES // SWIZZLE_BYTES):
            first = 2 * (number * SWIZZLE_BYTES + byte) // 16
            four = vector(f"$codes{first + i}" for i in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {four}, [a + {number * pattern}];")
    return "\n".join(lines)


def multiply(chunk: int, groups: int, parts_bytes: int, first: bool) -> str:
    """sums [64, 8] += chunk [64, 512] times the split rows, each group of 32 columns with its scale.

    A group is one k step of wgmma with the weights in registers and a fresh accumulator, hi and lo being 16 columns of
    one product; its float32 results are multiplied with the group's scale and added. An e2m1 number becomes e4m3 by
    moving bits, exactly, as its value times 2^-6.

    Operands: `codes` as `read` leaves them; `scales` in shared memory, a ring of tiles' scales, of which these are
    number `scales_place`; `numbers`, there, where they become float32; `parts` as for `split`; `warpgroup`, its number,
    which the compiler has to know to be the same in a whole warp, or it moves every descriptor to a uniform register by
    itself; `sums`, a result too, and an operand unless `first`.

    Args:
        chunk: number of the chunk in the tile.
        groups: as for `ask`.
        parts_bytes: as for `split`.
        first: the sums begin at zero.
    """
    sets, batches, halves = 2 * _BATCH, CHUNK_GROUPS // _BATCH, CHUNK_GROUPS // SCALED_GROUPS
    lines = [
        f"""
        .reg .b32 thread, lane, warp, parts, own, factors, a, b, low, e<4>, scales<{halves}>, A<{4 * sets}>;
        .reg .f32 f<{4 * _BATCH}>, d<{8 * sets}>; .reg .b64 descriptor<{_BATCH}>; .reg .pred no;
        {_THREAD} shr.u32 a, lane, 1; mad.lo.u32 a, warp, 16, a; mad.lo.u32 a, $scales_place, {TILE}, a;
        mad.lo.u32 a, a, {groups}, $scales; and.b32 b, lane, 1; mad.lo.u32 a, b, 4, a;
        """
    ]
    for half in range(halves):
        lines.append(f"ld.shared.u32 scales{half}, [a + {chunk * CHUNK_GROUPS + half * SCALED_GROUPS}];")
    lines.append(
        f"""
        mad.lo.u32 own, thread, {4 * 4}, $numbers; shr.u32 a, thread, 5; bfe.u32 b, thread, 2, 3;
        mad.lo.u32 a, a, 16, b; mad.lo.u32 factors, a, {4 * SCALED_GROUPS}, $numbers; setp.ne.b32 no, 0, 0;
        mad.lo.u32 parts, $warpgroup, {parts_bytes}, $parts;
        add.u32 parts, parts, {chunk * CHUNK_GROUPS * GROUP * ROWS}; shr.u32 parts, parts, 4;
        """
    )
    for batch in range(batches):
        lines += [_decode(batch), _products(batch, groups * GROUP * ROWS)]
        if batch:
            lines += ["wgmma.wait_group.sync.aligned 1;", _fold(batch - 1, first)]
    lines += ["wgmma.wait_group.sync.aligned 0;", _fold(batches - 1, first)]
    return "\n".join(lines)


def _groups(batch: int) -> list[tuple[int, int]]:
    """The groups of a batch, and which set of registers each has; two batches take turns."""
    return [(batch * _BATCH + i, batch % 2 * _BATCH + i) for i in range(_BATCH)]


def _decode(batch: int) -> str:
    """A nibble's sign to bit 7 of its byte and its three others to bits 4 to 2; six instructions for eight weights."""
    lines = []
    for group, set_ in _groups(batch):
        for half in (0, 1):  # rows r and r + 8
            code, even, odd = f"$codes{2 * group + half}", f"A{4 * set_ + half}", f"A{4 * set_ + 2 + half}"
            lines.append(
                f"""
                and.b32 a, {code}, 0x88888888; shr.u32 b, {code}, 2; lop3.b32 {odd}, b, 0x1C1C1C1C, a, {_SELECT};
                shl.b32 a, a, 4; shl.b32 b, {code}, 2; lop3.b32 {even}, b, 0x1C1C1C1C, a, {_SELECT};
                """
            )
    return "\n".join(lines)


def _products(batch: int, lo_offset: int) -> str:
    lines = ["wgmma.fence.sync.aligned;"]
    high = descriptor(leading_bytes=0, stride_bytes=lo_offset, swizzle_bytes=128) >> 32
    for group, set_ in _groups(batch):
        sums, weights = vector(f"d{8 * set_ + i}" for i in range(8)), vector(f"A{4 * set_ + i}" for i in range(4))
        start = (group // 4 * 1024 + group % 4 * GROUP) >> 4  # descriptors count in 16 bytes
        described = f"descriptor{group % _BATCH}"
        lines.append(
            f"""
            add.u32 low, parts, {start}; mov.b64 {described}, {{low, {high}}};
            wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {sums}, {weights}, {described}, no, 1, 1;
            """
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    return "\n".join(lines)


def _fold(batch: int, first: bool) -> str:
    """The sums with the products of a batch; two batches load their factors at once."""
    lines = []
    half, scaled = divmod(_BATCH * batch, SCALED_GROUPS)
    if scaled == 0:
        lines.append(_numbers(half))
    if batch % 2 == 0:
        for upper in (0, 1):  # rows r and r + 8
            four = vector(f"f{2 * _BATCH * upper + i}" for i in range(2 * _BATCH))
            lines.append(f"ld.shared.v4.f32 {four}, [factors + {4 * (8 * upper * SCALED_GROUPS + scaled)}];")
    for group, set_ in _groups(batch):
        for i in range(8):  # hi, then lo
            term, sum_ = f"d{8 * set_ + i}, f{i % 4 // 2 * 2 * _BATCH + set_}", f"$sums{i % 4}"
            start = first and group == 0 and i < 4
            lines.append(f"mul.f32 {sum_}, {term};" if start else f"fma.rn.f32 {sum_}, {term}, {sum_};")
    return "\n".join(lines)


def _numbers(half: int) -> str:
    """Float32 numbers of the scales of a warp's rows, four a lane, in shared memory, where four lanes need each."""
    return f"""
        shl.b32 e0, scales{half}, 23; shl.b32 e1, scales{half}, 15; shl.b32 e2, scales{half}, 7;
        shr.u32 e3, scales{half}, 1; {" ".join(f"and.b32 e{i}, e{i}, 0x7F800000;" for i in range(4))}
        bar.warp.sync 0xFFFFFFFF; st.shared.v4.u32 [own], {{e0, e1, e2, e3}}; bar.warp.sync 0xFFFFFFFF;
        """  # a code is the exponent field of its float32; all lanes have used the numbers before


def finish(warpgroups: int, width: int, limit: float | None, rounded: bool = False) -> str:
    """Adds the warpgroups' sums of a tile in their order, and stores bfloat16 results.

    All warpgroups write their sums; the one whose turn it is waits for the others, adds up and stores, while the others
    signal and go on, until they have the next sums. The sums of a thread are those of rows r and r+8 for tokens 2q and
    2q+1. Between two tiles the threads of a warpgroup have to meet.

    Operands: `sums`; `count`, tiles of this block before; `partial` in shared memory; `notes` as for `split`; `tile`,
    its number in the slot; `out` in global memory, bfloat16 for every pair.

    Args:
        warpgroups: that share a tile, a power of two.
        width: columns of the output.
        limit: for a tile of 32 rows of gate and 32 of up: the result is share * silu(min(gate, limit)) * clip(up). None
            for a plain product.
        rounded: gate and up are rounded to bfloat16 first, as where the official code stores them.
    """
    threads = warpgroups * WARPGROUP
    there, free = FIRST_NAMED_BARRIER, FIRST_NAMED_BARRIER + 1
    rows, tokens = (TILE, 4) if limit is None else (TILE // 2, 2)  # of a tile's output, and of a thread
    lines = [
        f"""
        .reg .b32 thread, lane, warp, warpgroup, notes, r, quarter, row, token, turn, bar, a, b, n;
        .reg .b32 pair<4>; .reg .f32 q, x<2>, h<4>, u<4>, share<4>; .reg .b64 byte, to<4>; .reg .b16 code;
        .reg .pred p, there<4>;
        {_THREAD}
        shr.u32 warpgroup, thread, 7; shr.u32 r, lane, 2; and.b32 quarter, lane, 3; mad.lo.u32 row, warp, 16, r;
        mad.lo.u32 notes, warpgroup, {4 * NOTES}, $notes; mad.lo.u32 a, quarter, 8, notes;
        ld.shared.v2.f32 {{x0, x1}}, [a + {4 * ROWS}];
        setp.eq.u32 p, $count, 0; @p bra FREE; sub.u32 bar, $count, 1;
        and.b32 turn, bar, {warpgroups - 1}; setp.eq.u32 p, turn, warpgroup; @p bra FREE;
        and.b32 bar, bar, 1; add.u32 bar, bar, {free}; bar.sync bar, {threads};
        FREE:
        mad.lo.u32 a, warpgroup, {_PARTIAL}, $partial; mad.lo.u32 a, row, 4, a; mad.lo.u32 a, quarter, {8 * PITCH}, a;
        mul.f32 q, $sums0, x0; st.shared.f32 [a], q; mul.f32 q, $sums1, x1; st.shared.f32 [a + {4 * PITCH}], q;
        add.u32 a, a, 32;
        mul.f32 q, $sums2, x0; st.shared.f32 [a], q; mul.f32 q, $sums3, x1; st.shared.f32 [a + {4 * PITCH}], q;
        and.b32 turn, $count, {warpgroups - 1}; setp.eq.u32 p, turn, warpgroup; @p bra MINE;
        bar.arrive {there}, {threads}; bra.uni DONE;
        MINE:
        and.b32 a, thread, {WARPGROUP - 1}; and.b32 n, a, {rows - 1}; shr.u32 token, a, {rows.bit_length() - 1};
        mul.lo.u32 token, token, {tokens}; mad.lo.u32 notes, token, 4, notes;
        """  # who added up knows that the memory is free and may be a tile ahead of the others: two barriers
    ]
    lines += _results(tokens, rows, width, limit is not None)
    lines.append(f"mad.lo.u32 b, token, {4 * PITCH}, $partial; mad.lo.u32 b, n, 4, b; bar.sync {there}, {threads};")
    lines += _add(warpgroups, tokens, {"h": 0} if limit is None else {"h": 0, "u": 4 * rows})
    lines.append(f"and.b32 bar, $count, 1; add.u32 bar, bar, {free}; bar.arrive bar, {threads};")
    for i in range(tokens):
        if limit is not None:
            lines += [_round(f"h{i}"), _round(f"u{i}")] if rounded else []
            lines.append(_swiglu(f"h{i}", f"u{i}", f"share{i}", limit))
        lines.append(f"cvt.rn.bf16.f32 code, h{i}; @there{i} st.global.b16 [to{i}], code;")
    lines.append("DONE:")
    return "\n".join(lines)


def _results(tokens: int, rows: int, width: int, shared: bool) -> Iterator[str]:
    """to = where a thread's results belong, there = whether they are wanted, and share = that of their pair."""
    for i in range(tokens):
        yield f"""
            ld.shared.u32 pair{i}, [notes + {4 * i}]; setp.ge.s32 there{i}, pair{i}, 0;
            mad.lo.u32 a, pair{i}, {width}, n; mad.lo.u32 a, $tile, {rows}, a; mul.wide.u32 byte, a, 2;
            add.u64 to{i}, $out, byte;
            """
        if shared:
            yield f"ld.shared.f32 share{i}, [notes + {4 * (2 * ROWS + i)}];"


def _add(warpgroups: int, tokens: int, values: dict[str, int]) -> Iterator[str]:
    """A thread's values, by name with their byte in a token row, over the warpgroups in their order."""
    for warpgroup in range(warpgroups):
        for i in range(tokens):
            for value, byte in values.items():
                into = "q" if warpgroup else f"{value}{i}"
                yield f"ld.shared.f32 {into}, [b + {warpgroup * _PARTIAL + 4 * PITCH * i + byte}];"
                if warpgroup:
                    yield f"add.f32 {value}{i}, {value}{i}, q;"


def _round(value: str) -> str:
    return f"cvt.rn.bf16.f32 code, {value}; cvt.u32.u16 a, code; shl.b32 a, a, 16; mov.b32 {value}, a;"


def _swiglu(gate: str, up: str, share: str, limit: float) -> str:
    """gate = share * silu(min(gate, limit)) * clip(up, +-limit)."""
    bound = float32(limit)
    return f"""
        min.NaN.f32 {gate}, {gate}, {bound}; min.NaN.f32 {up}, {up}, {bound};
        max.NaN.f32 {up}, {up}, {float32(-limit)};
        mul.f32 q, {gate}, {float32(-math.log2(math.e))}; ex2.approx.f32 q, q; add.f32 q, q, {float32(1.0)};
        div.full.f32 {gate}, {gate}, q; mul.f32 {gate}, {gate}, {up}; mul.f32 {gate}, {gate}, {share};
        """
