"""The output of a job: one line a completion, written whole when its sequence has finished.

A killed job has lost the sequences that were running and nothing else. A completion depends on its own line, the
settings, the batch size and the capacity, so a second start adds what the first would have written.
"""

import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.trace import Round
from dspark_jax.errors import RequestError
from dspark_jax.jobs.json_lines import parse_object, to_line
from dspark_jax.jobs.prompts import Job, Key
from dspark_jax.jobs.text import Text

LINE_START = b'{"id": '  # of what `record_of` makes: by it a torn line is known as ours


def record_of(job: Job, completion: Completion, text: Text, common: dict[str, Any]) -> dict[str, Any]:
    """The output line of a finished job; `common` are settings that it shares with all others."""
    name, sample = job.key
    record: dict[str, Any] = {
        "id": name,
        "sample": sample,
        "prompt_ids": list(job.request.prompt),
        "tokens": completion.tokens,
        "text": text.decode(completion.tokens),
        "finish_reason": completion.finish_reason,
        "statistics": completion.statistics.to_dict(),
        "settings": job.settings() | common,
    }
    if job.thinking is not None:
        answer = text.answer(completion.tokens, job.thinking)
        record["message"] = answer.to_message()
        if completion.finish_reason == "stop":
            record["finish_reason"] = answer.finish_reason
    if completion.target_logprobs is not None:
        record["target_logprobs"] = completion.target_logprobs
        record["drawn_logprobs"] = completion.drawn_logprobs
    if completion.rounds is not None:
        record["rounds"] = {name: [getattr(one, name) for one in completion.rounds] for name in Round._fields}
    return record


class Results:
    """The output file of a job, opened to go on: locked against a second writer, a torn last line cut off.

    Attributes:
        path: the file.
        common: settings that all completions of the job share: what they depend on besides their own.
        settings: of the completions that are there, by key.
    """

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        """Opens or creates the file.

        Raises:
            RequestError: another process writes it, or it holds lines that are none of this package's.
        """
        self.path, self.common = path, common
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise RequestError(f"{path}: cannot be opened ({error.strerror}); name another --out.") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise RequestError(f"{path}: is no regular file, so a job could not go on with it; name another --out.")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise RequestError(
                f"{path}: is being written by another job; wait for it, or name another --out."
            ) from error
        try:
            self.settings = self._read()
        except RequestError:
            os.close(self._file)
            raise

    def __enter__(self) -> "Results":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file, which unlocks it."""
        os.close(self._file)

    def _read(self) -> dict[Key, dict[str, Any]]:
        """What is there; cuts off a torn last line, but of no file that another program has written."""
        *lines, torn = self.path.read_bytes().split(b"\n")
        settings = {}
        for number, line in enumerate(lines, start=1):
            where = f"{self.path} line {number}"
            record = parse_object(line.decode(errors="replace"), where) if line.startswith(LINE_START) else {}
            match record:
                case {"id": str() | int() as name, "sample": int() as sample, "settings": dict() as known}:
                    settings[name, sample] = known
                case _:
                    raise RequestError(f"{where}: is no completion that `dspark` wrote; name another --out.")
        if not (torn.startswith(LINE_START) or LINE_START.startswith(torn)):
            raise RequestError(f"{self.path}: its last line is none that `dspark` wrote; name another --out.")
        os.ftruncate(self._file, sum(len(line) + 1 for line in lines))
        return settings

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs that are not there yet.

        Raises:
            RequestError: the file holds completions that these jobs would not have written.
        """
        wanted = {job.key: job.settings() | self.common for job in jobs}
        for key, settings in self.settings.items():
            if key not in wanted:
                raise RequestError(
                    f"{self.path}: holds a completion of id {key[0]!r}, sample {key[1]}, which the prompts do not ask "
                    "for; it belongs to another job: name another --out."
                )
            for name, value in wanted[key].items():
                if settings.get(name) != value:
                    raise RequestError(
                        f"{self.path}: the completion of id {key[0]!r} has {name} {settings.get(name)!r} and this job "
                        f"{value!r}; name another --out, or start with the old settings."
                    )
        return [job for job in jobs if job.key not in self.settings]

    def append(self, job: Job, completion: Completion, text: Text) -> None:
        """Writes the line of a finished job."""
        line = (to_line(record_of(job, completion, text, self.common)) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
