"""A file of prompts for a measurement, all of which are decoded with the same settings."""

from pathlib import Path

from dspark_jax.errors import RequestError
from dspark_jax.jobs.prompts import PromptReader


def read_prompts(path: Path, reader: PromptReader) -> tuple[list[list[int]], list[str]]:
    """The token ids of every line of a file that `dspark generate --prompts` could read, too.

    Args:
        path: JSON lines.
        reader: with the settings of the measurement, one sample a line.

    Returns:
        The prompts, and the names of fields that mean nothing.

    Raises:
        RequestError: see `PromptReader.read`; or a line asks for settings or samples of its own.
    """
    jobs, ignored = reader.read(path)
    for job in jobs:
        name, sample = job.key
        own = [setting for setting, value in reader.settings.items() if getattr(job.request, setting) != value]
        own = ["samples"] if sample else own
        if own:
            raise RequestError(
                f"{path}: the line of id {name!r} has its own {', '.join(own)}, and a measurement decodes all of them "
                "with the settings of the command; take it out of the line."
            )
    return [list(job.request.prompt) for job in jobs], ignored
