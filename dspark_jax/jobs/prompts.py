"""A file of prompts, read and checked line by line before anything is loaded."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax import chat
from dspark_jax.decoding.request import SETTINGS, Request, check_request
from dspark_jax.errors import DsparkError, RequestError, check_count
from dspark_jax.jobs.json_lines import parse_object, read_lines
from dspark_jax.jobs.text import Text
from dspark_jax.model.model import Model

PROMPTS = ("prompt", "prompt_ids", "messages")
FIELDS = ("id", *PROMPTS, "tools", "thinking", "category", "samples", *SETTINGS)

Key = tuple[str | int, int]
"""A line's id and the number of the sample."""


@dataclass(frozen=True)
class Job:
    """One completion that a file asks for.

    Attributes:
        key: the line's id and the number of the sample.
        request: checked.
        thinking: that of a dialogue, None for a plain prompt.
        category: what kind of prompt it is, if the line says so.
    """

    key: Key
    request: Request
    thinking: chat.Thinking | None
    category: str | None

    def settings(self) -> dict[str, Any]:
        """What the completion depends on of its own, and its category, as JSON values."""
        prompt = np.array(self.request.prompt, np.int32).tobytes()
        known = {name: getattr(self.request, name) for name in SETTINGS}
        return known | {
            "stop_ids": list(self.request.stop_ids or ()),
            "thinking": self.thinking,
            "category": self.category,
            "prompt_tokens": len(self.request.prompt),
            "prompt_sha256": hashlib.sha256(prompt).hexdigest()[:16],
        }


@dataclass(frozen=True)
class PromptReader:
    """Makes jobs of what a person wrote.

    A row is an object with one of `prompt` (text), `prompt_ids` or `messages` (with `tools` and `thinking` by option).
    `samples` and the settings of `Request` may stand beside them and replace the reader's; `category` names the kind.

    Attributes:
        settings: of rows that have none of their own, by the names of `Request`.
        samples: completions of each row; see `Request.sample` for their seeds.
        thinking: of dialogues.
        text: of the checkpoint.
        model: abstract or not; tells the vocabulary and the block.
    """

    settings: Mapping[str, Any]
    samples: int
    thinking: chat.Thinking
    text: Text
    model: Model

    def read(self, path: Path) -> tuple[list[Job], list[str]]:
        """Everything that a file of JSON lines asks for; each has an `id`, empty ones are skipped.

        Returns:
            The jobs in the file's order, the samples of a line together; and the names of fields that mean nothing.

        Raises:
            RequestError: the file cannot be read, or a line of it cannot be; the message names it.
        """
        jobs: list[Job] = []
        ignored: dict[str, None] = {}
        for where, row in read_rows(path):
            ignored |= dict.fromkeys(field for field in row if field not in FIELDS)
            try:
                jobs += self.jobs_of(row["id"], row)
            except DsparkError as error:
                raise RequestError(f"{where}: {error}") from error
        if not jobs:
            raise RequestError(f'{path}: holds no prompt; expected JSON lines like {{"id": 1, "prompt": "Hello"}}.')
        return jobs, list(ignored)

    def jobs_of(self, name: str | int, row: dict[str, Any]) -> list[Job]:
        """The samples of one row.

        Raises:
            RequestError: none of the three kinds of prompt, or more than one; or a value that cannot be.
        """
        given = [field for field in PROMPTS if field in row]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"expected one of {', '.join(PROMPTS)}; found {found}.")
        [kind] = given
        thinking, samples = row.get("thinking", self.thinking), check_count(row.get("samples", self.samples), "samples")
        category = _category(row["category"]) if "category" in row else None
        own = {setting: row[setting] for setting in SETTINGS if setting in row}
        request = Request(self._prompt(kind, row, thinking), **{**self.settings, **own})
        request = check_request(request, self.model, kind)
        answered = thinking if kind == "messages" else None
        return [Job((name, number), request.sample(number), answered, category) for number in range(samples)]

    def _prompt(self, kind: str, row: dict[str, Any], thinking: chat.Thinking) -> Sequence[int]:
        if kind == "messages":
            return self.text.encode_messages(chat.messages_of(row, "the dialogue"), thinking)
        if kind == "prompt_ids":
            return row[kind]
        if not isinstance(row[kind], str):
            raise RequestError(f"prompt is {row[kind]!r}; expected text, or token ids as prompt_ids.")
        return self.text.encode(row[kind])


def _category(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise RequestError(f'category is {value!r}; expected the name of a kind of prompts, such as "maths".')
    return value.strip()


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file of JSON lines, each with an `id` of its own, and what sentences call them.

    Raises:
        RequestError: the file cannot be read, or a line is no row; the message names it.
    """
    lines_of: dict[str | int, int] = {}
    for number, line in read_lines(path):
        where = f"{path} line {number}"
        row = parse_object(line, where)
        name = row.get("id")
        if name is None:
            raise RequestError(f"{where}: has no id; give it a text or an integer, by which the output names it.")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise RequestError(f"{where}: id is {name!r}; expected a text or an integer that names the line.")
        if name in lines_of:
            raise RequestError(f"{where}: id {name!r} is that of line {lines_of[name]}; give each line its own.")
        lines_of[name] = number
        yield where, row
