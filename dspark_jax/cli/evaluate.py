"""`dspark evaluate`: how well a drafter drafts, as a page to look at and as JSON."""

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
from rich.table import Table
from rich.text import Text
from tyro.conf import OmitArgPrefixes, arg

from dspark_jax import chat
from dspark_jax.checkpoint.fingerprint import fingerprint
from dspark_jax.cli.options import ONE_DEVICE, PACKAGED_PAIR, Devices, Drafting
from dspark_jax.cli.terminal import RESULT, bytes_bar, completions_bar, print_json, print_warning, spinner
from dspark_jax.config import ModelConfig
from dspark_jax.data.files import replace
from dspark_jax.decoding.request import SETTINGS, Request, check_request
from dspark_jax.errors import NotFiniteError, RequestError, check_count
from dspark_jax.evaluation.decode import Decoded, decode, read_decoded, read_jobs
from dspark_jax.evaluation.report import Report, Run
from dspark_jax.jobs.json_lines import to_line
from dspark_jax.jobs.prompts import FIELDS, Job, PromptReader
from dspark_jax.jobs.results import Results
from dspark_jax.jobs.text import Text as TextCoding
from dspark_jax.model.model import Model, abstract_model
from dspark_jax.model.numerics import numerics_of

ROUNDS, REPORT, PAGE, TEMPERATURES = "rounds.jsonl", "report.json", "report.html", "temperatures.json"
LIBRARIES = ("dspark-jax", "jax", "flax", "numpy")


@dataclass(frozen=True)
class Evaluation:
    """What is decoded."""

    temperatures: Annotated[tuple[float, ...], arg(metavar="T [T ...]", help_behavior_hint="(default: 0)")] = (0.0,)
    """Of the target; 0 decodes greedily. Each is evaluated by itself, and all are in one report."""
    samples: Annotated[int, arg(metavar="N")] = 1
    """Completions of each prompt at each temperature above 0."""
    max_new_tokens: Annotated[int, arg(metavar="N")] = 512
    """Tokens to generate at most; acceptance depends on it, so compare like with like."""
    draft_tokens: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: the trained block)")] = None
    """Drafts offered in a round. The whole block tells the accepted length of every smaller offer, too."""
    seed: Annotated[int, arg(metavar="S")] = Request.seed
    """Of the sampling."""
    thinking: Annotated[chat.Thinking, arg(help_behavior_hint="(default: high)")] = "high"
    """How long the model reasons before it answers messages."""

    def reader(self, text: TextCoding, model: Model) -> PromptReader:
        """Of prompts, with these settings."""
        asked = {name: getattr(self, name) for name in SETTINGS if hasattr(self, name)}
        checked = check_request(Request([0], **asked), model, "prompt")
        settings = {name: getattr(checked, name) for name in SETTINGS}
        return PromptReader(settings, check_count(self.samples, "samples"), self.thinking, text, model)


GREEDY = Evaluation()


def evaluate(
    *,
    prompts: Annotated[Path, arg(metavar="FILE")],
    out: Annotated[Path, arg(metavar="DIR")],
    batch_size: Annotated[int, arg(metavar="B", help_behavior_hint="(default: 8)")] = 8,
    loading: OmitArgPrefixes[Drafting] = PACKAGED_PAIR,
    devices: OmitArgPrefixes[Devices] = ONE_DEVICE,
    evaluation: OmitArgPrefixes[Evaluation] = GREEDY,
    json: bool = False,
) -> int:
    """Measure how many drafts are accepted, where, and whether the drafter's confidence can be believed.

    Args:
        prompts: JSON lines as `dspark generate --prompts` reads them; a line may also have a `category`, a text.
        out: Folder of report.html, report.json, rounds.jsonl and temperatures.json. Started again, the command goes on
            where it was.
        batch_size: Sequences that run side by side.
        json: Print one JSON object instead of the table.
    """
    from dspark_jax.evaluation.page import render  # imports matplotlib, for which no other command should wait

    config = ModelConfig.from_file(loading.checkpoint / "config.json")
    abstract = abstract_model(config, numerics_of(loading.numerics))
    if not abstract.block_size:
        raise RequestError(f"{loading.checkpoint}: has no drafter to evaluate; name a checkpoint that has one.")
    if evaluation.draft_tokens == 0:
        raise RequestError(
            "draft_tokens is 0, so no draft is offered and there is nothing to evaluate; give 1 or more."
        )
    check_count(batch_size, "batch_size")
    text = TextCoding.of(loading.checkpoint)
    jobs, ignored = read_jobs(prompts, evaluation.reader(text, abstract), evaluation.temperatures)
    if ignored:
        print_warning(f"{prompts}: not known, and ignored: {', '.join(ignored)}; a line may have {', '.join(FIELDS)}.")
    _make_folder(out)
    model = fingerprint(loading.checkpoint, loading.drafter)
    with Results(out / ROUNDS, {"model": model, "numerics": loading.numerics, "trace": True}) as results:
        missing = results.missing(jobs)
        if missing:
            _decode(missing, results, text, loading, devices, batch_size, total=len(jobs))
        with spinner("writing the report"):
            decoded = read_decoded(out / ROUNDS, jobs, abstract.block_size)
            _refuse_broken(decoded)
            ran = {
                "checkpoint": str(loading.checkpoint),
                "drafter": str(loading.drafter) if loading.drafter else None,
                "model": model,
                "numerics": loading.numerics,
                "prompts": str(prompts),
                **dataclasses.asdict(evaluation),
                "draft_tokens": min(evaluation.draft_tokens or abstract.block_size, abstract.block_size),
                "batch_size": batch_size,
                "device": jax.devices()[0].device_kind,
                "mesh": dataclasses.asdict(devices),
                "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            report = Report(ran, [Run.of(each, prompts.name, model) for each in decoded])
            replace(out / REPORT, [to_line(report.to_dict()).encode(), b"\n"])
            replace(out / PAGE, [render(report).encode()])
            report.temperatures.save(out / TEMPERATURES)
    if json:
        print_json({"out": str(out), "new_completions": len(missing), "runs": [_headline(run) for run in report.runs]})
    else:
        _print_runs(report.runs)
        RESULT.print(Text.assemble(("\nlook at ", "dim"), str(out / PAGE)), soft_wrap=True)
    return 0


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{out}: cannot be made a folder ({error.strerror}); name another --out.") from error


def _decode(
    jobs: Sequence[Job],
    results: Results,
    tokenizer: TextCoding,
    loading: Drafting,
    devices: Devices,
    batch_size: int,
    total: int,
) -> None:
    with bytes_bar("loading weights") as progress:
        model = loading.model(devices, progress)
    with completions_bar("compiling and generating", total - len(jobs), total) as report:
        for number, completion in decode(model, [job.request for job in jobs], batch_size, report):
            results.append(jobs[number], completion, tokenizer)


def _refuse_broken(decoded: Sequence[Decoded]) -> None:
    broken = [key for each in decoded for key in each.broken]
    if broken:
        raise NotFiniteError(
            f"the target's logits were not finite in {len(broken)} of {sum(each.completions for each in decoded)} "
            f"completions, first in that of id {broken[0][0]!r}; {ROUNDS} says in which. Check its weights."
        )


def _headline(run: Run) -> dict[str, Any]:
    figures = run.overall
    return {
        "temperature": run.temperature,
        "completions": run.completions,
        "new_tokens": run.new_tokens,
        "rounds": figures.rounds,
        "accepted_length": dataclasses.asdict(figures.accepted_length),
        "prefix_acceptance_per_offering_round": [
            estimate.value for estimate in figures.prefix_acceptance_per_offering_round
        ],
        "ece_before": run.temperatures.ece_before,
        "ece_after": run.temperatures.ece_after,
    }


def _print_runs(runs: Sequence[Run]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(no_wrap=True)
    headers = ("rounds", "accepted length\nbonus included", "prefix acceptance\nby position, %", "ECE\n(scaled)")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        length = run.overall.accepted_length
        interval = "" if length.low is None else f" ({length.low:.2f}–{length.high:.2f})"
        shares = [estimate.value for estimate in run.overall.prefix_acceptance_per_offering_round]
        after = run.temperatures.ece_after
        table.add_row(
            run.name,
            f"{run.overall.rounds}",
            f"[bold]{length.value:.2f}[/]{interval}",
            " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares),
            f"{run.temperatures.ece_before:.3f}" + ("" if after is None else f" ({after:.3f})"),
        )
    RESULT.print(table)
