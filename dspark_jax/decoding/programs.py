"""The programs that generation on the host is made of, and what they are given and checked for."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from dspark_jax.decoding.generation import Generation
from dspark_jax.decoding.loop import decode, prefill
from dspark_jax.decoding.request import KEY
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import State, initial_state, with_settings
from dspark_jax.errors import SilentDrafterError
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Setting
from dspark_jax.placement import constrain_rows


def pack(prompts: Sequence[Sequence[int]], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, capacity], zeros behind them, and their lengths, int32 [B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


@partial(jax.jit, static_argnames=("logprobs", "trace"))
def start(
    model: Model, setting: Setting, tokens: jax.Array, length: jax.Array, logprobs: bool = False, trace: bool = False
) -> State:
    """A prefilled state, compiled once for a batch size and a capacity; arguments as for `initial_state`."""
    state = constrain_rows(initial_state(model, tokens, length, logprobs, trace), setting.partition)
    return prefill(model, setting, state)


@partial(jax.jit, donate_argnames="state")
def finish(model: Model, setting: Setting, state: State, sampling: Sampling) -> State:
    """Decodes a prefilled state to its end, compiled once for a batch size and a capacity."""
    state = with_settings(state, sampling, jax.random.key(KEY))
    return decode(model, setting, constrain_rows(state, setting.partition))


def check_drafter(generation: Generation) -> None:
    """Refuses a drafter that was on and could not draft.

    Raises:
        SilentDrafterError: it was allowed to draft and never offered a finite draft, in any sequence whose target is
            sound: the taps of a broken one silence every drafter.
    """
    allowed = int(generation.counters.allowed_rounds[generation.finite].sum())
    if allowed and not np.any(generation.counters.offered):
        raise SilentDrafterError(
            f"the drafter was allowed to offer drafts in {allowed} rounds and offered none: its logits are not "
            "finite. Check the drafter's weights, or generate with draft_tokens=0."
        )
