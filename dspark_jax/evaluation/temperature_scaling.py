"""Sequential temperature scaling (DSpark, section 5): a temperature for each draft position makes confidence honest.

Position by position, the temperature is taken from a grid for which the predictions have the least calibration error,
those of earlier positions fixed. Confidence divided by temperatures keeps its order at each position.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.data.files import replace
from dspark_jax.decoding.request import LARGEST_NUMBER
from dspark_jax.errors import CalibrationError
from dspark_jax.evaluation.calibration import calibrate, clamp, counted, expected_calibration_error, sigmoid
from dspark_jax.evaluation.log import RoundLog

GRID = np.geomspace(0.25, 8, 61)


class Fit(NamedTuple):
    """What a search has found.

    Attributes:
        temperatures: float64 [g]; 1 at positions that were never offered.
        ece_curves: float64 [g, G], the calibration error at each position for every temperature of the grid.
    """

    temperatures: np.ndarray
    ece_curves: np.ndarray


def search(log: RoundLog, grid: np.ndarray = GRID) -> Fit:
    """Finds the temperatures of a log; of equally good ones the lowest.

    Raises:
        NotFiniteError: the confidence of an offered draft is not finite.
    """
    counts, labels = counted(log)
    logits = log.confidence.astype(np.float64)
    temperatures, curves = np.ones(log.block), np.empty((log.block, len(grid)))
    before = np.ones(len(log))
    for k in range(log.block):
        rows = counts[:, k]
        curves[k] = [
            expected_calibration_error(clamp(before[rows] * sigmoid(logits[rows, k] / temperature)), labels[rows, k])
            for temperature in grid
        ]
        if rows.any():
            temperatures[k] = grid[np.argmin(curves[k])]
        before = before * sigmoid(logits[:, k] / temperatures[k])
    return Fit(temperatures, curves)


def held_out_logits(log: RoundLog) -> np.ndarray | None:
    """Confidence over temperatures that were found without the prompt it belongs to, float64 [N, g].

    Two halves of the prompts, drawn once and for all, take turns as the one to learn from. None if there is one prompt.
    """
    prompts, number = np.unique(log.prompt, return_inverse=True)
    if len(prompts) < 2:
        return None
    # Drawn, since kinds of prompts may alternate in a file.
    first = np.random.default_rng(0).permutation(len(prompts))[number] % 2 == 0
    of_first, of_second = (search(log.where(half)).temperatures for half in (first, ~first))
    return log.confidence / np.where(first[:, None], of_second, of_first)


@dataclass(frozen=True)
class Temperatures:
    """The temperatures of one model's confidence head, as its JSON file holds them.

    Attributes:
        temperatures: one of each draft position, above 0.
        dataset: what they were found on, in words.
        num_samples: rounds they were found on.
        ece_before: mean calibration error over the positions, without them.
        ece_after: with temperatures found on other prompts; None if there was one prompt only.
        model: fingerprint of the checkpoint.
    """

    temperatures: list[float]
    dataset: str
    num_samples: int
    ece_before: float
    ece_after: float | None
    model: str

    @classmethod
    def fit(cls, log: RoundLog, dataset: str, model: str) -> "Temperatures":
        """Those of a log in which drafts were offered.

        Raises:
            NotFiniteError: the confidence of an offered draft is not finite.
        """
        scaled = held_out_logits(log)
        return cls(
            temperatures=search(log).temperatures.tolist(),
            dataset=dataset,
            num_samples=int((log.offered > 0).sum()),
            ece_before=calibrate(log).summary.ece,
            ece_after=None if scaled is None else calibrate(log, scaled).summary.ece,
            model=model,
        )

    def apply(self, confidence: np.ndarray) -> np.ndarray:
        """Confidence logits [..., g] over the temperatures, in float64."""
        return confidence / np.array(self.temperatures)

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            OSError: the disk refuses.
        """
        replace(path, [json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False).encode(), b"\n"])

    @classmethod
    def load(cls, path: Path, block: int, model: str) -> "Temperatures":
        """Reads the file of a model with blocks of `block` drafts and this fingerprint.

        Raises:
            CalibrationError: the file cannot be read, was made for another model or block, or holds temperatures that
                cannot be.
        """
        values = _read_object(path)
        for field in dataclasses.fields(cls):
            if field.name not in values:
                raise CalibrationError(f"{path}: has no {field.name}; write it again with `dspark evaluate`.")
        temperatures = values["temperatures"]
        if not isinstance(temperatures, list) or not all(map(_is_temperature, temperatures)):
            raise CalibrationError(
                f"{path}: temperatures is {temperatures!r}; expected finite numbers above 0. Fit them again with "
                "`dspark evaluate`."
            )
        if len(temperatures) != block:
            raise CalibrationError(
                f"{path}: holds temperatures for blocks of {len(temperatures)} drafts, and the model drafts {block}; "
                "fit its own with `dspark evaluate`."
            )
        if values["model"] != model:
            raise CalibrationError(
                f"{path}: was fitted for the model {values['model']!r}, and this one is {model!r}; fit its own with "
                "`dspark evaluate`."
            )
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read ({error.strerror}); name a file of temperatures.") from error
    except ValueError as error:
        raise CalibrationError(f"{path}: is no JSON ({error}); write it again with `dspark evaluate`.") from error
    if not isinstance(values, dict):
        raise CalibrationError(f"{path}: is {type(values).__name__}; expected an object with temperatures.")
    return values


def _is_temperature(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST_NUMBER
