"""Features of the target: against `forward`, from a cache, and from a cache that passes by."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import QUICK
from flax import nnx
from random_model import random_model
from tiny_configs import CONFIGS

import dspark_jax
from dspark_jax.data.assemble import assemble
from dspark_jax.data.batches import Batches
from dspark_jax.data.cache_format import digest_of, facts_of_run
from dspark_jax.data.cache_reader import FeatureCache
from dspark_jax.data.cache_writer import CacheWriter
from dspark_jax.data.capture import capture, features_of
from dspark_jax.data.document import Document
from dspark_jax.data.documents import Documents
from dspark_jax.data.example import Example, Examples
from dspark_jax.data.features import target_features
from dspark_jax.data.passing import PassingCache
from dspark_jax.errors import CacheError
from dspark_jax.model.model import Model
from dspark_jax.model.target import lm_logits

pytestmark = pytest.mark.usefixtures("quick")

CONFIG = CONFIGS["two-streams"]
LENGTHS = (20, 3, 13, 8, 1, 17, 11, 5)
LENGTH, ROWS = 20, 2
FACTS = facts_of_run(CONFIG, "fingerprint", "float32")


@pytest.fixture(scope="module")
def model(quick: None) -> Model:
    return random_model(CONFIG, parts=("target",))


@pytest.fixture(scope="module")
def documents() -> Documents:
    rng = np.random.default_rng(0)
    some = [Document(rng.integers(0, 96, length, np.int32), rng.random(length) < 0.7) for length in LENGTHS]
    return Documents(some, len(some), 0, 0)


# The pure function ---------------------------------------------------------------------------------------------------


def test_features_are_what_forward_gives_for_each_document_alone(model: Model, documents: Documents) -> None:
    """In chunks of 8: documents that end inside a chunk, at its end, and rows that end long before others."""
    example = assemble(documents, [(0,), (1,), (2,), (3,)], LENGTH)
    run = jax.jit(lambda model, example: target_features(model, example, chunk=8), compiler_options=QUICK)
    features = run(model, example)
    assert features.taps.shape == (4, LENGTH, CONFIG.taps_width) and features.hidden.shape == (4, LENGTH, 64)
    assert features.taps.dtype == features.hidden.dtype == jnp.float32
    whole = dspark_jax.forward(model, np.asarray(example.ids), chunk=LENGTH)
    logits = lm_logits(model.vocabulary, features.hidden)
    for row, length in enumerate(LENGTHS[:4]):
        np.testing.assert_allclose(features.taps[row, :length], whole.taps[row, :length], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(logits[row, :length], whole.logits[row, :length], rtol=1e-4, atol=1e-4)
        assert not np.any(features.taps[row, length:]) and not np.any(features.hidden[row, length:])

    padding = np.asarray(example.document) < 0
    other = replace(example, ids=np.where(padding, 50, example.ids))  # type: ignore[arg-type]
    for found, expected in zip(jax.tree.leaves(run(model, other)), jax.tree.leaves(features), strict=True):
        np.testing.assert_array_equal(found, expected, err_msg="what stands behind a document has no influence")


def test_no_gradient_passes(model: Model, documents: Documents) -> None:
    example = assemble(documents, [(1,)], 4)
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        definition, parameters, rest = nnx.split(model, nnx.Param, ...)

        def loss(parameters: nnx.State) -> jax.Array:
            features = target_features(nnx.merge(definition, parameters, rest), example)
            return jnp.sum(features.taps) + jnp.sum(features.hidden)

        gradients = jax.jit(jax.grad(loss), compiler_options=QUICK)(parameters)
    leaves = jax.tree.leaves(gradients)
    assert leaves and not any(np.any(leaf) for leaf in leaves)


# A cache -------------------------------------------------------------------------------------------------------------


def write(folder: Path, model: Model, documents: Documents, stop: int | None = None) -> None:
    """Writes the cache of all documents; killed, so to speak, behind sample `stop`."""
    facts = FACTS | {"documents": digest_of(documents.documents)}

    class Stop(Exception): ...

    def progress(done: int, total: int) -> None:
        if stop is not None and done >= sum(LENGTHS[:stop]):
            raise Stop

    with CacheWriter(folder, facts, shard_bytes=6000) as writer:
        try:
            capture(model, documents, range(len(documents)), writer, ROWS, progress)
        except Stop:
            assert writer.samples == stop and not writer.finished


@pytest.fixture(scope="module")
def cached(model: Model, documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    folder = tmp_path_factory.mktemp("cache")
    write(folder, model, documents)
    return FeatureCache(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_capture_goes_on_to_the_same_bytes(
    cached: FeatureCache, model: Model, documents: Documents, tmp_path: Path
) -> None:
    for stop in (0, 3, 6, 7, None):
        write(tmp_path, model, documents, stop)
    assert contents(tmp_path) == contents(cached.directory)
    assert len(contents(tmp_path)) > 4, "several shards"
    cached.check_documents()
    cached.check_run(FACTS)


def test_each_document_has_its_own_features(cached: FeatureCache, model: Model, documents: Documents) -> None:
    """Alone, in float32: a cache that mixed two up would be far off."""
    numbers = (0, 2, 5, 7)
    alone = dspark_jax.forward(model, assemble(documents, [(n,) for n in numbers], LENGTH).ids, chunk=LENGTH)
    for row, number in enumerate(numbers):
        document = cached[number]
        np.testing.assert_array_equal(document.ids, documents[number].ids)
        assert document.features is not None
        taps = np.asarray(document.features.taps, np.float32)
        np.testing.assert_allclose(taps, alone.taps[row, : len(document)], rtol=2**-8, atol=1e-4)


# Three ways to the same examples -------------------------------------------------------------------------------------


def assert_same(example: Example, expected: Example) -> None:
    leaves, others = jax.tree.leaves(example), jax.tree.leaves(expected)
    assert len(leaves) == len(others) == 5
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(leaf, other)


def test_on_the_fly_and_cached_are_the_same(cached: FeatureCache, model: Model, documents: Documents) -> None:
    on_the_fly: Examples = Batches(documents, length=LENGTH, batch_size=ROWS, seed=3)
    from_cache: Examples = Batches(cached, length=LENGTH, batch_size=ROWS, seed=3)
    for example, expected in islice(zip(on_the_fly.starting_at(2), from_cache.starting_at(2), strict=True), 4):
        assert example.features is None
        assert_same(replace(example, features=features_of(model, example)), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_a_passing_cache_gives_the_same_from_any_step(
    packed: bool, cached: FeatureCache, model: Model, documents: Documents, tmp_path: Path
) -> None:
    settings = {"length": 24, "batch_size": 1 if packed else ROWS, "packed": packed, "seed": 3}
    whole = Batches(cached, **settings)  # type: ignore[arg-type]
    batches = Batches(documents, **settings)  # type: ignore[arg-type]
    passing = PassingCache(model, batches, tmp_path, FACTS, steps=3, batch_size=ROWS)
    for first, count in ((0, 7), (5, 3), (1, 1)):
        for step, example in enumerate(islice(passing.starting_at(first), count), start=first):
            assert_same(example, whole[step])
            assert [path.name for path in tmp_path.iterdir()] == [f"part-{step // 3:06d}"]
    used = FeatureCache(tmp_path / "part-000000")
    assert len(used) < len(documents) or packed
    other = PassingCache(model, batches, tmp_path, FACTS | {"model_fingerprint": "other"}, steps=3, batch_size=ROWS)
    with pytest.raises(CacheError, match="has model_fingerprint 'fingerprint' and this run 'other'"):
        next(other.starting_at(0))
