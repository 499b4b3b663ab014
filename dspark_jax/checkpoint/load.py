"""From official files to arrays: checked against the layout before a byte is read, then streamed leaf by leaf."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.gguf.load import open_drafter, read_drafter
from dspark_jax.checkpoint.layout import Entry, layout, tensor_names
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError, RequestError
from dspark_jax.model.model import PARTS, Model, Part, abstract_model
from dspark_jax.model.numerics import Numerics, numerics_of
from dspark_jax.sharding import automatic, sharding_of

LEGACY_MTP = ("enorm", "hnorm", "e_proj", "h_proj")  # modules of the one-layer predictor that preceded DSpark
NAN_CODES = {"F8_E8M0": (0xFF,), "F8_E4M3": (0x7F, 0xFF)}
ALIGNMENT = 64  # bytes, XLA's for buffers of a CPU
PIECE = 1 << 18  # values that stay in a core's cache while they are looked through

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes in all."""


def load(
    directory: str | Path,
    numerics: str | Numerics = "float32",
    mesh: Mesh | None = None,
    parts: Sequence[Part] = PARTS,
    progress: Progress | None = None,
    drafter: str | Path | None = None,
) -> Model:
    """Loads a checkpoint in the official layout.

    Packed weights stay packed. Every tensor that the parts need is consumed exactly once; on a mesh each device's
    slices are read and no more.

    Args:
        directory: folder with `config.json`, `model.safetensors.index.json` and the shards. Only the shards that the
            parts need have to be there.
        numerics: a preset, "float32", "official" or "bfloat16", or a `Numerics`.
        mesh: such as `make_mesh` gives; None for the first device of this process. Its axes are taken as automatic.
        parts: "target", "drafter" or both. A checkpoint without a DSpark drafter gives a target alone.
        progress: told about the bytes read.
        drafter: GGUF file of llama.cpp or ds4 to take the drafter from, as `gguf.load` says; None for the folder.

    Raises:
        ConfigError: `config.json` is not one that this package runs.
        CheckpointError: a file or tensor is missing, unexpected, misshapen, mistyped or damaged; the message names it.
        RequestError: unknown numerics, or a part that the checkpoint does not have.
    """
    if not isinstance(parts, Sequence) or not parts or any(part not in PARTS for part in parts):
        known = ", ".join(map(repr, PARTS))
        raise RequestError(f"parts is {parts!r}; expected a tuple of one or both of {known}, such as ('target',).")
    config = ModelConfig.from_file(Path(directory) / "config.json")
    abstract = abstract_model(config, numerics_of(numerics), parts)
    if set(parts) == {"drafter"} and abstract.drafter is None:
        raise RequestError(f"{directory}: config.json has no dspark_* fields, so there is no drafter to load.")
    mesh, folder = automatic(mesh), CheckpointFolder.open(directory)
    if drafter is not None:
        return _with_drafter_of(drafter, folder, abstract, mesh, progress)
    entries = layout(abstract)
    account(entries, folder, abstract, parts)
    return fill(abstract, entries, lambda entry: read_leaf(entry, folder, mesh, config), progress)


def _with_drafter_of(
    file: str | Path, folder: CheckpointFolder, abstract: Model, mesh: Mesh | None, progress: Progress | None
) -> Model:
    """The model with its drafter from a GGUF file and the rest from the folder, whose own drafter may be absent."""
    if abstract.drafter is None:
        raise RequestError(
            f"{file}: a drafter was given, and either config.json has no dspark_* fields, so that it says nothing of "
            "how to draft, or the parts to load leave the drafter out."
        )
    rest, held = replace(abstract, drafter=None), open_drafter(file, abstract.config)
    entries = layout(rest)
    account(entries, folder, rest, parts=("target",))
    sizes = [sum(entry.leaf.size * entry.leaf.dtype.itemsize for entry in entries), held.bytes]

    def part(number: int) -> Progress | None:
        return progress and (lambda done, _: progress(sum(sizes[:number]) + done, sum(sizes)))

    model = fill(rest, entries, lambda entry: read_leaf(entry, folder, mesh, abstract.config), part(0))
    return replace(model, drafter=read_drafter(held, abstract, mesh, part(1)))


def account(entries: tuple[Entry, ...], folder: CheckpointFolder, model: Model, parts: Sequence[Part] = PARTS) -> None:
    """Checks that the folder holds exactly what the configuration promises, from the files' headers alone.

    Who asks for the target alone is not told about odd stages; who asks for the drafter is, even where config.json has
    no `dspark_*` fields: the stages are then those of another kind of drafter, or the configuration is incomplete.

    Raises:
        CheckpointError: naming the first tensor that is unexpected, missing, mistyped or misshapen.
    """
    known = set(tensor_names(layout(abstract_model(model.config, model.numerics))))
    unexpected = sorted(folder.names - known)
    if "drafter" not in parts:
        unexpected = [name for name in unexpected if not name.startswith("mtp.")]
    if unexpected:
        raise CheckpointError(_explain_unexpected(unexpected, folder))
    for entry in entries:
        for name in entry.names:
            _check_tensor(name, entry, folder)


def _check_tensor(name: str, entry: Entry, folder: CheckpointFolder) -> None:
    if name not in folder.names:
        raise CheckpointError(
            f"{folder.directory}: tensor {name} is missing; config.json calls for it as {entry.dtype} "
            f"{list(entry.shape)}. Fetch the checkpoint again, correct config.json, or load another part (parts=...)."
        )
    info = folder.info(name)
    if (info.dtype, info.shape) != (entry.dtype, entry.shape):
        raise CheckpointError(
            f"{folder.file_of(name)}: tensor {name} is {info.dtype} {list(info.shape)}; expected {entry.dtype} "
            f"{list(entry.shape)} by config.json. The file and config.json do not belong together."
        )


def _explain_unexpected(names: list[str], folder: CheckpointFolder) -> str:
    stages = [name for name in names if name.startswith("mtp.")]
    if any(part in LEGACY_MTP for name in stages for part in name.split(".")):
        return (
            f"{folder.directory}: {stages[0]} belongs to the one-layer MTP head of the preview release, which is not a "
            "DSpark drafter and cannot draft here. Use a checkpoint with dspark_* fields in config.json, or load the "
            'target alone with parts=("target",).'
        )
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{folder.file_of(names[0])}: tensor {names[0]}{more} is unexpected; config.json has no place for it. "
        "The files and config.json do not belong together."
    )


def fill(
    abstract: Model, entries: tuple[Entry, ...], read: Callable[[Entry], jax.Array], progress: Progress | None = None
) -> Model:
    """The model with `read(entry)` in the place of every leaf, one leaf in flight at a time."""
    leaves, structure = jax.tree.flatten(abstract)
    assert [leaf.shape for leaf in leaves] == [entry.leaf.shape for entry in entries]
    assert max(Counter(tensor_names(entries)).values()) == 1, "the layout names a tensor twice"
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    done, arrays = 0, []
    for entry in entries:
        arrays.append(jax.block_until_ready(read(entry)))
        done += arrays[-1].nbytes
        if progress is not None:
            progress(done, total)
    return jax.tree.unflatten(structure, arrays)


def read_leaf(entry: Entry, folder: CheckpointFolder, mesh: Mesh | None, config: ModelConfig) -> jax.Array:
    """Reads one leaf, each device's slice by itself, and each into one buffer."""

    def read_slice(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        shape = [len(range(*part.indices(size))) for part, size in zip(index, entry.leaf.shape, strict=True)]
        values = _empty(shape, entry.leaf.dtype)
        if entry.stacked:
            for name, expert in zip(entry.names[index[0]], values, strict=True):
                _read_tensor(entry, name, index[1:], expert, folder, config)
        else:
            _read_tensor(entry, entry.names[0], index, values, folder, config)
        return values

    sharding = sharding_of(mesh, entry.axes, entry.leaf.shape)
    return jax.make_array_from_callback(entry.leaf.shape, sharding, read_slice, dtype=entry.leaf.dtype)


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array on a boundary from which JAX, on a CPU, takes it over; from others it copies."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _read_tensor(
    entry: Entry,
    name: str,
    index: tuple[slice, ...],
    out: np.ndarray,
    folder: CheckpointFolder,
    config: ModelConfig,
) -> None:
    """Copies a slice of a tensor as it lies in memory: quantised values as bytes, integers as int32."""
    values = folder.read(name)[index]
    if entry.dtype == "I64":
        if values.size and not 0 <= values.min() <= values.max() < config.n_routed_experts:
            raise CheckpointError(
                f"{folder.file_of(name)}: tensor {name} names experts {values.min()} to {values.max()}; "
                f"expected 0 to {config.n_routed_experts - 1}."
            )
        out[...] = values
        return
    bits = f"u{out.itemsize}"  # numpy copies its own types several times faster than those of ml_dtypes
    out.view(bits)[...] = values.view(bits)
    if _holds(out, NAN_CODES.get(entry.dtype, ())):
        raise CheckpointError(
            f"{folder.file_of(name)}: tensor {name} ({entry.dtype}) holds NaN; expected finite values. "
            "The file is damaged: fetch it again."
        )


def _holds(values: np.ndarray, codes: Sequence[int]) -> bool:
    """Whether one of the codes is among contiguous values; in pieces, since a mask is as large as what it masks."""
    flat = values.reshape(-1)
    pieces = (flat[first : first + PIECE] for first in range(0, flat.size if codes else 0, PIECE))
    return any((piece == code).any() for piece in pieces for code in codes)
