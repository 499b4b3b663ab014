"""What an evaluation decodes, what of it counts, and how it is read back.

The last round of a completion counts whole, as in DeepSpec's evaluation: cut at the budget, it would look as if drafts
had been rejected. So sequences run with room for one more block, and the rounds that began within the budget count.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.request import Request
from dspark_jax.decoding.sampling import GREEDY_BELOW
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.decoding.stream import StreamProgress, stream
from dspark_jax.decoding.trace import Round
from dspark_jax.errors import RequestError
from dspark_jax.evaluation.log import RoundLog, Traced
from dspark_jax.jobs.json_lines import parse_object, read_lines
from dspark_jax.jobs.prompts import Job, Key, PromptReader
from dspark_jax.model.model import Model


@dataclass(frozen=True)
class Decoded:
    """All completions of one temperature.

    Attributes:
        temperature: of the target; below 1e-5 they are greedy.
        completions: how many.
        new_tokens: of all of them.
        broken: those in which the target's logits were not finite; their rounds are left out.
        log: their rounds.
    """

    temperature: float
    completions: int
    new_tokens: int
    broken: list[Key]
    log: RoundLog


def read_jobs(path: Path, reader: PromptReader, temperatures: Sequence[float]) -> tuple[list[Job], list[str]]:
    """Every line of a file of prompts at every temperature: the reader's samples where it is above 0, one where not.

    The samples of a line are numbered through all temperatures.

    Returns:
        The jobs, and the names of fields that mean nothing.

    Raises:
        RequestError: see `PromptReader.read`; or no temperature, one twice, or a line that has one of its own.
    """
    if not temperatures or len(set(temperatures)) != len(temperatures):
        raise RequestError(f"temperatures are {list(temperatures)}; expected at least one, and each once.")
    jobs: list[Job] = []
    ignored: list[str] = []
    for temperature in temperatures:
        samples = 1 if temperature < GREEDY_BELOW else reader.samples
        own = replace(reader, settings={**reader.settings, "temperature": temperature}, samples=samples)
        read, ignored = own.read(path)
        earlier = Counter(job.key[0] for job in jobs)
        for job in read:
            name, number = job.key
            if job.request.temperature != temperature:
                raise RequestError(
                    f"{path}: the line of id {name!r} has temperature {job.request.temperature}, and every line is "
                    "evaluated at the temperatures of the command; take it out."
                )
            jobs.append(replace(job, key=(name, earlier[name] + number)))
    return jobs, ignored


def decode(
    model: Model,
    requests: Sequence[Request],
    batch_size: int = 8,
    progress: Callable[[StreamProgress], None] | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Completes requests like `stream`, traced, and cut at their budgets but for what the last round did.

    Yields:
        The number of a request and its completion, in the order in which they finish.

    Raises:
        RequestError: see `stream`.
        SilentDrafterError: see `stream`.
    """
    roomy = [replace(request, max_new_tokens=request.max_new_tokens + model.block_size) for request in requests]
    for number, completion in stream(model, roomy, batch_size, progress=progress, trace=True):
        yield number, cut(completion, requests[number].max_new_tokens, model.block_size)


def cut(completion: Completion, budget: int, block: int) -> Completion:
    """A traced completion that ran beyond its budget, without what lies behind it."""
    rounds = [one for one in completion.rounds or () if one.begin < budget]
    stopped_behind = completion.finish_reason == "stop" and len(completion.tokens) > budget
    return replace(
        completion,
        tokens=completion.tokens[:budget],
        finish_reason="length" if stopped_behind else completion.finish_reason,
        statistics=Statistics.of_rounds(rounds, block),
        rounds=rounds,
    )


def read_decoded(path: Path, jobs: Sequence[Job], block: int) -> list[Decoded]:
    """Reads back what jobs have written, each temperature by itself.

    Args:
        path: of the job's results; all jobs are there.
        jobs: as `read_jobs` gave them.
        block: drafts of a round at most.
    """
    records = {(record["id"], record["sample"]): record for record in _records(path)}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(job.key[0] for job in jobs))}
    found = []
    for temperature in dict.fromkeys(job.request.temperature for job in jobs):
        ours = [(job, records[job.key]) for job in jobs if job.request.temperature == temperature]
        sound = [(job, record) for job, record in ours if record["finish_reason"] != "not_finite"]
        traced = [Traced(numbers[job.key[0]], job.category or "", _rounds(record)) for job, record in sound]
        found.append(
            Decoded(
                temperature=temperature,
                completions=len(ours),
                new_tokens=sum(len(record["tokens"]) for _, record in ours),
                broken=[job.key for job, record in ours if record["finish_reason"] == "not_finite"],
                log=RoundLog.of(traced, block),
            )
        )
    return found


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in read_lines(path):
        yield parse_object(line, f"{path} line {number}")


def _rounds(record: dict[str, Any]) -> list[Round]:
    rounds = record.get("rounds")
    if not isinstance(rounds, dict) or not rounds.keys() >= set(Round._fields):
        raise RequestError(f"completion {record.get('id')!r} has no rounds; delete rounds.jsonl and start again.")
    columns = [rounds[name] for name in Round._fields]
    return [Round(*values) for values in zip(*columns, strict=True)]
