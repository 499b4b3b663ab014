"""The objective against DeepSpec's own numbers, and against formulas written down again in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, QUICK
from safetensors.numpy import load_file

from dspark_jax.training.losses import EPSILON, Losses, Metrics, Objective, losses, metrics
from dspark_jax.training.slot_terms import SlotTerms, terms_of_logits

FILE = load_file(GOLDEN / "training" / "loss.safetensors")
DRAFT, TARGET, LABELS, CONFIDENCE = (
    jnp.asarray(FILE[f"in/{name}"]) for name in ("draft_logits", "target_logits", "target_ids", "confidence")
)
DEFAULT = Objective(confidence_gradient=True)
SETTINGS = {
    "default": DEFAULT,
    "decay5": replace(DEFAULT, decay=5.0),
    "nodecay": replace(DEFAULT, decay=0.0),
    "decay0": replace(DEFAULT, decay=0.0),
    "swapped": replace(DEFAULT, cross_entropy=0.9, l1=0.1, confidence=0.5),
    "l1_off": replace(DEFAULT, cross_entropy=1.0, l1=0.0),
    "conf_off": replace(DEFAULT, confidence=0.0),
    "conf_zero": replace(DEFAULT, confidence=0.0),
    "ce_only": replace(DEFAULT, decay=5.0, cross_entropy=1.0, l1=0.0, confidence=0.0),
}
MASKS = ("full", "prefix", "dummy", "holes", "empty")
WORDS = DRAFT.shape[-1]


def terms_of(draft: jax.Array, target: jax.Array, labels: jax.Array, size: int | None = None) -> SlotTerms:
    size = size or draft.shape[-1]

    def logits(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(jax.lax.dynamic_slice_in_dim(values, first, size, axis=-1) for values in (draft, target))

    return terms_of_logits(logits, labels, draft.shape[-1], size)


def evaluated(
    draft: jax.Array, confidence: jax.Array, mask: tuple[jax.Array, jax.Array], objective: Objective
) -> tuple[jax.Array, tuple[Losses, Metrics]]:
    supervised, kept = mask
    terms = terms_of(draft, TARGET, LABELS)
    sums = losses(terms, confidence, supervised, objective)
    return sums.total(objective), (sums, metrics(terms, confidence, LABELS, supervised, kept, objective))


def mask_of(name: str) -> tuple[jax.Array, jax.Array]:
    supervised, kept = (jnp.asarray(FILE[f"in/{name}/{kind}"]) for kind in ("supervised", "kept"))
    return supervised, kept


gradients = jax.jit(
    jax.value_and_grad(evaluated, argnums=(0, 1), has_aux=True), static_argnums=3, compiler_options=QUICK
)


class TestGolden:
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_loss_sums_metrics_and_gradients(self, setting: str, mask: str) -> None:
        golden = {key.split("/")[-1]: value for key, value in FILE.items() if key.startswith(f"out/{mask}/{setting}/")}
        objective = SETTINGS[setting]
        (loss, (sums, logged)), (slope, confidence_slope) = gradients(DRAFT, CONFIDENCE, mask_of(mask), objective)
        np.testing.assert_allclose(loss, golden["loss"], atol=2e-6, rtol=2e-6)
        found = np.repeat([sums.cross_entropy, sums.l1, sums.confidence], 2)
        found[1::2] = sums.weight
        wanted = np.repeat(
            [objective.cross_entropy > 0, objective.l1 > 0, setting not in ("conf_off", "conf_zero", "ce_only")], 2
        )
        np.testing.assert_allclose(found[wanted], golden["sums"][wanted], rtol=1e-5)
        if "grad_draft_logits" in golden:
            np.testing.assert_allclose(slope, golden["grad_draft_logits"], atol=1e-7)
        if "grad_confidence" in golden:
            np.testing.assert_allclose(confidence_slope, golden["grad_confidence"], atol=1e-7)
        if setting == "ce_only":
            return  # it was given no target logits, so the official code logs nothing of what follows
        np.testing.assert_allclose(logged.acceptance, golden["accept_rate"], atol=2e-6)
        kinds = [logged.expected_length, logged.confidence_error, logged.confidence_bias, logged.survival_bias]
        compared = np.isfinite(golden["metrics"]) & (mask != "empty")
        np.testing.assert_allclose(np.array(kinds)[compared], golden["metrics"][compared], atol=2e-6)
        parts = [logged.loss, logged.cross_entropy, logged.l1, logged.confidence]
        off = [False, False, objective.l1 == 0, setting in ("conf_off", "conf_zero")]
        compared = np.isfinite(golden["logged"]) & ~np.array(off)
        np.testing.assert_allclose(np.array(parts)[compared], golden["logged"][compared], atol=4e-6)

    def test_the_label_of_the_confidence_is_the_expected_acceptance(self) -> None:
        np.testing.assert_allclose(terms_of(DRAFT, TARGET, LABELS).acceptance, FILE["in/accept_star"], atol=2e-7)

    def test_bfloat16_logits_have_their_cross_entropy_in_float32(self) -> None:
        draft, target = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (DRAFT, TARGET))
        sums = losses(terms_of(draft, target, LABELS), CONFIDENCE, mask_of("prefix")[0], DEFAULT)
        np.testing.assert_allclose(sums.total(DEFAULT), FILE["bf16/float32_loss"], rtol=2e-6)
        np.testing.assert_allclose(sums.cross_entropy, FILE["bf16/float32_ce_num"], rtol=2e-6)

    @pytest.mark.parametrize(("case", "masks"), [("uneven", ("prefix", "dummy")), ("one_empty", ("holes", "empty"))])
    def test_two_ranks_are_one_batch(self, case: str, masks: tuple[str, str]) -> None:
        """Official gradients are twice their share of the pooled one, since the mean over ranks is taken later."""
        ranks = ((DRAFT, CONFIDENCE), (DRAFT * 0.9 + 0.1, -CONFIDENCE))

        def pooled(ranks: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
            parts = [
                evaluated(draft, confidence, mask_of(mask), DEFAULT)[1][0]
                for (draft, confidence), mask in zip(ranks, masks, strict=True)
            ]
            return jax.tree.map(jnp.add, *parts).total(DEFAULT)

        loss, slopes = jax.value_and_grad(pooled)(ranks)
        np.testing.assert_allclose(loss, FILE[f"ranks/{case}/pooled_loss"], rtol=2e-6)
        for rank, (draft, confidence) in enumerate(slopes):
            np.testing.assert_allclose(2 * draft, FILE[f"ranks/{case}/rank{rank}/grad_draft_logits"], atol=1e-7)
            np.testing.assert_allclose(2 * confidence, FILE[f"ranks/{case}/rank{rank}/grad_confidence"], atol=1e-7)


class TestChunks:
    @pytest.mark.parametrize("size", [1, 5, 36])
    def test_chunks_of_words_change_nothing(self, size: int) -> None:
        def total(draft: jax.Array, size: int) -> tuple[jax.Array, SlotTerms]:
            terms = terms_of(draft, TARGET, LABELS, size)
            return jnp.sum(terms.cross_entropy + jnp.sin(terms.distance)), terms

        (_, whole), slope = jax.value_and_grad(total, has_aux=True)(DRAFT, WORDS)
        (_, parts), parts_slope = jax.value_and_grad(total, has_aux=True)(DRAFT, size)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), whole, parts)
        np.testing.assert_allclose(slope, parts_slope, atol=4e-6)
        np.testing.assert_array_equal(parts.draft_pick, jnp.argmax(DRAFT, axis=-1))
        np.testing.assert_array_equal(parts.target_pick, jnp.argmax(TARGET, axis=-1))

    def test_equal_logits_pick_the_lowest_id_in_whatever_chunk(self) -> None:
        flat = jnp.zeros((2, 37))
        assert terms_of(flat, flat, jnp.zeros(2, jnp.int32), 5).draft_pick.tolist() == [0, 0]


class TestByHand:
    """Four words, three slots, decay 4: T3 of the training page, in float64."""

    DRAFT = np.log([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
    TARGET = np.log([[0.4, 0.4, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1]])
    LABELS = (0, 3, 2)
    LOGITS = (0.0, 2.0, -1.0)

    def loss(self, **changes: float | bool) -> float:
        objective = replace(DEFAULT, **changes)
        terms = terms_of(
            jnp.asarray(self.DRAFT, jnp.float32), jnp.asarray(self.TARGET, jnp.float32), jnp.array([0, 3, 2])
        )
        sums = losses(terms, jnp.array(self.LOGITS), jnp.ones(3, bool), objective)
        return float(sums.total(objective))

    def expected(self, half: bool) -> float:
        w = np.exp(-np.arange(3) / 4)
        entropy = -np.log([0.7, 0.25, 0.3])
        distance = np.array([0.6, 0.0, 0.8])
        acceptance = 1 - distance / 2
        probability = 1 / (1 + np.exp(-np.array(self.LOGITS)))
        confidence = -acceptance * np.log(probability) - (1 - acceptance) * np.log(1 - probability)
        slots = 0.1 * entropy + 0.9 * (distance / 2 if half else distance) + confidence
        return float((w * slots).sum() / (w.sum() + EPSILON))

    def test_total(self) -> None:
        assert self.loss() == pytest.approx(self.expected(half=False), rel=1e-6)

    def test_half_the_distance_is_an_option(self) -> None:
        assert self.loss(half_distance=True) == pytest.approx(self.expected(half=True), rel=1e-6)

    def test_what_is_not_supervised_may_be_anything(self) -> None:
        terms = terms_of(DRAFT.at[0, 0, 4].set(jnp.nan), TARGET, LABELS)
        supervised = jnp.ones(LABELS.shape, bool).at[0, 0, 4].set(False)
        total = losses(terms, CONFIDENCE, supervised, DEFAULT).total(DEFAULT)
        assert jnp.isfinite(total)


def test_the_expected_length_is_what_sampling_accepts() -> None:
    """T5: Monte-Carlo of the acceptance rule against 1 + the sum of products of expected acceptances."""
    rng = np.random.default_rng(0)
    draft, target = rng.normal(size=(2, 4, 6)) * 1.5
    p_d, p_t = (np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True) for x in (draft, target))
    rounds = 200_000
    alive, accepted = np.ones(rounds, bool), np.zeros(rounds)
    for slot in range(4):
        word = rng.choice(6, size=rounds, p=p_d[slot])
        alive &= rng.random(rounds) < np.minimum(1, p_t[slot] / p_d[slot])[word]
        accepted += alive
    labels, supervised = jnp.zeros((1, 1, 4), jnp.int32), jnp.ones((1, 1, 4), bool)
    terms = terms_of(jnp.asarray(draft[None, None], jnp.float32), jnp.asarray(target[None, None], jnp.float32), labels)
    found = metrics(terms, jnp.zeros((1, 1, 4)), labels, supervised, jnp.ones((1, 1), bool), DEFAULT).expected_length
    assert float(found) == pytest.approx(1 + accepted.mean(), abs=4 * accepted.std() / rounds**0.5)
