"""The files of a feature cache: DeepSpec's version 2, and what our manifest adds to it.

- `shard-NNNNN.bin`: samples one after the other. A sample of n tokens is ids (int32 [n]), attention mask (uint8 [n],
  all 1), loss mask (uint8 [n]), taps (bfloat16 [n, layers * width]) and the LM head's input (bfloat16 [n, width]).
- `samples.idx`: a record of 56 bytes for each sample, little-endian: where it lies.
- `manifest.json`: counts, dtypes, shards, and facts of the run that wrote the cache. It is written last: a folder
  without one is unfinished.

A fact is a manifest field that the format does not determine. DeepSpec's tools read those of `facts_of_run` that they
know; `model_fingerprint`, `vocab_size`, `numerics`, `prefill_chunk`, `block_size` and `documents_sha256` are ours.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.data.document import Document
from dspark_jax.decoding.loop import PREFILL_CHUNK
from dspark_jax.errors import CacheError, RequestError

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "samples.idx"
SHARD_BYTES = 64 << 30

FIELDS = ("ids", "attention_mask", "supervised", "taps", "hidden")
RECORD = np.dtype(
    [("number", "<u8"), ("shard", "<u4"), ("length", "<u4"), *((field, "<u8") for field in FIELDS)],
)
"""One sample: its number, from 0 without a gap; shard; tokens; and where each field begins in the shard."""

FORMAT = {
    "version": 2,
    "index_record_size": RECORD.itemsize,
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "hidden_dtype": "bfloat16",
}
COUNTS = ("num_samples", "num_shards", "shards")

HIDDEN = np.dtype(ml_dtypes.bfloat16)

DIGEST = "documents_sha256"
"""The fact that says which documents a cache holds."""

PINNED = ("model_fingerprint", "target_layer_ids", "hidden_size", "vocab_size")
"""Facts in which a cache and a run must agree."""

NAMES = (
    "target_model_name_or_path",
    "source_jsonl_paths",
    "chat_template",
    "project_name",
    "exp_name",
    "git_sha",
)
"""Facts that only say where things came from: who goes on with a cache may call them otherwise."""

WRITE_AGAIN = "delete its folder and write the cache again with `dspark data cache`"

Facts = dict[str, Any]


def facts_of_run(config: ModelConfig, model_fingerprint: str, numerics: str) -> Facts:
    """What a cache depends on besides its documents, by the names of the manifest.

    Args:
        config: of a checkpoint with a drafter, which says which layers are tapped.
        model_fingerprint: see `checkpoint.fingerprint`.
        numerics: name of the preset in which the target ran.

    Raises:
        RequestError: the config has no drafter.
    """
    if config.drafter is None:
        raise RequestError("config.json has no dspark_* fields, so no layer is tapped and there is nothing to cache.")
    return {
        "model_fingerprint": model_fingerprint,
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "numerics": numerics,
        "prefill_chunk": PREFILL_CHUNK,
    }


def facts_of_data(
    target: Path, sources: Iterable[Path], documents: Iterable[Document], max_length: int, min_supervised: int
) -> Facts:
    """What a manifest says about the documents and where they came from, DeepSpec's names and our digest."""
    return {
        "target_model_name_or_path": str(target),
        "source_jsonl_paths": [str(path) for path in sources],
        "max_length": max_length,
        "min_loss_tokens": min_supervised,
        "chat_template": "deepseek_v4",
        "project_name": "dspark_jax",
        "exp_name": "",
        "git_sha": "unknown",
        DIGEST: digest_of(documents),
    }


def digest_of(documents: Iterable[Document]) -> str:
    """16 hexadecimal digits of a SHA-256 over ids and loss masks, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document.ids.astype("<i4").tobytes())
        digest.update(document.supervised.astype("u1").tobytes())
    return digest.hexdigest()[:16]


def bytes_per_token(facts: Mapping[str, Any]) -> int:
    """What a token takes on disk: for V4-Flash 32 774 bytes."""
    return 4 + 1 + 1 + HIDDEN.itemsize * facts["hidden_size"] * (len(facts["target_layer_ids"]) + 1)


def record(number: int, shard: int, length: int, start: int, facts: Mapping[str, Any]) -> np.ndarray:
    """The index record [] of a sample that begins at byte `start` of its shard."""
    return np.array((number, shard, length, *starts(length, start, facts)), RECORD)


def starts(length: Any, start: Any, facts: Mapping[str, Any]) -> list[Any]:
    """Where each field begins; integers, or arrays of them for many samples."""
    width = HIDDEN.itemsize * facts["hidden_size"]
    sizes = (4, 1, 1, width * len(facts["target_layer_ids"]))
    offsets = [start]
    for size in sizes:
        offsets.append(offsets[-1] + length * size)
    return offsets


def shard_name(shard: int) -> str:
    """File name of a shard."""
    return f"shard-{shard:05d}.bin"


def shard_sizes(records: np.ndarray, facts: Mapping[str, Any]) -> list[int]:
    """Bytes of each shard that these records fill."""
    tokens = np.bincount(records["shard"].astype(np.int64), weights=records["length"])
    return [int(count) * bytes_per_token(facts) for count in tokens]


def counts(records: np.ndarray, facts: Mapping[str, Any]) -> Facts:
    """What the manifest says about the files, by its names."""
    shards = range(len(shard_sizes(records, facts)))
    return {
        "num_samples": len(records),
        "num_shards": len(shards),
        "shards": [{"file_name": shard_name(shard), "shard_id": shard} for shard in shards],
    }


def manifest(facts: Facts, records: np.ndarray) -> bytes:
    """Contents of the manifest of a whole cache."""
    return json.dumps(facts | FORMAT | counts(records, facts), indent=2, sort_keys=True).encode()


def facts_of_manifest(manifest: Facts, where: str) -> Facts:
    """The facts of a manifest, those that the layout depends on checked.

    Raises:
        CacheError: another format, or a fact that cannot be; `where` names the file.
    """
    for field, expected in FORMAT.items():
        if manifest.get(field) != expected:
            raise CacheError(f"{where}: {field} is {manifest.get(field)!r}; expected {expected!r}, {WRITE_AGAIN}.")
    layers, width = manifest.get("target_layer_ids"), manifest.get("hidden_size")
    if not isinstance(width, int) or width < 1:
        raise CacheError(f"{where}: hidden_size is {width!r}; expected an integer of at least 1, {WRITE_AGAIN}.")
    for name in ("vocab_size", "max_length"):
        if not isinstance(manifest.get(name, 1), int):
            raise CacheError(f"{where}: {name} is {manifest[name]!r}; expected an integer, {WRITE_AGAIN}.")
    if not _ascending(layers):
        raise CacheError(f"{where}: target_layer_ids is {layers!r}; expected ascending integers, {WRITE_AGAIN}.")
    return {name: value for name, value in manifest.items() if name not in FORMAT and name not in COUNTS}


def _ascending(layers: Any) -> bool:
    whole = isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)
    return whole and len(layers) > 0 and layers == sorted({layer for layer in layers if layer >= -1})


def check_facts(found: Mapping[str, Any], expected: Mapping[str, Any], fields: Iterable[str], where: str) -> None:
    """Refuses a cache that was not made for this run.

    Raises:
        CacheError: the first of the fields in which they differ; `where` names the cache.
    """
    for field in fields:
        if found.get(field) != expected.get(field):
            raise CacheError(
                f"{where}: has {field} {found.get(field)!r} and this run {expected.get(field)!r}; name the cache of "
                "this run's checkpoint and data, or write another."
            )
