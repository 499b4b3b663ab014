"""What the compiled loop is made of."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from random_model import random_model

from dspark_jax.config import ModelConfig
from dspark_jax.decoding.loop import decode
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import initial_state, with_settings
from dspark_jax.model.indexer import top_entries
from dspark_jax.model.model import Model
from dspark_jax.model.numerics import PRESETS

CAPACITY = 128


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(ModelConfig.tiny())


def loop_arguments(model: Model, batch: int) -> tuple:
    tokens, lengths = jnp.zeros((batch, CAPACITY), jnp.int32), jnp.ones(batch, jnp.int32)
    sampling = Sampling.of(batch, temperature=0.7, top_p=0.9)
    state = with_settings(initial_state(model, tokens, lengths, logprobs=True), sampling, jax.random.key(0))
    return model, model.setting(CAPACITY), state


def test_the_loop_holds_each_target_layer_once(model: Model) -> None:
    """Every matrix of the target is read by exactly one equation of the loop's body."""
    arguments = loop_arguments(model, batch=2)
    jaxpr = jax.make_jaxpr(decode)(*arguments).jaxpr
    [loop] = [equation for equation in jaxpr.eqns if equation.primitive.name == "while"]
    first = loop.params["cond_nconsts"]
    body = loop.params["body_jaxpr"].jaxpr
    inside = dict(zip(loop.invars[first : first + loop.params["body_nconsts"]], body.invars, strict=False))

    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(arguments)]
    reads = Counter(var for equation in body.eqns for var in equation.invars if not hasattr(var, "val"))
    counts = {
        path: reads[inside[var]]
        for (path, leaf), var in zip(leaves, jaxpr.invars, strict=True)
        if path.startswith("[0].target") and leaf.ndim > 1
    }
    assert len(counts) > 60
    assert set(counts.values()) == {1}, {path: count for path, count in counts.items() if count != 1}


@pytest.mark.parametrize("batch", [1, 2])
def test_the_compiled_loop_stays_on_the_device_and_copies_no_cache(model: Model, batch: int) -> None:
    arguments = loop_arguments(model, batch)
    state = arguments[2]
    text = jax.jit(decode, donate_argnums=2).lower(*arguments).compile().as_text()
    assert not re.findall(r"\b(infeed|outfeed|send|recv)\(", text)
    assert set(re.findall(r'custom_call_target="([^"]+)"', text)) <= {"TopK"}, "no callback to the host"

    caches = {leaf.shape for leaf in jax.tree.leaves((state.target, state.drafter))}
    copies = [
        tuple(int(size) for size in dims.split(",") if size) for dims in re.findall(r"\[([\d,]*)\]\S* copy\(", text)
    ]
    assert len(copies) > 10, "the pattern finds copies at all"
    assert not caches & set(copies)


def test_an_indexer_over_a_million_tokens_compiles_to_little_memory() -> None:
    """262 144 entries, 64 heads of 128 channels, a whole verification step: under 2 GB of temporaries."""
    rows, heads, width, entries = 6, 64, 128, 262_144
    bf16 = jnp.bfloat16
    shapes = [
        jax.ShapeDtypeStruct((1, rows, heads, width), bf16),
        jax.ShapeDtypeStruct((1, rows, heads), bf16),
        jax.ShapeDtypeStruct((1, entries, width), bf16),
        jax.ShapeDtypeStruct((1, rows), jnp.int32),
    ]
    for batch in (1, 32):
        batched = [jax.ShapeDtypeStruct((batch, *shape.shape[1:]), shape.dtype) for shape in shapes]
        compiled = jax.jit(top_entries, static_argnums=(4, 5)).lower(*batched, 512, PRESETS["bfloat16"]).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2e9
