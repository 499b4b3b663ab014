"""A domain that tiny-v4 has not seen, to fine-tune its drafter on: the standard library's tables of character sets.

They were left out of the corpus, lie on every machine under the same licence, and look like no other text there. The
target stays as it is: what it makes of them is another matter than how well a drafter foretells it.
"""

import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.data.files import replace
from dspark_jax.errors import CorpusError
from dspark_jax.training.tiny_v4.corpus import Corpus, SourceFile, Split, read_files, split_of

TABLE = "decoding_table"  # what those modules of `encodings` hold that are one

PASSAGE_CHARACTERS, PROMPT_CHARACTERS = 700, 130  # about 384 and 64 tokens of tiny-v4
TRAINING_PASSAGES, HELD_OUT_PROMPTS = 600, 64  # so few that two CPU cores learn them in minutes


def collect(encodings: Path | None = None) -> Corpus:
    """Reads the tables.

    Args:
        encodings: the folder of the package; that of the running interpreter if None.

    Raises:
        CorpusError: it holds none.
    """
    encodings = encodings or Path(sysconfig.get_path("stdlib")) / "encodings"
    paths = sorted(path.name for path in encodings.glob("*.py"))
    tables = [path for path in paths if TABLE in (encodings / path).read_text(encoding="utf-8", errors="replace")]
    if not tables:
        raise CorpusError(f"{encodings}: holds no tables of character sets; name the folder `encodings` of a Python.")
    return read_files(encodings, tables, side_of)


def side_of(path: str) -> Split:
    """The side of a table."""
    return split_of(f"encodings_{path}")


def write(corpus: Corpus, out: Path) -> dict[str, Any]:
    """Writes the files of a fine-tuning into a folder: JSON lines, for the commands of `dspark`.

    - `text.jsonl`: passages of the train side, to train on as they are;
    - `prompts.jsonl`: their beginnings, for `dspark data regenerate`;
    - `held-out.jsonl`: beginnings of passages of the other sides, for `dspark evaluate`;
    - `held-out-text.jsonl`: those passages.

    Returns:
        Where the text came from, and how many lines each file has.
    """
    train = spread(_passages(file for file in corpus.files if file.split == "train"), TRAINING_PASSAGES)
    held_out = spread(_passages(file for file in corpus.files if file.split != "train"), HELD_OUT_PROMPTS)
    files = {
        "text.jsonl": [{"id": name, "text": text} for name, text in train],
        "prompts.jsonl": _prompts(train),
        "held-out.jsonl": _prompts(held_out),
        "held-out-text.jsonl": [{"id": name, "text": text} for name, text in held_out],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        replace(out / name, ((json.dumps(row) + "\n").encode() for row in rows))
    source = f"character sets of {platform.python_implementation()} {platform.python_version()}"
    return corpus.provenance | {"source": source, "lines": {name: len(rows) for name, rows in files.items()}}


def pieces(text: str, characters: int) -> Iterator[str]:
    """Runs of whole lines, each ended by the line that makes it long enough; a rest that is too short is left out."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= characters:
            yield piece
            piece = ""


def spread[T](items: Sequence[T], count: int) -> list[T]:
    """`count` of the items at equal distances, or all of fewer."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def _passages(files: Iterator[SourceFile]) -> list[tuple[str, str]]:
    """Name and text of each."""
    return [
        (f"{file.path}-{number}", passage)
        for file in files
        for number, passage in enumerate(pieces(file.text, PASSAGE_CHARACTERS))
    ]


def _prompts(passages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"id": name, "prompt": next(pieces(text, PROMPT_CHARACTERS))} for name, text in passages]
