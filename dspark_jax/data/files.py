"""Files that are there whole or not at all."""

import os
from collections.abc import Iterable
from pathlib import Path


def replace(path: Path, content: Iterable[bytes]) -> None:
    """Writes a file beside and renames it."""
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
