"""The report as one HTML page that needs nothing else: its pictures are inside, and it follows light and dark."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from dspark_jax.evaluation import plots
from dspark_jax.evaluation.acceptance import Acceptance, Estimate
from dspark_jax.evaluation.report import Report, Run

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: color-mix(in srgb, CanvasText 18%, Canvas); }}
body {{ margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; color: CanvasText; background: Canvas;
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; margin: 0; }}
h2 {{ font-size: 1.25rem; margin: 2.75rem 0 .75rem; border-top: 2px solid; padding-top: .75rem; }}
h3 {{ font-size: 1rem; margin: 1.75rem 0 .25rem; }}
p {{ max-width: 46rem; }}
.quiet {{ opacity: .72; }}
.tiles, .pictures {{ display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }}
.tiles > div {{ flex: 1 1 11rem; border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .9rem; }}
.tiles b {{ display: block; font-size: 1.7rem; line-height: 1.2; }}
figure {{ flex: 1 1 22rem; max-width: 30rem; margin: 0; }}
figure.wide {{ flex-basis: 100%; max-width: none; }}
figcaption {{ font-size: .9rem; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); }}
th {{ font-weight: 600; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""

NOTES = """\
A round is one verification step: the anchor and the offered drafts pass through the target together, and the accepted
drafts and one token of the target's own are committed. The first token counts like every other, a round that ends at
an accepted stop id has no bonus, and the last round of a completion counts whole. Intervals are 95 %, from resampling
the prompts. The curve over widths takes it that rounds which would begin elsewhere accept as much as these. Confidence
over temperatures is judged on prompts that the temperatures were not fitted to; a temperature of 0.25 or 8, an end of
the grid, is a sign that the confidence says little."""


def render(report: Report) -> str:
    """The page."""
    title = f"Acceptance of the drafter of {report.ran['checkpoint']}"
    facts = " · ".join(str(report.ran[name]) for name in ("model", "numerics", "date"))
    body = [f"<h1>{escape(title)}</h1>", f'<p class="quiet">{escape(facts)}</p>']
    if len(report.runs) > 1:
        body.append(_runs(report.runs))
    body += [_run(run) for run in report.runs]
    ran = [[name.replace("_", " "), _plain(value)] for name, value in report.ran.items()]
    body += ["<h2>What was run</h2>", _table(["", ""], ran), "<h2>How to read it</h2>", f"<p>{escape(NOTES)}</p>"]
    return PAGE.format(title=escape(title), body="\n".join(body))


def _runs(runs: Sequence[Run]) -> str:
    rows = [
        [
            run.name,
            _interval(run.overall.accepted_length),
            *map(_share, run.overall.prefix_acceptance_per_offering_round),
        ]
        for run in runs
    ]
    positions = [f"draft {k}" for k in range(1, len(rows[0]) - 1)]
    return _table(["", "accepted length", *positions], rows)


def _run(run: Run) -> str:
    figures = run.overall
    tiles = (
        ("accepted length, bonus included", _interval(figures.accepted_length)),
        ("accepted per offered draft", _share(figures.accepted_drafts_per_offered_draft)),
        ("committed tokens per verified row", _number(figures.committed_tokens_per_verified_row)),
        ("rounds", f"{figures.rounds:,}"),
        ("completions of prompts", f"{run.completions:,} of {figures.prompts:,}"),
    )
    pictures = [
        _picture("Acceptance by position in the block", plots.draft_positions(figures)),
        _picture("Accepted length if fewer drafts were offered", plots.width_curve(figures)),
        _picture("Drafts accepted in a round", plots.accepted_drafts(figures)),
        _picture("Accepted length by new tokens before the round", plots.parts(run.by_new_tokens_before_round)),
    ]
    tables = [_parts("new tokens before the round", run.by_new_tokens_before_round)]
    if run.by_category:
        pictures.append(_picture("Accepted length by category", plots.parts(run.by_category)))
        tables.insert(0, _parts("category", run.by_category))
    reliable = plots.reliability(run.calibration, run.scaled_calibration)
    return "\n".join(
        [
            f"<h2>{escape(run.name.capitalize())}</h2>",
            f'<div class="tiles">{"".join(f"<div><b>{value}</b>{escape(name)}</div>" for name, value in tiles)}</div>',
            f'<div class="pictures">{"".join(pictures)}</div>',
            *tables,
            "<h3>Can its confidence be believed?</h3>",
            _picture("Predicted and observed acceptance of the first k drafts, by k", reliable, "wide"),
            _confidence(run),
        ]
    )


def _parts(kind: str, figures: Mapping[str, Acceptance]) -> str:
    widths = range(1, len(next(iter(figures.values())).offering_rounds) + 1)
    head = [kind, "prompts", "rounds", "accepted length", *(f"draft {k}" for k in widths)]
    rows = [
        [
            name,
            f"{part.prompts:,}",
            f"{part.rounds:,}",
            _interval(part.accepted_length),
            *map(_share, part.prefix_acceptance_per_offering_round),
        ]
        for name, part in figures.items()
    ]
    return f"<h3>By {escape(kind)}</h3>" + _table(head, rows)


def _confidence(run: Run) -> str:
    before, after = run.calibration, run.scaled_calibration
    head = ["position", "rounds", "mean predicted", "accepted", "AUC", "Brier", "ECE", "ECE scaled", "temperature"]
    rows = [
        [
            str(k + 1),
            f"{before.count[k]:,}",
            *(f"{values[k]:.3f}" for values in (before.prediction, before.label, before.auc, before.brier, before.ece)),
            f"{after.ece[k]:.3f}" if after else "",
            f"{temperature:.3f}",
        ]
        for k, temperature in enumerate(run.temperatures.temperatures)
    ]
    return _table(head, rows)


def _picture(title: str, figure: Figure, kind: str = "") -> str:
    svg = plots.to_svg(figure, title)
    return f'<figure class="{kind}"><figcaption>{escape(title)}</figcaption>{svg}</figure>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f'<div class="scroll"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def _interval(estimate: Estimate) -> str:
    bounds = "" if estimate.low is None else f" ({estimate.low:.2f}–{estimate.high:.2f})"
    return _number(estimate) + bounds


def _number(estimate: Estimate) -> str:
    return "" if estimate.value is None else f"{estimate.value:.2f}"


def _share(estimate: Estimate) -> str:
    return "" if estimate.value is None else f"{estimate.value:.0%}"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
