"""A run's metrics as event files for TensorBoard, beside its log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark_jax.errors import RequestError
from dspark_jax.training.run import Record


@contextmanager
def events(folder: Path) -> Iterator[Callable[[Record], None]]:
    """What it yields writes a record; events of steps that an earlier start took beyond its checkpoint are purged.

    Raises:
        RequestError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise RequestError("--tensorboard needs tensorboardX: pip install 'dspark-jax[tensorboard]'.") from error
    writer: Any = None

    def write(record: Record) -> None:
        nonlocal writer
        writer = writer or SummaryWriter(str(folder), purge_step=record["step"])
        for name, value in record.items():
            for position, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
                writer.add_scalar(name if position is None else f"{name}/{position}", one, record["step"])

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
