"""Pictures of an evaluation, as matplotlib figures, and as SVG that is legible on light and on dark pages."""

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_jax.evaluation.acceptance import Acceptance, Estimate
from dspark_jax.evaluation.calibration import Calibration

INK = "#010203"  # stands for the colour of the page's text
FIRST, SECOND = "#3b82c4", "#d9822b"
STYLE: dict[Any, Any] = {
    name: INK for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
} | {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9.0,
    "text.parse_math": False,  # a category may hold dollars
    "svg.fonttype": "none",
    "svg.hashsalt": "dspark",
}


@matplotlib.rc_context(STYLE)
def draft_positions(figures: Acceptance) -> Figure:
    """Prefix and conditional acceptance of each draft position, with intervals."""
    figure, axis = _figure(4.4, 3)
    both = (
        ("prefix, per offering round", figures.prefix_acceptance_per_offering_round, FIRST),
        ("conditional, per reached round", figures.conditional_acceptance_per_reached_round, SECOND),
    )
    for side, (label, rates, colour) in enumerate(both):
        values, errors = _with_errors(rates)
        places = np.arange(1, len(rates) + 1) + 0.4 * side - 0.2
        axis.bar(places, values, 0.38, color=colour, label=label)
        axis.errorbar(places, values, errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    axis.set(xlabel="draft position", ylabel="acceptance", ylim=(0, 1.25), yticks=np.linspace(0, 1, 6))
    axis.set_xticks(range(1, len(figures.offering_rounds) + 1))
    axis.legend(frameon=False, loc="upper right")
    return figure


@matplotlib.rc_context(STYLE)
def width_curve(figures: Acceptance) -> Figure:
    """The accepted length that offering the first drafts only would give, for every width."""
    figure, axis = _figure(4.4, 3)
    values, errors = _with_errors(figures.accepted_length_by_width)
    widths = np.arange(len(values))
    axis.fill_between(widths, values - errors[0], values + errors[1], color=FIRST, alpha=0.25, linewidth=0)
    axis.plot(widths, values, color=FIRST, marker="o")
    for width, value in zip(widths, values, strict=True):
        if np.isfinite(value):
            axis.annotate(f"{value:.2f}", (width, value), (0, -14), textcoords="offset points", ha="center")
    axis.set(xlabel="drafts offered in a round", ylabel="accepted length, bonus included", xticks=widths)
    axis.set_ylim(0.5, None)
    return figure


@matplotlib.rc_context(STYLE)
def accepted_drafts(figures: Acceptance) -> Figure:
    """How many drafts rounds accepted."""
    figure, axis = _figure(4.4, 3)
    shares = np.array(figures.rounds_by_accepted_drafts) / max(figures.rounds, 1)
    bars = axis.bar(range(len(shares)), shares, 0.8, color=FIRST)
    axis.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2)
    axis.set(xlabel="drafts accepted in a round", ylabel="share of rounds", xticks=range(len(shares)))
    axis.margins(y=0.15)
    return figure


@matplotlib.rc_context(STYLE)
def parts(figures: Mapping[str, Acceptance]) -> Figure:
    """The accepted length of each part, with intervals."""
    figure, axis = _figure(4.4, 0.9 + 0.34 * len(figures))
    values, errors = _with_errors([part.accepted_length for part in figures.values()])
    places = np.arange(len(values))
    axis.errorbar(values, places, xerr=errors, fmt="o", color=FIRST, ecolor=INK, elinewidth=1, capsize=3)
    axis.set_yticks(places, list(figures))
    axis.invert_yaxis()
    axis.margins(x=0.1, y=0.5 / len(figures))
    axis.set(xlabel="accepted length, bonus included")
    return figure


@matplotlib.rc_context(STYLE)
def reliability(before: Calibration, after: Calibration | None) -> Figure:
    """For each position what was foretold against what happened; the area of a point is its bin's share of rounds."""
    positions = np.flatnonzero(before.count).tolist()
    figure = Figure(figsize=(1.85 * max(len(positions), 2), 2.6), layout="constrained")
    axes = figure.subplots(1, len(positions), sharey=True, squeeze=False)[0]
    for axis, k in zip(axes, positions, strict=True):
        axis.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=":")
        _points(axis, before, k, SECOND, "as it is")
        title = f"position {k + 1}\nECE {before.ece[k]:.3f}"
        if after is not None:
            _points(axis, after, k, FIRST, "scaled, held out")
            title += f" → {after.ece[k]:.3f}"
        axis.set_title(title, fontsize=9)
        axis.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    axes[0].set_ylabel("share accepted")
    figure.supxlabel("predicted", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def to_svg(figure: Figure, title: str) -> str:
    """An element for an HTML page: the text's colour is the page's, and the width that of its container."""
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the page's reader has it
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub("<metadata>.*</metadata>", "", file.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r'width="[^"]*pt"|height="[^"]*pt"', "", svg, count=2).replace(
        "<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1
    )


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _points(axis: Axes, calibration: Calibration, position: int, colour: str, label: str) -> None:
    predicted, accepted, count = calibration.reliability[position].T
    there = count > 0
    axis.plot(predicted[there], accepted[there], color=colour, linewidth=1, alpha=0.5)
    sizes = 4 + 240 * count[there] / count.sum()
    axis.scatter(predicted[there], accepted[there], sizes, color=colour, alpha=0.8, linewidths=0, label=label)


def _with_errors(estimates: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray]:
    """Values [n], NaN for None, and how far the interval reaches below and above: [2, n], 0 where there is none."""
    values = np.array([estimate.value for estimate in estimates], float)
    bounds = np.array([(estimate.low, estimate.high) for estimate in estimates], float).T
    return values, np.nan_to_num(np.maximum(np.abs(bounds - values), 0))
