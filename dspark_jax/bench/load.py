"""How fast a checkpoint is loaded, beside a plain read of the same files, and the host memory that takes."""

import dataclasses
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dspark_jax.bench.memory import anonymous_peak
from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.load import Progress, load
from dspark_jax.errors import CheckpointError

PIECE = 1 << 24  # bytes of a plain read


@dataclass(frozen=True)
class LoadReport:
    """One loading, between two plain reads of the same files: the second read is the ceiling.

    So both the loading and the ceiling come after a complete pass over the files, and find the same share of them in
    the page cache: all of a checkpoint that fits into memory, next to nothing of one that does not.

    Attributes:
        device: kind of the devices that the arrays are on.
        devices: how many they are.
        file_bytes: of the shards.
        first_read_seconds: of the first read, which met the page cache as it was.
        load_seconds: of the loading, configuration and headers included.
        read_seconds: of the second read.
        array_bytes: of all arrays, what is replicated counted once.
        host_array_bytes: of all that devices hold of them in host memory, being CPUs.
        largest_array_bytes: of the largest array.
        peak_anonymous_bytes: the most anonymous host memory while loading, above what there was before; None where the
            system does not tell.
    """

    device: str
    devices: int
    file_bytes: int
    first_read_seconds: float
    load_seconds: float
    read_seconds: float
    array_bytes: int
    host_array_bytes: int
    largest_array_bytes: int
    peak_anonymous_bytes: int | None

    @property
    def overhead_bytes(self) -> int | None:
        """Anonymous host memory that loading takes beside the arrays."""
        return None if self.peak_anonymous_bytes is None else self.peak_anonymous_bytes - self.host_array_bytes

    @property
    def load_bytes_per_second(self) -> float:
        """Of the files."""
        return self.file_bytes / self.load_seconds

    @property
    def read_bytes_per_second(self) -> float:
        """Of the second plain read."""
        return self.file_bytes / self.read_seconds

    @property
    def load_speed_per_read_speed(self) -> float:
        """The share of the ceiling that loading reaches."""
        return self.read_seconds / self.load_seconds

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures as JSON values."""
        return dataclasses.asdict(self) | {
            "overhead_bytes": self.overhead_bytes,
            "load_bytes_per_second": self.load_bytes_per_second,
            "read_bytes_per_second": self.read_bytes_per_second,
            "load_speed_per_read_speed": self.load_speed_per_read_speed,
        }


def bench_load(directory: Path, progress: Progress, mesh: Mesh | None = None) -> LoadReport:
    """Loads a checkpoint and measures.

    Args:
        directory: folder with `config.json`, the index and all shards.
        progress: told about the bytes passed over, in three passes.
        mesh: see `load`.

    Raises:
        ConfigError: see `load`.
        CheckpointError: see `load`.
    """
    folder = CheckpointFolder.open(directory)
    files = sorted({folder.file_of(name) for name in folder.names})
    jax.devices()  # are started before the clock is

    first_read_seconds = read_files(files, progress)
    gc.collect()  # JAX holds on to host buffers of earlier arrays until then
    with anonymous_peak() as peak:
        began = time.perf_counter()
        model = load(directory, mesh=mesh, progress=progress)
        load_seconds = time.perf_counter() - began
    leaves = jax.tree.leaves(model)
    sizes, host_array_bytes = [leaf.nbytes for leaf in leaves], _host_bytes(leaves)
    devices = leaves[0].sharding.device_set
    del model, leaves
    return LoadReport(
        device=next(iter(devices)).device_kind,
        devices=len(devices),
        file_bytes=sum(file.stat().st_size for file in files),
        first_read_seconds=first_read_seconds,
        load_seconds=load_seconds,
        read_seconds=read_files(files, progress),
        array_bytes=sum(sizes),
        host_array_bytes=host_array_bytes,
        largest_array_bytes=max(sizes),
        peak_anonymous_bytes=peak.bytes,
    )


def _host_bytes(arrays: Sequence[jax.Array]) -> int:
    """Bytes of the buffers that are in host memory; CPU devices share those of what is replicated on them."""
    pieces = [shard.data for array in arrays for shard in array.addressable_shards if shard.device.platform == "cpu"]
    return sum({piece.unsafe_buffer_pointer(): piece.nbytes for piece in pieces}.values())


def read_files(files: Sequence[Path], progress: Progress) -> float:
    """Seconds that a plain sequential read takes, into one small buffer.

    Raises:
        CheckpointError: a file cannot be read.
    """
    buffer, done = bytearray(PIECE), 0
    began = time.perf_counter()
    for path in files:
        try:
            total = sum(file.stat().st_size for file in files)
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    done += count
                    progress(done, total)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); fetch it again.") from error
    return time.perf_counter() - began
