"""JSON, one value a line."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_jax.errors import RequestError


def to_line(value: Any) -> str:
    """A value as one line without its end; what JSON has no number for (NaN, infinity) becomes null."""
    return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def parse_object(line: str, where: str) -> dict[str, Any]:
    """A line's JSON object.

    Raises:
        RequestError: it is something else; the message begins with `where`.
    """
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, and can never be written
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: is no JSON ({error}); expected one object a line.") from error
    if not isinstance(row, dict):
        raise RequestError(f"{where}: is {type(row).__name__}; expected an object.")
    return row


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers.

    Raises:
        RequestError: the file cannot be read, or is not UTF-8.
    """
    try:
        whole = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path}: cannot be read ({reason}); name a file of JSON lines.") from error
    return ((number, line) for number, line in enumerate(whole.split("\n"), start=1) if line.strip())
