"""A checkpoint's drafter as a GGUF file, a piece of a tensor at a time."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.gguf.file import write_gguf
from dspark_jax.checkpoint.gguf.layout import (
    TYPES,
    Build,
    Kind,
    Piece,
    Place,
    Spelling,
    pieces,
    places,
    planned,
    scale_rows,
)
from dspark_jax.checkpoint.gguf.metadata import metadata
from dspark_jax.checkpoint.layout import Entry
from dspark_jax.checkpoint.load import Progress, account
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError, RequestError
from dspark_jax.formats import e4m3, mxfp4, narrow, q2_k, q4_k
from dspark_jax.formats.ggml import BF16, F16, MXFP4, Q2_K, Q4_K, Bytes, Type, Values
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of

K_QUANTS = {Q2_K: q2_k.encode, Q4_K: q4_k.encode}
NOT_FINITE = "a value is NaN or infinite"


def convert(
    checkpoint: Path,
    build: Build,
    out: Path,
    spelling: Spelling,
    search: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Writes the drafter of a checkpoint in the official layout as a GGUF file.

    MXFP4 experts pass through `llama.cpp` builds with their codes and scales, and what FP8 and BF16 values become in
    BF16 or F32 is exact. Q8_0, F16 and K-quants round.

    Args:
        checkpoint: folder that holds `config.json`, the index and the shards of the drafter.
        out: the file; it appears when it is whole.
        spelling: of names and metadata, one that the build's program reads.
        search: look for the best scales of K-quants; else take those of the largest values, which is quicker.
        overwrite: take the place of a file of this name.
        progress: told about the bytes written.

    Returns:
        Bytes of the tensors.

    Raises:
        ConfigError: `config.json` is not one that this package runs.
        RequestError: the configuration has no drafter, or one that no such file can express; no program reads `build`
            in `spelling`; `out` is a file of the checkpoint.
        CheckpointError: a tensor is missing, damaged, or does not fit the type that should hold it exactly; `out` is
            taken, or the disk refuses.
    """
    config = ModelConfig.from_file(checkpoint / "config.json")
    infos, folder = planned(config, build, spelling, checkpoint), CheckpointFolder.open(checkpoint)
    _refuse_own_file(out, checkpoint)
    by_name = {place.names[spelling]: place for place in places(config)}
    entries = tuple(entry for place in by_name.values() for entry in place.entries)
    account(entries, folder, abstract_model(config, numerics_of("float32")))
    total, done = sum(info.bytes for info in infos.values()), 0

    def contents(name: str) -> Iterator[np.ndarray]:
        nonlocal done
        place = by_name[name]
        for piece in pieces(place.shape):
            stored = _stored(place, piece, TYPES[build][place.kind], folder, search)
            yield stored
            folder.release()
            done += stored.nbytes
            if progress is not None:
                progress(done, total)

    about = metadata(config, spelling, f"{checkpoint.resolve().name} DSpark drafter", checkpoint)
    write_gguf(out, about, infos, contents, overwrite)
    return total


def _refuse_own_file(out: Path, checkpoint: Path) -> None:
    """What is read is not overwritten, whatever links lead to it; other drafters may lie in the folder."""
    own = {os.path.realpath(file) for file in checkpoint.iterdir() if file.suffix in (".json", ".safetensors")}
    if os.path.realpath(out) in own:
        raise RequestError(f"{out}: belongs to the checkpoint {checkpoint} that is read; name another place.")


def _stored(place: Place, piece: Piece, type: Type, folder: CheckpointFolder, search: bool) -> Bytes:
    """A piece of a tensor as the file holds it.

    Raises:
        CheckpointError: the type cannot hold a value, or rounds where it should not.
    """
    first = place.entries[0]
    name = first.names[piece] if isinstance(piece, int) else first.names[0]
    parts = [_part(entry, piece, folder) for entry in place.entries]
    try:
        return _encode(parts, place.kind, type, search)
    except ValueError as error:
        raise CheckpointError(
            f"{folder.file_of(name)}: tensor {name} does not fit {type.name}: {error}. Choose another build, or, if "
            "the weights are not what they should be, fetch the file again."
        ) from error


def _part(entry: Entry, piece: Piece, folder: CheckpointFolder) -> np.ndarray:
    """An expert's tensor, or those rows of a tensor or of its scales; quantised values as bytes."""
    if isinstance(piece, int):
        return folder.read(entry.names[piece]).view(np.uint8)
    values = folder.read(entry.names[0])[scale_rows(piece) if entry.dtype == "F8_E8M0" else piece]
    return values.view(np.uint8) if values.dtype.itemsize == 1 else values


def _encode(parts: list[np.ndarray], kind: Kind, type: Type, search: bool) -> Bytes:
    if type == MXFP4:
        codes, scales = parts
        if not mxfp4.finite(codes, scales):
            raise ValueError(NOT_FINITE)
        return mxfp4.to_gguf(codes, scales)
    values = _values(parts, kind)
    if not np.isfinite(values).all():
        raise ValueError(NOT_FINITE)
    if type in K_QUANTS:
        return K_QUANTS[type](values, search)
    if type == BF16 and not narrow.fits_bfloat16(values):
        raise ValueError("a value would be rounded, its scale being out of range")
    if type == F16 and narrow.float16_range(values).overflow:
        raise ValueError("a value is beyond 65504")
    assert type.encode is not None
    return type.encode(values)


def _values(parts: list[np.ndarray], kind: Kind) -> Values:
    """float32, exact, of plain values or of codes and their scales."""
    if len(parts) == 1:
        return parts[0].astype(np.float32)
    codes, scales = parts
    return mxfp4.dequantise(codes, scales) if kind == "experts" else e4m3.dequantise(codes, scales)
