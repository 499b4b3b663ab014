"""The blocks of PTX that the kernel is made of, written for a plan, with the names of their operands.

In all of them thread (r, t) of a warp, lane 4 r + t, holds of wgmma's A and of its sums the rows r and r + 8 of the
warp's 16; of sums the columns 2t and 2t + 1 of every 8, and of A the columns 2t, 2t + 1, 2t + 8, 2t + 9 of every step.
"""

from collections.abc import Iterator

from pallas_kernels.fp8_linear.plan import CHUNK, FEATURES, PITCH, WARPGROUPS, Plan
from pallas_kernels.hopper import FIRST_NAMED_BARRIER, WARPGROUP, descriptor, float32, vector

FRAGMENTS = FEATURES * CHUNK // 2 // WARPGROUP  # registers of a thread that hold its part of a chunk as float16

_STEPS = CHUNK // 16  # wgmmas of a chunk
_PIECE = 16 * WARPGROUP  # bytes that a warpgroup copies by one instruction
_PAIR = 32  # bytes of a row of x in a step; of 8 rows they are two core matrices, one behind the other


def fetch(plan: Plan) -> str:
    """Asks for a chunk of weights and its scale, without waiting for them.

    Operands: `payload`, `scales` in GMEM; `feature`, `column` where the chunk begins; `wanted`, 0 to ask for nothing;
    `slot` in SMEM, `SLOT_BYTES` for what is asked for.

    A thread asks for 16 bytes of each of its two rows at column 16 t and at column 64 + 16 t, and for the four scales
    of which its warpgroup's is one. Nobody else reads what it gets, so that nobody has to wait for others.
    """
    copy, below = "@wanted cp.async.cg.shared.global.L2::128B", 8 * plan.columns
    return f"""
    .reg .pred wanted; .reg .b32 thread, row, place; .reg .b64 address, offset;
    setp.ne.b32 wanted, $wanted, 0;
    mov.u32 thread, %tid.x; and.b32 thread, thread, {WARPGROUP - 1};
    bfe.u32 row, thread, 5, 2; bfe.u32 place, thread, 2, 3; mad.lo.u32 row, row, 16, place; add.u32 row, row, $feature;
    and.b32 place, thread, 3; mad.lo.u32 place, place, 16, $column;
    mad.wide.u32 address, row, {plan.columns}, $payload; cvt.u64.u32 offset, place; add.u64 address, address, offset;
    mad.lo.u32 place, thread, 16, $slot;
    {copy} [place], [address], 16;
    {copy} [place + {_PIECE}], [address + 64], 16;
    {copy} [place + {2 * _PIECE}], [address + {below}], 16;
    {copy} [place + {3 * _PIECE}], [address + {below + 64}], 16;
    shr.u32 row, $feature, 7; mad.wide.u32 address, row, {plan.columns // CHUNK}, $scales;
    shr.u32 row, $column, 9; mul.wide.u32 offset, row, 4; add.u64 address, address, offset;
    mad.lo.u32 place, thread, 4, $slot;
    @wanted cp.async.ca.shared.global [place + {4 * _PIECE}], [address], 4;
    cp.async.commit_group;
    """


def decode(plan: Plan) -> str:
    """Waits for the oldest chunk that was asked for and makes it float16, wgmma's A.

    Operands: `slot` in SMEM.
    Results: `a`, `FRAGMENTS` registers of two numbers each; `scale`, float32.

    Word i of 16 bytes of weights is a thread's part of step i, and 64 columns further on of step i + 4.
    """

    def lines() -> Iterator[str]:
        yield f"""
        .reg .pred nan; .reg .b16 low, high; .reg .b32 thread, place, bits, w<4>;
        cp.async.wait_group {plan.ahead - 1};
        mov.u32 thread, %tid.x; and.b32 place, thread, {WARPGROUP - 1}; mad.lo.u32 place, place, 16, $slot;
        """
        for piece in range(4):
            yield f"ld.shared.v4.b32 {{w0, w1, w2, w3}}, [place + {piece * _PIECE}];"
            below, later = divmod(piece, 2)
            for word in range(4):
                first = 4 * (4 * later + word) + below
                yield f"mov.b32 {{low, high}}, w{word};"
                yield f"cvt.rn.f16x2.e4m3x2 $a{first}, low; cvt.rn.f16x2.e4m3x2 $a{first + 2}, high;"
        # A code is the exponent field of its scale, but that 2^-127 is subnormal and 255 is NaN.
        yield f"""
        and.b32 place, thread, {WARPGROUP - 1}; mad.lo.u32 place, place, 4, $slot;
        shr.u32 bits, thread, 7; add.u32 place, place, bits; ld.shared.u8 bits, [place + {4 * _PIECE}];
        setp.eq.u32 nan, bits, 255; shl.b32 bits, bits, 23; max.u32 bits, bits, 0x00400000;
        selp.b32 bits, 0x7FC00000, bits, nan; mov.b32 $scale, bits;
        """

    return "\n".join(lines())


def multiply(plan: Plan) -> str:
    """Adds the product of a chunk of weights with its part of the panel to the sums of a unit.

    Operands: `a`, `scale` as decoded; `chunk`, its number in the unit; `panel`, `powers` in SMEM as staged; `t`, sums.
    Result: `t`, tile / 2 registers, float32.
    """
    partial = [f"p{index}" for index in range(plan.tile // 2)]

    def lines() -> Iterator[str]:
        yield f"""
        .reg .pred add; .reg .b32 place; .reg .b64 base, step; .reg .f32 p<{len(partial)}>, x<2>;
        mad.lo.u32 place, $chunk, {_STEPS * _PAIR * plan.tile}, $panel; shr.u32 place, place, 4;
        cvt.u64.u32 base, place; add.u64 base, base, {descriptor(leading_bytes=128, stride_bytes=256)};
        wgmma.fence.sync.aligned;
        """
        for step in range(_STEPS):
            a = vector(f"$a{4 * step + index}" for index in range(4))
            yield f"""
            setp.ne.b32 add, {step}, 0; add.u64 step, base, {step * _PAIR * plan.tile >> 4};
            wgmma.mma_async.sync.aligned.m64n{plan.tile}k16.f32.f16.f16 {vector(partial)}, {a}, step, add, 1, 1, 0;
            """
        yield f"""
        wgmma.commit_group.sync.aligned;
        mov.u32 place, %tid.x; and.b32 place, place, 3; mad.lo.u32 place, place, 8, $powers;
        mad.lo.u32 place, $chunk, {4 * plan.tile}, place;
        wgmma.wait_group.sync.aligned 0;
        """
        for index, part in enumerate(partial):
            if index % 4 == 0:
                yield f"ld.shared.v2.f32 {{x0, x1}}, [place + {index * 8}];"
            yield f"mul.f32 {part}, {part}, x{index % 2}; fma.rn.f32 $t{index}, {part}, $scale, $t{index};"

    return "\n".join(lines())


def zeros(plan: Plan) -> str:
    """Sums of nothing. Result: `t` as multiplied."""
    return " ".join(f"mov.b32 $t{index}, 0;" for index in range(plan.tile // 2))


def stage(plan: Plan, quantised: bool) -> str:
    """Writes a warpgroup's chunks of a panel to SMEM: x by a power of two for each row and chunk, float16, and those.

    Operands: `x` in GMEM; `row`, `group`, `column` where the panel begins; `panel`, `powers` in SMEM.

    A warp takes 8 rows of a chunk at a time. Its lane 8 i + r reads words i of every 16 columns of row r, those of
    which `multiply` makes its steps i and i + 4: the first half of such a word goes to the first eight columns of the
    step, the other half to the others.
    """
    tasks, octets = plan.chunks * plan.tile // 8, plan.tile // 8

    def lines() -> Iterator[str]:
        yield f"""
        .reg .pred flag; .reg .b16 codes; .reg .f32 factor, even, odd; .reg .b64 address, offset;
        .reg .b32 thread, warp, word, row, barrier, task, chunk, place, other, largest, power, w<16>, h<4>;
        mov.u32 thread, %tid.x; bfe.u32 warp, thread, 5, 2; bfe.u32 word, thread, 3, 2; and.b32 row, thread, 7;
        shr.u32 barrier, thread, 7; add.u32 barrier, barrier, {FIRST_NAMED_BARRIER + 1};
        bar.sync barrier, {WARPGROUP};
        """
        for first in range(0, tasks, WARPGROUP // 32):
            yield f"""
            add.u32 task, warp, {first}; setp.ge.u32 flag, task, {tasks}; @flag bra DONE;
            div.u32 chunk, task, {octets}; rem.u32 task, task, {octets};
            mad.lo.u32 place, task, 8, row; add.u32 place, place, $row; min.u32 place, place, {plan.rows - 1};
            mad.lo.u32 place, place, {plan.groups}, $group; mad.wide.u32 address, place, {2 * plan.columns}, $x;
            mad.lo.u32 place, chunk, {CHUNK * WARPGROUPS}, $column; mad.lo.u32 place, word, 4, place;
            mul.wide.u32 offset, place, 2; add.u64 address, address, offset;
            """
            for index in range(8):
                yield f"ld.global.nc.v2.b32 {{w{2 * index}, w{2 * index + 1}}}, [address + {32 * index}];"
            yield "mov.b32 largest, 0;"
            for index in range(16):  # magnitudes of bfloat16 are ordered like their bits
                yield f"and.b32 other, w{index}, 0x7FFF7FFF; max.u16x2 largest, largest, other;"
            for distance in (8, 16):
                yield f"shfl.sync.bfly.b32 other, largest, {distance}, 31, -1; max.u16x2 largest, largest, other;"
            yield f"""
            shl.b32 other, largest, 16; and.b32 largest, largest, 0xFFFF0000; max.u32 largest, largest, other;
            {_power(quantised)}
            sub.u32 other, 0x7F000000, power; mov.b32 factor, other;
            setp.ge.u32 flag, largest, 0x7F800000; selp.b32 power, 0x7FC00000, power, flag;
            mad.lo.u32 place, chunk, {octets}, task; mad.lo.u32 place, place, 8, row;
            mad.lo.u32 place, place, 4, $powers;
            setp.eq.u32 flag, word, 0; @flag st.shared.b32 [place], power;
            mad.lo.u32 place, chunk, {_STEPS}, word; mad.lo.u32 place, place, {octets}, task;
            mad.lo.u32 place, place, {8 * _PAIR}, $panel; mad.lo.u32 place, row, 16, place;
            """
            for later in range(2):
                for half in range(2):
                    for thread in range(4):
                        yield _scaled(quantised, f"w{8 * later + 2 * thread + half}", f"h{thread}")
                    offset = later * 4 * _PAIR * plan.tile + half * 128
                    yield f"st.shared.v4.b32 [place + {offset}], {{h0, h1, h2, h3}};"
        yield f"DONE: fence.proxy.async.shared::cta; bar.sync barrier, {WARPGROUP};"

    return "\n".join(lines())


def finish(plan: Plan) -> str:
    """Adds up the sums that the warpgroups have for a unit, in their order, and writes those of rows that exist.

    Operands: `t` as multiplied; `sums` a buffer in SMEM; `out` in GMEM; `row`, `feature`, `slice` where the unit lies.

    The whole block passes one barrier, which is enough if units take turns with two buffers.
    """
    pitch, part = 4 * PITCH, 4 * PITCH * plan.tile
    width = plan.groups * plan.features

    def lines() -> Iterator[str]:
        yield f"""
        .reg .pred exists; .reg .b32 thread, feature, row, place; .reg .f32 sum, other; .reg .b64 address, offset;
        mov.u32 thread, %tid.x; bfe.u32 feature, thread, 2, 3; bfe.u32 row, thread, 5, 2;
        mad.lo.u32 feature, row, 16, feature; shr.u32 row, thread, 7; mad.lo.u32 place, row, {part}, $sums;
        and.b32 row, thread, 3; mad.lo.u32 place, row, {2 * pitch}, place; mad.lo.u32 place, feature, 4, place;
        """
        for index in range(plan.tile // 2):
            octet, corner = divmod(index, 4)
            yield f"st.shared.f32 [place + {octet * 8 * pitch + corner % 2 * pitch + corner // 2 * 32}], $t{index};"
        yield f"""
        bar.sync {FIRST_NAMED_BARRIER}, {WARPGROUPS * WARPGROUP};
        and.b32 feature, thread, {FEATURES - 1}; shr.u32 row, thread, {FEATURES.bit_length() - 1};
        mad.lo.u32 place, row, {pitch}, $sums; mad.lo.u32 place, feature, 4, place;
        add.u32 row, row, $row; add.u32 feature, feature, $feature;
        mad.lo.u32 thread, $slice, {plan.rows}, row; mad.wide.u32 address, thread, {4 * width}, $out;
        mul.wide.u32 offset, feature, 4; add.u64 address, address, offset;
        """
        for octet in range(plan.tile // 8):
            yield f"ld.shared.f32 sum, [place + {octet * 8 * pitch}];"
            for warpgroup in range(1, WARPGROUPS):
                yield f"ld.shared.f32 other, [place + {octet * 8 * pitch + warpgroup * part}];"
                yield "add.f32 sum, sum, other;"
            yield f"setp.lt.s32 exists, row, {plan.rows - 8 * octet};"
            yield f"@exists st.global.f32 [address + {octet * 8 * 4 * width}], sum;"

    return "\n".join(lines())


def _power(quantised: bool) -> str:
    """`power`, by which a row's chunk is divided, from `largest`, its largest magnitude; both as bits of float32."""
    if quantised:  # 2^ceil(log2(max(largest, 1e-4) / 448)) like `fake_e4m3`
        return f"""
        mov.b32 factor, largest; max.f32 factor, factor, {float32(1e-4)}; mul.f32 factor, factor, {float32(1 / 448)};
        mov.b32 power, factor; add.u32 power, power, 0x007FFFFF; and.b32 power, power, 0x7F800000;
        """
    # What is left of x is below 2^15, and of what lies above 2^-31 of that all eight bits are.
    return "and.b32 power, largest, 0x7F800000; max.u32 power, power, 0x0D800000; sub.u32 power, power, 0x07000000;"


def _scaled(quantised: bool, word: str, to: str) -> str:
    """Two numbers of x, times `factor`, as two float16; through E4M3 if quantised."""
    if quantised:
        convert = f"cvt.rn.satfinite.e4m3x2.f32 codes, odd, even; cvt.rn.f16x2.e4m3x2 {to}, codes;"
    else:
        convert = f"cvt.rn.f16x2.f32 {to}, odd, even;"
    return f"""
    shl.b32 other, {word}, 16; mov.b32 even, other; mul.f32 even, even, factor;
    and.b32 other, {word}, 0xFFFF0000; mov.b32 odd, other; mul.f32 odd, odd, factor; {convert}
    """
