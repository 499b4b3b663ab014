"""Anchors, masks and labels: against DeepSpec's own, and against loops that say the rules once more."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, QUICK
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dspark_jax.data.example import Example
from dspark_jax.model.drafter import confidence_logits
from dspark_jax.model.linear import project
from dspark_jax.model.markov import embed_previous, markov_latent, markov_latents
from dspark_jax.training.blocks import Blocks, blocks_at, candidates, choose_anchors, draw_blocks
from dspark_jax.training.losses import Objective, losses, metrics
from dspark_jax.training.slot_terms import slot_terms
from dspark_jax.training.teacher_forcing import context_window

FILE = load_file(GOLDEN / "training" / "blocks.safetensors")
MARKOV = load_file(GOLDEN / "training" / "markov.safetensors")
CASES = sorted({key.split("/")[0] for key in FILE})


def example_of(ids: np.ndarray, supervised: np.ndarray, document: np.ndarray | None = None) -> Example:
    document = np.zeros_like(ids) if document is None else document
    return Example(jnp.asarray(ids), jnp.asarray(supervised, bool), jnp.asarray(document), None)


class Golden:
    """One case: its arrays, and ours from the same inputs."""

    def __init__(self, name: str) -> None:
        self.golden = {key.removeprefix(f"{name}/"): value for key, value in FILE.items() if key.startswith(f"{name}/")}
        _, self.length, self.anchors, self.size, self.words, self.width, self.rank = self.golden["shape"].tolist()
        self.example = example_of(self.golden["input_ids"], self.golden["loss_mask"])
        draws = jnp.asarray(self.golden["random_keys"])
        self.blocks = blocks_at(self.example, *choose_anchors(draws, candidates(self.example), self.anchors), self.size)

    def head(self, names: dict[str, jax.Array]) -> SimpleNamespace:
        return markov_head({name: names.get(name, self.golden.get(name)) for name in [*self.golden, *names]})


def markov_head(values: dict[str, jax.Array]) -> SimpleNamespace:
    def dense(name: str) -> SimpleNamespace | None:
        if f"{name}_weight" not in values:
            return None
        return SimpleNamespace(weight=nnx.Param(values[f"{name}_weight"]), bias=nnx.Param(values[f"{name}_bias"]))

    return SimpleNamespace(
        markov_w1=nnx.Param(values["markov_w1"]),
        markov_w2=nnx.Param(values["markov_w2"]),
        gate_proj=dense("gate_proj"),
        joint_proj=dense("joint_proj"),
    )


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


class TestGolden:
    def test_candidates_and_anchors(self, case: Golden) -> None:
        np.testing.assert_array_equal(candidates(case.example), case.golden["candidates"])
        np.testing.assert_array_equal(case.blocks.anchors, case.golden["anchors"])
        np.testing.assert_array_equal(case.blocks.kept, case.golden["kept"])

    def test_labels_and_supervision(self, case: Golden) -> None:
        blocks, golden = case.blocks, case.golden
        np.testing.assert_array_equal(blocks.supervised, golden["supervised"])
        where = golden["supervised"]
        np.testing.assert_array_equal(np.asarray(blocks.labels)[where], golden["target_ids"][where])
        np.testing.assert_array_equal(np.asarray(blocks.previous)[where], golden["prev_ids"][where])
        rows = golden["target_last_hidden"] @ golden["lm_head"].T
        found = np.stack([row[index] for row, index in zip(rows, np.asarray(blocks.rows), strict=True)])
        np.testing.assert_allclose(found[where], golden["target_logits"][where], atol=1e-5)

    def test_positions_and_attention(self, case: Golden) -> None:
        blocks, golden = case.blocks, case.golden
        mask = seen_rows(case.example, blocks, window=case.length)
        np.testing.assert_array_equal(np.repeat(mask, case.size, axis=1), golden["attention_mask"][..., : case.length])
        positions = blocks.anchors[..., None] + jnp.arange(case.size)
        np.testing.assert_array_equal(positions.reshape(len(positions), -1), golden["position_ids"][:, case.length :])
        np.testing.assert_array_equal(case.example.positions, golden["position_ids"][:, : case.length])

    def test_logits_loss_and_gradients(self, case: Golden) -> None:
        golden, blocks, objective = case.golden, case.blocks, Objective(confidence_gradient=True)
        names = ("markov_w1", "markov_w2", "gate_proj_weight", "joint_proj_weight", "confidence_weight")
        tensors = {name: jnp.asarray(golden[name]) for name in names if name in golden}

        def outputs(hidden: jax.Array, tensors: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
            head = case.head(tensors)
            embedding = embed_previous(head, blocks.previous)
            latent = markov_latents(head, hidden, embedding)
            weights = SimpleNamespace(markov_head=head, confidence=nnx.Param(tensors["confidence_weight"]))
            confidence = confidence_logits(weights, hidden, embedding) + golden["confidence_bias"][0]
            return latent, weights, confidence

        def loss(hidden: jax.Array, tensors: dict[str, jax.Array]) -> tuple[jax.Array, tuple]:
            latent, weights, confidence = outputs(hidden, tensors)
            vocabulary = SimpleNamespace(head=nnx.Param(jnp.asarray(golden["lm_head"])))
            target = jax.vmap(lambda h, rows: h[rows])(jnp.asarray(golden["target_last_hidden"]), blocks.rows)
            terms = slot_terms(weights, vocabulary, hidden, latent, target, blocks.labels)
            logged = metrics(terms, confidence, blocks.labels, blocks.supervised, blocks.kept, objective)
            total = losses(terms, confidence, blocks.supervised, objective).total(objective)
            return total, (project(latent, weights.markov_head.markov_w2), confidence, logged)

        hidden = jnp.asarray(golden["hidden"])
        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), compiler_options=QUICK)
        (total, (bias, confidence, logged)), (slope, slopes) = gradient(hidden, tensors)
        where = golden["supervised"]
        np.testing.assert_allclose(bias[where], (golden["draft_logits"] - golden["base_logits"])[where], atol=1e-5)
        np.testing.assert_allclose(confidence[where], golden["confidence"][where], atol=1e-5)
        np.testing.assert_allclose(total, golden["loss"], atol=5e-6)
        smooth = ~tied(golden["draft_logits"], golden["target_logits"])
        np.testing.assert_allclose(slope[smooth], golden["grad_hidden"][smooth], atol=1e-6)
        for name in ("markov_w1", "markov_w2", "confidence_weight") if smooth.all() else ("confidence_weight",):
            np.testing.assert_allclose(slopes[name], golden[f"grad_{name}"], atol=1e-6, err_msg=name)
        if case.blocks.supervised.any():
            np.testing.assert_allclose(logged.expected_length, golden["tau_probabilistic"], atol=1e-5)
            np.testing.assert_allclose(logged.anchors, golden["sampler_stats"][2], rtol=1e-6)
            np.testing.assert_allclose(logged.slots, where.sum() / golden["kept"].sum(), rtol=1e-6)


def tied(draft: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Slots where a word's two probabilities are so close that rounding decides the sign of |p_d - p_t|'s slope.

    There is one in the file: (0, 1, 0) of "dense", where they differ by 1.2e-8.
    """
    p_d, p_t = (np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True) for x in (draft.astype(float), target.astype(float)))
    return np.abs(p_d - p_t).min(axis=-1) < 1e-7


class TestMarkovHeads:
    @pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
    def test_whole_blocks_and_chains(self, kind: str) -> None:
        values = {f"markov_{n}": jnp.asarray(MARKOV[f"{kind}/{n}"]) for n in ("w1", "w2")}
        values |= {
            key.removeprefix(f"{kind}/"): jnp.asarray(value)
            for key, value in MARKOV.items()
            if key.startswith(f"{kind}/") and "_proj_" in key
        }
        head = markov_head(values)
        block = {n: jnp.asarray(MARKOV[f"{kind}/block/{n}"]) for n in ("base_logits", "prev_ids", "hidden", "logits")}
        latents = markov_latents(head, block["hidden"], embed_previous(head, block["prev_ids"]))
        found = block["base_logits"] + project(latents, head.markov_w2)
        np.testing.assert_allclose(found, block["logits"], atol=1e-5)

        chain = {n: jnp.asarray(MARKOV[f"{kind}/chain/{n}"]) for n in ("base_logits", "anchor_ids", "hidden")}
        previous, state = chain["anchor_ids"], jnp.zeros((len(chain["anchor_ids"]), 8))
        for slot in range(5):
            latent, state = markov_latent(head, chain["hidden"][:, slot], embed_previous(head, previous), state)
            logits = chain["base_logits"][:, slot] + project(latent, head.markov_w2)
            np.testing.assert_allclose(logits, MARKOV[f"{kind}/chain/logits"][:, slot], atol=1e-5)
            previous = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            np.testing.assert_array_equal(previous, MARKOV[f"{kind}/chain/tokens"][:, slot])


def seen_rows(example: Example, blocks: Blocks, window: int) -> np.ndarray:
    """bool [B, A, T]: which rows of the context the slots of a block see."""
    index, usable = (np.asarray(x) for x in context_window(example, blocks, window))
    rows = np.arange(example.ids.shape[1])
    return ((index[..., None] == rows) & usable[..., None]).any(axis=2)


class TestByBruteForce:
    """T1 and T2 of the training page: twelve tokens, anchors 0, 3 and 10, a window of 4, one block of padding."""

    def test_window(self) -> None:
        example = example_of(np.arange(12)[None], np.ones((1, 12)))
        blocks = blocks_at(example, jnp.array([[0, 3, 10, 0]]), jnp.array([[True, True, True, False]]), 5)
        expected = np.zeros((4, 12), bool)
        for block, anchor in enumerate((0, 3, 10)):
            for row in range(12):
                expected[block, row] = anchor - 4 <= row <= anchor - 1
        np.testing.assert_array_equal(seen_rows(example, blocks, window=4)[0], expected)
        assert blocks.supervised[0].sum(axis=-1).tolist() == [5, 5, 1, 0]

    def test_two_packed_documents_do_not_see_each_other(self) -> None:
        document = np.array([[0] * 5 + [1] * 5 + [-1] * 2])
        example = example_of(np.arange(12)[None], document >= 0, document)
        blocks = blocks_at(example, jnp.array([[3, 5, 7]]), jnp.ones((1, 3), bool), 5)
        seen = [np.flatnonzero(row).tolist() for row in seen_rows(example, blocks, window=4)[0]]
        assert seen == [[0, 1, 2], [], [5, 6]]
        assert blocks.supervised[0].astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
        assert np.flatnonzero(candidates(example)[0]).tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
        assert example.positions[0, :10].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]

    def test_alignment(self) -> None:
        example = example_of(np.arange(40)[None], np.ones((1, 40)))
        blocks = draw_blocks(jax.random.key(0), example, 7, 5)
        slots = np.asarray(blocks.anchors)[..., None] + np.arange(5)
        where = np.asarray(blocks.supervised)
        assert where.sum() >= 30
        np.testing.assert_array_equal(np.asarray(blocks.labels)[where], (slots + 1)[where])
        np.testing.assert_array_equal(np.asarray(blocks.previous)[where], slots[where])
        np.testing.assert_array_equal(np.asarray(blocks.rows)[where], slots[where])

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_any_mask_and_any_documents(self, data: st.DataObject) -> None:
        length, size, count = 16, 4, 6
        lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
        document = np.repeat(np.arange(len(lengths)), lengths)[:length]
        document = np.pad(document, (0, length - len(document)), constant_values=-1)
        supervised = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length))) & (document >= 0)
        example = example_of(np.arange(length)[None], supervised[None], document[None])
        blocks = draw_blocks(jax.random.key(data.draw(st.integers(0, 99))), example, count, size)
        legal = [
            a
            for a in range(length - 1)
            if supervised[a] and supervised[a + 1] and document[a] == document[a + 1] and document[a] >= 0
        ]
        chosen = np.asarray(blocks.anchors)[0][np.asarray(blocks.kept)[0]].tolist()
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(legal)
        assert len(chosen) == min(count, len(legal))
        for number, anchor in enumerate(chosen):
            run = 0
            while (
                run < size
                and anchor + 1 + run < length
                and supervised[anchor + 1 + run]
                and document[anchor + 1 + run] == document[anchor]
            ):
                run += 1
            assert blocks.supervised[0, number].sum() == run
        assert not blocks.supervised[0, len(chosen) :].any()


def test_every_candidate_is_drawn_equally_often() -> None:
    example = example_of(np.zeros((1, 10), int), np.ones((1, 10)))
    draw = jax.jit(jax.vmap(lambda key: draw_blocks(key, example, 3, 2).anchors))
    anchors = draw(jax.random.split(jax.random.key(0), 3000))
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=10)
    assert counts[9] == 0
    np.testing.assert_allclose(counts[:9], 1000, atol=5 * (1000 * 2 / 3) ** 0.5)
