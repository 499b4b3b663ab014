"""A record of the PyTorch path: tensors under the names that `tests/golden/*/README.md` lists."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.safetensors import SafetensorsFile
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.generate import check_ids
from dspark_jax.errors import CheckpointError

INPUTS = re.compile(
    r"exact/(prompt_ids|decode/forced_ids|short/prompt_ids|tiny/(prompt|forced)_ids|greedy/prompt_ids"
    r"|draft/(start_pos|anchor_ids)|loop\w*/(prompt_ids|start_pos))|ops/x"
)
"""Keys that are replayed rather than compared."""


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
            CheckpointError: the record lacks the key.
            RequestError: an id is outside the vocabulary, or there is none.
        """
        if key not in self:
            raise CheckpointError(f"{self.path}: {key} is missing, and other keys of its group need it to be replayed.")
        return check_ids(self[key].ravel().tolist(), self._config.vocab_size, f"{self.path}: {key}")

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
    """The sequences that a record holds, by the prefix of their keys; `main` is the one at the top level."""
    found = {}
    if "exact/prompt_ids" in record:
        forced = record.ids("exact/decode/forced_ids") if "exact/decode/forced_ids" in record else []
        found["main"] = Run(record.ids("exact/prompt_ids"), forced)
    if record.group("exact/short"):
        found["short"] = Run(record.ids("exact/short/prompt_ids"), [])
    if record.group("exact/tiny"):
        forced = record.ids("exact/tiny/forced_ids") if "exact/tiny/forced_ids" in record else []
        found["tiny"] = Run(record.ids("exact/tiny/prompt_ids"), forced)
    if record.group("exact/greedy"):
        found["greedy"] = Run(record.ids("exact/greedy/prompt_ids"), record.ids("exact/greedy/tokens"))
    for _, match in record.matching(r"exact/(loop\w*)/prompt_ids"):
        name = match[1]
        found[name] = Run(record.ids(f"exact/{name}/prompt_ids"), record.ids(f"exact/{name}/stream"))
    return found
