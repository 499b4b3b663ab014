"""A model of Flash's width whose rounds run on the kernels, as a program that no weights are needed for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from dspark_jax.bench.sparse import FEWEST_LAYERS, cut_flash
from dspark_jax.decoding.loop import decode
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import initial_state, with_settings
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import PRESETS
from pallas_kernels.implementation import Implementation

KERNELS = ("site", "grouped_fp8_linear", "mxfp4_experts")  # functions that are jitted by themselves, once a kind


def programs(implementation: Implementation | None) -> Iterator[tuple[str, int]]:
    """Name and identity of every call of a kernel in the decoding loop of layers of all kinds and three stages."""
    config = cut_flash(4e9)
    assert config.num_hidden_layers == FEWEST_LAYERS == 4 and config.num_stages == 3
    model = abstract_model(config, replace(PRESETS["bfloat16"], implementation=implementation))

    def begin() -> tuple:
        state = initial_state(model, jnp.zeros((1, 256), jnp.int32), jnp.ones(1, jnp.int32))
        return model.setting(256), with_settings(state, Sampling.of(1), jax.random.key(0))

    def calls(jaxpr: Jaxpr) -> Iterator[tuple[str, int]]:
        for equation in jaxpr.eqns:
            if equation.params.get("name") in KERNELS:
                yield equation.params["name"], id(equation.params["jaxpr"])
                continue
            for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr)):
                if isinstance(value, Jaxpr | ClosedJaxpr):
                    yield from calls(value.jaxpr if isinstance(value, ClosedJaxpr) else value)

    return calls(jax.jit(decode).trace(model, *jax.eval_shape(begin)).jaxpr.jaxpr)


def test_every_round_runs_on_the_kernels() -> None:
    calls = list(programs("mosaic"))
    counts = Counter(name for name, _ in calls)
    layers, stages, indexers = 4, 3, 1
    assert counts["site"] == 2 * (layers + stages)
    assert counts["mxfp4_experts"] == layers + stages
    # Eight matrices each, the keys of the context in every stage, the indexer's query, and the projection of the taps.
    assert counts["grouped_fp8_linear"] == 8 * (layers + stages) + stages + indexers + 1
    kinds = Counter(name for name, _ in set(calls))
    assert kinds["site"] == 4 and kinds["mxfp4_experts"] == 2  # target and stages; and with a write
    assert kinds["grouped_fp8_linear"] < 20


def test_none_of_them_runs_where_xla_is_asked_for() -> None:
    assert not list(programs("xla"))
