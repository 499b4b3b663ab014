"""A domain that tiny-v4 has not seen, to fine-tune its drafter on: the C headers of the running interpreter.

Its target has learnt Python and nothing else, and stays as it is; what it makes of C is another matter than how well a
drafter foretells it. Headers lie beside most interpreters and are under the licence of the standard library.
"""

import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dspark_jax.data.files import replace
from dspark_jax.errors import CorpusError
from dspark_jax.training.tiny_v4.corpus import Corpus, SourceFile, Split, read_files, split_of

FOLDERS = ("", "cpython", "internal")  # deeper ones, and others, hold other people's headers
_LEFT_OUT = ("pyconfig.h", "dynamic_annotations.h")  # what a build wrote about its machine; another licence
_TABLE = "_generated.h"  # ends the names of long lists of one pattern

PASSAGE_CHARACTERS, PROMPT_CHARACTERS = 448, 112  # about 256 and 64 tokens of tiny-v4
TRAINING_PASSAGES, HELD_OUT_PROMPTS = 384, 64  # so few that two CPU cores answer and learn them in minutes


def collect(include: Path | None = None) -> Corpus:
    """Reads the headers.

    Args:
        include: a folder of headers; that of the running interpreter if None.

    Raises:
        CorpusError: it holds none.
    """
    include = include or Path(sysconfig.get_path("include"))
    paths = sorted(
        path.relative_to(include).as_posix() for folder in FOLDERS for path in (include / folder).glob("*.h")
    )
    wanted = [path for path in paths if path not in _LEFT_OUT and not path.endswith(_TABLE)]
    if not wanted:
        raise CorpusError(
            f"{include}: holds no headers of Python; install them (such as the package python3-dev), run an "
            "interpreter that brings them (uv's does), or name their folder with --include."
        )
    return read_files(include, wanted, side_of)


def side_of(path: str) -> Split:
    """The side of a header; `object.h`, `cpython/object.h` and `internal/pycore_object.h` are on the same."""
    return split_of(PurePosixPath(path).stem.removeprefix("pycore_"))


def write(corpus: Corpus, out: Path) -> dict[str, Any]:
    """Writes the files of a fine-tuning into a folder: JSON lines, for the commands of `dspark`.

    - `text.jsonl`: passages of the train side, to train on as they are;
    - `prompts.jsonl`: their beginnings, for `dspark data regenerate`;
    - `held-out.jsonl`: beginnings of passages of the other sides, for `dspark evaluate`.

    Returns:
        Where the text came from, and how many lines each file has.
    """
    train = spread(_passages(file for file in corpus.files if file.split == "train"), TRAINING_PASSAGES)
    held_out = spread(_passages(file for file in corpus.files if file.split != "train"), HELD_OUT_PROMPTS)
    files = {
        "text.jsonl": [{"id": name, "text": text} for name, text in train],
        "prompts.jsonl": _prompts(train),
        "held-out.jsonl": _prompts(held_out),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        replace(out / name, ((json.dumps(row) + "\n").encode() for row in rows))
    source = f"C headers of {platform.python_implementation()} {platform.python_version()}"
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
