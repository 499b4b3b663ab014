"""Files that are there whole or not at all."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a kill leaves the old one or the new one.

    Raises:
        OSError: the disk refuses.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON value like `write_text`; every number must be finite.

    Raises:
        OSError: the disk refuses.
        ValueError: a number is not finite.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
