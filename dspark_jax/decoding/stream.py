"""Many prompts through one batch: a sequence that finishes gives its place to a waiting one, and nothing recompiles.

Prompts are prefilled a few at a time in a small state of their own, whose rows are then moved into the free places.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import batched
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.generation import Generation
from dspark_jax.decoding.loop import decode
from dspark_jax.decoding.programs import check_drafter, pack, start
from dspark_jax.decoding.request import KEY, Request, check_requests, sampling_of, stop_slots
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import State, coarse_bucket, initial_state, insert, pick, with_settings
from dspark_jax.errors import check_count
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Setting
from dspark_jax.placement import constrain_rows, fetch, place_rows, setting_of

PREFILL_ROWS = 4  # prompts that are prefilled together
ROUNDS = 32  # of decoding between two looks at what has finished


class StreamProgress(NamedTuple):
    """How far a stream is, running sequences included.

    Attributes:
        completions: finished sequences.
        tokens: new tokens.
        rounds: verification steps, summed over sequences.
    """

    completions: int
    tokens: int
    rounds: int


def stream(
    model: Model,
    requests: Sequence[Request],
    batch_size: int = 8,
    logprobs: bool = False,
    progress: Callable[[StreamProgress], None] | None = None,
    trace: bool = False,
) -> Iterator[tuple[int, Completion]]:
    """Completes any number of requests, `batch_size` at a time.

    Requests of similar size run in one batch, whose capacity is the next power of two; each capacity compiles its
    programs once. A completion depends on its request, the batch size and the capacity, not on its neighbours nor on
    when it was started. Requests with one prompt (several samples) that start together share its prefill.

    Args:
        model: with a target; without a drafter decoding is plain.
        requests: what to complete.
        batch_size: sequences that run side by side.
        logprobs: return log-probabilities.
        progress: told how far the work is, every few rounds.
        trace: return what each round did.

    Yields:
        The number of a request and its completion, in the order in which they finish.

    Raises:
        RequestError: a batch size below 1; or see `generate`.
        SilentDrafterError: see `generate`. A target that is not finite is the completion's finish reason.
    """
    checked = check_requests(requests, model)
    return _stream(
        model,
        checked,
        check_count(batch_size, "batch_size"),
        progress or (lambda _: None),
        logprobs=logprobs,
        trace=trace,
    )


def _stream(
    model: Model,
    requests: Sequence[Request],
    batch_size: int,
    progress: Callable[[StreamProgress], None],
    **records: bool,
) -> Iterator[tuple[int, Completion]]:
    queues: dict[int, deque[int]] = {}
    for number, request in enumerate(requests):
        queues.setdefault(coarse_bucket(request.positions), deque()).append(number)
    past, drafted = StreamProgress(0, 0, 0), False
    for capacity, waiting in sorted(queues.items(), reverse=True):  # the largest first: it shows at once if it fits
        for finished, running in _Batch(model, requests, capacity, batch_size, **records).run(waiting):
            progress(_sum(past, _progress_of(running, len(finished))))
            past = _sum(past, *(StreamProgress(1, len(c.tokens), c.statistics.rounds) for _, c in finished))
            yield from finished
            drafted = drafted or bool(running.counters.offered.any())
            if not drafted:
                check_drafter(running)


class _Batch:
    """Places for sequences of one capacity, the requests in them, and those requests' state on the device.

    `records` says what is recorded beside the tokens: `logprobs`, `trace`.
    """

    def __init__(
        self, model: Model, requests: Sequence[Request], capacity: int, batch_size: int, **records: bool
    ) -> None:
        self.model, self.requests, self.capacity, self.records = model, requests, capacity, records
        self.setting = setting_of(model, capacity)
        self.places: list[int | None] = [None] * batch_size
        self.prefill_rows = min(PREFILL_ROWS, batch_size)
        self.slots = stop_slots(requests)
        nobody = Sampling.of(batch_size, max_new_tokens=0, stop_ids=np.full(self.slots, -1))
        self.state = _empty(model, self.setting, place_rows(nobody, self.setting.partition), capacity, **records)

    @property
    def running(self) -> int:
        """Places that are taken."""
        return len(self.places) - self.places.count(None)

    def run(self, waiting: deque[int]) -> Iterator[tuple[list[tuple[int, Completion]], Generation]]:
        """Completes all that wait; yields, every few rounds, what has finished, and all sequences that ran."""
        while waiting or self.running:
            self.admit(waiting)
            yield self.advance(enough=min(len(waiting), self.prefill_rows) or self.running)

    def admit(self, waiting: deque[int]) -> None:
        """Fills free places from the front of the queue."""
        while waiting and None in self.places:
            prefilled: dict[tuple[int, ...], int] = {}
            moves = []  # (number of the request, row of its prefilled prompt, place)
            for place in [place for place, number in enumerate(self.places) if number is None]:
                prompt = tuple(self.requests[waiting[0]].prompt) if waiting else ()
                if not waiting or (prompt not in prefilled and len(prefilled) == self.prefill_rows):
                    break
                moves.append((waiting.popleft(), prefilled.setdefault(prompt, len(prefilled)), place))
            self._fill(list(prefilled), moves)

    def _fill(self, prompts: list[tuple[int, ...]], moves: list[tuple[int, int, int]]) -> None:
        idle = [(0,)] * (self.prefill_rows - len(prompts))
        packed = place_rows(pack([*prompts, *idle], self.capacity), self.setting.partition)
        prefilled = start(self.model, self.setting, *packed, **self.records)
        for some in batched(moves, self.prefill_rows):
            numbers, rows, places = zip(*some, strict=True)
            spare = self.prefill_rows - len(some)
            settings = [self.requests[number] for number in (*numbers, *numbers[:1] * spare)]
            beyond = range(len(self.places), len(self.places) + spare)  # dropped
            self.state = _move(
                self.setting,
                self.state,
                prefilled,
                np.array([*rows, *[0] * spare]),
                np.array([*places, *beyond]),
                sampling_of(settings, self.slots),
            )
            for number, place in zip(numbers, places, strict=True):
                self.places[place] = number

    def advance(self, enough: int) -> tuple[list[tuple[int, Completion]], Generation]:
        """Decodes until `enough` of the running sequences have finished, or for some rounds.

        Returns:
            What has finished, and all sequences that were running.
        """
        free = self.places.count(None)
        self.state = _advance(self.model, self.setting, self.state, np.int32(free + enough))
        done, generation = fetch((self.state.done, Generation.of(self.state)))
        taken = {place: number for place, number in enumerate(self.places) if number is not None}
        finished = [(number, Completion.of(generation, place)) for place, number in taken.items() if done[place]]
        self.places = [None if done[place] else number for place, number in enumerate(self.places)]
        return finished, jax.tree.map(lambda leaf: leaf[list(taken)], generation)


@partial(jax.jit, static_argnames=("capacity", "logprobs", "trace"))
def _empty(model: Model, setting: Setting, nobody: Sampling, capacity: int, logprobs: bool, trace: bool) -> State:
    """A state in which every place is free; `nobody` has no budget."""
    batch = nobody.seed.shape[0]
    tokens, lengths = jnp.zeros((batch, capacity), jnp.int32), jnp.ones(batch, jnp.int32)
    state = with_settings(initial_state(model, tokens, lengths, logprobs, trace), nobody, jax.random.key(KEY))
    return constrain_rows(state, setting.partition)


@partial(jax.jit, donate_argnames="state")
def _move(
    setting: Setting, state: State, prefilled: State, rows: jax.Array, places: jax.Array, sampling: Sampling
) -> State:
    """Puts prefilled sequences into places, each with settings of its own."""
    state = insert(state, places, with_settings(pick(prefilled, rows), sampling, jax.random.key(KEY)))
    return constrain_rows(state, setting.partition)


@partial(jax.jit, donate_argnames="state")
def _advance(model: Model, setting: Setting, state: State, enough: jax.Array) -> State:
    return decode(model, setting, state, enough, jnp.int32(ROUNDS))


def _progress_of(running: Generation, finished: int) -> StreamProgress:
    tokens = int((running.length - running.prompt_length).sum())
    return StreamProgress(finished, tokens, int(running.counters.rounds.sum()))


def _sum(*parts: StreamProgress) -> StreamProgress:
    return StreamProgress(*map(sum, zip(*parts, strict=True)))
