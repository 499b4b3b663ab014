"""The real decoding loop around a target and a drafter that are look-up tables: exact, and cheap for 10^5 sequences."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import QUICK

from dspark_jax.decoding import loop, state
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.model.cache import DrafterCache, TargetCache


class Tables:
    """A target `logits[p mod M, t]` of token t at position p, and a drafter `logits[p mod M, t, slot]` of anchor t, to
    which `markov[t]` of the token before is added.

    Attributes:
        target: float32 [M, V, V].
        drafter: float32 [M, V, g, V].
        markov: float32 [V, V].
        confidence: float32 [M, V, g] and [V], confidence logits made like the drafter's; the loop is then traced.

    The loop is compiled once for a batch size, with what is patched at that moment.
    """

    def __init__(
        self,
        target: np.ndarray,
        drafter: np.ndarray,
        markov: np.ndarray,
        confidence: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.target, self.drafter, self.markov = map(jnp.asarray, (target, drafter, markov))
        self.confidence = confidence and tuple(map(jnp.asarray, confidence))
        config = SimpleNamespace(vocab_size=target.shape[-1])
        self.model: Any = SimpleNamespace(
            config=config,
            numerics=None,
            vocabulary=None,
            target=object(),
            drafter=object(),
            block_size=drafter.shape[2],
            step_width=1 + drafter.shape[2],
        )
        setting = SimpleNamespace(partition=None)
        self._loop = jax.jit(lambda begun: loop.decode(self.model, setting, begun), compiler_options=QUICK)

    def decode(self, tokens: np.ndarray, lengths: np.ndarray, sampling: Sampling, key: int = 0) -> state.State:
        """The state when every sequence is done."""
        with self._in_place_of_the_model():
            wanted = {"logprobs": True, "trace": self.confidence is not None}
            begin = state.initial_state(self.model, jnp.asarray(tokens), jnp.asarray(lengths), **wanted)
            return self._loop(state.with_settings(begin, sampling, jax.random.key(key)))

    @contextmanager
    def _in_place_of_the_model(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "target_cache", lambda *_: TargetCache(()))
            patch.setattr(state, "drafter_cache", lambda *_: DrafterCache(()))
            patch.setattr(loop, "target_step", self._target_step)
            patch.setattr(loop, "lm_logits", lambda _, logits: logits)
            patch.setattr(loop, "draft_step", self._draft_step)
            patch.setattr(loop, "remember", lambda _, cache, *rest: cache)
            yield

    def _target_step(self, weights: Any, vocabulary: Any, rows: Any, cache: TargetCache, setting: Any) -> Any:
        logits = self.target[rows.positions % len(self.target), rows.ids]
        return SimpleNamespace(hidden=logits, taps=None, cache=cache)

    def _draft_step(self, weights: Any, vocabulary: Any, cache: Any, anchor: Any, position: Any, *rest: Any) -> Any:
        choose = rest[-1]
        base = self.drafter[position % len(self.drafter), anchor]
        ids, logits = [anchor], []
        for slot in range(base.shape[1]):
            logits.append(base[:, slot] + self.markov[ids[-1]])
            ids.append(choose(logits[-1], jnp.int32(slot)))
        confidence = None
        if self.confidence:
            place, before = self.confidence
            confidence = place[position % len(place), anchor] + before[jnp.stack(ids[:-1], axis=1)]
        return SimpleNamespace(ids=jnp.stack(ids[1:], axis=1), logits=jnp.stack(logits, axis=1), confidence=confidence)
