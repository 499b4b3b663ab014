"""Rounds of many completions as columns, the table that all figures of an evaluation are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from dspark_jax.decoding.trace import Round


class Traced(NamedTuple):
    """The rounds of one completion, and whose they are.

    Attributes:
        prompt: number of the prompt; its samples share it.
        category: kind of the prompt; "" for none.
        rounds: in their order.
    """

    prompt: int
    category: str
    rounds: Sequence[Round]


@dataclass(frozen=True)
class RoundLog:
    """N rounds with at most g drafts each; see `Round` for what counts.

    Attributes:
        prompt: int32 [N], number of the prompt.
        category: str [N], kind of the prompt; "" for none.
        begin: int32 [N], new tokens of the completion that were committed before the round.
        offered: int32 [N].
        accepted: int32 [N].
        tokens: int32 [N].
        confidence: float32 [N, g]; NaN behind the offered drafts.
    """

    prompt: np.ndarray
    category: np.ndarray
    begin: np.ndarray
    offered: np.ndarray
    accepted: np.ndarray
    tokens: np.ndarray
    confidence: np.ndarray

    @classmethod
    def of(cls, completions: Iterable[Traced], block: int) -> "RoundLog":
        """The rounds of some completions, which offered at most `block` drafts each."""
        rows = [(traced, one) for traced in completions for one in traced.rounds]
        confidence = np.full((len(rows), block), np.nan, np.float32)
        for values, (_, one) in zip(confidence, rows, strict=True):
            values[: one.offered] = one.confidence

        def column(name: str) -> np.ndarray:
            return np.array([getattr(one, name) for _, one in rows], np.int32)

        return cls(
            prompt=np.array([traced.prompt for traced, _ in rows], np.int32),
            category=np.array([traced.category for traced, _ in rows], np.str_),
            begin=column("begin"),
            offered=column("offered"),
            accepted=column("accepted"),
            tokens=column("tokens"),
            confidence=confidence,
        )

    @property
    def block(self) -> int:
        """g."""
        return self.confidence.shape[1]

    def __len__(self) -> int:
        """N."""
        return len(self.prompt)

    def where(self, chosen: np.ndarray) -> "RoundLog":
        """The rounds at bool [N]."""
        return RoundLog(*(getattr(self, field.name)[chosen] for field in fields(self)))
