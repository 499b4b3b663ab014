"""The training objective of DSpark (paper, equations 9 to 12) and what is logged beside it.

A sum over slots and its denominator are kept apart until all slots of a step are in: on a mesh the batch is one array,
so both are sums over all devices, and the gradient is that of the pooled mean.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.training.slot_terms import SlotTerms

EPSILON = 1e-6  # added to denominators, so that a step without supervised slots has loss 0


@dataclass(frozen=True)
class Objective:
    """Weights of the three terms, and what implementations disagree about. Defaults are DeepSpec's but for the last.

    Attributes:
        cross_entropy: of -log p_d(label).
        l1: of the distance |p_d - p_t|, summed over words.
        confidence: of the binary cross-entropy between confidence and expected acceptance.
        decay: slot k, from 0, weighs exp(-k / decay); 0 for equal weights.
        half_distance: use half the distance, the total variation, as speculators does.
        confidence_gradient: let the confidence loss move more than the confidence head itself. Without it a released
            drafter is safe from the spikes that its large unnormed input causes.
    """

    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    half_distance: bool = False
    confidence_gradient: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """Weighted sums over slots, float32 scalars; each term's mean is its sum over `weight`."""

    cross_entropy: jax.Array
    l1: jax.Array
    confidence: jax.Array
    weight: jax.Array

    def total(self, objective: Objective) -> jax.Array:
        """The scalar that is differentiated."""
        weighted = (
            objective.cross_entropy * self.cross_entropy
            + objective.l1 * self.l1
            + objective.confidence * self.confidence
        )
        return weighted / (self.weight + EPSILON)


def slot_weights(supervised: jax.Array, decay: float) -> jax.Array:
    """bool [..., g] -> float32: exp(-k / decay) on supervised slots, 0 elsewhere."""
    slots = jnp.arange(supervised.shape[-1], dtype=jnp.float32)
    return jnp.where(supervised, jnp.exp(-slots / decay) if decay > 0 else 1, 0.0)


def losses(terms: SlotTerms, confidence: jax.Array, supervised: jax.Array, objective: Objective) -> Losses:
    """Sums over all slots.

    Args:
        terms: of slots [..., g].
        confidence: float32 [..., g], logits.
        supervised: bool [..., g].
    """
    weights = slot_weights(supervised, objective.decay)
    label = jax.lax.stop_gradient(terms.acceptance)
    distance = terms.distance / 2 if objective.half_distance else terms.distance

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(supervised, weights * values, 0))  # what is not supervised may be anything

    return Losses(
        cross_entropy=total(terms.cross_entropy),
        l1=total(distance),
        confidence=total(binary_cross_entropy(confidence, label)),
        weight=jnp.sum(weights),
    )


def binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-c log s(z) - (1 - c) log(1 - s(z)) for soft labels c in [0, 1], in the form that cannot overflow."""
    return jax.nn.softplus(logits) - labels * logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """What a step is judged by; means over supervised slots, float32. Positions are g slots of a block, from 0.

    Attributes:
        loss: as differentiated.
        cross_entropy: mean with the objective's weights, like the next two.
        l1: distance between drafter and target.
        confidence: binary cross-entropy of the confidence.
        acceptance: [g], expected share of accepted drafts at a position, if those before it are accepted.
        expected_length: accepted length with bonus that follows for sampled decoding at temperature 1, mean of blocks.
        greedy_length: the same for greedy drafts against the target's likeliest words on this text.
        label_accuracy: [g], share of slots whose likeliest word is the label.
        agreement: [g], share of slots whose likeliest word is the target's.
        draft_top: mean probability of the drafter's likeliest word.
        target_top: the same of the target.
        confidence_error: mean |confidence - expected acceptance|, with the objective's weights, like the next two.
        confidence_bias: mean of the difference.
        survival_bias: mean difference of the products over the slots so far.
        anchors: mean number of blocks in use a row.
        slots: mean number of supervised slots a block in use.
    """

    loss: jax.Array
    cross_entropy: jax.Array
    l1: jax.Array
    confidence: jax.Array
    acceptance: jax.Array
    expected_length: jax.Array
    greedy_length: jax.Array
    label_accuracy: jax.Array
    agreement: jax.Array
    draft_top: jax.Array
    target_top: jax.Array
    confidence_error: jax.Array
    confidence_bias: jax.Array
    survival_bias: jax.Array
    anchors: jax.Array
    slots: jax.Array


def metrics(
    terms: SlotTerms,
    confidence: jax.Array,
    labels: jax.Array,
    supervised: jax.Array,
    kept: jax.Array,
    objective: Objective,
) -> Metrics:
    """All of them, from slots [B, A, g] and blocks [B, A]."""
    sums, weights = losses(terms, confidence, supervised, objective), slot_weights(supervised, objective.decay)
    blocks = supervised.any(axis=-1)
    agrees, probability = terms.draft_pick == terms.target_pick, jax.nn.sigmoid(confidence)
    survival = _products(probability, supervised) - _products(terms.acceptance, supervised)

    def position_mean(values: jax.Array) -> jax.Array:
        return _mean(values, supervised, axis=tuple(range(values.ndim - 1)))

    return Metrics(
        loss=sums.total(objective),
        cross_entropy=_ratio(sums.cross_entropy, sums.weight),
        l1=_ratio(sums.l1, sums.weight),
        confidence=_ratio(sums.confidence, sums.weight),
        acceptance=position_mean(terms.acceptance),
        expected_length=_mean(1 + jnp.sum(_products(terms.acceptance, supervised), axis=-1), blocks),
        greedy_length=_mean(1 + jnp.sum(_products(agrees, supervised), axis=-1), blocks),
        label_accuracy=position_mean(terms.draft_pick == labels),
        agreement=position_mean(agrees),
        draft_top=_mean(terms.draft_top, supervised),
        target_top=_mean(terms.target_top, supervised),
        confidence_error=_mean(jnp.abs(probability - terms.acceptance), weights),
        confidence_bias=_mean(probability - terms.acceptance, weights),
        survival_bias=_mean(survival, weights),
        anchors=jnp.mean(jnp.sum(kept, axis=-1, dtype=jnp.float32)),
        slots=_ratio(jnp.sum(supervised, dtype=jnp.float32), jnp.sum(blocks, dtype=jnp.float32)),
    )


def _products(probabilities: jax.Array, supervised: jax.Array) -> jax.Array:
    """Products over the slots so far; a slot that is not supervised ends them."""
    return jnp.cumprod(jnp.where(supervised, probabilities.astype(jnp.float32), 0), axis=-1)


def _mean(values: jax.Array, weights: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    weights = weights.astype(jnp.float32)
    total = jnp.sum(jnp.where(weights > 0, weights * values.astype(jnp.float32), 0), axis=axis)
    return _ratio(total, jnp.sum(weights, axis=axis))


def _ratio(total: jax.Array, count: jax.Array) -> jax.Array:
    """0 where nothing was counted."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)
