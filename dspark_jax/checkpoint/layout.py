"""The one table between the official files and the module tree: name, dtype, shape, place, logical axes.

Module attributes carry the checkpoint's names, so the table is a walk of the abstract tree with a handful of renames;
what a module cannot know is written here: the dtype on disk, and which axes may be sharded.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.checkpoint.safetensors import DTYPES
from dspark_jax.config import ModelConfig
from dspark_jax.model.model import Model
from dspark_jax.sharding import Axis
from pallas_kernels.block_scaled import BlockScaled


@dataclass(frozen=True)
class Entry:
    """One leaf of the module tree and the tensors that fill it.

    Attributes:
        names: the tensor's official name, or for stacked experts one name an expert, in order.
        dtype: safetensors dtype of each tensor.
        shape: shape of each tensor on disk.
        leaf: shape and dtype in memory.
        axes: logical axis or None, for each dimension of the leaf.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    leaf: jax.ShapeDtypeStruct
    axes: tuple[Axis | None, ...]

    @property
    def stacked(self) -> bool:
        """Whether the leaf has a leading axis of experts that the tensors lack."""
        return len(self.leaf.shape) > len(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its tensors on disk."""
        return len(self.names) * math.prod(self.shape) * DTYPES[self.dtype].itemsize


# Module path -> official name; {last} is the last stage. The first rule that matches the front of a path is applied.
_PLACES = (
    (r"vocabulary\.", ""),
    (r"target\.", ""),
    (r"drafter\.stages\.", "mtp."),
    (r"drafter\.main_", "mtp.0.main_"),
    (r"drafter\.confidence", "mtp.{last}.confidence_head.proj"),
    (r"drafter\.", "mtp.{last}."),
)
_HYPER_CONNECTION = re.compile(r"(hc_attn|hc_ffn|hc_head)\.(fn|base|scale)$")

# Which axis of which weight may be split, by the end of the module path (the official tensor-parallel split, experts,
# and the hidden axis of the shared expert).
_AXES: tuple[tuple[str, tuple[Axis | None, ...]], ...] = (
    (r"vocabulary\.(embed|head)", ("vocabulary", None)),
    (r"markov_w[12]", ("vocabulary", None)),
    (r"attn\.attn_sink", ("heads",)),
    (r"\.(wq_b|wo_a|weights_proj)", ("heads", None)),
    (r"attn\.wo_b", (None, "heads")),
    (r"\.experts\.w[123]", ("expert", None, None)),
    (r"\.shared_experts\.w[13]", ("hidden", None)),
    (r"\.shared_experts\.w2", (None, "hidden")),
)

_PLAIN_DTYPES = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float32): "F32", jnp.dtype(jnp.int32): "I64"}
_PACKED_DTYPES = {"e4m3": "F8_E4M3", "e2m1": "I8"}


def layout(model: Model) -> tuple[Entry, ...]:
    """The entries of a model, abstract or not, in the order of its flattened leaves."""
    variables = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return tuple(
        entry
        for path, variable in variables
        for entry in _entries(jax.tree_util.keystr(path, simple=True, separator="."), variable, model.config)
    )


def tensor_names(entries: tuple[Entry, ...]) -> Iterator[str]:
    """Official names of all tensors in the table."""
    return (name for entry in entries for name in entry.names)


def _entries(path: str, variable: nnx.Variable, config: ModelConfig) -> Iterator[Entry]:
    name, axes = official_name(path, config), logical_axes(path)
    value = variable.get_value()
    if isinstance(value, BlockScaled):
        yield _entry(f"{name}.weight", _PACKED_DTYPES[value.format], value.payload, axes)
        yield _entry(f"{name}.scale", "F8_E8M0", value.scales, axes)
    else:
        dtype = _PLAIN_DTYPES[jnp.dtype(value.dtype)]
        suffix = ".weight" if dtype == "BF16" and not name.endswith(".weight") else ""
        yield _entry(name + suffix, dtype, value, axes)


def _entry(name: str, dtype: str, value: jax.Array, axes: tuple[Axis | None, ...]) -> Entry:
    leaf = jax.ShapeDtypeStruct(value.shape, value.dtype)
    axes = axes or (None,) * len(leaf.shape)
    if ".experts." not in name:
        return Entry((name,), dtype, leaf.shape, leaf, axes)
    names = tuple(name.replace(".experts.", f".experts.{expert}.") for expert in range(leaf.shape[0]))
    return Entry(names, dtype, leaf.shape[1:], leaf, axes)


def official_name(path: str, config: ModelConfig) -> str:
    """What the files call the weight at a module path, but for the ends `.weight` and `.scale` and numbers of experts.

    Of a few weights the module path has the end `.weight` itself.
    """
    for place, official in _PLACES:
        renamed, hits = re.subn(f"^{place}", official.format(last=config.num_stages - 1), path)
        if hits:
            return _HYPER_CONNECTION.sub(r"\1_\2", renamed)
    raise AssertionError(f"no rule names the module path {path}")


def logical_axes(path: str) -> tuple[Axis | None, ...]:
    """The logical axes of the weight at a module path, or () if it is never split."""
    return next((axes for end, axes in _AXES if re.search(f"{end}$", path)), ())
