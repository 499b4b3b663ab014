"""The facts of an evaluation: what was run, and what came out at each temperature."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_jax.decoding.sampling import GREEDY_BELOW
from dspark_jax.errors import RequestError
from dspark_jax.evaluation.acceptance import Acceptance, acceptance, by_category, by_length
from dspark_jax.evaluation.calibration import Calibration, calibrate
from dspark_jax.evaluation.decode import Decoded
from dspark_jax.evaluation.temperature_scaling import Temperatures, held_out_logits

SCHEMA = 1


@dataclass(frozen=True)
class Run:
    """What came out at one temperature.

    Attributes:
        temperature: of the target.
        completions: how many.
        new_tokens: of all of them.
        overall: of all rounds.
        by_category: of the rounds of each kind of prompt; empty where no prompt has a category.
        by_new_tokens_before_round: of the rounds that began so far into a completion.
        calibration: of the confidence as it is.
        scaled_calibration: of the confidence over temperatures that other prompts gave; None if there is one prompt.
        temperatures: for this confidence.
    """

    temperature: float
    completions: int
    new_tokens: int
    overall: Acceptance
    by_category: dict[str, Acceptance]
    by_new_tokens_before_round: dict[str, Acceptance]
    calibration: Calibration
    scaled_calibration: Calibration | None
    temperatures: Temperatures

    @classmethod
    def of(cls, decoded: Decoded, dataset: str, model: str) -> "Run":
        """The figures of some completions.

        Args:
            decoded: the completions.
            dataset: what they complete, in words.
            model: fingerprint of the checkpoint.

        Raises:
            RequestError: no draft was offered, so that there is nothing to evaluate.
            NotFiniteError: the confidence of an offered draft is not finite.
        """
        log, name = decoded.log, name_of(decoded.temperature)
        if not log.offered.any():
            raise RequestError(
                f"no draft was offered ({name}), so there is nothing to evaluate; allow more new tokens."
            )
        scaled = held_out_logits(log)
        return cls(
            temperature=decoded.temperature,
            completions=decoded.completions,
            new_tokens=decoded.new_tokens,
            overall=acceptance(log),
            by_category=by_category(log),
            by_new_tokens_before_round=by_length(log),
            calibration=calibrate(log),
            scaled_calibration=None if scaled is None else calibrate(log, scaled),
            temperatures=Temperatures.fit(log, f"{dataset}, {name}", model),
        )

    @property
    def name(self) -> str:
        """How it is called in headings."""
        return name_of(self.temperature)


@dataclass(frozen=True)
class Report:
    """An evaluation.

    Attributes:
        ran: what was run: settings, model, versions and date, as JSON values.
        runs: one for each temperature.
    """

    ran: dict[str, Any]
    runs: Sequence[Run]

    @property
    def temperatures(self) -> Temperatures:
        """Those of the hottest run: the confidence head is trained to foretell what sampling accepts."""
        return max(self.runs, key=lambda run: run.temperature).temperatures

    def to_dict(self) -> dict[str, Any]:
        """JSON values: `schema` (1), `ran`, and `runs`, whose names are those of `Run` and of what it holds.

        An interval is None where there is one prompt only; a figure is None or NaN where nothing counts. A row of a
        reliability table is [mean prediction, share accepted, count].
        """
        return {"schema": SCHEMA, "ran": self.ran, "runs": [_facts(run) for run in self.runs]}


def name_of(temperature: float) -> str:
    """How decoding at a temperature is called."""
    return "greedy" if temperature < GREEDY_BELOW else f"temperature {temperature:g}"


def _facts(run: Run) -> dict[str, Any]:
    scaled = run.scaled_calibration
    return dataclasses.asdict(run) | {
        "calibration": run.calibration.to_dict(),
        "scaled_calibration": scaled.to_dict() if scaled else None,
    }
