"""Files of training data: JSON lines to documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax import chat
from dspark_jax.data.document import Document, Progress
from dspark_jax.data.turns import Turn, join, turns_of_dialogue
from dspark_jax.decoding.request import check_ids
from dspark_jax.errors import DsparkError, RequestError
from dspark_jax.jobs.json_lines import parse_object, read_lines
from dspark_jax.jobs.text import Text

MIN_SUPERVISED = 14  # two blocks of seven: DeepSpec's default, whatever the block
MAX_LENGTH = 4096  # DeepSpec's default

COMPLETION = ("prompt_ids", "tokens")  # among the fields of a line of `dspark generate`
KINDS = (("text",), ("ids",), ("prompt", "response"), ("prompt_ids", "response_ids"), ("messages",), COMPLETION)


@dataclass(frozen=True)
class Documents:
    """The documents of a file.

    Attributes:
        documents: in the file's order, a row's together.
        rows: lines that were read.
        truncated: documents that were longer than allowed, and were cut.
        dropped: documents that were left out, since too little of them is supervised.
    """

    documents: Sequence[Document]
    rows: int
    truncated: int
    dropped: int

    def __len__(self) -> int:
        """Documents."""
        return len(self.documents)

    def __getitem__(self, number: int) -> Document:
        """One of them."""
        return self.documents[number]

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens of every document."""
        return np.array([len(document) for document in self.documents], np.int64)


@dataclass(frozen=True)
class DocumentReader:
    """Makes documents of rows, each an object of one of these kinds:

    - `text`: all of it is supervised;
    - `ids`: token ids, supervised where `loss_mask` (0 or 1 for each) says so, or everywhere;
    - `prompt` and `response`: text; response and a closing end-of-sequence token are supervised;
    - `prompt_ids` and `response_ids`: token ids; exactly the response is supervised;
    - `messages`: a dialogue, with `tools` and `thinking` by option; the assistant's turns are supervised, their
      end-of-turn tokens included. Where thinking is on, each turn may become a document of its own: see `turns.join`;
    - a line of `dspark generate` or `dspark data regenerate`.

    Attributes:
        text: of the checkpoint.
        vocabulary: ids lie below it.
        end_id: the end-of-sequence token.
        thinking: of dialogues that do not say it.
        max_length: tokens of a document; what lies behind them is cut off.
        min_supervised: supervised tokens that a document needs, after the cut. It also needs two in a row.
    """

    text: Text
    vocabulary: int
    end_id: int
    thinking: chat.Thinking = "off"
    max_length: int = MAX_LENGTH
    min_supervised: int = MIN_SUPERVISED

    def read(self, path: Path, progress: Progress = lambda done, total: None) -> Documents:
        """The documents of a file of JSON lines; empty lines are skipped.

        Args:
            path: the file.
            progress: takes the rows done and the rows in all.

        Raises:
            RequestError: the file cannot be read or leaves nothing to learn; or a line cannot be a row, and is named.
        """
        lines = list(read_lines(path))
        found: list[Document] = []
        for done, (number, line) in enumerate(lines, start=1):
            where = f"{path} line {number}"
            row = parse_object(line, where)
            try:
                found += self.documents_of(row)
            except DsparkError as error:
                raise RequestError(f"{where}: {error}") from error
            progress(done, len(lines))
        documents = [document.cut(self.max_length) for document in found]
        kept = [document for document in documents if self._teaches(document)]
        if not kept:
            raise RequestError(
                f"{path}: none of its {len(lines)} rows has {self.min_supervised} supervised tokens among the first "
                f"{self.max_length}, two of them in a row; give more text, or allow fewer."
            )
        truncated = sum(len(document) > self.max_length for document in found)
        return Documents(kept, len(lines), truncated, len(found) - len(kept))

    def documents_of(self, row: dict[str, Any]) -> list[Document]:
        """The documents of one row, whatever their lengths.

        Raises:
            RequestError: it is of none of the kinds or of several, or holds what cannot be.
        """
        kinds = (
            [COMPLETION]
            if isinstance(row.get("tokens"), list)
            else [kind for kind in KINDS if all(field in row for field in kind)]
        )
        match kinds:
            case [("text",)]:
                return [_all_supervised(self.text.encode(_text(row, "text")))]
            case [("ids",)]:
                return [self._masked(row)]
            case [("prompt", "response")]:
                prompt, response = (self.text.encode(_text(row, field)) for field in ("prompt", "response"))
                return join([Turn(prompt, [*response, self.end_id])])
            case [("prompt_ids", "response_ids")]:
                return join([Turn(self._ids(row, "prompt_ids"), self._ids(row, "response_ids"))])
            case [("messages",)]:
                messages = chat.messages_of(row, "the dialogue")
                return join(turns_of_dialogue(messages, row.get("thinking", self.thinking), self.text))
            case [("prompt_ids", "tokens")]:
                return join([self._completed(row)])
        fields = {field for kind in KINDS for field in kind} & set(row)
        raise RequestError(
            f"expected a row of one kind: {'; '.join(' and '.join(kind) for kind in KINDS)}; "
            f"found {' and '.join(sorted(fields)) or 'none of them'}."
        )

    def _masked(self, row: dict[str, Any]) -> Document:
        document = _all_supervised(self._ids(row, "ids"))
        mask = row.get("loss_mask")
        if mask is None:
            return document
        if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
            raise RequestError("loss_mask: expected a list of 0 and 1.")
        if len(mask) != len(document):
            raise RequestError(f"loss_mask has {len(mask)} values for {len(document)} ids; expected one for each.")
        return Document(document.ids, np.array(mask, bool))

    def _completed(self, row: dict[str, Any]) -> Turn:
        if "prompt_ids" not in row:
            raise RequestError("has tokens and no prompt_ids; expected a line of `dspark generate`, which has both.")
        if row.get("finish_reason") == "not_finite":
            raise RequestError("finish_reason is 'not_finite', so that its tokens mean nothing; take the line away.")
        return Turn(self._ids(row, "prompt_ids"), self._ids(row, "tokens"))

    def _ids(self, row: dict[str, Any], field: str) -> list[int]:
        return check_ids(row[field], self.vocabulary, field)

    def _teaches(self, document: Document) -> bool:
        return bool(np.count_nonzero(document.supervised) >= self.min_supervised and document.anchors)


def _all_supervised(ids: Sequence[int]) -> Document:
    return Document(np.array(ids, np.int32), np.ones(len(ids), bool))


def _text(row: dict[str, Any], field: str) -> str:
    if not isinstance(row[field], str):
        raise RequestError(f"{field} is {row[field]!r}; expected text.")
    return str(row[field])
