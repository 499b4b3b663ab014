"""What `dspark inspect` finds out from configuration and file headers alone; no weight is read, no array is made."""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from re import match
from typing import Any

import jax
from jax.sharding import AbstractMesh

from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.layout import Entry, layout
from dspark_jax.checkpoint.load import account
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.state import bucket
from dspark_jax.errors import CheckpointError
from dspark_jax.model.cache import drafter_cache, target_cache
from dspark_jax.model.model import Model, abstract_model
from dspark_jax.model.numerics import numerics_of
from dspark_jax.sharding import sharding_of

NUMERICS = "bfloat16"  # what `dspark generate` uses; caches in float32 take up to twice as much
CONTEXTS = (4096, 65536, 1048576)

DRAFTER = "drafter"
KINDS = {
    "embedding and head": r"(embed|head)\.",
    "attention": r"layers\.\d+\.attn\.(?!compressor|indexer)",
    "compressors, indexers": r"layers\.\d+\.attn\.(compressor|indexer)\.",
    "routed experts": r"layers\.\d+\.ffn\.experts\.",
    "shared experts": r"layers\.\d+\.ffn\.shared_experts\.",
    "hyper-connections": r"(layers\.\d+\.)?hc_",
    "norms and routers": r"(layers\.\d+\.)?(norm|attn_norm|ffn_norm|ffn\.gate)\.",
    DRAFTER: r"mtp\.",
}
"""Kinds of tensors and how their official names begin."""


@dataclass(frozen=True)
class Amount:
    """Tensors on disk and their bytes."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class Group(Amount):
    """Tensors that belong together; `by_dtype` names their safetensors dtypes, the one of most bytes first."""

    by_dtype: dict[str, Amount]


@dataclass(frozen=True)
class Tensors(Group):
    """What the configuration calls for on disk; `by_kind` has those of `KINDS` that occur."""

    by_kind: dict[str, Group]


@dataclass(frozen=True)
class Parameters:
    """Numbers that were trained; scales of quantised weights are not counted, two FP4 codes in a byte are two.

    Attributes:
        target: with embedding and head.
        target_active: those that one token meets, most routed experts left out.
        drafter: without the tables it shares with the target.
    """

    target: int
    target_active: int
    drafter: int


@dataclass(frozen=True)
class Files:
    """Whether the folder holds what its configuration calls for.

    Attributes:
        complete: None if the folder holds no tensors at all, only `config.json`.
        message: a sentence about it.
    """

    complete: bool | None
    message: str


@dataclass(frozen=True)
class Context:
    """What sequences of one length take.

    Attributes:
        positions: prompt and new tokens.
        cache_bytes: caches of one sequence, on each device.
        devices_needed: devices like these that hold the weights and one such sequence; None if no number of them does.
        sequences: how many such sequences fit beside the weights on the devices that are here.
    """

    positions: int
    cache_bytes: int
    devices_needed: int | None
    sequences: int


@dataclass(frozen=True)
class Memory:
    """What fits where. Activations and the compiler's temporaries come on top.

    Attributes:
        device: kind of the devices that JAX sees.
        devices: how many there are.
        devices_used: how many of them the routed experts divide over.
        bytes_per_device: what JAX may use of each; the CPU's devices share the memory of the host.
        weight_bytes: all weights, as they lie in memory.
        weight_bytes_per_device: with the experts split over `devices_used` and the rest replicated.
        contexts: for some lengths.
        numerics: of the caches.
    """

    device: str
    devices: int
    devices_used: int
    bytes_per_device: int
    weight_bytes: int
    weight_bytes_per_device: int
    contexts: list[Context]
    numerics: str = NUMERICS


@dataclass(frozen=True)
class Inspection:
    """All that `dspark inspect` tells."""

    checkpoint: str
    config: ModelConfig
    parameters: Parameters
    tensors: Tensors
    files: Files
    memory: Memory

    def to_dict(self) -> dict[str, Any]:
        """The facts as JSON values."""
        derived = {"layer_kinds": list(self.config.layer_kinds), "drafter_stages": self.config.num_stages}
        return dataclasses.asdict(self) | {"config": self.config.to_dict()} | derived


def inspect_folder(directory: Path) -> Inspection:
    """The facts about a checkpoint folder; `config.json` is enough.

    Raises:
        ConfigError: there is no configuration that this package runs. Damaged or missing tensors raise nothing: they
            are told in `files`.
    """
    config = ModelConfig.from_file(directory / "config.json")
    model = abstract_model(config, numerics_of(NUMERICS))
    entries = layout(model)
    return Inspection(
        checkpoint=str(directory),
        config=config,
        parameters=count_parameters(config, entries),
        tensors=count_tensors(entries),
        files=check_files(directory, entries, model),
        memory=measure_memory(config, entries, jax.devices()),
    )


def kind_of(entry: Entry) -> str:
    """The key of `KINDS` that an entry belongs to."""
    return next(kind for kind, begin in KINDS.items() if match(begin, entry.names[0]))


def count_tensors(entries: tuple[Entry, ...]) -> Tensors:
    """Tensors and bytes on disk, by kind and by dtype."""
    members: dict[str, list[Entry]] = {kind: [] for kind in KINDS}
    for entry in entries:
        members[kind_of(entry)].append(entry)
    total = _group(entries)
    return Tensors(**vars(total), by_kind={kind: _group(some) for kind, some in members.items() if some})


def _group(entries: Iterable[Entry]) -> Group:
    tensors, size = Counter[str](), Counter[str]()
    for entry in entries:
        tensors[entry.dtype] += len(entry.names)
        size[entry.dtype] += entry.stored_bytes
    return Group(
        tensors.total(), size.total(), {dtype: Amount(tensors[dtype], size[dtype]) for dtype, _ in size.most_common()}
    )


def count_parameters(config: ModelConfig, entries: tuple[Entry, ...]) -> Parameters:
    """Trained numbers of target and drafter."""
    by_kind = dict.fromkeys(KINDS, 0)
    for entry in entries:
        if entry.dtype not in ("F8_E8M0", "I64"):
            codes_per_byte = 2 if entry.dtype == "I8" else 1
            by_kind[kind_of(entry)] += len(entry.names) * math.prod(entry.shape) * codes_per_byte
    drafter = by_kind.pop(DRAFTER)
    target = sum(by_kind.values())
    idle_experts = config.n_routed_experts - config.num_experts_per_tok
    idle = by_kind["routed experts"] // config.n_routed_experts * idle_experts
    return Parameters(target, target - idle, drafter)


def check_files(directory: Path, entries: tuple[Entry, ...], model: Model) -> Files:
    """Compares the folder's index and headers with the layout."""
    if not any(directory.glob("model*.safetensors*")):
        return Files(None, "the folder holds a config.json and no tensors; nothing was checked.")
    try:
        account(entries, CheckpointFolder.open(directory), model)
    except CheckpointError as error:
        return Files(False, str(error))
    count = sum(len(entry.names) for entry in entries)
    return Files(True, f"all {count:,} tensors are there, each of the dtype and shape that config.json calls for.")


def measure_memory(config: ModelConfig, entries: tuple[Entry, ...], devices: list[jax.Device]) -> Memory:
    """What fits on these devices, and how many of them would do."""
    # The loader replicates an axis that does not divide, so only divisors help.
    divisors = [n for n in range(1, config.n_routed_experts + 1) if config.n_routed_experts % n == 0]
    weights = {n: weight_bytes_per_device(entries, n) for n in divisors}
    used = max(n for n in divisors if n <= len(devices))
    limit = device_memory(devices)

    def context(positions: int) -> Context:
        cache = cache_bytes(config, positions)
        needed = next((n for n in divisors if weights[n] + cache <= limit), None)
        return Context(positions, cache, needed, max(0, limit - weights[used]) // cache)

    longest = config.max_position_embeddings
    return Memory(
        device=devices[0].device_kind,
        devices=len(devices),
        devices_used=used,
        bytes_per_device=limit,
        weight_bytes=weights[1],
        weight_bytes_per_device=weights[used],
        contexts=[context(n) for n in sorted({min(n, longest) for n in CONTEXTS})],
    )


def weight_bytes_per_device(entries: tuple[Entry, ...], devices: int) -> int:
    """Bytes of weights in memory, on a mesh that splits the experts over `devices` and replicates the rest."""
    # The sharding rules ask a mesh for its shape only, so one without devices will do.
    mesh = AbstractMesh((devices,), ("expert",))
    return sum(
        math.prod(sharding_of(mesh, entry.axes, entry.leaf.shape).shard_shape(entry.leaf.shape))
        * entry.leaf.dtype.itemsize
        for entry in entries
    )


def cache_bytes(config: ModelConfig, positions: int) -> int:
    """Bytes of target and drafter caches for one sequence of up to `positions`, as the decoding loop lays them out."""
    numerics, capacity = numerics_of(NUMERICS), bucket(positions)
    target = jax.eval_shape(partial(target_cache, config, numerics, 1, capacity, config.step_width))
    drafter = jax.eval_shape(partial(drafter_cache, config, numerics, 1))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((target, drafter)))


def device_memory(devices: list[jax.Device]) -> int:
    """Bytes that JAX may use on each device; devices without a limit of their own share the host's memory."""
    statistics = devices[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
