"""Which weights are trained: float32 masters beside the model, put into it for a step and rounded back at the end.

Masters are a flat dictionary by module path, such as "drafter.stages.0.attn.wq_a", so that optimisers and checkpoints
need to know nothing of modules. A model into which they are merged computes with what will be stored of them: bfloat16
weights rounded, packed ones quantised, both with straight-through gradients.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.errors import RequestError
from dspark_jax.model.model import Model
from dspark_jax.model.weights import Packed
from pallas_kernels.block_scaled import BlockScaled, Master, encode
from pallas_kernels.precision import round_to, straight_through

Parameters = dict[str, jax.Array]
"""Module path -> float32 master."""

Scope = Literal["heads", "non_expert", "full"]
"""`heads`: Markov and confidence head; `non_expert`: the whole drafter but its routed experts; `full`: all of it."""

_encode = jax.jit(encode, static_argnums=1)  # operation by operation a stack of experts would exist several times
_HEADS = ("drafter.markov", "drafter.confidence")


def weights_of(model: Model) -> Iterator[tuple[str, nnx.Variable]]:
    """Every weight with its module path, in the order of the model's leaves; tables of integers are none."""
    for path, variable in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_variable):
        if isinstance(variable, nnx.Param | Packed):
            yield _name(path), variable


def names_in(model: Model, scope: Scope) -> list[str]:
    """Module paths of the drafter's weights in a scope.

    Raises:
        RequestError: no such scope, or the model has no drafter.
    """
    belongs: dict[str, Callable[[str], bool]] = {
        "heads": lambda name: name.startswith(_HEADS),
        "non_expert": lambda name: ".experts." not in name,
        "full": lambda name: True,
    }
    if scope not in belongs:
        raise RequestError(f"scope is {scope!r}; expected one of {', '.join(belongs)}.")
    if model.drafter is None:
        raise RequestError("fine-tuning needs a drafter, and this model has none.")
    return [name for name, _ in weights_of(model) if name.startswith("drafter.") and belongs[scope](name)]


def masters(model: Model, names: Iterable[str]) -> Parameters:
    """float32 copies of the named weights, packed ones decoded."""
    wanted = set(names)
    return {name: _decoded(variable.get_value()) for name, variable in weights_of(model) if name in wanted}


def merge(model: Model, parameters: Parameters, rounded: bool = True) -> Model:
    """The model that computes with masters: differentiable with respect to them, and otherwise frozen.

    Without `rounded` it computes with the masters as they are, and not with what will be stored of them.
    """
    return _replaced(model, parameters, _rounded if rounded else _unrounded)


def release(model: Model, parameters: Parameters) -> Model:
    """The model with masters rounded and packed as the checkpoint stores them; it computes what `merge` gives."""
    return _replaced(model, parameters, _stored)


def _decoded(value: jax.Array | BlockScaled) -> jax.Array:
    return value.decode() if isinstance(value, BlockScaled) else value.astype(jnp.float32)


def _unrounded(value: jax.Array | BlockScaled, master: jax.Array) -> jax.Array | Master:
    return Master(master, None) if isinstance(value, BlockScaled) else master


def _rounded(value: jax.Array | BlockScaled, master: jax.Array) -> jax.Array | Master:
    if isinstance(value, BlockScaled):
        return Master(master, value.format)
    return straight_through(lambda master: round_to(master, value.dtype).astype(jnp.float32), master)


def _stored(value: jax.Array | BlockScaled, master: jax.Array) -> jax.Array | BlockScaled:
    return _encode(master, value.format) if isinstance(value, BlockScaled) else round_to(master, value.dtype)


def _replaced(model: Model, parameters: Parameters, value_of: Callable[[Any, jax.Array], Any]) -> Model:
    def replaced(path: tuple[Any, ...], variable: Any) -> Any:
        master = parameters.get(_name(path))
        return variable if master is None else type(variable)(value_of(variable.get_value(), master))

    return jax.tree_util.tree_map_with_path(replaced, model, is_leaf=_is_variable)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
