"""Anonymous host memory of this process: no file backs it, so the kernel cannot drop it as it can mapped files."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS_FILE = Path("/proc/self/status")
INTERVAL = 0.002  # seconds between two looks; touching a gigabyte for the first time takes a hundred times longer


def anonymous_bytes() -> int | None:
    """Resident anonymous memory now; None where the system does not tell."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB$", STATUS_FILE.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class Peak:
    """The most anonymous memory seen, above what there was at first.

    Attributes:
        bytes: None where the system does not tell.
    """

    def __init__(self) -> None:
        self._before = anonymous_bytes()
        self.bytes: int | None = None if self._before is None else 0

    def look(self) -> None:
        """Takes note of the memory held now."""
        now = anonymous_bytes()
        if now is not None and self._before is not None and self.bytes is not None:
            self.bytes = max(self.bytes, now - self._before)


@contextmanager
def anonymous_peak() -> Iterator[Peak]:
    """Inside, a thread looks every few milliseconds; the interpreter and libraries loaded before are not counted."""
    peak, over = Peak(), threading.Event()

    def watch() -> None:
        while not over.wait(INTERVAL):
            peak.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
        peak.look()
    finally:
        over.set()
        thread.join()
