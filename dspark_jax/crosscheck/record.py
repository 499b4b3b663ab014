"""A record of the PyTorch path: tensors under the names that `tests/golden/*/README.md` lists."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.safetensors import SafetensorsFile
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.request import check_prompt
from dspark_jax.errors import RequestError

INPUTS = re.compile(
    r"exact/(prompt_ids|decode/forced_ids|short/prompt_ids|tiny/(prompt|forced)_ids|greedy/prompt_ids"
    r"|draft/(start_pos|anchor_ids)|loop\w*/(prompt_ids|start_pos))|ops/x"
)
"""Keys that are replayed rather than compared."""

LAYERS = "inference/short/hc_streams"
"""The one key of `inference/` that is judged: streams after each layer in official numerics."""

PROMPT_ALONE = ("main", "short", "tiny")
"""Sequences that say something even if nothing follows their prompt."""


class Record:
    """Key -> array, read on demand."""

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        """Opens a record that belongs to a checkpoint with this configuration.

        Raises:
            CheckpointError: the file cannot be read or is damaged.
        """
        self._file = SafetensorsFile(path)
        self._config = config
        self.path = Path(path)
        self.keys = tuple(sorted(self._file.tensors))

    def __contains__(self, key: str) -> bool:
        return key in self._file.tensors

    def __getitem__(self, key: str) -> np.ndarray:
        return np.array(self._file.read(key))

    def ids(self, key: str) -> list[int]:
        """Token ids, checked against the vocabulary.

        Raises:
            RequestError: an id is outside the vocabulary, or there is none.
        """
        return check_prompt(self[key].ravel().tolist(), self._config.vocab_size, f"{self.path}: {key}")

    def positions(self, key: str, below: int) -> list[int]:
        """Positions in a sequence.

        Raises:
            RequestError: one is not in 0 ... below-1.
        """
        values = [int(value) for value in self[key].ravel()]
        for value in values:
            if not 0 <= value < below:
                raise RequestError(f"{self.path}: {key} holds position {value}; expected 0 to {below - 1}.")
        return values

    def group(self, prefix: str) -> bool:
        """Whether any key lies below `prefix/`."""
        return any(key.startswith(f"{prefix}/") for key in self.keys)

    def matching(self, pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
        """Keys that match a regular expression as a whole, with the match."""
        return ((key, match) for key in self.keys if (match := re.fullmatch(pattern, key)))


@dataclass(frozen=True)
class Run:
    """A token sequence of the record: a prompt and what follows it.

    Attributes:
        prompt: token ids.
        rest: ids fed or emitted after the prompt.
    """

    prompt: list[int]
    rest: list[int]

    @property
    def ids(self) -> list[int]:
        """All of it."""
        return self.prompt + self.rest


def runs(record: Record) -> dict[str, Run]:
    """The sequences that a record holds whole, by the prefix of their keys; `main` is the one at the top level.

    Raises:
        RequestError: an id is outside the vocabulary.
    """
    places = {
        "main": ("exact/prompt_ids", "exact/decode/forced_ids"),
        "short": ("exact/short/prompt_ids", ""),
        "tiny": ("exact/tiny/prompt_ids", "exact/tiny/forced_ids"),
        "greedy": ("exact/greedy/prompt_ids", "exact/greedy/tokens"),
    }
    for _, match in record.matching(r"exact/(loop\w*)/prompt_ids"):
        places[match[1]] = (f"exact/{match[1]}/prompt_ids", f"exact/{match[1]}/stream")
    found = {}
    for name, (prompt, rest) in places.items():
        fed = rest in record
        if prompt in record and (fed or name in PROMPT_ALONE):
            found[name] = Run(record.ids(prompt), record.ids(rest) if fed else [])
    return found
