"""Whether the drafter's confidence can be believed: what it foretold against what happened, position by position.

The head says for each draft how likely it survives if those before it do. The prediction for position k is the product
of the first k of these probabilities; what it foretells is that the first k drafts are all accepted.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.errors import NotFiniteError
from dspark_jax.evaluation.log import RoundLog

BINS = 20  # of the reliability table and the expected calibration error
AUC_BINS = 1000
LEAST = 1e-8  # predictions keep this distance from 0 and 1


class Summary(NamedTuple):
    """Means over the positions of a block, weighted with their counts; NaN where nothing counts.

    Attributes:
        ece: expected calibration error.
        auc: over the positions at which drafts were both accepted and rejected.
        brier: mean squared error.
        prediction: mean prediction.
        label: share of prefixes that were accepted.
    """

    ece: float
    auc: float
    brier: float
    prediction: float
    label: float


@dataclass(frozen=True)
class Calibration:
    """Reliability at each of g positions; NaN where nothing counts.

    Attributes:
        count: int64 [g], rounds in which the position was offered and no accepted stop id came before it.
        ece: float64 [g], mean distance of bins from the diagonal, weighted with their counts.
        auc: float64 [g], chance that an accepted prefix was thought likelier than a rejected one; NaN if there is only
            one kind.
        brier: float64 [g], mean squared error.
        prediction: float64 [g], mean prediction.
        label: float64 [g], share of accepted prefixes.
        reliability: float64 [g, bins, 3], for each bin of predictions their mean, the share accepted, and the count.
    """

    count: np.ndarray
    ece: np.ndarray
    auc: np.ndarray
    brier: np.ndarray
    prediction: np.ndarray
    label: np.ndarray
    reliability: np.ndarray

    @property
    def summary(self) -> Summary:
        """Over all positions."""
        return Summary(*(self._mean(getattr(self, name)) for name in Summary._fields))

    def _mean(self, values: np.ndarray) -> float:
        weights = np.where(np.isfinite(values), self.count, 0)
        return float(np.nansum(values * weights) / weights.sum()) if weights.any() else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """The fields and the summary as JSON values, with NaN where nothing counts."""
        return {name: values.tolist() for name, values in vars(self).items()} | {"summary": self.summary._asdict()}


def calibrate(log: RoundLog, logits: np.ndarray | None = None) -> Calibration:
    """The calibration of a log's confidence, or of other logits [N, g] in its place.

    Raises:
        NotFiniteError: the confidence of an offered draft is not finite.
    """
    predictions = survival(log.confidence if logits is None else logits)
    counts, labels = counted(log)
    positions = [
        _position(predictions[counts[:, k], k], labels[counts[:, k], k].astype(np.float64)) for k in range(log.block)
    ]
    columns = {name: np.array([position[name] for position in positions]) for name in positions[0]}
    return Calibration(count=counts.sum(axis=0), **columns)


def counted(log: RoundLog) -> tuple[np.ndarray, np.ndarray]:
    """Which positions count, and which prefixes were accepted: bool [N, g] each.

    Raises:
        NotFiniteError: the confidence of an offered draft is not finite.
    """
    draft = np.arange(log.block)
    counts = draft < log.offered[:, None]
    broken = int((counts & ~np.isfinite(log.confidence)).any(axis=1).sum())
    if broken:
        raise NotFiniteError(
            f"the drafter's confidence is not finite in {broken} of {len(log)} rounds; check its confidence head."
        )
    return counts, draft < log.accepted[:, None]


def survival(logits: np.ndarray) -> np.ndarray:
    """The probability that the first k drafts are all accepted: logits [N, g] -> float64 [N, g].

    Each probability is computed in the precision of the logits, their product in float64.
    """
    return clamp(np.cumprod(sigmoid(logits).astype(np.float64), axis=1))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """In the precision of the logits, without overflow."""
    return (1 + np.tanh(logits / 2)) / 2


def clamp(probabilities: np.ndarray) -> np.ndarray:
    """Away from 0 and 1."""
    return np.clip(probabilities, LEAST, 1 - LEAST)


def expected_calibration_error(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean distance of the bins from the diagonal, weighted with their counts; NaN without a prediction.

    Args:
        predictions: float64 [N], within 0 and 1.
        labels: float64 or bool [N].
    """
    if not len(predictions):
        return float("nan")
    _, predicted, accepted = _binned(predictions, labels, BINS)
    return float(np.abs(predicted - accepted).sum() / len(predictions))


def _position(predictions: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """The fields of `Calibration` but the count."""
    count, predicted, accepted = _binned(predictions, labels, BINS)
    return {
        "ece": expected_calibration_error(predictions, labels),
        "auc": _auc(predictions, labels),
        "brier": _over(((predictions - labels) ** 2).sum(), len(labels)),
        "prediction": _over(predictions.sum(), len(labels)),
        "label": _over(labels.sum(), len(labels)),
        "reliability": np.stack([_over(predicted, count), _over(accepted, count), count], axis=1),
    }


def _binned(predictions: np.ndarray, labels: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, sum of predictions and sum of labels of each bin: float64 [bins] each."""
    place = np.floor(predictions * bins).astype(np.int64)
    sums = [np.bincount(place, weights, bins) for weights in (np.ones_like(predictions), predictions, labels)]
    return sums[0], sums[1], sums[2]


def _auc(predictions: np.ndarray, labels: np.ndarray) -> float:
    """From counts in bins; pairs within a bin count half."""
    count, _, positive = _binned(predictions, labels, AUC_BINS)
    negative = count - positive
    below = np.cumsum(negative) - negative
    return float(_over((positive * (below + negative / 2)).sum(), positive.sum() * negative.sum()))


def _over(part: np.ndarray, whole: np.ndarray | float) -> np.ndarray:
    """NaN where the denominator is 0."""
    whole = np.asarray(whole)
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)
