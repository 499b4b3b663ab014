"""Generation on the golden checkpoints: the same tokens whatever is drafted, and every way to stop."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from safetensors.numpy import load_file

import dspark_jax
from dspark_jax.decoding import generate as generation
from dspark_jax.decoding.generate import run
from dspark_jax.decoding.generation import Generation
from dspark_jax.decoding.request import Request, check_requests
from dspark_jax.model.model import Model

NEW_TOKENS = 200
PROMPTS = ("exact/greedy/prompt_ids", "exact/loop/prompt_ids", "exact/loop_tiny/prompt_ids")


@pytest.fixture(scope="module")
def expected(golden: Path) -> dict[str, np.ndarray]:
    return load_file(golden / "expected.safetensors")


def recorded_prompts(expected: dict[str, np.ndarray]) -> list[list[int]]:
    """Three recorded prompts of different lengths, and one of a single token."""
    return [expected[key].tolist() for key in PROMPTS] + [[5]]


@pytest.fixture(scope="module")
def prompts(expected: dict[str, np.ndarray]) -> list[list[int]]:
    return recorded_prompts(expected)


@pytest.fixture(scope="module")
def model(golden: Path) -> Model:
    return dspark_jax.load(golden)


def complete(model: Model, prompts: list[list[int]], **options: object) -> dspark_jax.Completions:
    """`generate` at the one batch size and capacity that these tests compile."""
    return dspark_jax.generate(model, prompts, **{"max_new_tokens": NEW_TOKENS, "stop_ids": ()} | options)


def requests_of(model: Model, prompts: list[list[int]], **columns: list[int]) -> list[Request]:
    """Checked requests of one batch, NEW_TOKENS long where `columns` says nothing else."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    requests = [
        Request(prompt, **{"max_new_tokens": NEW_TOKENS, "stop_ids": ()} | row)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    return check_requests(requests, model)


@pytest.fixture(scope="module")
def plain(model: Model, prompts: list[list[int]]) -> dspark_jax.Completions:
    return complete(model, prompts, draft_tokens=0)


def test_plain_decoding_is_what_pytorch_emits(plain: dspark_jax.Completions, expected: dict[str, np.ndarray]) -> None:
    for tokens, key in zip(plain.tokens, ("greedy/tokens", "loop/stream", "loop_tiny/stream"), strict=False):
        recorded = expected[f"exact/{key}"].tolist()
        assert tokens[: len(recorded)] == recorded
    assert plain.statistics.offered_drafts == 0
    assert plain.statistics.accepted_length == 1.0


def test_every_draft_length_gives_the_same_tokens(
    model: Model, prompts: list[list[int]], plain: dspark_jax.Completions
) -> None:
    programs = generation.finish._cache_size()
    lengths = []
    for draft_tokens in range(1, model.block_size + 1):
        done = complete(model, prompts, draft_tokens=draft_tokens)
        assert done.tokens == plain.tokens
        assert len(done.statistics.offering_rounds) == model.block_size
        assert not any(done.statistics.offering_rounds[draft_tokens:])
        lengths.append(done.statistics.accepted_length)
    assert lengths[-1] > lengths[0] > 1.3, "the golden drafters accept"
    assert generation.finish._cache_size() == programs, "draft_tokens is data, not a program"


def test_statistics_account_for_every_token(model: Model, prompts: list[list[int]]) -> None:
    done = complete(model, prompts)
    statistics = done.statistics
    assert sum(map(len, done.tokens)) == statistics.accepted_drafts + statistics.bonus_tokens
    assert statistics.accepted_drafts == sum(statistics.accepting_rounds)
    assert statistics.accepted_length * statistics.rounds == pytest.approx(sum(map(len, done.tokens)))


def test_bfloat16_gives_the_same_tokens_for_every_draft_length() -> None:
    """Of one checkpoint, since it compiles much; `test_bits.py` has the bits of both."""
    golden = GOLDEN / "tiny-b"
    model = dspark_jax.load(golden, numerics="bfloat16")
    prompts = recorded_prompts(load_file(golden / "expected.safetensors"))
    plain = complete(model, prompts, draft_tokens=0)
    assert [len(tokens) for tokens in plain.tokens] == [NEW_TOKENS] * len(prompts)
    for draft_tokens in (1, model.block_size):  # float32 goes through all lengths
        assert complete(model, prompts, draft_tokens=draft_tokens).tokens == plain.tokens


def test_a_stop_id_cuts_after_itself_wherever_it_falls_in_a_block(
    model: Model, prompts: list[list[int]], plain: dspark_jax.Completions
) -> None:
    for place in range(20, 27):
        stop = plain.tokens[0][place]
        done = complete(model, prompts, stop_ids=(stop,))
        for tokens, whole in zip(done.tokens, plain.tokens, strict=True):
            end = whole.index(stop) + 1 if stop in whole else len(whole)
            assert tokens == whole[:end]
        emitted = sum(map(len, done.tokens))
        assert emitted == done.statistics.accepted_drafts + done.statistics.bonus_tokens


def test_the_config_eos_stops_by_default(
    model: Model, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    eos = (3, 14, 15)
    stops = []
    ending = replace(model, config=replace(model.config, eos_token_id=eos))

    def listen(_: Model, requests: list[Request], *rest: object) -> Generation:
        stops.extend(tuple(request.stop_ids) for request in requests)
        return run(model, requests, *rest)

    monkeypatch.setattr(generation, "run", listen)
    dspark_jax.generate(ending, prompts, max_new_tokens=NEW_TOKENS)
    complete(model, prompts)
    assert stops == [eos] * 4 + [()] * 4


def test_budgets_are_kept_to_the_token_row_by_row(
    model: Model, prompts: list[list[int]], plain: dspark_jax.Completions
) -> None:
    budgets = [NEW_TOKENS, 1, 2, 0]
    state = run(model, requests_of(model, prompts, max_new_tokens=budgets))
    for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        assert int(state.length[row]) == len(prompt) + budget
        assert state.tokens[row, len(prompt) : len(prompt) + budget].tolist() == plain.tokens[row][:budget]
    offered = np.asarray(state.counters.offered).sum(axis=1)
    assert offered[1] == 0, "the only token of this budget is the bonus"
    assert offered[3] == 0 and int(state.counters.rounds[3]) == 0


def test_draft_lengths_may_differ_by_row(model: Model, prompts: list[list[int]], plain: dspark_jax.Completions) -> None:
    state = run(model, requests_of(model, prompts, draft_tokens=[0, 5, 2, 1]))
    for row, prompt in enumerate(prompts):
        assert state.tokens[row, len(prompt) : len(prompt) + NEW_TOKENS].tolist() == plain.tokens[row]
    assert np.asarray(state.counters.offered)[0].sum() == 0


def test_neighbours_change_no_token(model: Model, prompts: list[list[int]], plain: dspark_jax.Completions) -> None:
    """Same batch size and capacity, other neighbours: replaced, finished at once, or drafting differently."""
    others = [[7, 8, 9] * 5, [2] * 40, prompts[2], [1, 2]]
    state = run(
        model, requests_of(model, others, max_new_tokens=[3, NEW_TOKENS, NEW_TOKENS, 0], draft_tokens=[5, 1, 3, 5])
    )
    n = len(prompts[2])
    assert state.tokens[2, n : n + NEW_TOKENS].tolist() == plain.tokens[2]


def test_a_second_prompt_of_the_bucket_compiles_nothing(model: Model, prompts: list[list[int]]) -> None:
    complete(model, prompts)
    programs = generation.start._cache_size(), generation.finish._cache_size()
    complete(model, [[3, 1, 4, 1, 5], [9], [2, 6], [5, 3, 5, 8]], stop_ids=(7, 8, 9))
    assert (generation.start._cache_size(), generation.finish._cache_size()) == programs


def test_more_drafts_than_the_block_are_clamped_with_a_warning(
    model: Model, prompts: list[list[int]], plain: dspark_jax.Completions
) -> None:
    with pytest.warns(UserWarning, match="draft_tokens 9 is more than the trained block of 5"):
        assert complete(model, prompts, draft_tokens=9).tokens == plain.tokens


def test_a_drafter_that_proposes_nothing_is_an_error(model: Model, prompts: list[list[int]]) -> None:
    """A planted fault: not-a-number in the Markov head makes no draft finite."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    broken = [
        jnp.full_like(leaf, jnp.nan) if "markov_w2" in jax.tree_util.keystr(path) else leaf for path, leaf in leaves
    ]
    silent = jax.tree.unflatten(structure, broken)
    with pytest.raises(dspark_jax.SilentDrafterError, match="offered none"):
        complete(silent, prompts)
    assert complete(silent, prompts, draft_tokens=0).statistics.offered_drafts == 0


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 512]], {}, "token id 512 is outside the vocabulary; expected 0 to"),
        ([[-1]], {}, "token id -1 is outside"),
        ([["a"]], {}, "expected a list of token ids"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ([[1]], {"max_new_tokens": 10**12}, "expected at most 16777216"),
        ([[1]], {"draft_tokens": -2}, "draft_tokens is -2"),
        ([[1]], {"stop_ids": [99999]}, "stop_ids: token id 99999 is outside"),
        ([[1]], {"stop_ids": 5}, "stop_ids: expected a list of token ids"),
    ],
)
def test_bad_requests_get_a_sentence(model: Model, prompts: list, options: dict, message: str) -> None:
    with pytest.raises(dspark_jax.RequestError, match=message):
        dspark_jax.generate(model, prompts, **options)


def test_parts_that_are_missing_are_named(golden: Path) -> None:
    drafter = dspark_jax.load(golden, parts=("drafter",))
    with pytest.raises(dspark_jax.RequestError, match="needs a target"):
        dspark_jax.generate(drafter, [[1]])
    with pytest.raises(dspark_jax.RequestError, match="needs a target"):
        dspark_jax.forward(drafter, [[1]])
    target = dspark_jax.load(golden, parts=("target",))
    with pytest.raises(dspark_jax.RequestError, match="has no drafter; use 0"):
        dspark_jax.generate(target, [[1]], draft_tokens=1)


def test_a_target_that_is_not_finite_is_named(model: Model, prompts: list[list[int]]) -> None:
    """A planted fault: one not-a-number in a norm of the target, with and without drafts."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    broken = [
        leaf.at[0].set(jnp.nan) if jax.tree_util.keystr(path).startswith(".target.norm") else leaf
        for path, leaf in leaves
    ]
    for draft_tokens in (0, 5):
        with pytest.raises(
            dspark_jax.NotFiniteError, match=r"the target's logits are not finite for prompts \[0, 1, 2, 3\]"
        ):
            complete(jax.tree.unflatten(structure, broken), prompts, draft_tokens=draft_tokens)
