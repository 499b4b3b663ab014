"""Plain and speculative decoding of the same prompts in one process, and whether speculation pays."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from dspark_jax.bench.bandwidth import copy_bandwidth
from dspark_jax.bench.ceiling import plain_step_bytes
from dspark_jax.bench.report import RUNS, Against, GenerateReport, TimedRun
from dspark_jax.bench.workload import Workload
from dspark_jax.decoding.generate import Completions
from dspark_jax.decoding.generation import Generation
from dspark_jax.decoding.programs import check_drafter, finish, pack, start
from dspark_jax.decoding.request import Request, sampling_of, stop_slots
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import bucket
from dspark_jax.errors import RequestError
from dspark_jax.model.model import Model
from dspark_jax.placement import fetch, partition_of, place_rows, setting_of

Progress = Callable[[str, int, int], None]
"""Called with the name of the work that begins, the pieces of work done, and the pieces in all."""


def bench_generate(model: Model, workload: Workload, progress: Progress) -> GenerateReport:
    """Generates in three ways: the first batch to warm up, then all of them as often as wanted, in turns.

    Raises:
        RequestError: no drafter, or a number that cannot be.
        NotFiniteError: the target's logits are not finite.
        SilentDrafterError: the drafter never offered a finite draft.
    """
    if model.drafter is None:
        raise RequestError("the checkpoint has no drafter, so there is nothing to compare; name one that has.")
    plain, speculative = workload.batches(model, 0), workload.batches(model, workload.draft_tokens)
    work = 3 + len(RUNS) * (1 + workload.repeats * len(plain))
    done = iter(range(work))

    def begin(what: str) -> None:
        progress(what, next(done), work)

    begin(f"compiling width {model.step_width}")
    wide = Programs(model, plain)
    begin("compiling width 1")
    narrow = Programs(replace(model, drafter=None), plain)
    ways = dict(zip(RUNS, ((wide, plain), (narrow, plain), (wide, speculative)), strict=True))
    for name, (programs, batches) in ways.items():
        begin(f"{_words(name)}, warming up")
        programs.run(batches[0])
    timed: dict[str, list[Timed]] = {name: [] for name in RUNS}
    for repeat in range(1, 1 + workload.repeats):
        for name, (programs, batches) in ways.items():
            parts = []
            for batch in batches:
                begin(f"{_words(name)}, repetition {repeat}")
                parts.append(programs.run(batch))
            timed[name].append(Timed.joined(parts))
    begin("copying")
    runs = {name: _run(programs, batches, timed[name]) for name, (programs, batches) in ways.items()}
    last = {name: times[-1].generation for name, times in timed.items()}
    greedy = bool(sampling_of(plain[0], 1).greedy.all())
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


def _words(name: str) -> str:
    return name.replace("_", " ")


class Timed(NamedTuple):
    """Seconds of prefill and of decoding, and what came out, on the host: of one batch, or of all in one repetition."""

    prefill: float
    decode: float
    generation: Generation

    @classmethod
    def joined(cls, parts: Sequence["Timed"]) -> "Timed":
        """Batches that ran one after the other, as if they were one large one."""
        prefill, decode, generations = zip(*parts, strict=True)
        return cls(sum(prefill), sum(decode), jax.tree.map(lambda *rows: np.concatenate(rows), *generations))


class Programs:
    """Prefill and decoding of one model, compiled for batches of one size and for the longest of their sequences."""

    def __init__(self, model: Model, batches: Sequence[Sequence[Request]]) -> None:
        longest = max(request.positions for batch in batches for request in batch)
        self.model, self.capacity = model, bucket(longest)
        self.setting = setting_of(model, self.capacity)
        prompts, sampling = self._placed(batches[0])
        began = time.perf_counter()
        prefill = start.lower(model, self.setting, *prompts)
        self.start = prefill.compile()
        self.finish = finish.lower(model, self.setting, prefill.out_info, sampling).compile()
        self.compile_seconds = time.perf_counter() - began

    def run(self, batch: Sequence[Request]) -> Timed:
        """Generates a batch once."""
        prompts, sampling = self._placed(batch)
        began = time.perf_counter()
        state = jax.block_until_ready(self.start(self.model, self.setting, *prompts))
        prefilled = time.perf_counter()
        state = jax.block_until_ready(self.finish(self.model, self.setting, state, sampling))
        finished = time.perf_counter()
        return Timed(prefilled - began, finished - prefilled, fetch(Generation.of(state)))

    def _placed(self, batch: Sequence[Request]) -> tuple[tuple[np.ndarray, np.ndarray], Sampling]:
        prompts = pack([request.prompt for request in batch], self.capacity)
        return place_rows((prompts, sampling_of(batch, stop_slots(batch))), self.setting.partition)


def _run(programs: Programs, batches: Sequence[Sequence[Request]], timed: Sequence[Timed]) -> TimedRun:
    generation = timed[-1].generation
    completions = Completions.of(generation)
    check_drafter(generation)
    rounds = np.reshape(generation.counters.rounds, (len(batches), -1))
    steps = int(rounds.max(axis=1).sum())
    return TimedRun(
        step_width=programs.model.step_width,
        draft_tokens=batches[0][0].draft_tokens or 0,
        compile_seconds=programs.compile_seconds,
        prefill_seconds=[times.prefill for times in timed],
        decode_seconds=[times.decode for times in timed],
        prefill_tokens=sum(len(request.prompt) - 1 for batch in batches for request in batch),
        new_tokens=sum(map(len, completions.tokens)),
        steps=steps,
        occupancy=float(rounds.sum() / (steps * rounds.shape[1])),
        statistics=completions.statistics,
    )


def _against(name: str, runs: dict[str, TimedRun], generations: dict[str, Generation], greedy: bool) -> Against:
    plain, speculative = runs[name], runs["speculative"]
    cost = speculative.step_seconds / plain.step_seconds
    tokens, other = np.asarray(generations[name].tokens), np.asarray(generations["speculative"].tokens)
    row, position = np.nonzero(tokens != other)  # behind the budget both hold zeros
    new = position - np.asarray(generations[name].prompt_length)[row]
    return Against(
        speed_up=speculative.tokens_per_second / plain.tokens_per_second,
        round_cost=cost,
        break_even_accepted_length=cost / speculative.occupancy,
        equal_sequences=len(tokens) - len(np.unique(row)) if greedy else None,
        first_difference=int(new.min()) if greedy and len(new) else None,
    )
