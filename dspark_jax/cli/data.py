"""`dspark data`: answers of the model itself, and features of the target on disk."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from rich.filesize import decimal
from rich.table import Table
from tyro.conf import OmitArgPrefixes, arg

from dspark_jax import chat
from dspark_jax.checkpoint.fingerprint import fingerprint
from dspark_jax.checkpoint.load import load
from dspark_jax.cli.options import ONE_DEVICE, PACKAGED, Answering, Devices, Loading
from dspark_jax.cli.terminal import (
    RESULT,
    STATUS,
    bytes_bar,
    completions_bar,
    print_json,
    print_warning,
    steps_bar,
    tokens_bar,
)
from dspark_jax.config import ModelConfig
from dspark_jax.data.cache_format import bytes_per_token, facts_of_data, facts_of_run
from dspark_jax.data.cache_reader import FeatureCache
from dspark_jax.data.cache_writer import CacheWriter
from dspark_jax.data.capture import capture
from dspark_jax.data.documents import MAX_LENGTH, MIN_SUPERVISED, DocumentReader, Documents
from dspark_jax.data.regenerate import answer, read_dialogues, write_lines
from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.request import SETTINGS, Request, check_request
from dspark_jax.decoding.stream import stream
from dspark_jax.errors import CacheError, RequestError, check_count
from dspark_jax.jobs.prompts import Job, PromptReader
from dspark_jax.jobs.text import Text
from dspark_jax.model.model import Model, abstract_model
from dspark_jax.model.numerics import numerics_of

ON_POLICY = Answering(max_new_tokens=1024, temperature=1.0, thinking="off")


@dataclass(frozen=True)
class Reading:
    """How rows become documents."""

    max_length: Annotated[int, arg(metavar="N")] = MAX_LENGTH
    """Tokens of a document; what lies behind them is cut off."""
    min_supervised: Annotated[int, arg(metavar="N")] = MIN_SUPERVISED
    """Supervised tokens that a document needs; others are left out."""
    thinking: Annotated[chat.Thinking, arg(help_behavior_hint="(default: off)")] = "off"
    """How dialogues are rendered that do not say it themselves."""

    def documents(self, path: Path, checkpoint: Path) -> Documents:
        """Those of a file, with a bar."""
        config = ModelConfig.from_file(checkpoint / "config.json")
        reader = DocumentReader(
            Text.of(checkpoint),
            config.vocab_size,
            config.eos_token_id[0],
            self.thinking,
            check_count(self.max_length, "max_length"),
            check_count(self.min_supervised, "min_supervised"),
        )
        with steps_bar("reading") as report:
            return reader.read(path, lambda done, total: report(path.name, done, total))


AS_USUAL = Reading()


def regenerate(
    *,
    prompts: Annotated[Path, arg(metavar="FILE")],
    out: Annotated[Path, arg(metavar="FILE")],
    batch_size: Annotated[int, arg(metavar="B")] = 8,
    loading: OmitArgPrefixes[Loading] = PACKAGED,
    devices: OmitArgPrefixes[Devices] = ONE_DEVICE,
    decoding: OmitArgPrefixes[Answering] = ON_POLICY,
    json: bool = False,
) -> int:
    """Let the target answer prompts, turn by turn, to train on what it says itself.

    Answers are kept in OUT.turns/ as they finish; started again, the command adds what is missing, and OUT is the same.

    Args:
        prompts: JSON lines as for `dspark generate`. Of a dialogue every assistant turn is answered anew.
        out: JSON lines of token ids and loss masks, one document a line.
        batch_size: Sequences that run side by side.
        json: Print the summary as JSON.
    """
    turns = out.with_name(out.name + ".turns")
    if out.resolve() == prompts.resolve():
        raise RequestError(f"{out}: holds the prompts; name another file for the answers.")
    if out.exists() and not turns.exists():
        raise RequestError(f"{out}: is there, and no {turns.name} of which it was made; name another --out.")
    config = ModelConfig.from_file(loading.checkpoint / "config.json")
    abstract = abstract_model(config, numerics_of(loading.numerics))
    checked = check_request(Request([0], **decoding.settings()), abstract, "prompt")
    settings = {name: getattr(checked, name) for name in SETTINGS}
    reader = PromptReader(settings, decoding.samples, decoding.thinking, Text.of(loading.checkpoint), abstract)
    dialogues = read_dialogues(prompts, reader)
    common = {"model": fingerprint(loading.checkpoint), "numerics": loading.numerics}
    batches = _Batches(loading, devices, check_count(batch_size, "batch_size"))
    new = answer(dialogues, reader, turns, common, batches.complete)
    write_lines(dialogues, out)
    unfinished = sum(dialogue.unfinished for dialogue in dialogues)
    if unfinished:
        print_warning(f"{unfinished} dialogues end early, since none goes on after what the model answered.")
    answers = [answer for dialogue in dialogues for answer in dialogue.answers]
    summary = {
        "out": str(out),
        "dialogues": len(dialogues),
        "answers": len(answers),
        "new_answers": new,
        "answer_tokens": sum(len(answer["tokens"]) for answer in answers),
        "cut_by_length": sum(answer["finish_reason"] == "length" for answer in answers),
    }
    _print(summary, json)
    return 0


@dataclass(frozen=True)
class _Batches:
    """The model, loaded when the first answer is missing, with bars."""

    loading: Loading
    devices: Devices
    batch_size: int

    @cached_property
    def model(self) -> Model:
        with bytes_bar("loading weights") as progress:
            return self.loading.model(self.devices, progress)

    def complete(self, jobs: Sequence[Job], done: int, turn: int) -> Iterator[tuple[int, Completion]]:
        model, requests = self.model, [job.request for job in jobs]
        with completions_bar(f"compiling, turn {turn}", done, done + len(jobs)) as progress:
            yield from stream(model, requests, self.batch_size, progress=progress)


def cache(
    *,
    documents: Annotated[Path, arg(metavar="FILE")],
    out: Annotated[Path, arg(metavar="DIR")],
    batch_size: Annotated[int, arg(metavar="B")] = 4,
    loading: OmitArgPrefixes[Loading] = PACKAGED,
    devices: OmitArgPrefixes[Devices] = ONE_DEVICE,
    reading: OmitArgPrefixes[Reading] = AS_USUAL,
    json: bool = False,
) -> int:
    """Run the target over documents once, and keep on disk what a drafter learns from.

    Started again after a kill, the command goes on, and the files are the same.

    Args:
        documents: JSON lines: `text`, `ids`, `prompt` and `response`, `messages`, or lines of `dspark data regenerate`.
        out: Folder of the cache.
        batch_size: Documents that run side by side.
        json: Print the summary as JSON.
    """
    batch_size = check_count(batch_size, "batch_size")
    found = reading.documents(documents, loading.checkpoint)
    config = ModelConfig.from_file(loading.checkpoint / "config.json")
    facts = facts_of_run(config, fingerprint(loading.checkpoint), loading.numerics) | facts_of_data(
        loading.checkpoint, [documents], found.documents, reading.max_length, reading.min_supervised
    )
    tokens = int(found.lengths.sum())
    size = tokens * bytes_per_token(facts)
    with CacheWriter(out, facts) as writer:
        done = int(found.lengths[: writer.samples].sum())
        _announce(out, tokens, size, size - done * bytes_per_token(facts), bytes_per_token(facts))
        if writer.finished:
            FeatureCache(out)  # which checks its files
        else:
            _fill(writer, found, loading, devices, batch_size)
    summary = {
        "out": str(out),
        "documents": len(found),
        "truncated": found.truncated,
        "dropped": found.dropped,
        "tokens": tokens,
        "new_tokens": tokens - done,
        "bytes_per_token": bytes_per_token(facts),
        "bytes": size,
    }
    _print(summary, json)
    return 0


def _announce(out: Path, tokens: int, size: int, missing: int, token: int) -> None:
    """What is going to be written, before it costs anything.

    Raises:
        CacheError: there is no room for it.
    """
    STATUS.print(f"{tokens:,} tokens of {token:,} bytes are {decimal(size)} in {out}.", soft_wrap=True)
    free = shutil.disk_usage(out).free
    if missing > free:
        raise CacheError(
            f"{out}: {decimal(missing)} are still to be written and {decimal(free)} are free; use less data or a "
            "smaller --max-length, or train with a cache that passes by."
        )


def _fill(writer: CacheWriter, documents: Documents, loading: Loading, devices: Devices, batch_size: int) -> None:
    with bytes_bar("loading weights") as progress:
        model = load(loading.checkpoint, loading.preset, devices.mesh(), parts=("target",), progress=progress)
    with tokens_bar("caching features") as progress:
        capture(model, documents, range(len(documents)), writer, batch_size, progress)


def _print(summary: dict[str, Any], json: bool) -> None:
    """What a command has done."""
    if json:
        print_json(summary)
        return
    facts = grid()
    for name, value in summary.items():
        text = decimal(value) if name == "bytes" else f"{value:,}" if isinstance(value, int) else value
        facts.add_row(name.replace("_", " "), text)
    RESULT.print(facts)


def grid() -> Table:
    """A table of facts, their names dim."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    return facts
