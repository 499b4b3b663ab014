"""What a measurement of generation tells: three runs, and what follows for speculation."""

import dataclasses
from dataclasses import dataclass
from statistics import median
from typing import Any

from dspark_jax.bench.workload import Workload
from dspark_jax.decoding.statistics import Statistics

RUNS = ("plain", "plain_width_1", "speculative")


@dataclass(frozen=True)
class TimedRun:
    """One way to decode, timed. A step is a round of a whole batch; batches run one after the other.

    Attributes:
        step_width: rows a sequence in each step.
        draft_tokens: drafts offered in a round.
        compile_seconds: of the programs for prefill and decoding. Plain and speculative decoding share theirs.
        prefill_seconds: of each repetition, all batches together; so are all other sums.
        decode_seconds: of each repetition, prefill not included.
        prefill_tokens: prompt tokens that pass through prefill: all but the last of each prompt.
        new_tokens: of all sequences.
        steps: of one repetition, in each batch until its last sequence has finished.
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
        """New tokens of all sequences in the median repetition, prefill not included."""
        return self.new_tokens / median(self.decode_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of all sequences in the median repetition."""
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
        return self.against_plain.equal_sequences in (None, self.workload.sequences)

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
        told = {"workload": self.workload.to_dict(), "ok": self.ok, "least_step_seconds": self.least_step_seconds}
        return dataclasses.asdict(self) | runs | told
