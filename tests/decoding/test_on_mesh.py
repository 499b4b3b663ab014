"""Generation on a mesh: the tokens of one device, however rows and weights are split, and whoever jits."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from conftest import QUICK
from jax.sharding import PartitionSpec as P
from random_model import on_mesh, random_model

import dspark_jax
from dspark_jax import Model, ModelConfig, make_mesh

pytestmark = pytest.mark.usefixtures("quick")

# A CSA layer, an HCA layer and a stage, of which everything divides by two.
SMALL = ModelConfig.tiny(num_hidden_layers=2, compress_ratios=[4, 128, 0], dspark_target_layer_ids=[1])
PROMPTS = [[5, 6, 7], list(range(40)), [9], [3, 1, 4, 1, 5, 9, 2, 6]]
TEMPERATURES, SEEDS, NEW_TOKENS = [0.0, 0.0, 0.9, 0.6], [0, 1, 2, 3], 24


@pytest.fixture(scope="module")
def model(quick: None) -> Model:
    return random_model(SMALL)


def complete(model: Model) -> dspark_jax.Completions:
    return dspark_jax.generate(
        model, PROMPTS, NEW_TOKENS, temperature=TEMPERATURES, seed=SEEDS, stop_ids=(), logprobs=True
    )


@pytest.fixture(scope="module")
def expected(model: Model) -> dspark_jax.Completions:
    """On one device."""
    return complete(model)


def margin(model: Model, ids: list[int]) -> float:
    """By how much the likeliest next token leads."""
    best = np.sort(np.asarray(dspark_jax.forward(model, [ids]).logits)[0, -1])
    return float(best[-1] - best[-2])


def test_tokens_are_those_of_one_device(model: Model, expected: dspark_jax.Completions) -> None:
    """A greedy row may part only where two tokens are as good as equal, and then says so."""
    ours = complete(on_mesh(model, make_mesh(data=2, expert=2, tensor=2)))
    for row, (tokens, others) in enumerate(zip(ours.tokens, expected.tokens, strict=True)):
        if tokens == others:
            np.testing.assert_allclose(ours.target_logprobs[row], expected.target_logprobs[row], atol=1e-5)
            continue
        parted = next(i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1])
        gap = margin(model, PROMPTS[row] + others[:parted])
        print(f"row {row} parts after {parted} tokens, at a margin of {gap:.1e}")
        assert TEMPERATURES[row] == 0 and gap < 1e-4
    assert ours.statistics.offered_drafts > 0


def test_a_stream_is_that_of_one_device(model: Model) -> None:
    requests = [dspark_jax.Request(PROMPTS[i % 4][:9], 8 + i, temperature=i % 2, seed=i, stop_ids=()) for i in range(6)]
    split = on_mesh(model, make_mesh(data=2, tensor=2))
    ours, expected = (dict(dspark_jax.stream(m, requests, batch_size=2)) for m in (split, model))
    assert [ours[i].tokens for i in range(6)] == [expected[i].tokens for i in range(6)]


class TestGenerateFn:
    """In a jit of one's own."""

    def tokens(self, run: Callable[..., dspark_jax.Generation], model: Model) -> tuple[jax.Array, list[list[int]]]:
        """The buffer, and the new tokens of each row."""
        ids = np.zeros((4, 40), np.int32)
        for row, prompt in zip(ids, PROMPTS, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
        sampling = dspark_jax.Sampling.of(4, temperature=TEMPERATURES, seed=SEEDS, max_new_tokens=NEW_TOKENS)
        out = jax.jit(run, compiler_options=QUICK)(model, ids, lengths, sampling, jax.random.key(0))
        rows = zip(np.asarray(out.tokens), lengths, np.asarray(out.length), strict=True)
        return out.tokens, [row[start:end].tolist() for row, start, end in rows]

    def test_under_a_mesh(self, model: Model, expected: dspark_jax.Completions) -> None:
        mesh = make_mesh(data=2, tensor=2)
        buffer, tokens = self.tokens(dspark_jax.generate_fn(SMALL, 64, mesh=mesh), on_mesh(model, mesh))
        assert buffer.sharding.spec[0] == "data"
        assert tokens == expected.tokens

    def test_inside_a_shard_map_of_ones_own(self, model: Model, expected: dspark_jax.Completions) -> None:
        """Every device has the weights and its own rows, and stops when these are done."""
        rows = P("data")
        mapped = jax.shard_map(
            dspark_jax.generate_fn(SMALL, 64),
            mesh=make_mesh(data=2),
            in_specs=(P(), rows, rows, rows, P()),
            out_specs=rows,
            check_vma=False,
        )
        assert self.tokens(mapped, model)[1] == expected.tokens
