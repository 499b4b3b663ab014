"""The text that tiny-v4 learns from: the source files of the running interpreter's standard library.

They are many, well written, under one permissive licence (PSF), and on every machine that can run this package.
"""

import ast
import hashlib
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

# What is no language to learn: other people's packages, generated tables of characters, prose in one string literal, a
# second copy of the tokenizer and of old grammars, and what a build wrote about its own machine.
_LEFT_OUT = re.compile(
    r"(site-packages|encodings|pydoc_data|lib2to3|test/test_lib2to3|config-[^/]*|__pycache__)/"
    r"|(html/entities|stringprep|_sysconfigdata[^/]*)[.]py$"
)
_SHARES = {"train": 0.9, "validation": 0.05, "test": 0.05}
_SALT = "tiny-v4"  # of the hash; fixed, so that a file never changes sides


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus.

    Attributes:
        path: below the library's folder, with forward slashes.
        text: its contents.
        split: which side it is on.
    """

    path: str
    text: str
    split: Split


@dataclass(frozen=True)
class Corpus:
    """The files in the order of their paths, and what they were."""

    files: tuple[SourceFile, ...]

    def texts(self, split: Split) -> list[str]:
        """The texts of one side."""
        return [file.text for file in self.files if file.split == split]

    @property
    def provenance(self) -> dict[str, str | int]:
        """Where the text comes from, and a digest of all paths and texts, to tell whether two corpora are one."""
        digest = hashlib.sha256()
        for file in self.files:
            for part in (file.path, file.text):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        return {
            "source": f"standard library of {platform.python_implementation()} {platform.python_version()}",
            "licence": "PSF-2.0",
            "files": len(self.files),
            "sha256": digest.hexdigest(),
        }


def collect(library: Path | None = None) -> Corpus:
    """Reads the corpus.

    Files that are no UTF-8, empty ones, and second copies are left out.

    Args:
        library: a folder of sources; the running interpreter's standard library if None.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py"))
    return read_files(library, (path for path in paths if not _LEFT_OUT.match(path)), split_of)


def read_files(folder: Path, paths: Iterable[str], side_of: Callable[[str], Split]) -> Corpus:
    """The files at paths below a folder, but for those that are no UTF-8, empty, or a second copy of one."""
    texts: dict[str, str] = {}  # text -> the first path that has it
    for path in paths:
        text = _read(folder / path)
        if text and text.strip():
            texts.setdefault(text, path)
    return Corpus(tuple(SourceFile(path, text, side_of(path)) for text, path in texts.items()))


def split_of(path: str) -> Split:
    """The side of a file, by a hash of its family, so that a module and its tests are on the same side.

    `_pydecimal.py`, `decimal.py` and `test/test_decimal.py` repeat each other; so do the files of a package.
    """
    position = int.from_bytes(hashlib.sha256(f"{_SALT} {family(path)}".encode()).digest()[:4], "big") / 2**32
    for split in SPLITS:
        position -= _SHARES[split]
        if position < 0:
            return split
    return "train"


def family(path: str) -> str:
    """The module that a file belongs to, tests them or implements them: "test/test_json/test_decode.py" -> "json"."""
    parts = PurePosixPath(path).parts
    first = parts[1] if parts[0] == "test" and len(parts) > 1 else parts[0]
    return re.fullmatch(r"_*(?:test_)?_*(?:py)?_*(.*?)(?:tester)?(?:[.]py)?", first)[1]  # type: ignore[index]


def beginnings(texts: Iterable[str], shortest: int = 200) -> Iterator[str]:
    """The sources of functions and classes at the top of a file, from the keyword on, those of some length.

    A model that is shown the first tokens of one has something to go on and something left to say. Files that this
    interpreter cannot parse are passed over.
    """
    for text in texts:
        for node in _definitions(text):
            source = ast.get_source_segment(text, node) or ""
            if len(source) >= shortest:
                yield source


def _definitions(text: str) -> list[ast.stmt]:
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return []
    return [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
