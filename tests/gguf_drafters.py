"""A drafter 256 wide, so that K-quants take its rows, and the kinds of GGUF files that it is converted to."""

from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax import ModelConfig
from dspark_jax.checkpoint.gguf.file import GGUFFile, TensorInfo, write_gguf
from dspark_jax.checkpoint.gguf.layout import Build, Spelling

CONFIG = ModelConfig.tiny(
    hidden_size=256,
    num_hidden_layers=2,
    moe_intermediate_size=256,
    q_lora_rank=64,
    o_lora_rank=64,
    compress_ratios=[0, 4, 0, 0],
    num_hash_layers=0,
    dspark_target_layer_ids=[0, 1],
    dspark_markov_rank=32,
)
FILES: tuple[tuple[Build, Spelling], ...] = (
    ("llama.cpp-bf16", "llama.cpp"),
    ("llama.cpp-q8_0", "llama.cpp"),
    ("ds4-q2k", "entrpi"),
    ("ds4-q4k", "upstream"),
)


def rewrite(
    source: Path, out: Path, metadata: dict[str, Any] | None = None, **tensors: tuple[str, TensorInfo, np.ndarray]
) -> Path:
    """A copy of a file with other metadata (None drops a key), and tensors replaced, dropped, or added."""
    file = GGUFFile(source)
    values = {key: value for key, value in (file.metadata | (metadata or {})).items() if value is not None}
    contents = {name: (info, file.read(info)) for name, info in file.tensors.items()}
    for name, info, stored in tensors.values():
        contents[name] = (info, stored)
    kept = {name: content for name, content in contents.items() if content[0] is not None}
    write_gguf(out, values, {name: info for name, (info, _) in kept.items()}, lambda name: [kept[name][1]], False)
    return out
