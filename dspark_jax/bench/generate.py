"""Plain and speculative decoding of the same prompts in one process, and whether speculation pays."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from dspark_jax.bench.ceiling import copy_bandwidth, plain_step_bytes
from dspark_jax.decoding.generate import Completions
from dspark_jax.decoding.generation import Generation
from dspark_jax.decoding.programs import check_drafter, finish, pack, start
from dspark_jax.decoding.request import Request, check_requests, sampling_of, stop_slots
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import bucket
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.errors import RequestError, check_count
from dspark_jax.model.model import Model
from dspark_jax.placement import fetch, partition_of, place_rows, setting_of

RUNS = ("plain", "plain_width_1", "speculative")

Progress = Callable[[str, int, int], None]
"""Called with the name of the work that begins, the pieces of work done, and the pieces in all."""


@dataclass(frozen=True)
class Workload:
    """What is generated. Prompts are random ids; no id stops a sequence, so that each spends its budget.

    Attributes:
        batch_size: sequences.
        prompt_tokens: of each.
        max_new_tokens: of each.
        draft_tokens: offered in a round of the speculative run; None for the trained block.
        temperature: 0 decodes greedily.
        repeats: timed repetitions of each run.
        seed: of the prompts, and of sampling.
    """

    batch_size: int = 1
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    draft_tokens: int | None = None
    temperature: float = 0.0
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks what has nothing to do with the model, so that no weights are loaded in vain.

        Raises:
            RequestError: a number below 1 of what there must be some of.
        """
        for name in ("batch_size", "prompt_tokens", "max_new_tokens", "draft_tokens", "repeats"):
            value = getattr(self, name)
            if value is not None:
                check_count(value, name)

    def requests(self, model: Model, draft_tokens: int | None) -> list[Request]:
        """The checked requests.

        Raises:
            RequestError: see `check_requests`.
        """
        shape = (self.batch_size, self.prompt_tokens)
        prompts = np.random.default_rng(self.seed).integers(model.config.vocab_size, size=shape)
        requests = [
            Request(
                prompt.tolist(),
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                seed=self.seed + row,
                draft_tokens=draft_tokens,
                stop_ids=(),
            )
            for row, prompt in enumerate(prompts)
        ]
        return check_requests(requests, model)


@dataclass(frozen=True)
class TimedRun:
    """One way to decode, timed. A step is a round of the whole batch.

    Attributes:
        step_width: rows a sequence in each step.
        draft_tokens: drafts offered in a round.
        compile_seconds: of the programs for prefill and decoding. Plain and speculative decoding share theirs.
        prefill_seconds: of each repetition.
        decode_seconds: of each repetition, prefill not included.
        prefill_tokens: prompt tokens that pass through prefill: all but the last of each prompt.
        new_tokens: of all sequences together.
        steps: of one repetition, until the last sequence has finished.
        occupancy: share of the places in the batch whose sequence is still running, in the mean over the steps.
        statistics: rounds and drafts.
    """

    step_width: int
    draft_tokens: int
    compile_seconds: float
    prefill_seconds: list[float]
    decode_seconds: list[float]
    prefill_tokens: int
    new_tokens: int
    steps: int
    occupancy: float
    statistics: Statistics

    @property
    def step_seconds(self) -> float:
        """Of the median repetition."""
        return median(self.decode_seconds) / self.steps

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the batch in the median repetition, prefill not included."""
        return self.new_tokens / median(self.decode_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of the batch in the median repetition."""
        return self.prefill_tokens / median(self.prefill_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures as JSON values."""
        return dataclasses.asdict(self) | {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
        }


@dataclass(frozen=True)
class Against:
    """Speculative decoding against one of the plain runs.

    Attributes:
        speed_up: ratio of the tokens per second.
        round_cost: a speculative round in plain steps, C in `speed_up = accepted length * occupancy / C`.
        break_even_accepted_length: C / occupancy: the accepted length above which speculation pays.
        equal_sequences: sequences whose greedy tokens are the same; None where tokens are sampled.
        first_difference: number of the first new token that differs in any sequence, from 0; None if there is none.
    """

    speed_up: float
    round_cost: float
    break_even_accepted_length: float
    equal_sequences: int | None
    first_difference: int | None


@dataclass(frozen=True)
class GenerateReport:
    """Three runs in one process, their repetitions taking turns.

    Attributes:
        device: kind of the devices.
        mesh: sizes of the mesh axes over which the model is split; None on one device.
        workload: what was generated.
        capacity: positions of the caches.
        plain: no drafts, in the program of the speculative run.
        plain_width_1: no drafter, compiled for one row a sequence: outside the promise of identical tokens.
        speculative: with drafts.
        against_plain: whose greedy tokens must be the same.
        against_plain_width_1: the fastest that plain decoding can be here.
        plain_step_bytes: of weights that each device must read in a plain step; see `plain_step_bytes`.
        copy_bytes_per_second: of a large copy on one device in this process.
    """

    device: str
    mesh: dict[str, int] | None
    workload: Workload
    capacity: int
    plain: TimedRun
    plain_width_1: TimedRun
    speculative: TimedRun
    against_plain: Against
    against_plain_width_1: Against
    plain_step_bytes: float
    copy_bytes_per_second: float

    @property
    def ok(self) -> bool:
        """Whether greedy tokens do not depend on the drafts."""
        return self.against_plain.equal_sequences in (None, self.workload.batch_size)

    @property
    def least_step_seconds(self) -> float:
        """Of a plain step that does nothing but read its weights, as fast as a copy."""
        return self.plain_step_bytes / self.copy_bytes_per_second

    def speed_per_ceiling(self, run: TimedRun) -> float:
        """The share of that ceiling that a plain run reaches."""
        return self.least_step_seconds / run.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures as JSON values."""
        runs = {name: getattr(self, name).to_dict() for name in RUNS}
        for name in ("plain", "plain_width_1"):
            runs[name]["speed_per_ceiling"] = self.speed_per_ceiling(getattr(self, name))
        return dataclasses.asdict(self) | runs | {"ok": self.ok, "least_step_seconds": self.least_step_seconds}


def bench_generate(model: Model, workload: Workload, progress: Progress) -> GenerateReport:
    """Generates in three ways: once to warm up, then as often as wanted, in turns.

    Raises:
        RequestError: no drafter, or a number that cannot be.
        NotFiniteError: the target's logits are not finite.
        SilentDrafterError: the drafter never offered a finite draft.
    """
    if model.drafter is None:
        raise RequestError("the checkpoint has no drafter, so there is nothing to compare; name one that has.")
    plain, speculative = workload.requests(model, 0), workload.requests(model, workload.draft_tokens)
    work = 3 + len(RUNS) * (1 + workload.repeats)
    done = iter(range(work))

    def begin(what: str) -> None:
        progress(what, next(done), work)

    begin(f"compiling width {model.step_width}")
    wide = Programs(model, plain)
    begin("compiling width 1")
    narrow = Programs(replace(model, drafter=None), plain)
    ways = dict(zip(RUNS, ((wide, plain), (narrow, plain), (wide, speculative)), strict=True))
    timed: dict[str, list[Timed]] = {name: [] for name in RUNS}
    for repeat in range(1 + workload.repeats):
        for name, (programs, requests) in ways.items():
            begin(f"{name.replace('_', ' ')}, {f'repetition {repeat}' if repeat else 'warming up'}")
            timed[name].append(programs.run(requests))
    begin("copying")
    runs = {name: _run(programs, requests, timed[name]) for name, (programs, requests) in ways.items()}
    last = {name: times[-1].generation for name, times in timed.items()}
    greedy = bool(sampling_of(plain, 1).greedy.all())
    return GenerateReport(
        device=jax.devices()[0].device_kind,
        mesh=dict(partition.mesh.shape) if (partition := partition_of(model)) else None,
        workload=workload,
        capacity=wide.capacity,
        **runs,
        against_plain=_against("plain", runs, last, greedy),
        against_plain_width_1=_against("plain_width_1", runs, last, greedy),
        plain_step_bytes=plain_step_bytes(model, workload.batch_size),
        copy_bytes_per_second=copy_bandwidth(),
    )


class Timed(NamedTuple):
    """One repetition: seconds of prefill and of decoding, and what came out, on the host."""

    prefill: float
    decode: float
    generation: Generation


class Programs:
    """Prefill and decoding of one model, compiled for one batch."""

    def __init__(self, model: Model, requests: Sequence[Request]) -> None:
        self.model, self.capacity = model, bucket(max(request.positions for request in requests))
        self.setting = setting_of(model, self.capacity)
        self.prompts = self._placed(pack([request.prompt for request in requests], self.capacity))
        began = time.perf_counter()
        prefill = start.lower(model, self.setting, *self.prompts)
        self.start = prefill.compile()
        self.finish = finish.lower(model, self.setting, prefill.out_info, self._sampling(requests)).compile()
        self.compile_seconds = time.perf_counter() - began

    def run(self, requests: Sequence[Request]) -> Timed:
        """Generates once."""
        sampling = self._sampling(requests)
        began = time.perf_counter()
        state = jax.block_until_ready(self.start(self.model, self.setting, *self.prompts))
        prefilled = time.perf_counter()
        state = jax.block_until_ready(self.finish(self.model, self.setting, state, sampling))
        finished = time.perf_counter()
        return Timed(prefilled - began, finished - prefilled, fetch(Generation.of(state)))

    def _sampling(self, requests: Sequence[Request]) -> Sampling:
        return self._placed(sampling_of(requests, stop_slots(requests)))

    def _placed[Rows](self, rows: Rows) -> Rows:
        return place_rows(rows, self.setting.partition)


def _run(programs: Programs, requests: Sequence[Request], timed: list[Timed]) -> TimedRun:
    generation = timed[-1].generation
    completions = Completions.of(generation)
    check_drafter(generation)
    rounds = generation.counters.rounds
    return TimedRun(
        step_width=programs.model.step_width,
        draft_tokens=requests[0].draft_tokens or 0,
        compile_seconds=programs.compile_seconds,
        prefill_seconds=[times.prefill for times in timed[1:]],
        decode_seconds=[times.decode for times in timed[1:]],
        prefill_tokens=sum(len(request.prompt) - 1 for request in requests),
        new_tokens=sum(map(len, completions.tokens)),
        steps=int(rounds.max()),
        occupancy=float(rounds.mean() / rounds.max()),
        statistics=completions.statistics,
    )


def _against(name: str, runs: dict[str, TimedRun], generations: dict[str, Generation], greedy: bool) -> Against:
    plain, speculative = runs[name], runs["speculative"]
    cost = speculative.step_seconds / plain.step_seconds
    differs = generations[name].tokens != generations["speculative"].tokens  # [B, S], behind the budget zeros
    first = int(differs.any(axis=0).argmax() - generations[name].prompt_length[0]) if differs.any() else None
    return Against(
        speed_up=speculative.tokens_per_second / plain.tokens_per_second,
        round_cost=cost,
        break_even_accepted_length=cost / speculative.occupancy,
        equal_sequences=int((~differs.any(axis=1)).sum()) if greedy else None,
        first_difference=first if greedy else None,
    )
