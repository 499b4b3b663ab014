"""Runs the body of a Pallas kernel that is made of `hopper.run`, on the CPU: a thread of Python is a warpgroup.

Knows the instructions that our kernels use, in the words of the PTX manual, and takes its own notice of none of the
kernel's conventions: fragments and descriptors of wgmma are read as the manual lays them out. All 128 threads of a
warpgroup take every instruction together, so races between them go unseen; those between warpgroups may not.
"""

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

THREADS = 128
E4M3 = ml_dtypes.float8_e4m3fn
_STATEMENT = re.compile(r"(?:(\w+):)?\s*(?:@(\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


@dataclass(frozen=True)
class Ref:
    """An array in one of the two memories."""

    machine: "Machine"
    shared: bool
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def at(self) -> "Ref":
        return self

    def __getitem__(self, index: int) -> "Ref":
        size = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        return Ref(self.machine, self.shared, self.address + int(index) * size, self.shape[1:], self.dtype)

    def read(self) -> np.ndarray:
        count = int(np.prod(self.shape)) * self.dtype.itemsize
        memory = self.machine.shared if self.shared else self.machine.whole
        return memory[self.address : self.address + count].view(self.dtype).reshape(self.shape)


class Machine:
    """Two memories, and barriers by number. Memory that nobody wrote is 0xFF: NaN in all formats of a kernel."""

    def __init__(self) -> None:
        self.whole, self.shared = (np.full(1 << 24, 0xFF, np.uint8) for _ in range(2))
        self._ends = {False: 1024, True: 1024}
        self._barriers: dict[tuple[int, int], threading.Barrier] = {}
        self._lock = threading.Lock()

    def place(self, shape: Sequence[int], dtype: Any, shared: bool, values: np.ndarray | None = None) -> Ref:
        ref = Ref(self, shared, self._ends[shared], tuple(shape), np.dtype(dtype))
        if values is not None:
            ref.read()[...] = values
        self._ends[shared] += -(-int(np.prod(shape)) * ref.dtype.itemsize // 1024) * 1024
        return ref

    def wait(self, barrier: int, threads: int) -> None:
        with self._lock:
            key = (barrier, threads)
            meeting = self._barriers.setdefault(key, threading.Barrier(threads // THREADS))
        meeting.wait(timeout=60)


class Warpgroup:
    """128 threads that run PTX together. Registers are bits: uint16, uint32 or uint64; predicates are bool."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.tid = (np.arange(THREADS) + THREADS * number).astype(np.uint32)
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def run(self, text: str, operands: Mapping[str, Any], results: Mapping[str, Any]) -> list[Any]:
        self.registers: dict[str, np.ndarray] = {}
        self.active = np.ones(THREADS, bool)
        self.waiting: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(THREADS, bool))
        for name, value in operands.items():
            if isinstance(value, Ref):
                self.registers[f"${name}"] = np.full(THREADS, value.address, np.uint32 if value.shared else np.uint64)
            elif np.ndim(value) == 2:
                self.registers |= {f"${name}{index}": part for index, part in enumerate(value)}
            else:
                self.registers[f"${name}"] = np.broadcast_to(np.asarray(value).astype(np.uint32), THREADS)
        for label, guard, opcode, arguments in statements(text):
            if label:
                self.active |= self.waiting[label]
            mask = self.active & self.registers[guard] if guard else self.active
            self._execute(opcode, arguments, mask)
        outputs = []
        for name, kind in results.items():
            count = int(np.prod(kind.shape)) // THREADS
            parts = [self.registers[f"${name}{index}"] for index in range(count)]
            outputs.append(np.stack(parts) if count else self.registers[f"${name}"])
        return outputs

    def _read(self, operand: str) -> np.ndarray:
        if operand == "%tid.x":
            return self.tid
        if operand.startswith("0f"):
            return np.full(THREADS, int(operand[2:], 16), np.uint32)
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
            return np.full(THREADS, int(operand, 0) % (1 << 64), np.uint64)
        return self.registers[operand]

    def _write(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        old = self.registers.get(name)
        if old is None or old.dtype != value.dtype:
            old = np.zeros(THREADS, value.dtype)
        self.registers[name] = np.where(mask, value, old)

    def _address(self, operand: str) -> np.ndarray:
        name, _, offset = operand.strip("[] ").partition("+")
        return self.registers[name.strip()].astype(np.int64) + int(offset or 0)

    def _execute(self, opcode: str, arguments: list[str], mask: np.ndarray) -> None:
        name, *modifiers = opcode.split(".")
        if name in ("ld", "st"):
            self._move(name, modifiers, arguments, mask)
        elif name == "wgmma":
            if modifiers[0] == "mma_async":
                self._wgmma(modifiers, arguments)
        elif name == "cp":
            self._copy(modifiers, arguments, mask)
        elif name == "bar":
            barrier, threads = (int(self._read(argument)[0]) for argument in arguments)
            self.machine.wait(barrier, threads)
        elif name == "bra":
            self.waiting[arguments[0]] = self.waiting[arguments[0]] | mask
            self.active = self.active & ~mask
        elif name == "shfl":
            source = np.arange(THREADS) ^ int(self._read(arguments[2])[0])
            self._write(arguments[0], self._read(arguments[1])[source], mask)
        elif opcode == "mov.b32" and arguments[0].startswith("{"):
            low, high = names(arguments[0])
            self._write(low, self._read(arguments[1]).astype(np.uint16), mask)
            self._write(high, (self._read(arguments[1]) >> 16).astype(np.uint16), mask)
        elif name != "fence":
            value = ARITHMETIC[opcode](*map(self._read, arguments[1:]))
            self._write(arguments[0], value, mask)

    def _move(self, name: str, modifiers: list[str], arguments: list[str], mask: np.ndarray) -> None:
        memory = self.machine.shared if modifiers[0] == "shared" else self.machine.whole
        size = 1 if modifiers[-1] == "u8" else 4
        where, what = arguments if name == "st" else arguments[::-1]
        address, parts = self._address(where), names(what)
        assert not (address[mask] % (size * len(parts))).any(), "misaligned"
        for index, part in enumerate(parts):
            spots = address[mask][:, None] + size * index + np.arange(size)
            if name == "st":
                memory[spots] = self._read(part)[mask].astype(np.uint32)[:, None].view(np.uint8)
            else:
                value = np.zeros((THREADS, 4), np.uint8)
                value[mask, :size] = memory[spots]
                self._write(part, value.view(np.uint32)[:, 0], mask)

    def _copy(self, modifiers: list[str], arguments: list[str], mask: np.ndarray) -> None:
        """Copies happen when they are waited for, as late as they may."""
        if modifiers[1] == "commit_group":
            self.groups.append(self.copies)
            self.copies = []
        elif modifiers[1] == "wait_group":
            late = int(self._read(arguments[0])[0])
            while len(self.groups) > late:
                for target, source in self.groups.pop(0):
                    self.machine.shared[target] = self.machine.whole[source]
        else:
            span = np.arange(int(arguments[2]))
            target, source = (self._address(argument)[mask][:, None] + span for argument in arguments[:2])
            assert not (target[:, 0] % len(span)).any() and not (source[:, 0] % len(span)).any(), "misaligned"
            self.copies.append((target, source))

    def _wgmma(self, modifiers: list[str], arguments: list[str]) -> None:
        """m64nNk16, float32 sums of float16 products, A in registers, B in SMEM without swizzle, K-major."""
        assert modifiers[4:] == ["f32", "f16", "f16"] and arguments[4:] == ["1", "1", "0"]
        match = re.fullmatch(r"m64n(\d+)k16", modifiers[3])
        assert match
        width, (sums, a) = int(match[1]), map(names, arguments[:2])
        described = int(self._read(arguments[2])[0])
        start, leading, stride = ((described >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        assert described >> 62 == 0
        warp, r, t = np.arange(THREADS) // 32, np.arange(THREADS) % 32 // 4, np.arange(THREADS) % 4
        matrix = np.zeros((64, 16), np.float64)
        for index, name in enumerate(a):
            pair = self._read(name)[:, None].view(np.float16)
            rows, columns = 16 * warp + r + 8 * (index % 2), 2 * t + 8 * (index // 2)
            matrix[rows, columns], matrix[rows, columns + 1] = pair.T
        n, k = np.arange(width)[:, None], np.arange(16)
        spots = start + n // 8 * stride + n % 8 * 16 + k // 8 * leading + k % 8 * 2
        other = self.machine.shared.view(np.float16)[spots // 2].astype(np.float64)
        with np.errstate(invalid="ignore"):
            product = matrix @ other.T
        for index, name in enumerate(sums):
            value = product[16 * warp + r + index % 4 // 2 * 8, index // 4 * 8 + 2 * t + index % 2]
            if self._read(arguments[3])[0]:
                value = value + self._read(name).view(np.float32)
            self._write(name, value.astype(np.float32).view(np.uint32), self.active)


def statements(text: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Label, guard, opcode and operands of each."""
    for statement in text.split(";"):
        match = _STATEMENT.fullmatch(statement.strip())
        if match and not statement.strip().startswith(".reg"):
            label, guard, opcode, rest = match.groups()
            yield label, guard, opcode, [operand.strip() for operand in _OPERAND.findall(rest)]


def names(vector: str) -> list[str]:
    return [name.strip() for name in vector.strip("{}").split(",")]


def unsigned(function: Callable[..., np.ndarray], bits: int = 32) -> Callable[..., np.ndarray]:
    """An operation on integers, of which the lowest bits are kept."""
    kind = np.uint32 if bits == 32 else np.uint64
    return lambda *values: function(*(value.astype(np.uint64) for value in values)).astype(kind)


def floating(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on float32, exact before it is rounded."""

    def run(*values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            wide = (value.astype(np.uint32).view(np.float32).astype(np.float64) for value in values)
            return function(*wide).astype(np.float32).view(np.uint32)

    return run


def small(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32).view(np.float32)


def halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32)[:, None].view(np.uint16)


def decode_pair(codes: np.ndarray) -> np.ndarray:
    return codes[:, None].view(E4M3).astype(np.float16).view(np.uint32)[:, 0]


def encode_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    values = np.stack([small(low), small(high)], axis=1)
    return np.clip(values, -448, 448).astype(E4M3).view(np.uint16)[:, 0]


def half_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.stack([small(low), small(high)], axis=1).astype(np.float16).view(np.uint32)[:, 0]


def compare(function: Callable[..., np.ndarray], kind: Any = np.uint32) -> Callable[..., np.ndarray]:
    return lambda a, b: function(a.astype(np.uint32).view(kind), b.astype(np.uint32).view(kind))


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "mov.u32": unsigned(lambda a: a),
    "mov.b32": unsigned(lambda a: a),
    "cvt.u64.u32": unsigned(lambda a: a, 64),
    "add.u32": unsigned(np.add),
    "add.u64": unsigned(np.add, 64),
    "sub.u32": unsigned(np.subtract),
    "div.u32": unsigned(np.floor_divide),
    "rem.u32": unsigned(np.remainder),
    "and.b32": unsigned(np.bitwise_and),
    "shl.b32": unsigned(np.left_shift),
    "shr.u32": unsigned(np.right_shift),
    "max.u32": unsigned(np.maximum),
    "min.u32": unsigned(np.minimum),
    "mad.lo.u32": unsigned(lambda a, b, c: a * b + c),
    "mad.wide.u32": unsigned(lambda a, b, c: a * b + c, 64),
    "mul.wide.u32": unsigned(lambda a, b: a * b, 64),
    "bfe.u32": unsigned(lambda a, b, c: a >> b & ((np.uint64(1) << c) - np.uint64(1))),
    "max.u16x2": lambda a, b: np.maximum(halves(a), halves(b)).view(np.uint32)[:, 0],
    "selp.b32": lambda a, b, flag: np.where(flag, a, b).astype(np.uint32),
    "setp.ne.b32": compare(np.not_equal),
    "setp.eq.u32": compare(np.equal),
    "setp.ge.u32": compare(np.greater_equal),
    "setp.lt.s32": compare(np.less, np.int32),
    "add.f32": floating(np.add),
    "mul.f32": floating(np.multiply),
    "max.f32": floating(np.fmax),
    "fma.rn.f32": floating(lambda a, b, c: a * b + c),
    "cvt.rn.f16x2.e4m3x2": decode_pair,
    "cvt.rn.f16x2.f32": half_pair,
    "cvt.rn.satfinite.e4m3x2.f32": encode_pair,
}


def run_kernel(
    build: Callable[[], Any], module: Any, operands: Sequence[np.ndarray], patch: pytest.MonkeyPatch
) -> np.ndarray:
    """What the kernel that `build` returns computes.

    Args:
        module: where the kernel is written; what it calls of Pallas is replaced there.
    """
    caught: dict[str, Any] = {}
    with patch.context() as during:
        during.setattr(module.plgpu, "kernel", lambda body, **options: caught.update(options, body=body))
        build()
    here = threading.local()
    machine = Machine()
    refs = [machine.place(value.shape, value.dtype, False, value) for value in operands]
    kind = caught["out_type"]
    out = machine.place(kind.shape, kind.dtype, False)
    scratch = [machine.place(memory.shape, memory.dtype, True) for memory in caught["scratch_types"]]
    failures: list[BaseException] = []

    def warpgroup(block: int, number: int) -> None:
        here.index = {caught["grid_names"][0]: block, caught["thread_name"]: number}
        here.unit = Warpgroup(machine, number)
        try:
            caught["body"](*refs, out, *scratch)
        except BaseException as failure:
            failures.append(failure)

    def fori_loop(lower: int, upper: int, body: Callable[[int, Any], Any], carry: Any) -> Any:
        for index in range(lower, int(upper)):
            carry = body(index, carry)
        return carry

    with patch.context() as during:
        during.setattr(module.jax.lax, "axis_index", lambda name: np.int32(here.index[name]))
        during.setattr(module.jax.lax, "fori_loop", fori_loop)
        during.setattr(module.pl, "when", lambda condition: lambda f: f() if condition else None)
        during.setattr(module.jnp, "zeros", lambda shape, dtype: np.zeros((shape[0] // THREADS, THREADS), np.uint32))
        during.setattr(
            module.hopper, "run", lambda text, results=None, **given: here.unit.run(text, given, results or {})
        )
        for block in range(caught["grid"][0]):
            threads = [
                threading.Thread(target=warpgroup, args=(block, number)) for number in range(caught["num_threads"])
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
    return out.read()
