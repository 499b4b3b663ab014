"""What a step of training takes on a device, from the compiler's own analysis: nothing is allocated or run."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.data.example import Example, Features
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import Numerics
from dspark_jax.training.step import Recipe, abstract_state, train_step


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device.

    Attributes:
        model: frozen weights.
        state: float32 masters and moments, updated in place.
        example: tokens and features.
        temporary: what the step needs beside them at its peak.
    """

    model: int
    state: int
    example: int
    temporary: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.model + self.state + self.example + self.temporary


def step_memory(config: ModelConfig, numerics: Numerics, recipe: Recipe, batch: int, length: int) -> StepMemory:
    """Compiles a step for the backend in use, on one device and with features that come with the example.

    Args:
        batch: rows of an example.
        length: tokens of a row.
    """
    model = abstract_model(config, numerics, parts=("drafter",))
    state, example = abstract_state(model, recipe), _abstract_example(config, batch, length)
    compiled = train_step.lower(state, model, example, recipe).compile()
    analysis: Any = compiled.memory_analysis()
    return StepMemory(_bytes(model), _bytes(state), _bytes(example), analysis.temp_size_in_bytes)


def _abstract_example(config: ModelConfig, batch: int, length: int) -> Example:
    def shape(dtype: jax.typing.DTypeLike, *more: int) -> Any:
        return jax.ShapeDtypeStruct((batch, length, *more), dtype)

    features = Features(shape(jnp.bfloat16, config.taps_width), shape(jnp.bfloat16, config.hidden_size))
    return Example(shape(jnp.int32), shape(bool), shape(jnp.int32), features)


def _bytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
