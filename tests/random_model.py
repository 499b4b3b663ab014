"""Models with random weights of sensible size, for any configuration: packed like a checkpoint."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.checkpoint.layout import Entry, layout
from dspark_jax.checkpoint.load import fill
from dspark_jax.config import ModelConfig
from dspark_jax.model.model import PARTS, Model, Part, abstract_model
from dspark_jax.model.numerics import numerics_of
from dspark_jax.sharding import sharding_of

CODE_RMS = {"F8_E4M3": 1.2, "I8": 2.9}  # of the codes drawn below, before scaling


def random_model(config: ModelConfig, numerics: str = "float32", seed: int = 0, parts: Sequence[Part] = PARTS) -> Model:
    """A model whose activations keep their size from layer to layer."""
    abstract = abstract_model(config, numerics_of(numerics), parts)
    entries = layout(abstract)
    widths = {name: entry.shape[-1] for entry in entries for name in entry.names}
    rng = np.random.default_rng(seed)
    return fill(abstract, entries, lambda entry: jnp.asarray(_draw(entry, rng, widths, config), entry.leaf.dtype))


def on_mesh(model: Model, mesh: Mesh) -> Model:
    """A model, abstract or not, with its leaves where `load` would put them."""
    leaves, structure = jax.tree.flatten(model)
    shardings = [sharding_of(mesh, entry.axes, entry.leaf.shape) for entry in layout(model)]
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        placed = [shaped(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    else:
        placed = jax.device_put(leaves, shardings)
    return jax.tree.unflatten(structure, placed)


def shaped(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _draw(entry: Entry, rng: np.random.Generator, widths: dict[str, int], config: ModelConfig) -> np.ndarray:
    shape, name = entry.leaf.shape, entry.names[0]
    if entry.dtype == "I64":
        return np.argsort(rng.random((shape[0], config.n_routed_experts)), axis=-1)[:, : shape[1]]
    if entry.dtype == "F8_E8M0":
        packed = ".experts." in name
        into = widths[name.removesuffix("scale") + "weight"] * (2 if packed else 1)
        middle = 127 - round(math.log2(CODE_RMS["I8" if packed else "F8_E4M3"] * math.sqrt(into)))
        return middle + rng.integers(-1, 2, shape)
    if entry.dtype == "I8":
        return rng.integers(0, 256, shape, np.uint8)
    if entry.dtype == "F8_E4M3":
        bits = rng.integers(0, 256, shape, np.uint8)
        exponent = 4 + (bits >> 3) % 4  # values from 1/8 to 2
        return (bits & 0x87) | (exponent << 3)
    noise = rng.standard_normal(shape, np.float32)
    if name.endswith(("norm.weight", "_scale")):
        return 1 + 0.1 * noise
    if len(shape) == 1 or name.endswith("ape"):
        return 0.3 * noise
    if name.endswith(("embed.weight", "markov_w1.weight")):
        return noise
    return noise * shape[-1] ** -0.5
