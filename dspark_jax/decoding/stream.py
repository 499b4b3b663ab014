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

from dspark_jax.decoding.generate import Completion, check_drafter, pack, start
from dspark_jax.decoding.generation import PREFILL_CHUNK, Generation
from dspark_jax.decoding.loop import decode
from dspark_jax.decoding.request import KEY, Request, check_requests, sampling_of, stop_slots
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import State, initial_state, insert, pick, settle
from dspark_jax.errors import RequestError
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Setting

PREFILL_ROWS = 4  # prompts that are prefilled together
ROUNDS = 32  # of decoding between two looks at what has finished
SMALLEST = 64


class Progress(NamedTuple):
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
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Completes any number of requests, `batch_size` at a time.

    Requests of similar size run in one batch, whose capacity is the next power of two; each capacity compiles its
    programs once. A completion depends on its request, the batch size and the capacity, not on its neighbours nor on
    when it was started. Neighbouring requests with one prompt (several samples) share its prefill.

    Args:
        model: with a target; without a drafter decoding is plain.
        requests: what to complete.
        batch_size: sequences that run side by side.
        logprobs: return log-probabilities.
        progress: told how far the work is, every few rounds.

    Yields:
        The number of a request and its completion, in the order in which they finish.

    Raises:
        RequestError: a batch size below 1; or see `generate`.
        SilentDrafterError: see `generate`. A target that is not finite is the completion's finish reason.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise RequestError(f"batch_size is {batch_size!r}; expected an integer of at least 1.")
    checked = check_requests(requests, model)
    return _stream(model, checked, batch_size, logprobs, progress or (lambda _: None))


def _stream(
    model: Model, requests: Sequence[Request], batch_size: int, logprobs: bool, progress: Callable[[Progress], None]
) -> Iterator[tuple[int, Completion]]:
    queues: dict[int, deque[int]] = {}
    for number, request in enumerate(requests):
        queues.setdefault(_capacity(request), deque()).append(number)
    past = Progress(0, 0, 0)
    for capacity, waiting in sorted(queues.items(), reverse=True):  # the largest first: it shows at once if it fits
        batch = _Batch(model, requests, capacity, batch_size, logprobs)
        while waiting or batch.running:
            batch.admit(waiting)
            finished, running = batch.advance(enough=min(len(waiting), batch.prefill_rows) or batch.running)
            progress(_sum(past, running))
            past = _sum(past, *(_progress_of(completion) for _, completion in finished))
            yield from finished


class _Batch:
    """Places for sequences of one capacity, the requests in them, and those requests' state on the device."""

    def __init__(
        self, model: Model, requests: Sequence[Request], capacity: int, batch_size: int, logprobs: bool
    ) -> None:
        self.model, self.requests, self.capacity, self.logprobs = model, requests, capacity, logprobs
        self.setting = model.setting(capacity)
        self.places: list[int | None] = [None] * batch_size
        self.prefill_rows = min(PREFILL_ROWS, batch_size)
        self.slots = stop_slots(requests)
        nobody = Sampling.of(batch_size, max_new_tokens=0, stop_ids=np.full(self.slots, -1))
        self.state = _empty(model, nobody, capacity, logprobs)

    @property
    def running(self) -> int:
        """Places that are taken."""
        return len(self.places) - self.places.count(None)

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
        tokens, lengths = pack([*prompts, *idle], self.capacity)
        chunk = min(PREFILL_CHUNK, self.capacity)
        prefilled = start(self.model, self.setting, tokens, lengths, chunk, self.logprobs)
        for some in batched(moves, self.prefill_rows):
            numbers, rows, places = zip(*some, strict=True)
            spare = self.prefill_rows - len(some)
            settings = [self.requests[number] for number in (*numbers, *numbers[:1] * spare)]
            beyond = range(len(self.places), len(self.places) + spare)  # dropped
            self.state = _move(
                self.state,
                prefilled,
                np.array([*rows, *[0] * spare]),
                np.array([*places, *beyond]),
                sampling_of(settings, self.slots),
            )
            for number, place in zip(numbers, places, strict=True):
                self.places[place] = number

    def advance(self, enough: int) -> tuple[list[tuple[int, Completion]], Progress]:
        """Decodes until `enough` of the running sequences have finished, or for some rounds.

        Returns:
            What has finished, and the progress of all that were running.
        """
        free = self.places.count(None)
        self.state = _advance(self.model, self.setting, self.state, np.int32(free + enough))
        done, generation = jax.device_get((self.state.done, Generation.of(self.state)))
        taken = {place: number for place, number in enumerate(self.places) if number is not None}
        rows = list(taken)
        check_drafter(jax.tree.map(lambda counts: counts[rows], generation.counters))
        finished = [(number, Completion.of(generation, place)) for place, number in taken.items() if done[place]]
        running = Progress(
            int(done[rows].sum()),
            int((generation.length - generation.prompt_length)[rows].sum()),
            int(generation.counters.rounds[rows].sum()),
        )
        self.places = [None if done[place] else number for place, number in enumerate(self.places)]
        return finished, running


@partial(jax.jit, static_argnames=("capacity", "logprobs"))
def _empty(model: Model, nobody: Sampling, capacity: int, logprobs: bool) -> State:
    """A state in which every place is free; `nobody` has no budget."""
    batch = nobody.seed.shape[0]
    tokens, lengths = jnp.zeros((batch, capacity), jnp.int32), jnp.ones(batch, jnp.int32)
    return settle(initial_state(model, tokens, lengths, logprobs), nobody, jax.random.key(KEY))


@partial(jax.jit, donate_argnames="state")
def _move(state: State, prefilled: State, rows: jax.Array, places: jax.Array, sampling: Sampling) -> State:
    """Puts prefilled sequences into places, each with settings of its own."""
    return insert(state, places, settle(pick(prefilled, rows), sampling, jax.random.key(KEY)))


@partial(jax.jit, donate_argnames="state")
def _advance(model: Model, setting: Setting, state: State, enough: jax.Array) -> State:
    return decode(model, setting, state, enough, jnp.int32(ROUNDS))


def _capacity(request: Request) -> int:
    return max(SMALLEST, 1 << (request.positions - 1).bit_length())


def _progress_of(completion: Completion) -> Progress:
    return Progress(1, len(completion.tokens), completion.statistics.rounds)


def _sum(*parts: Progress) -> Progress:
    return Progress(*map(sum, zip(*parts, strict=True)))
