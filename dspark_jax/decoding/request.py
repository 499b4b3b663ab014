"""What a caller may ask for, checked: every refusal is a sentence, before anything is compiled."""

import logging
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from dspark_jax.config import LARGEST_INTEGER
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.errors import RequestError
from dspark_jax.model.model import Model

_log = logging.getLogger(__name__)

POSITION_LIMIT = 1 << 24  # RoPE angles are float32 products; beyond this, positions are no longer exact
LARGEST_NUMBER = float(np.finfo(np.float32).max)
STOP_SLOTS = 8  # stop ids are padded to a multiple of this, so that their number compiles nothing
SEEDS = 1 << 32
SAMPLE_STEP = 0x9E3779B1  # odd, so that no two samples share a seed; large, so that seeds may count up
KEY = 0  # of the key that all seeds are folded into, so that a seed alone names a random sequence


@dataclass(frozen=True)
class Request:
    """One prompt and how it is to be completed.

    Attributes:
        prompt: token ids.
        max_new_tokens: budget.
        temperature: 0 is greedy.
        top_k: samples from the k likeliest tokens; 0 from all.
        top_p: samples from the likeliest tokens that together have this share; 1 from all.
        seed: 0 to 2^32 - 1. The same prompt, settings and seed draw the same random numbers in any batch.
        draft_tokens: drafts offered in a round; None for the trained block.
        greedy_drafts: let the drafter propose its likeliest tokens instead of drawing them. The distribution of the
            output is the same, and fewer drafts are accepted.
        stop_ids: ids that end the completion; None for the config's EOS, () for none.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    draft_tokens: int | None = None
    greedy_drafts: bool = False
    stop_ids: Sequence[int] | None = None

    def sample(self, number: int) -> "Request":
        """Another completion of the same prompt; its seed lies far from those of other requests' samples."""
        return replace(self, seed=(self.seed + number * SAMPLE_STEP) % SEEDS)

    @property
    def positions(self) -> int:
        """Positions that prompt and completion need."""
        return len(self.prompt) + self.max_new_tokens


SETTINGS = tuple(field.name for field in fields(Request) if field.name != "prompt")


def check_requests(requests: Sequence[Request], model: Model) -> list[Request]:
    """The requests with every value of its proper type and the defaults filled in.

    More drafts than the trained block are clamped with a warning, since a longer block than the trained one degrades
    every draft.

    Raises:
        RequestError: there is none, the model has no target, or a value that cannot be.
    """
    if model.target is None:
        raise RequestError("generation needs a target, and this model was loaded with the drafter alone.")
    if not requests:
        raise RequestError("there is no prompt; pass at least one list of token ids.")
    checked = [check_request(request, model, f"prompt {number}") for number, request in enumerate(requests)]
    longest, trained = max(request.positions for request in checked), model.config.max_position_embeddings
    if longest > trained:
        _log.warning("prompt and max_new_tokens make %d positions; the model was made for %d", longest, trained)
    return checked


def check_request(request: Request, model: Model, what: str) -> Request:
    """One request, checked; `what` names its prompt.

    Raises:
        RequestError: a value that cannot be.
    """
    checked = replace(
        request,
        prompt=check_prompt(request.prompt, model.config.vocab_size, what),
        max_new_tokens=_integer(request.max_new_tokens, "max_new_tokens"),
        temperature=_number(request.temperature, "temperature"),
        top_k=_integer(request.top_k, "top_k", LARGEST_INTEGER),
        top_p=_number(request.top_p, "top_p", 1),
        seed=_integer(request.seed, "seed", SEEDS - 1),
        draft_tokens=_draft_tokens(request.draft_tokens, model.block_size),
        greedy_drafts=_flag(request.greedy_drafts, "greedy_drafts"),
        stop_ids=_stop_ids(request.stop_ids, model),
    )
    if checked.positions > POSITION_LIMIT:
        raise RequestError(
            f"prompt and max_new_tokens make {checked.positions} positions; expected at most {POSITION_LIMIT}."
        )
    return checked


def stop_slots(requests: Sequence[Request]) -> int:
    """Stop ids that each of these checked requests needs room for."""
    most = max(len(request.stop_ids or ()) for request in requests)
    return -(-max(most, 1) // STOP_SLOTS) * STOP_SLOTS


def sampling_of(requests: Sequence[Request], slots: int) -> Sampling:
    """The settings of checked requests as arrays on the host, stop ids padded to so many slots."""

    def column(name: str) -> np.ndarray:
        return np.array([getattr(request, name) for request in requests])

    stops = np.full((len(requests), slots), -1, np.int32)
    for row, request in zip(stops, requests, strict=True):
        row[: len(request.stop_ids or ())] = request.stop_ids or ()
    columns = {name: column(name) for name in SETTINGS if name != "stop_ids"}
    return Sampling.of(len(requests), stop_ids=stops, **columns)


def check_ids(ids: Any, vocabulary: int, what: str) -> list[int]:
    """`ids` as a list of ints.

    Raises:
        RequestError: `what` holds something that is not an id below `vocabulary`.
    """
    try:
        values = [operator.index(i) for i in ids]
        if isinstance(ids, Mapping) or any(isinstance(i, bool) for i in ids):
            raise TypeError(f"not {ids!r}")
    except TypeError as error:
        raise RequestError(f"{what}: expected a list of token ids ({error}).") from error
    for value in values:
        if not 0 <= value < vocabulary:
            raise RequestError(f"{what}: token id {value} is outside the vocabulary; expected 0 to {vocabulary - 1}.")
    return values


def check_prompt(ids: Any, vocabulary: int, what: str) -> list[int]:
    """`ids` as a list of ints.

    Raises:
        RequestError: as `check_ids`, or `what` is empty.
    """
    values = check_ids(ids, vocabulary, what)
    if not values:
        raise RequestError(f"{what} is empty; give at least one token id.")
    return values


def _integer(value: Any, name: str, largest: int | None = None) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not 0 <= value <= (largest or value):
        raise RequestError(f"{name} is {value!r}; expected an integer {_bounds(largest)}.")
    return int(value)


def _number(value: Any, name: str, largest: float | None = None) -> float:
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not real or not 0 <= value <= (largest or LARGEST_NUMBER):
        raise RequestError(f"{name} is {value!r}; expected a number {_bounds(largest)}.")
    return float(value)


def _bounds(largest: float | None) -> str:
    return "of at least 0" if largest is None else f"from 0 to {largest}"


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise RequestError(f"{name} is {value!r}; expected true or false.")
    return bool(value)


def _draft_tokens(wanted: Any, block: int) -> int:
    if wanted is None:
        return block
    wanted = _integer(wanted, "draft_tokens")
    if wanted and not block:
        raise RequestError(f"draft_tokens is {wanted}, but the model has no drafter; use 0.")
    if wanted > block:
        message = f"draft_tokens {wanted} is more than the trained block of {block}; {block} are used"
        warnings.warn(message, UserWarning, stacklevel=4)
    return min(wanted, block)


def _stop_ids(ids: Any, model: Model) -> Sequence[int]:
    return model.config.eos_token_id if ids is None else check_ids(ids, model.config.vocab_size, "stop_ids")
