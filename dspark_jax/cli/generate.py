"""`dspark generate`: one prompt or dialogue, or a file of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import rich.text
from rich.bar import Bar
from rich.rule import Rule
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, arg

from dspark_jax import chat
from dspark_jax.checkpoint.fingerprint import fingerprint
from dspark_jax.cli.options import ONE_DEVICE, PACKAGED_PAIR, UNLESS_ASKED, Decoding, Devices, Drafting
from dspark_jax.cli.terminal import RESULT, bytes_bar, completions_bar, print_json, print_warning
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.request import SETTINGS, Request, check_request
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.decoding.stream import stream
from dspark_jax.errors import NotFiniteError, RequestError, check_count
from dspark_jax.jobs.prompts import FIELDS, Job, PromptReader
from dspark_jax.jobs.results import Results, record_of
from dspark_jax.jobs.text import Text
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of


def generate(
    prompt: Annotated[Positional[str], arg(metavar="[PROMPT]", help_behavior_hint="(or one of the next three)")] = "",
    *,
    prompt_ids: Annotated[str, arg(metavar="ID,ID,...", help_behavior_hint="")] = "",
    messages: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    prompts: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(needs --out)")] = None,
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(with --prompts)")] = None,
    batch_size: Annotated[int, arg(metavar="B", help_behavior_hint="(with --prompts; default: 8)")] = 8,
    loading: OmitArgPrefixes[Drafting] = PACKAGED_PAIR,
    devices: OmitArgPrefixes[Devices] = ONE_DEVICE,
    decoding: OmitArgPrefixes[Decoding] = UNLESS_ASKED,
    json: bool = False,
) -> int:
    """Complete prompts; drafting and verification stay on the device.

    Args:
        prompt: Text, taken as it is, without a chat template. Needs the folder's tokenizer.json.
        prompt_ids: The prompt as token ids.
        messages: A dialogue: a JSON list of messages, or an object with `messages` and `tools`. Needs the extra `chat`.
        prompts: JSON lines with `id` and one of `prompt`, `prompt_ids`, `messages`, and by option settings of their
            own, named as here (`max_new_tokens`, `temperature`, ...).
        out: JSON lines of completions, written as they finish. Started again, the command adds what is missing.
        batch_size: Sequences that run side by side.
        json: Print JSON: a completion a line, or with --prompts a summary.
    """
    given = {"PROMPT": prompt, "--prompt-ids": prompt_ids, "--messages": messages, "--prompts": prompts}
    given = {name: value for name, value in given.items() if value}
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "there is no prompt"
        raise RequestError(f"{found}; give exactly one: a text, --prompt-ids 1,2,3, --messages FILE or --prompts FILE.")
    if (prompts is None) != (out is None):
        raise RequestError("--prompts FILE and --out FILE belong together; give both, or neither.")
    if prompts and out and prompts.resolve() == out.resolve():
        raise RequestError(f"{out}: holds the prompts; name another file for the completions.")
    config = ModelConfig.from_file(loading.checkpoint / "config.json")
    abstract = abstract_model(config, numerics_of(loading.numerics))
    text = Text.of(loading.checkpoint)
    checked = check_request(Request([0], **decoding.settings()), abstract, "prompt")
    settings = {name: getattr(checked, name) for name in SETTINGS}
    reader = PromptReader(settings, decoding.samples, decoding.thinking, text, abstract)
    session = Session(loading, devices, decoding.logprobs, text, json)
    if prompts and out:
        jobs, ignored = reader.read(prompts)
        if ignored:
            print_warning(
                f"{prompts}: not known, and ignored: {', '.join(ignored)}; a line may have {', '.join(FIELDS)}."
            )
        return session.file(jobs, out, check_count(batch_size, "batch_size"))
    if messages:
        row: dict[str, Any] = {"messages": chat.read_messages(messages)}
    else:
        row = {"prompt_ids": _parse_ids(prompt_ids)} if prompt_ids else {"prompt": prompt}
    return session.prompt(reader.jobs_of(0, row))


@dataclass(frozen=True)
class Session:
    """Jobs on their way through a model to the screen or a file."""

    loading: Drafting
    devices: Devices
    logprobs: bool
    text: Text
    json: bool

    def common(self) -> dict[str, Any]:
        """What every completion depends on, and is recorded with."""
        model = fingerprint(self.loading.checkpoint, self.loading.drafter)
        return {"model": model, "numerics": self.loading.numerics, "logprobs": self.logprobs}

    def prompt(self, jobs: Sequence[Job]) -> int:
        """Completes the samples of one prompt and prints them."""
        start = time.perf_counter()
        finished = dict(self._complete(jobs, len(jobs), total=len(jobs)))
        seconds = time.perf_counter() - start
        completions = [finished[number] for number in range(len(jobs))]
        broken = [number for number, completion in enumerate(completions) if completion.finish_reason == "not_finite"]
        if broken:
            raise NotFiniteError(f"the target's logits are not finite for samples {broken}; check its weights.")
        common = self.common()
        for job, completion in zip(jobs, completions, strict=True):
            record = record_of(job, completion, self.text, common)
            if self.json:
                extra = {"checkpoint": str(self.loading.checkpoint), "seconds_with_compilation": seconds}
                print_json({name: value for name, value in record.items() if name != "id"} | extra)
            else:
                print_record(record, rule=len(jobs) > 1)
        if not self.json:
            statistics = Statistics.total([completion.statistics for completion in completions])
            print_statistics(statistics, sum(len(completion.tokens) for completion in completions), seconds)
        return 0

    def file(self, jobs: Sequence[Job], out: Path, batch_size: int) -> int:
        """Completes what the output file lacks and appends it, line by line."""
        start, parts, tokens, broken = time.perf_counter(), [], 0, []
        with Results(out, self.common()) as results:
            missing = results.missing(jobs)
            for number, completion in self._complete(missing, batch_size, total=len(jobs)) if missing else ():
                results.append(missing[number], completion, self.text)
                parts.append(completion.statistics)
                tokens += len(completion.tokens)
                if completion.finish_reason == "not_finite":
                    broken.append(missing[number].key)
        summary = {
            "out": str(out),
            "completions": len(jobs),
            "new_completions": len(parts),
            "new_tokens": tokens,
            "seconds_with_compilation": time.perf_counter() - start,
            "statistics": Statistics.total(parts).to_dict() if parts else None,
        }
        if self.json:
            print_json(summary)
        else:
            print_summary(summary)
        if broken:
            raise NotFiniteError(
                f"the target's logits were not finite in {len(broken)} of {len(parts)} completions, first in that of "
                f"id {broken[0][0]!r}; their lines say so. Check its weights."
            )
        return 0

    def _complete(self, jobs: Sequence[Job], batch_size: int, total: int) -> Iterator[tuple[int, Completion]]:
        """Loads the model and streams the jobs through it, with a bar that begins at what is there already."""
        with bytes_bar("loading weights") as progress:
            model = self.loading.model(self.devices, progress)
        with completions_bar("compiling and generating", total - len(jobs), total) as progress:
            yield from stream(model, [job.request for job in jobs], batch_size, self.logprobs, progress)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--prompt-ids is {text!r}; expected token ids and commas, such as 1,2,3.") from error


def print_record(record: dict[str, Any], rule: bool) -> None:
    """A completion's text, under a heading if there are several; ids where there is no tokenizer."""
    if rule:
        heading = f"sample {record['sample']}, seed {record['settings']['seed']}, {record['finish_reason']}"
        RESULT.print(Rule(heading, style="dim", align="left"))
    message = record.get("message")
    if message is None:
        print(record["text"] if record["text"] is not None else ",".join(map(str, record["tokens"])))
        return
    if message.get("reasoning_content"):
        RESULT.print(rich.text.Text(message["reasoning_content"], style="dim"), soft_wrap=True)
    print(message["content"])
    for call in message.get("tool_calls", ()):
        print(f"{call['function']['name']}({call['function']['arguments']})")


def print_summary(summary: dict[str, Any]) -> None:
    """What a job with files has done."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row(
        "completions", f"{summary['completions']} in {summary['out']}, {summary['new_completions']} of them new"
    )
    if summary["statistics"]:
        rate = summary["new_tokens"] / summary["seconds_with_compilation"]
        facts.add_row("tokens", f"{summary['new_tokens']} new, {rate:.1f} a second, loading and compilation included")
        length = summary["statistics"]["accepted_length"]
        facts.add_row("accepted length", f"[bold]{length:.2f}[/] tokens a round, bonus included")
    RESULT.print(facts)


def print_statistics(statistics: Statistics, tokens: int, seconds: float) -> None:
    """A summary, and a bar for each draft position that was offered."""
    s = statistics
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row("accepted length", f"[bold]{s.accepted_length:.2f}[/] tokens a round, bonus included")
    facts.add_row("rounds", f"{s.rounds}")
    facts.add_row("drafts", f"{s.accepted_drafts} accepted of {s.offered_drafts} offered")
    facts.add_row("time", f"{tokens} tokens in {seconds:.1f} s, compilation included")
    RESULT.print()
    RESULT.print(facts)
    if s.offered_drafts:
        RESULT.print()
        RESULT.print(_positions(s))


def _positions(s: Statistics) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("draft", justify="right")
    table.add_column("prefix acceptance\nper offering round")
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column("conditional\nper reached round", justify="right")
    table.add_column(justify="right", style="dim")
    rows = zip(
        s.accepting_rounds,
        s.offering_rounds,
        s.reached_rounds,
        s.prefix_acceptance_per_offering_round,
        s.conditional_acceptance_per_reached_round,
        strict=True,
    )
    for position, (accepting, offering, reached, prefix, conditional) in enumerate(rows, start=1):
        if prefix is not None:
            bar = Bar(1, 0, prefix, width=24, color="cyan")
            table.add_row(
                str(position),
                bar,
                f"{prefix:.0%}",
                f"{accepting}/{offering}",
                "" if conditional is None else f"{conditional:.0%}",
                f"{accepting}/{reached}",
            )
    return table
