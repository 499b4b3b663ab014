"""Compares a checkpoint with a record of the PyTorch path, key by key."""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.load import load
from dspark_jax.crosscheck.exact import exact
from dspark_jax.crosscheck.official import end_to_end, layer_by_layer
from dspark_jax.crosscheck.operations import operations
from dspark_jax.crosscheck.record import INPUTS, LAYERS, Record
from dspark_jax.model.numerics import PRESETS

ABSOLUTE = 3e-4  # two independent PyTorch codes differ by up to 3e-5 on logits in float32
SPLIT = 1e-5  # one site's sinkhorn split, from recorded mixes
PRODUCT = 1e-4  # one matrix product, relative to the largest value
LAYER_RMS = 0.003  # one layer in official numerics, fed with recorded streams

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the parts done so far, and the parts in all."""


@dataclass(frozen=True)
class Row:
    """The comparison of one key.

    Attributes:
        key: name in the record.
        max_abs: largest absolute difference (number of differing values for discrete keys; NaN if shapes differ).
        relative: root mean square of the difference over that of the record.
        tolerance: what `max_abs` is held to, or for layers in official numerics the relative error of the worst one.
        judged: whether the comparison counts.
        ok: whether it holds.
        note: what a reader should know besides.
    """

    key: str
    max_abs: float
    relative: float
    tolerance: float
    judged: bool
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All rows, and the keys of the record that nothing was compared with."""

    rows: tuple[Row, ...]
    not_compared: list[str]

    @property
    def ok(self) -> bool:
        """Whether something was judged, and all of it holds."""
        judged = [row for row in self.rows if row.judged]
        return bool(judged) and all(row.ok for row in judged)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": self.ok, "rows": [asdict(row) for row in self.rows], "not_compared": self.not_compared}


def compare(directory: str | Path, record: str | Path, progress: Progress | None = None) -> Report:
    """Recomputes what a record holds, in float32 and layer by layer in the official numerics.

    Args:
        directory: checkpoint in the official layout.
        record: safetensors file with the keys of the golden folders' README, not necessarily all of them.
        progress: told about the parts of the work.

    Raises:
        DsparkError: the checkpoint or the record cannot be read.
    """
    tell = progress or (lambda *_: None)
    tell("loading", 0, 1)
    model = load(directory, numerics="float32")
    recorded = Record(record, model.config)
    official = replace(model, numerics=PRESETS["official"])
    parts: dict[str, Callable[[], Iterator[tuple[str, np.ndarray]]]] = {
        "tensors and operations": lambda: operations(model, recorded),
        "target, drafter and loops in float32": lambda: exact(model, recorded),
        "layers in official numerics": lambda: layer_by_layer(official, recorded),
        "whole runs in official numerics": lambda: end_to_end(official, recorded),
    }
    rows: dict[str, Row] = {}
    for number, (what, values) in enumerate(parts.items()):
        tell(what, number, len(parts))
        rows |= {key: judge(key, value, recorded[key]) for key, value in values() if key in recorded}
    tell("done", len(parts), len(parts))
    left = [key for key in recorded.keys if key not in rows and not INPUTS.fullmatch(key)]
    return Report(tuple(rows[key] for key in sorted(rows)), left)


def judge(key: str, computed: np.ndarray, recorded: np.ndarray) -> Row:
    """Holds one value to the tolerance of its key."""
    if re.fullmatch(r"exact/indexer/.+", key):
        computed, recorded = _as_sets(computed, recorded)
    if computed.shape != recorded.shape:
        note = f"shape {list(computed.shape)}, recorded {list(recorded.shape)}"
        return Row(key, np.nan, np.nan, 0.0, _is_judged(key), False, note)
    if key == LAYERS:
        layers = [_relative_rms(ours, theirs) for ours, theirs in zip(computed, recorded, strict=True)]
        note = "relative error by layer: " + ", ".join(f"{error:.4f}" for error in layers)
        worst = float(np.max(layers))
        return Row(key, _max_abs(computed, recorded), worst, LAYER_RMS, True, worst <= LAYER_RMS, note)
    if np.issubdtype(recorded.dtype, np.integer) or _is_bitwise(key):
        wrong = _differing(computed, recorded)
        return Row(key, float(wrong), _relative_rms(computed, recorded), 0.0, _is_judged(key), wrong == 0)
    error, tolerance = _max_abs(computed, recorded), _tolerance(key, recorded)
    return Row(key, error, _relative_rms(computed, recorded), tolerance, _is_judged(key), error <= tolerance)


def _is_judged(key: str) -> bool:
    return key == LAYERS or not key.startswith("inference/")


def _is_bitwise(key: str) -> bool:
    return bool(re.fullmatch(r"dequant/.+|ops/.*quant.*|exact/sinkhorn/(scale|base)", key))


def _tolerance(key: str, recorded: np.ndarray) -> float:
    if re.fullmatch(r"exact/sinkhorn/(pre|post|comb)", key):
        return SPLIT
    if key.startswith("ops/"):
        return PRODUCT * max(1.0, float(np.max(np.abs(recorded.astype(np.float32)), initial=0)))
    return ABSOLUTE


def _as_sets(*picks: np.ndarray) -> list[np.ndarray]:
    """Picks in ascending order, with as many unused ones (-1) in front as the widest has columns."""
    width = max(values.shape[-1] for values in picks)
    pads = [[(0, 0)] * (values.ndim - 1) + [(width - values.shape[-1], 0)] for values in picks]
    return [np.sort(np.pad(v, pad, constant_values=-1), axis=-1) for v, pad in zip(picks, pads, strict=True)]


def _differing(computed: np.ndarray, recorded: np.ndarray) -> int:
    """Number of values that differ, floats by their bits."""
    if not np.issubdtype(recorded.dtype, np.integer):
        computed, recorded = (np.asarray(x, np.float32).view(np.int32) for x in (computed, recorded))
    return int(np.sum(computed != recorded))


def _max_abs(computed: np.ndarray, recorded: np.ndarray) -> float:
    difference = np.abs(computed.astype(np.float32) - recorded.astype(np.float32))
    return float(np.max(difference, initial=0))


def _relative_rms(computed: np.ndarray, recorded: np.ndarray) -> float:
    ours, theirs = computed.astype(np.float64), recorded.astype(np.float64)
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), np.finfo(np.float64).tiny))
