"""One program, one row: nothing that other rows or other steps do changes a bit of its logits."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import dspark_jax
from dspark_jax.decoding.programs import start
from dspark_jax.decoding.state import State
from dspark_jax.model.cache import TargetCache
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import lm_logits, target_step

BATCH, CAPACITY, STEPS = 3, 128, 24


@jax.jit
def verify(model: Model, setting: Setting, rows: Rows, cache: TargetCache) -> tuple[jax.Array, TargetCache]:
    step = target_step(model.target, model.vocabulary, rows, cache, setting)
    return lm_logits(model.vocabulary, step.hidden), step.cache


class Steps:
    """Verification steps of any live count on a golden checkpoint, all of them one program."""

    def __init__(self, golden: Path, numerics: str) -> None:
        self.model = dspark_jax.load(golden, numerics=numerics)
        expected = load_file(golden / "expected.safetensors")
        self.prompt = expected["exact/loop/prompt_ids"].tolist()
        self.ids = self.prompt + expected["exact/loop/stream"].tolist()
        self.setting = self.model.setting(CAPACITY)
        self.width = 1 + self.model.block_size

    def begin(self, *prompts: list[int]) -> State:
        tokens = np.zeros((BATCH, CAPACITY), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
        return start(self.model, self.setting, jnp.asarray(tokens), lengths)

    def step(self, cache: TargetCache, position: list[int], live: list[int], ids: np.ndarray) -> tuple:
        rows = Rows(jnp.asarray(ids, jnp.int32), jnp.asarray(position, jnp.int32), jnp.asarray(live, jnp.int32))
        return verify(self.model, self.setting, rows, cache)

    def row_ids(self, position: int) -> list[int]:
        return self.ids[position : position + self.width]

    def plain(self) -> list[np.ndarray]:
        """Logits of row 0 for STEPS single steps with idle neighbours."""
        cache, first = self.begin(self.prompt, [1], [1]).target, len(self.prompt) - 1
        logits = []
        for position in range(first, first + STEPS):
            ids = np.zeros((BATCH, self.width))
            ids[0] = self.row_ids(position)
            out, cache = self.step(cache, [position, 0, 0], [1, 0, 0], ids)
            logits.append(np.asarray(out[0, 0]))
        return logits


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def steps(golden: Path, request: pytest.FixtureRequest) -> Steps:
    return Steps(golden, request.param)


@pytest.fixture(scope="module")
def plain(steps: Steps) -> list[np.ndarray]:
    return steps.plain()


@settings(derandomize=True, deadline=None, max_examples=5)
@given(data=st.data())
def test_a_row_has_the_same_bits_wherever_it_stands(steps: Steps, plain: list[np.ndarray], data: st.DataObject) -> None:
    """Verification with rejected rows, and neighbours that draft, finish, stop and start over, against single steps."""
    cache = steps.begin(steps.prompt, steps.prompt[:9], [4, 2]).target
    first = position = len(steps.prompt) - 1
    others = [8, 1]
    while position - first < STEPS - steps.width:
        live = data.draw(st.integers(1, steps.width), label="live rows")
        keep = data.draw(st.integers(1, live), label="rows kept")
        busy = [data.draw(st.integers(0, steps.width), label="live rows of a neighbour") for _ in others]
        ids = np.array([data.draw(st.lists(st.integers(0, 300), min_size=6, max_size=6)) for _ in range(BATCH)])
        ids[0, :keep] = steps.row_ids(position)[:keep]
        out, cache = steps.step(cache, [position, *others], [live, *busy], ids)
        for row in range(keep):
            assert np.array_equal(np.asarray(out[0, row]), plain[position - first + row])
        position += keep
        others = [
            p + data.draw(st.integers(0, b), label="rows a neighbour keeps") for p, b in zip(others, busy, strict=True)
        ]


def test_the_bits_are_compared_at_all(steps: Steps, plain: list[np.ndarray]) -> None:
    """A planted fault: one other token in the row's own past."""
    past = [*steps.prompt[:-2], steps.prompt[-2] ^ 1, steps.prompt[-1]]
    cache, first = steps.begin(past, [1], [1]).target, len(past) - 1
    ids = np.zeros((BATCH, steps.width))
    ids[0] = steps.row_ids(first)
    out, _ = steps.step(cache, [first, 0, 0], [1, 0, 0], ids)
    assert not np.array_equal(np.asarray(out[0, 0]), plain[0])
