"""T4 of the training page: teacher forcing on a drafter's own chain gives the logits of the decoding path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import QUICK
from random_model import random_model

from dspark_jax.config import ModelConfig
from dspark_jax.data.example import Example, Features
from dspark_jax.model.cache import drafter_cache
from dspark_jax.model.drafter import DraftStep, confidence_logits, draft_step, remember
from dspark_jax.model.linear import project
from dspark_jax.model.markov import embed_previous, markov_latents
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows
from dspark_jax.training.blocks import Blocks, blocks_at
from dspark_jax.training.teacher_forcing import draft_blocks

LENGTH = 40
ANCHORS = (1, 3, 7, 8, 9, 21, 30)  # contexts shorter than the window of 8, just full, and wrapped


@pytest.fixture(scope="module", params=["vanilla", "gated", "rnn"])
def model(request: pytest.FixtureRequest) -> Model:
    return random_model(ModelConfig.tiny(dspark_markov_head=request.param), seed=3)


def decoded(model: Model, taps: jax.Array, ids: jax.Array, anchor: jax.Array) -> DraftStep:
    """One round of drafting at an anchor, after its context has entered the ring row by row."""
    setting, cache = model.setting(LENGTH + 8), drafter_cache(model.config, model.numerics, batch=1)
    assert model.drafter is not None
    count = anchor[None]
    rows = Rows(jnp.zeros((1, LENGTH), jnp.int32), jnp.zeros(1, jnp.int32), count)
    cache = remember(model.drafter, cache, taps, rows, setting)
    live = jnp.ones(1, bool)
    return draft_step(model.drafter, model.vocabulary, cache, ids[:, anchor], count, live, setting)


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "behind another document"])
def test_logits_and_confidence_are_those_of_decoding(model: Model, packed: bool) -> None:
    config, key = model.config, jax.random.key(0)
    assert config.drafter is not None
    if packed and config.drafter.markov_head != "vanilla":
        pytest.skip("documents and heads have nothing to do with each other")
    taps = jax.random.normal(key, (1, LENGTH, config.taps_width))
    ids = jax.random.randint(key, (1, LENGTH), 0, config.vocab_size)
    ahead = 11 if packed else 0  # another document before this one
    decode = jax.jit(decoded, compiler_options=QUICK)
    step = jax.jit(score, compiler_options=QUICK)
    for anchor in ANCHORS:
        drafts = decode(model, taps, ids, jnp.int32(anchor))
        text = ids.at[0, anchor + 1 : anchor + 6].set(drafts.ids[0])
        example = placed(text, taps, ahead)
        logits, confidence, blocks = step(model, example, jnp.array([[ahead + anchor]]))
        np.testing.assert_array_equal(blocks.previous[0, 0, 1:], drafts.ids[0, :-1])
        np.testing.assert_allclose(logits[0, 0], drafts.logits[0], atol=2e-5, err_msg=str(anchor))
        np.testing.assert_allclose(confidence[0, 0], drafts.confidence[0], atol=2e-5)


def placed(text: jax.Array, taps: jax.Array, ahead: int) -> Example:
    """The text as a row, behind another document if `ahead` is positive."""
    document = jnp.pad(jnp.full(text.shape, min(ahead, 1), jnp.int32), [(0, 0), (ahead, 0)])
    features = Features(jnp.pad(taps, [(0, 0), (ahead, 0), (0, 0)], constant_values=1.0), jnp.zeros((1, 1, 1)))
    ids = jnp.pad(text, [(0, 0), (ahead, 0)], constant_values=5).astype(jnp.int32)
    return Example(ids, jnp.ones(ids.shape, bool), document, features)


def score(model: Model, example: Example, anchors: jax.Array) -> tuple[jax.Array, jax.Array, Blocks]:
    blocks = blocks_at(example, anchors.astype(jnp.int32), jnp.ones(anchors.shape, bool), model.config.block_size)
    weights, features = model.drafter, example.features
    assert weights is not None and features is not None
    setting = model.setting(example.ids.shape[1] + 8)
    hidden, normed = draft_blocks(weights, model.vocabulary, example, features, blocks, setting)
    embedding = embed_previous(weights.markov_head, blocks.previous)
    latents = markov_latents(weights.markov_head, normed, embedding)
    logits = project(normed, model.vocabulary.head) + project(latents, weights.markov_head.markov_w2)
    return logits, confidence_logits(weights, hidden, embedding), blocks
