"""The drafter of a model from a GGUF file of either program.

What the file holds exactly as a checkpoint would is packed as a checkpoint has it: MXFP4 experts byte for byte, and
matrices of FP8 values, which BF16 files keep, in FP8 again, with the smallest scales that the values allow. What the
file rounded to other numbers (Q8_0, K-quants) is not rounded again to fit: its values stay plain (`Unpacked`), in the
dtype of activations, to which products decode packed matrices, too. In bfloat16 a K-quantised stack of experts takes
almost four times the memory of a packed one.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.checkpoint.gguf.drafter import DrafterFile
from dspark_jax.checkpoint.gguf.file import Value
from dspark_jax.checkpoint.gguf.layout import Place, bare, pieces, places, scale_rows
from dspark_jax.checkpoint.gguf.metadata import NEEDED, TAP_SHIFT, TARGET_LAYERS, facts, target_layers
from dspark_jax.checkpoint.layout import official_name
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.formats import e4m3, mxfp4
from dspark_jax.formats.ggml import MXFP4, Values
from dspark_jax.model.model import Model
from dspark_jax.model.weights import Drafter
from dspark_jax.sharding import Axis, sharding_of
from pallas_kernels.block_scaled import BlockScaled, Unpacked

_log = logging.getLogger(__name__)

Codes = tuple[np.ndarray, np.ndarray]
"""Codes and scales, both uint8."""


def open_drafter(path: str | Path, config: ModelConfig) -> DrafterFile:
    """A file that holds the drafter of a target's configuration, checked from its header alone.

    Raises:
        CheckpointError: the file is damaged, is no DSpark drafter's, or does not belong to the configuration; or one of
            its tensors is unexpected, missing or misshapen.
        RequestError: the configuration has no drafter, or one that no GGUF file can express.
    """
    file = DrafterFile(path)
    _check_metadata(file, config)
    _check_tensors(file, config)
    return file


def read_drafter(
    file: DrafterFile, abstract: Model, mesh: Mesh | None, progress: Callable[[int, int], None] | None = None
) -> Drafter:
    """The drafter of `abstract`, filled from a file.

    Args:
        file: `open_drafter` gave it for the model's configuration.
        abstract: a model with an abstract drafter.
        mesh: as for `load`.
        progress: told about the bytes of the file that have been read, and those of all its tensors.

    Raises:
        CheckpointError: a tensor is of a type that is not read, or not finite.
    """
    config, done = abstract.config, 0
    by_name = {place.official: place for place in places(config)}

    def filled(path: tuple[object, ...], variable: nnx.Variable) -> nnx.Variable:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        place = by_name[official_name(f"drafter.{name}", config).removesuffix(".weight")]
        value = variable.get_value()
        if isinstance(value, BlockScaled):
            new = type(variable)(_matrix(file, place, value, abstract.numerics.activations, mesh))
        else:
            new = type(variable)(_plain(file, place, value, mesh))
        jax.block_until_ready(jax.tree.leaves(new))
        nonlocal done
        done += file.tensors[place.official].bytes
        if progress is not None:
            progress(done, file.bytes)
        return new

    return jax.tree_util.tree_map_with_path(
        filled, abstract.drafter, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


def _check_tensors(file: DrafterFile, config: ModelConfig) -> None:
    expected = {place.official: bare(place.shape) for place in places(config)}
    for name in file.tensors:
        if name not in expected:
            raise CheckpointError(
                f"{file.path}: tensor {name} is unexpected; a drafter of this configuration has no place for it. The "
                "file and config.json do not belong together."
            )
    for name, shape in expected.items():
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: tensor {name} is missing; fetch the file again, or convert it again.")
        if file.tensors[name].shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {name} has shape {list(file.tensors[name].shape)}; expected {list(shape)} by "
                "config.json. The file and config.json do not belong together."
            )


def _check_metadata(file: DrafterFile, config: ModelConfig) -> None:
    """Whatever the file says must be what the configuration says, and what drafting needs must be said."""
    layers = TARGET_LAYERS[file.spelling]
    for key, expected in facts(config, file.spelling).items():
        found = file.metadata.get(key)
        if found is None:
            if key.endswith(NEEDED):
                raise CheckpointError(
                    f"{file.path}: key {key} is missing; expected {_told(expected)} by config.json. Convert it again."
                )
        elif key == layers:
            _check_layers(file, config, found)
        elif not np.array_equal(np.asarray(found), np.asarray(expected)):
            raise CheckpointError(
                f"{file.path}: {key} is {_told(found)}; expected {_told(expected)} by config.json. The file and "
                "config.json do not belong together."
            )


def _check_layers(file: DrafterFile, config: ModelConfig, found: Value) -> None:
    """The tapped layers, which a file of either program may count in the way of the other: weights do not tell."""
    counted = {shift: target_layers(config, spelling) for spelling, shift in TAP_SHIFT.items()}
    layers, shift = np.asarray(found).tolist(), TAP_SHIFT[file.spelling]
    if layers == counted[shift]:
        return
    key = TARGET_LAYERS[file.spelling]
    if layers in counted.values():
        _log.warning(
            "%s: %s is %s, and files of this kind count the same layers as %s; they are taken as the layers of "
            "config.json. The program that the file is for would tap others and accept few drafts: convert it again.",
            file.path,
            key,
            layers,
            counted[shift],
        )
        return
    raise CheckpointError(
        f"{file.path}: {key} is {layers}; config.json taps the outputs of layers {counted[0]}, which are the inputs of "
        f"{counted[1]}, and the file names neither. It is the drafter of another target."
    )


def _told(value: Value) -> str:
    return str(value.tolist() if isinstance(value, np.ndarray) else value)


def _plain(file: DrafterFile, place: Place, value: jax.Array, mesh: Mesh | None) -> jax.Array:
    """A weight that the checkpoint does not quantise: in its dtype, or in float32 if that would round it."""
    values = _all_values(file, place, np.dtype(np.float32))
    narrow = values.astype(value.dtype)
    exact = np.array_equal(narrow.astype(np.float32), values)
    return _put(narrow if exact else values, place.entries[0].leaf.shape, place.entries[0].axes, mesh)


def _matrix(
    file: DrafterFile, place: Place, value: BlockScaled, dtype: jnp.dtype, mesh: Mesh | None
) -> BlockScaled | Unpacked:
    """A quantised weight: packed if that is exact, and plain if not."""
    info = file.tensors[place.official]
    packed = _mxfp4(file, place) if info.type == MXFP4 and value.format == "e2m1" else _packed(file, place)
    if packed is None:
        return Unpacked(_put(_all_values(file, place, dtype), place.shape, place.entries[0].axes, mesh))
    codes, scales = (
        _put(part, entry.leaf.shape, entry.axes, mesh) for part, entry in zip(packed, place.entries, strict=True)
    )
    return BlockScaled(codes, scales, value.format)


def _mxfp4(file: DrafterFile, place: Place) -> Codes:
    """Experts in the checkpoint's own numbers, in another order."""
    codes, scales = _empty_codes(place)
    stored = file.stored(place.official)
    for piece in pieces(stored.shape):
        codes[piece], scales[piece] = mxfp4.from_gguf(stored[piece])
    if not mxfp4.finite(codes, scales):
        raise CheckpointError(
            f"{file.path}: tensor {place.official} (MXFP4) holds NaN or infinity; expected finite values. Fetch the "
            "file again."
        )
    return codes, scales


def _packed(file: DrafterFile, place: Place) -> Codes | None:
    """Values in the checkpoint's format, or None as soon as one of them has no code there."""
    codes, scales = _empty_codes(place)
    form = mxfp4 if place.kind == "experts" else e4m3
    for piece in pieces(file.tensors[place.official].shape):
        values = file.values(place.official, piece)
        part = form.quantise(values)
        if not np.array_equal(form.dequantise(*part), values):
            return None
        codes[piece] = part[0]
        scales[piece if form is mxfp4 or isinstance(piece, int) else scale_rows(piece)] = part[1]
    return codes, scales


def _empty_codes(place: Place) -> Codes:
    codes, scales = (np.empty(entry.leaf.shape, np.uint8) for entry in place.entries)
    return codes, scales


def _all_values(file: DrafterFile, place: Place, dtype: np.dtype) -> Values:
    shape = file.tensors[place.official].shape
    values = np.empty(shape, dtype)
    for piece in pieces(shape):
        values[piece] = file.values(place.official, piece)
    return values


def _put(values: np.ndarray, shape: tuple[int, ...], axes: tuple[Axis | None, ...], mesh: Mesh | None) -> jax.Array:
    """An array where the layout has it."""
    whole = values.reshape(shape)
    return jax.make_array_from_callback(shape, sharding_of(mesh, axes, shape), lambda index: whole[index])
