"""Runs PTX on the CPU, for the threads of a warpgroup together.

Knows the instructions that our kernels use, in the words of the PTX manual, and takes no notice of any convention of a
kernel: fragments, descriptors and swizzles of wgmma are as the manual lays them out. What is asynchronous happens as
late as it may. The threads of a warpgroup take every instruction together, and one warpgroup runs at a time, until it
has to wait for another; what would be a race between the warps of a warpgroup is seen by `Races`. Fences and waits
inside a warp do nothing here: that one is missing is not seen.
"""

import functools
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from ptx_arithmetic import ARITHMETIC

THREADS = 128
WARPS = 16  # of a block, at most
EVERYONE = np.ones(THREADS, bool)
E4M3 = ml_dtypes.float8_e4m3fn
SHARED_BYTES = 227 * 1024  # of a block, on Hopper
_ALIGNMENT = 1024
_STATEMENT = re.compile(r"(?:(\w+):(?!:))?\s*(?:@(!?)(\w+)\s+)?([\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_ROW = np.arange(THREADS) // 32 * 16 + np.arange(THREADS) % 32 // 4  # of wgmma, first for a thread
_QUARTER = np.arange(THREADS) % 4
_SIZES = {"u8": 1, "b16": 2}


class Turn(threading.Condition):
    """Held by the warpgroup that runs; once one has failed, the others give up.

    Attributes:
        running: warpgroups that neither wait at a barrier nor have ended.
        failed: whether one has.
    """

    def __init__(self, running: int) -> None:
        super().__init__()
        self.running = running
        self.failed = False

    def leave(self) -> None:
        """A warpgroup waits or ends; the last one tells those that wait for it."""
        self.running -= 1
        if self.failed or not self.running:
            self.notify_all()


class GaveUpError(Exception):
    """Of a warpgroup that waited for one that failed."""


class Memory:
    """Bytes. What nobody wrote is 0xFF: NaN in all formats of a kernel that have one."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size + _ALIGNMENT, 0xFF, np.uint8)
        self._end = _ALIGNMENT  # no array is at 0

    def place(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An array that lies here."""
        start, size = self._end, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        assert start + size <= len(self.bytes), "memory is full"
        return self.bytes[start : start + size].view(dtype).reshape(shape)

    def address(self, array: np.ndarray) -> int:
        """Of the first byte of an array that lies here."""
        return array.ctypes.data - self.bytes.ctypes.data


def swizzled(address: Any) -> Any:
    """The 128-byte swizzle: of an address, bits 4 to 6 are taken xor bits 7 to 9."""
    return address ^ (address >> 7 & 7) << 4


class Races:
    """Who touched the words of shared memory since the warps of its warpgroup last met."""

    def __init__(self, memory: Memory) -> None:
        words = len(memory.bytes) // 4
        self._writer, self._reader = np.full(words, -1), np.full(words, -1)  # epoch * WARPS + warp, of the last one
        self._epochs = np.zeros(WARPS, int)  # of each warp; those of a warpgroup are equal

    def meet(self, warpgroup: int) -> None:
        """Its warps have waited for each other."""
        self._epochs[4 * warpgroup : 4 * warpgroup + 4] += 1

    def read(self, addresses: np.ndarray, warps: np.ndarray) -> None:
        """What another warp has written must have been waited for."""
        words, now = addresses // 4, self._epochs[warps] * WARPS + warps
        assert not self._raced(self._writer[words], warps).any(), "a warp reads what another one has just written"
        self._reader[words] = now

    def write(self, addresses: np.ndarray, warps: np.ndarray) -> None:
        """What another warp has read or written must have been waited for."""
        words, now = addresses // 4, self._epochs[warps] * WARPS + warps
        for last in (self._writer[words], self._reader[words]):
            assert not self._raced(last, warps).any(), "a warp overwrites what another one has just used"
        self._writer[words] = now

    def copy(self, addresses: np.ndarray, warpgroup: int) -> None:
        """What any warp of it has used must have been waited for, whichever of them begins the copy."""
        for last in (self._writer[addresses // 4], self._reader[addresses // 4]):
            epoch, warp = last // WARPS, last % WARPS
            used = (last >= 0) & (warp // 4 == warpgroup) & (epoch == self._epochs[4 * warpgroup])
            assert not used.any(), "a copy overwrites what a warp has just used"

    def _raced(self, last: np.ndarray, warps: np.ndarray) -> np.ndarray:
        epoch, warp = last // WARPS, last % WARPS
        return (last >= 0) & (warp != warps) & (warp // 4 == warps // 4) & (epoch == self._epochs[warps])


class Block:
    """A block of threads.

    Attributes:
        whole: global memory.
        shared: the block's own.
        races: there.
        turn: of all blocks; held by the warpgroup that runs.
    """

    def __init__(self, whole: Memory, turn: Turn) -> None:
        self.whole, self.shared, self.turn = whole, Memory(SHARED_BYTES), turn
        self.races = Races(self.shared)
        self._arrived: dict[int, int] = defaultdict(int)
        self._waiting: dict[int, int] = defaultdict(int)
        self._opened: dict[int, int] = defaultdict(int)

    def arrive(self, barrier: int, threads: int, wait: bool) -> None:
        """A warpgroup comes to a named barrier, which opens once so many threads have."""
        opened = self._opened[barrier]
        self._arrived[barrier] += THREADS
        if self._arrived[barrier] == threads:
            self._arrived[barrier] = 0
            self._opened[barrier] += 1
            self.turn.running += self._waiting.pop(barrier, 0)
            self.turn.notify_all()
        elif wait:
            self._waiting[barrier] += 1
            self.turn.leave()
            self.turn.wait_for(lambda: self._opened[barrier] > opened or self.turn.failed or not self.turn.running, 120)
            if self.turn.failed:
                raise GaveUpError
            assert self._opened[barrier] > opened, "nobody comes any more"


@dataclass
class Groups:
    """What is under way, in groups; it happens when it is waited for."""

    open: list[Callable[[], None]] = field(default_factory=list)
    closed: list[list[Callable[[], None]]] = field(default_factory=list)

    def commit(self) -> None:
        self.closed.append(self.open)
        self.open = []

    def wait(self, late: int) -> None:
        while len(self.closed) > late:
            for happen in self.closed.pop(0):
                happen()


class Warpgroup:
    """128 threads that run PTX. Registers are bits: uint16, uint32 or uint64; predicates are bool."""

    def __init__(self, block: Block, number: int) -> None:
        self.block = block
        self.tid = (np.arange(THREADS) + THREADS * number).astype(np.uint32)
        self.copies, self.products = Groups(), Groups()

    def run(self, text: str, operands: Mapping[str, Any], results: Mapping[str, int]) -> list[np.ndarray]:
        """What a block of PTX gives.

        Args:
            operands: numbers, 64 bits wide if they are uint64 and else 32, or bits [registers, 128].
            results: how many registers each has, 0 for a number.

        Returns:
            uint32 [registers, 128] for each, [128] for a number.
        """
        self.registers: dict[str, np.ndarray] = {}
        for name, value in operands.items():
            if np.ndim(value) == 2:
                self.registers |= {f"${name}{index}": part for index, part in enumerate(value)}
            else:
                kind = np.uint64 if np.asarray(value).dtype == np.uint64 else np.uint32
                self.registers[f"${name}"] = np.full(THREADS, value).astype(kind)
        program, labels = assembled(text)
        counters = np.zeros(THREADS, int)
        while (here := int(counters.min())) < len(program):  # those that are behind go first, until all are together
            active = counters == here
            counters[active] += 1
            active = EVERYONE if active.all() else active
            for statement in program[here]:
                mask = active & (self.registers[statement.guard] ^ statement.negated) if statement.guard else active
                if statement.name == "bra":
                    counters[mask] = labels[statement.arguments[0]]
                elif mask is EVERYONE or mask.any():
                    self._execute(statement, mask)
        assert not self.products.open and not self.products.closed, "products are left to a block that may not wait"
        return [self._result(f"${name}", count) for name, count in results.items()]

    def meet(self) -> None:
        """Its warps wait for each other."""
        self.block.races.meet(int(self.tid[0]) // THREADS)

    def _result(self, name: str, count: int) -> np.ndarray:
        return np.stack([self.registers[f"{name}{index}"] for index in range(count)]) if count else self.registers[name]

    def _read(self, operand: str) -> np.ndarray:
        if operand == "%tid.x":
            return self.tid
        value = literal(operand)
        return self.registers[operand] if value is None else value

    def _number(self, operand: str) -> int:
        """Which all threads agree on."""
        value = self._read(operand)
        assert (value == value[0]).all()
        return int(value[0])

    def _write(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if mask is EVERYONE:
            self.registers[name] = value
            return
        old = self.registers.get(name)
        if old is None or old.dtype != value.dtype:
            old = np.full(THREADS, -1).astype(value.dtype)
        self.registers[name] = np.where(mask, value, old)

    def _address(self, operand: str) -> np.ndarray:
        name, _, offset = operand.strip("[] ").partition("+")
        return self.registers[name.strip()].astype(np.int64) + int(offset or 0)

    def _execute(self, statement: "Statement", mask: np.ndarray) -> None:
        _, _, name, modifiers, arguments, arithmetic = statement
        if arithmetic:
            self._write(arguments[0], arithmetic(*map(self._read, arguments[1:])), mask)
            return
        match name, *modifiers:
            case (("ld" | "st"), *_):
                self._move(name, modifiers, arguments, mask)
            case "red", *_, ("global" | "shared"), "add", "u32":
                memory = (self.block.shared if "shared" in modifiers else self.block.whole).bytes
                spots = self._address(arguments[0])[mask] // 4
                np.add.at(memory.view(np.uint32), spots, self._read(arguments[1])[mask])
            case "bar", ("sync" | "arrive") as kind:
                self.block.arrive(*map(self._number, arguments), wait=kind == "sync")
                if kind == "sync":
                    self.meet()
            case "cp", "async", "commit_group":
                self.copies.commit()
            case "cp", "async", "wait_group":
                self.copies.wait(self._number(arguments[0]))
            case "cp", *_:
                self._copy(arguments, mask)
            case "wgmma", "mma_async", *_:
                self.products.open.append(self._product(modifiers, arguments))
            case "wgmma", "commit_group", *_:
                self.products.commit()
            case "wgmma", "wait_group", *_:
                self.products.wait(self._number(arguments[0]))
            case ("fence", *_) | ("wgmma", "fence", *_) | ("bar", "warp", "sync"):
                pass
            case "shfl", "sync", kind, "b32":
                assert whole_warps(mask)
                source = shuffled(kind, self._read(arguments[2]).astype(int), self._number(arguments[3]))
                self._write(arguments[0], self._read(arguments[1])[source], mask)
            case "redux", "sync", "max", "u32":
                assert whole_warps(mask)
                self._write(arguments[0], self._read(arguments[1]).reshape(-1, 32).max(axis=1).repeat(32), mask)
            case "vote", "sync", "ballot", "b32":
                assert whole_warps(mask)
                votes = np.packbits(self._read(arguments[1]), bitorder="little").view(np.uint32)
                self._write(arguments[0], votes.repeat(32), mask)
            case "ldmatrix", "sync", "aligned", "m8n8", "x4", "shared", "b16":
                assert mask is EVERYONE
                self._load_matrices(*arguments)
            case "mov", kind:
                self._repack(int(kind[1:]), arguments, mask)
            case _:
                raise NotImplementedError(f"{name} {modifiers}")

    def _repack(self, bits: int, arguments: list[str], mask: np.ndarray) -> None:
        """A register from its parts, or the parts of one; the lowest bits come first."""
        parts = names(arguments[0])
        if len(parts) > 1:
            value = self._read(arguments[1])[:, None].view(f"u{bits // 8 // len(parts)}")
            for part, bits_of_part in zip(parts, value.T, strict=True):
                self._write(part, bits_of_part, mask)
        else:
            parts = names(arguments[1])
            value = np.stack([self._read(part).astype(f"u{bits // 8 // len(parts)}") for part in parts], axis=1)
            self._write(arguments[0], value.view(f"u{bits // 8}")[:, 0], mask)

    def _move(self, name: str, modifiers: list[str], arguments: list[str], mask: np.ndarray) -> None:
        if "acquire" in modifiers:
            self.block.turn.wait(timeout=1e-3)  # for others that may have to come here first
            if self.block.turn.failed:
                raise GaveUpError
        memory = (self.block.shared if "shared" in modifiers else self.block.whole).bytes
        size = _SIZES.get(modifiers[-1], 4)
        where, what = arguments if name == "st" else arguments[::-1]
        address, parts = self._address(where)[mask], names(what)
        assert not (address % (size * len(parts))).any(), "misaligned"
        if "shared" in modifiers:
            touched = self.block.races.write if name == "st" else self.block.races.read
            for index in range(len(parts)):
                touched(address + size * index, self.tid[mask] // 32)
        for index, part in enumerate(parts):
            spots = address[:, None] + size * index + np.arange(size)
            if name == "st":
                memory[spots] = self._read(part)[mask].astype(np.uint32)[:, None].view(np.uint8)[:, :size]
            else:
                value = np.zeros((THREADS, 4), np.uint8)
                value[mask, :size] = memory[spots]
                self._write(part, value.view(np.uint32)[:, 0], mask)

    def _load_matrices(self, registers: str, where: str) -> None:
        """Four of eight rows by 16 bytes, of each of which eight lanes say where its rows lie."""
        rows = self._address(where).reshape(-1, 4, 8)
        assert not (rows % 16).any(), "misaligned"
        for word in range(0, 16, 4):
            self.block.races.read(rows.reshape(-1) + word, self.tid // 32)
        words = self.block.shared.bytes[rows[..., None] + np.arange(16)].view(np.uint32)
        for index, name in enumerate(names(registers)):
            self.registers[name] = words[:, index].reshape(THREADS)

    def _copy(self, arguments: list[str], mask: np.ndarray) -> None:
        span = np.arange(int(arguments[2]))
        target, source = (self._address(argument)[mask][:, None] + span for argument in arguments[:2])
        assert not (target[:, 0] % len(span)).any() and not (source[:, 0] % len(span)).any(), "misaligned"
        for word in range(0, len(span), 4):
            self.block.races.write(target[:, word], self.tid[mask] // 32)
        shared, whole = self.block.shared.bytes, self.block.whole.bytes
        self.copies.open.append(lambda: shared.__setitem__(target, whole[source]))

    def _product(self, modifiers: list[str], arguments: list[str]) -> Callable[[], None]:
        """float32 sums [64, n] of products, A [64, k] in registers, B [n, k] in SMEM, K-major: either of 32 bytes."""
        _, _, _, shape, *kinds = modifiers
        width = int(shape.removeprefix("m64n").partition("k")[0])
        assert kinds in (["f32", "f16", "f16"], ["f32", "e4m3", "e4m3"])
        kind, last = (np.dtype(np.float16), ["1", "1", "0"]) if kinds[1] == "f16" else (np.dtype(E4M3), ["1", "1"])
        assert arguments[4:] == last and shape.endswith(f"k{32 // kind.itemsize}")
        sums, a = map(names, arguments[:2])
        described, adds = self._number(arguments[2]), self._number(arguments[3])
        spots = described_bytes(described, width)

        def happen() -> None:
            left = np.zeros((64, 32), np.uint8)
            for index, name in enumerate(a):
                left.view(np.uint32)[_ROW + index % 2 * 8, _QUARTER + index // 2 * 4] = self.registers[name]
            right = self.block.shared.bytes[spots]
            for warp in self.tid[::32] // 32:
                self.block.races.read(spots[:, ::4], np.full(spots[:, ::4].shape, warp))
            with np.errstate(invalid="ignore"):
                product = left.view(kind).astype(np.float64) @ right.view(kind).astype(np.float64).T
            values = product[accumulators(len(sums))]
            if adds:
                values = values + np.stack([self.registers[name].view(np.float32) for name in sums])
            self.registers |= zip(sums, values.astype(np.float32).view(np.uint32), strict=True)

        return happen


def whole_warps(mask: np.ndarray) -> bool:
    return bool((mask.reshape(-1, 32) == mask[::32, None]).all())


def shuffled(kind: str, lane: np.ndarray, bounds: int) -> np.ndarray:
    """Whose register each thread gets; its own where the other one is out of bounds."""
    thread = np.arange(THREADS)
    own = thread % 32
    other = {"bfly": own ^ lane, "up": own - lane, "idx": lane}[kind]
    assert bounds == (0 if kind == "up" else 31), "of a whole warp"
    return np.where((other >= 0) & (other < 32), thread - own + other, thread)


class Statement(NamedTuple):
    guard: str
    negated: bool
    name: str
    modifiers: list[str]
    arguments: list[str]
    arithmetic: Callable[..., np.ndarray] | None


@functools.cache
def assembled(text: str) -> tuple[list[list[Statement]], dict[str, int]]:
    """Pieces that threads run through together, and the number of the one that begins with each label."""
    pieces: list[list[Statement]] = [[]]
    labels: dict[str, int] = {}
    for line in map(str.strip, text.split(";")):
        match = _STATEMENT.fullmatch(line)
        assert match, line
        label, negation, guard, opcode, rest = match.groups()
        if label:
            labels[label] = len(pieces)
            pieces.append([])
        if opcode and not opcode.startswith(".reg"):
            name, *modifiers = opcode.replace("::", ".").split(".")
            arithmetic = None if opcode.startswith("mov") and "{" in rest else ARITHMETIC.get(opcode)
            arguments = [operand.strip() for operand in _OPERAND.findall(rest)]
            pieces[-1].append(Statement(guard or "", bool(negation), name, modifiers, arguments, arithmetic))
            if name == "bra":
                pieces.append([])
    return pieces, labels


@functools.cache
def accumulators(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, [registers, 128] each, of the sums of wgmma."""
    index = np.arange(count)[:, None]
    return _ROW + index % 4 // 2 * 8, index // 4 * 8 + 2 * _QUARTER + index % 2


@functools.cache
def described_bytes(descriptor: int, width: int) -> np.ndarray:
    """Where the 32 bytes of each row of a K-major matrix lie in SMEM: [width, 32]."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    n, byte = np.arange(width)[:, None], np.arange(32)
    if mode := descriptor >> 62:
        assert mode == 1 and start >> 7 & 7 == 0, "a pattern of the 128-byte swizzle begins at a multiple of 1024"
        return swizzled(start + n // 8 * stride + n % 8 * 128 + byte)
    return start + n // 8 * stride + n % 8 * 16 + byte // 16 * leading + byte % 16


@functools.cache
def literal(operand: str) -> np.ndarray | None:
    """The bits of a constant in every thread; None for what is none."""
    if operand.startswith("0f"):
        return np.full(THREADS, int(operand[2:], 16), np.uint32)
    if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
        value = int(operand, 0) % (1 << 64)
        return np.full(THREADS, value, np.uint32 if value < 1 << 32 else np.uint64)
    return None


def names(vector: str) -> list[str]:
    return [name.strip() for name in vector.strip("{}").split(",")]
