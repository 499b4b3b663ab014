"""One token sequence to learn from, and collections of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark_jax.data.example import Features

Progress = Callable[[int, int], None]
"""Takes how much is done, and of how much."""


@dataclass(frozen=True, eq=False)
class Document:
    """One token sequence.

    Attributes:
        ids: int32 [n].
        supervised: bool [n], tokens that the drafter learns to predict.
        features: of the target, bfloat16 [n, taps_width] and [n, d]; None where they are not known yet.
    """

    ids: np.ndarray
    supervised: np.ndarray
    features: Features | None = None

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)

    def cut(self, length: int) -> "Document":
        """Its first `length` tokens, without features."""
        return Document(self.ids[:length], self.supervised[:length])

    @property
    def anchors(self) -> int:
        """Tokens that a block can start from: supervised, and their successor, too (DeepSpec's rule)."""
        return int(np.count_nonzero(self.supervised[:-1] & self.supervised[1:]))


class Corpus(Protocol):
    """Documents by number, in memory or in a cache on disk."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens of every document, known without reading any."""

    def __len__(self) -> int:
        """N."""

    def __getitem__(self, number: int, /) -> Document:
        """One of them."""
