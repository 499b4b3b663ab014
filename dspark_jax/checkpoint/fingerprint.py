"""A short name for the contents of a checkpoint folder, cheap enough for 160 GB."""

import hashlib
from pathlib import Path

from dspark_jax.checkpoint.folder import SHARD_PATTERN, SINGLE_FILE
from dspark_jax.errors import CheckpointError

SAMPLES, SAMPLE_BYTES, DIGITS = 16, 4096, 16
PROVENANCE = "training.json"  # beside the weights of a trained checkpoint


def fingerprint(directory: Path, drafter: Path | None = None) -> str:
    """16 hexadecimal digits of a SHA-256 over three things: `config.json`; name, size and 16 samples of 4 KiB of every
    shard, and of the file of a `drafter` if it is another one's; and what `dspark export` says of the tensors that it
    wrote, a digest of their bytes included.

    It tells apart checkpoints that anybody would call different without reading them; a change of single weights by
    another program can escape it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for name in ("config.json", PROVENANCE):
            path = directory / name
            digest.update(path.read_bytes() if name != PROVENANCE or path.exists() else b"")
        shards = sorted([*directory.glob(SHARD_PATTERN), *directory.glob(SINGLE_FILE)])
        for shard in [*shards, drafter] if drafter else shards:
            size = shard.stat().st_size
            digest.update(f"{shard.name} {size}".encode())
            with shard.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror or error}); fetch it again.") from error
    return digest.hexdigest()[:DIGITS]
