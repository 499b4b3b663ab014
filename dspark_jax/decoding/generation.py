"""Generation as a pure function of arrays, to be called inside one's own `jax.jit`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.config import ModelConfig
from dspark_jax.decoding.loop import PREFILL_CHUNK, decode, prefill
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import LogProbs, State, initial_state, pick, with_settings
from dspark_jax.decoding.statistics import Counters
from dspark_jax.decoding.trace import Trace
from dspark_jax.errors import RequestError, check_count
from dspark_jax.model.model import Model
from dspark_jax.placement import constrain_rows, partition_on
from dspark_jax.sharding import automatic

GenerateFunction = Callable[[Model, jax.Array, jax.Array, Sampling, jax.Array], "Generation"]
"""(weights, prompt ids int32 [P, T], prompt lengths int32 [P], sampling of P * samples rows, key) -> Generation."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """What a batch of R sequences has become.

    Attributes:
        tokens: int32 [R, S], prompt and completion at their positions; behind them what the prompts were padded with.
        prompt_length: int32 [R].
        length: int32 [R], prompt and completion together, a stop id included if one ended it.
        stopped: bool [R], whether a stop id ended it, not the budget.
        finite: bool [R], false if the target's logits were not; what follows then means nothing.
        logprobs: of the new tokens, if they were asked for.
        trace: what each round did, if it was asked for.
        counters: what each sequence took.
    """

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    stopped: jax.Array
    finite: jax.Array
    logprobs: LogProbs | None
    trace: Trace | None
    counters: Counters

    @property
    def is_new(self) -> jax.Array:
        """bool [R, S], the positions of the completion."""
        position = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return (position >= self.prompt_length[:, None]) & (position < self.length[:, None])

    @classmethod
    def of(cls, state: State) -> "Generation":
        """What a state holds of interest."""
        return cls(
            tokens=state.tokens,
            prompt_length=state.prompt_length,
            length=state.length,
            stopped=state.stopped,
            finite=state.finite,
            logprobs=state.logprobs,
            trace=state.trace,
            counters=state.counters,
        )


def generate_fn(
    config: ModelConfig,
    capacity: int,
    *,
    mesh: Mesh | None = None,
    samples: int = 1,
    logprobs: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> GenerateFunction:
    """A pure function that completes a batch of prompts, drafting and verifying on the device.

    It is `run(weights, prompt_ids, prompt_lengths, sampling, key) -> Generation`, jitted, and may be called inside
    another `jit`:

    * weights: a `Model` of this config; its numerics decide how activations are rounded.
    * prompt_ids: int32 [P, T] with T at most the capacity, padded behind each prompt with anything.
    * prompt_lengths: int32 [P], 1 to T.
    * sampling: `Sampling` of R = P * samples rows; the rows of a prompt lie together.
    * key: a random key, from which the rows' seeds make theirs. `generate` uses `jax.random.key(0)`.

    Being traced, it cannot check values: ids outside the vocabulary, lengths outside 1 to T and settings outside their
    ranges give rows that mean nothing.

    Args:
        config: `model.config`.
        capacity: positions; a row whose prompt and budget need more ends there.
        mesh: the one that the weights were loaded onto; the rows are split over its axis "data". None for one device,
            and inside a `shard_map` of your own.
        samples: rows that go on from each prompt, which is prefilled once.
        logprobs: return log-probabilities.
        chunk: rows of a prefill step.

    Raises:
        RequestError: a size below 1. The function raises it, too, when traced: weights of another config or without a
            target, prompts longer than the capacity, or leading axes that do not fit together.
    """
    for name, value in (("capacity", capacity), ("samples", samples), ("chunk", chunk)):
        check_count(value, name)

    mesh = automatic(mesh)
    partition = partition_on(mesh, config) if mesh else None

    @jax.jit
    def run(
        weights: Model, prompt_ids: jax.Array, prompt_lengths: jax.Array, sampling: Sampling, key: jax.Array
    ) -> Generation:
        _check_call(weights, config, capacity, samples, prompt_ids, prompt_lengths, sampling)
        setting = weights.setting(capacity, partition)
        tokens = jnp.pad(prompt_ids.astype(jnp.int32), [(0, 0), (0, capacity - prompt_ids.shape[1])])
        state = initial_state(weights, tokens, prompt_lengths.astype(jnp.int32), logprobs)
        state = prefill(weights, setting, constrain_rows(state, partition), chunk)
        if samples > 1:
            state = pick(state, jnp.repeat(jnp.arange(len(tokens)), samples))
        state = constrain_rows(with_settings(state, sampling, key), partition)
        return Generation.of(decode(weights, setting, state))

    return run


def _check_call(
    weights: Model,
    config: ModelConfig,
    capacity: int,
    samples: int,
    prompt_ids: jax.Array,
    prompt_lengths: jax.Array,
    sampling: Sampling,
) -> None:
    if weights.config != config:
        raise RequestError("the weights are of another config than generate_fn was made for; make one for theirs.")
    if weights.target is None:
        raise RequestError("generation needs a target, and these weights are the drafter alone.")
    if prompt_ids.ndim != 2 or prompt_lengths.shape != prompt_ids.shape[:1]:
        raise RequestError(
            f"prompt_ids is {list(prompt_ids.shape)} and prompt_lengths {list(prompt_lengths.shape)}; expected "
            "[prompts, tokens] and [prompts]."
        )
    if prompt_ids.shape[1] > capacity:
        raise RequestError(f"prompt_ids has room for {prompt_ids.shape[1]} tokens; the capacity is {capacity}.")
    found, rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(sampling)}, len(prompt_ids) * samples
    if found != {(rows,)}:
        raise RequestError(
            f"sampling has settings for {sorted(map(list, found))} rows; expected {rows}: {len(prompt_ids)} prompts "
            f"and {samples} samples of each."
        )
