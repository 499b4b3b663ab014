"""What kernels written in PTX for Hopper GPUs share: values that lie in registers, addresses, descriptors, barriers.

What handles MLIR values is for the inside of `plgpu.inline_mgpu`. A PTX block has to finish what it starts: fence,
products, commit and wait of wgmma belong into one block, because the compiler believes a register once the block has
ended.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

WARPGROUP = 128  # threads
FIRST_NAMED_BARRIER = 9  # Mosaic uses 0 and, for each of up to eight warpgroups, the one after its number
_GRID_BARRIER = 15  # the last one

MULTIPROCESSORS = 132
"""Of an H100 (SXM), H200 or GH200: the blocks of a persistent grid, all of which run at once."""

_VECTOR = 4  # registers that a `registers` value keeps together


def registers(count: int, dtype: DTypeLike) -> plgpu.ShapeDtypeStruct:
    """The type of a value that is nothing but `count` 32-bit registers of each thread of a warpgroup, a multiple of 4.

    Its elements have no order that Pallas knows of; only `pack` and `unpack` look inside.
    """
    shape = (WARPGROUP * count,)
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=plgpu.Layout.WG_STRIDED(shape, vec_size=_VECTOR))


def scalar(dtype: DTypeLike) -> plgpu.ShapeDtypeStruct:
    """The type of a 32-bit number that is the same in all threads of a warpgroup."""
    return plgpu.ShapeDtypeStruct((), jnp.dtype(dtype), layout=plgpu.Layout.WG_SPLAT(()))


def run(text: str, results: Mapping[str, plgpu.ShapeDtypeStruct] | None = None, **operands: Any) -> Any:
    """Runs a block of PTX in every thread of a warpgroup, from the body of a kernel.

    Args:
        text: statements in which `$name` stands for an operand; see `ptx`.
        results: what the block writes, `registers` or `scalar`, by name. A result that has the name of an operand
            begins with its value.
        operands: by name. A reference is the address of its first byte, 32 bits in shared and 64 in global memory, and
            a pair of a reference and its transforms too; an integer of the kernel is 32 bits; a `registers` value `x`
            is `$x0`, `$x1` and so on.

    Returns:
        The results as a tuple.
    """
    results = results or {}
    values = {name: value[0] if isinstance(value, tuple) else value for name, value in operands.items()}
    types = [plgpu.RefType(v[1]) if isinstance(v, tuple) else _operand_type(v) for v in operands.values()]

    @plgpu.inline_mgpu(arg_types=tuple(types), return_type=tuple(results.values()))
    def block(_: Any, *arguments: Any) -> Any:
        inputs: dict[str, ir.Value] = {}
        for name, argument in zip(values, arguments, strict=True):
            inputs |= _inputs(name, argument)
        kinds = {}
        for name, result in results.items():
            kind = ir.F32Type.get() if result.dtype == np.float32 else ir.IntegerType.get_signless(32)
            count = result.shape[0] // WARPGROUP if result.shape else 0
            kinds[name] = {f"{name}{i}": kind for i in range(count)} or {name: kind}
        outputs = iter(ptx(text, {name: kind for group in kinds.values() for name, kind in group.items()}, inputs))
        return tuple(_packed(result, [next(outputs) for _ in kinds[name]]) for name, result in results.items())

    return block(*values.values())


def warpgroup_barrier() -> None:
    """Waits for the other threads of the warpgroup, from the body of a kernel."""

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    wait()


def grid_arrive(barrier: Any, threads: int) -> None:
    """Counts this block in `barrier`, a 32-bit number in GMEM, once all of its threads are here."""
    text = f"""
        .reg .b32 thread; .reg .pred leader; bar.sync {_GRID_BARRIER}, {threads};
        mov.u32 thread, %tid.x; setp.eq.u32 leader, thread, 0; @leader red.release.gpu.global.add.u32 [$barrier], 1;
        """
    run(text, barrier=barrier)


def grid_wait(barrier: Any, blocks: int, threads: int) -> None:
    """Waits until so many blocks have arrived at `barrier`. All of them have to run at once, or this waits for ever."""
    text = f"""
        .reg .b32 thread, seen; .reg .pred p;
        mov.u32 thread, %tid.x; setp.ne.u32 p, thread, 0; @p bra DONE;
        AGAIN: ld.acquire.gpu.global.u32 seen, [$barrier]; setp.lt.u32 p, seen, {blocks}; @p bra AGAIN;
        DONE: bar.sync {_GRID_BARRIER}, {threads};
        """
    run(text, barrier=barrier)


def _operand_type(value: Any) -> Any:
    if isinstance(value, int) or (isinstance(value, jax.Array) and value.ndim == 0):
        return plgpu.Layout.WG_SPLAT(())
    if isinstance(value, jax.Array):
        return plgpu.Layout.WG_STRIDED(value.shape, vec_size=_VECTOR)
    return plgpu.RefType()


def _inputs(name: str, argument: Any) -> dict[str, ir.Value]:
    if not isinstance(argument, mgpu.FragmentedArray):
        return {name: shared_address(argument) if mgpu.utils.is_smem_ref(argument) else global_address(argument)}
    if argument.registers.size == 1 and not argument.shape:
        return {name: argument.registers.item()}
    return {f"{name}{i}": register for i, register in enumerate(unpack(argument))}


def _packed(kind: plgpu.ShapeDtypeStruct, values: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    if kind.shape:
        return pack(values)
    signed = None if kind.dtype == np.float32 else kind.dtype == np.int32
    return mgpu.FragmentedArray.splat(values[0], (), is_signed=signed)


def pack(values: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    """A `registers` value of these MLIR values, which are all i32 or all f32."""
    kind = values[0].type
    vectors = []
    for first in range(0, len(values), _VECTOR):
        vector = llvm.mlir_undef(ir.VectorType.get((_VECTOR,), kind))
        for lane in range(_VECTOR):
            vector = llvm.insertelement(vector, values[first + lane], constant(lane))
        vectors.append(vector)
    layout = mgpu.WGStridedFragLayout((WARPGROUP * len(values),), vec_size=_VECTOR)
    signed = None if isinstance(kind, ir.F32Type) else False
    return mgpu.FragmentedArray(_registers=np.array(vectors, dtype=object), _layout=layout, _is_signed=signed)


def unpack(value: mgpu.FragmentedArray) -> list[ir.Value]:
    """The registers of a `registers` value, in the order in which they were packed."""
    return [llvm.extractelement(vector, constant(lane)) for vector in value.registers.flat for lane in range(_VECTOR)]


def constant(value: int) -> ir.Value:
    """An i32."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def shared_address(ref: ir.Value) -> ir.Value:
    """Where a reference to SMEM begins: i32, as `ld.shared` and matrix descriptors take it."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def global_address(ref: ir.Value) -> ir.Value:
    """Where a reference to GMEM begins: i64."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))


def descriptor(leading_bytes: int, stride_bytes: int, swizzle_bytes: int = 0) -> int:
    """A matrix descriptor for a K-major wgmma operand in SMEM, 64 bits, to which `address >> 4` remains to be added.

    Args:
        leading_bytes: without swizzle, between two core matrices (8 rows of 16 bytes) side by side along K.
        stride_bytes: between two core matrices, or with swizzle two groups of 8 rows, one below the other.
        swizzle_bytes: 0 or 128.
    """
    return (1 << 62 if swizzle_bytes else 0) | stride_bytes >> 4 << 32 | leading_bytes >> 4 << 16


def vector(registers: Iterable[str]) -> str:
    """Registers as one operand of a PTX instruction."""
    return "{" + ", ".join(registers) + "}"


def float32(value: float) -> str:
    """A float32 number as PTX writes it, by its bits."""
    return f"0f{np.float32(value).view(np.uint32):08X}"


def ptx(text: str, results: Mapping[str, ir.Type], operands: Mapping[str, ir.Value]) -> list[ir.Value]:
    """Inlines PTX in which `$name` stands for an operand or a result.

    Args:
        text: statements. They get a scope of their own, so registers and labels that they declare are theirs.
        results: what the block writes, by name. A result that has the name of an operand begins with its value.
        operands: i32, i64 or f32 values by name.

    Returns:
        The results, in their order.
    """
    names = list(results) + [name for name in operands if name not in results]
    updated = [name for name in results if name in operands]
    # Tied inputs take numbers of their own, which the text never mentions, between the results and the operands.
    numbers = {name: index + (len(updated) if index >= len(results) else 0) for index, name in enumerate(names)}
    inputs = updated + [name for name in operands if name not in results]
    constraints = [f"=&{_letter(kind)}" for kind in results.values()]
    constraints += [str(numbers[name]) for name in updated]
    constraints += [_letter(operands[name].type) for name in inputs[len(updated) :]]
    body = re.sub(r"\$(\w+)", lambda match: f"${numbers[match[1]]}", text)
    kinds = list(results.values())
    # LLVM has no structure of one member, and none of none.
    kind = llvm.StructType.get_literal(kinds) if len(kinds) > 1 else (kinds or [ir.Type.parse("!llvm.void")])[0]
    block = llvm.inline_asm(
        kind,
        [operands[name] for name in inputs],
        f"{{\n{body}\n}}",
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        convergent=True,  # it may hold barriers and products of whole warps
        asm_dialect=0,
    )
    if len(kinds) < 2:
        return [block] if kinds else []
    return [llvm.extractvalue(kind, block, [index]) for index, kind in enumerate(kinds)]


def _letter(kind: ir.Type) -> str:
    return {"i32": "r", "i64": "l", "f32": "f"}[str(kind)]
