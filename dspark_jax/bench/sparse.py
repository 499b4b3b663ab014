"""Checkpoints for measurements that need size and no content: right headers, and holes in the place of weights.

A hole reads as zeros and takes no room on the disk. Zeros are valid everywhere: as an E8M0 scale 2^-127, as an expert
number the first.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from dspark_jax.checkpoint.folder import INDEX_FILE
from dspark_jax.checkpoint.layout import Entry, layout, tensor_names
from dspark_jax.checkpoint.safetensors import LENGTH_BYTES
from dspark_jax.checkpoint.save import shard_key, shard_order
from dspark_jax.checkpoint.write import CONFIG_FILE, index, shard_name, write_json
from dspark_jax.config import DrafterConfig, ModelConfig, RopeScaling
from dspark_jax.errors import RequestError
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of

FLASH = ModelConfig(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0, 0, 0),
    compress_rope_theta=160000.0,
    rope_theta=10000.0,
    rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=65536, beta_fast=32.0, beta_slow=1.0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=6,
    num_hash_layers=3,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    max_position_embeddings=1048576,
    eos_token_id=(1,),
    drafter=DrafterConfig(block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), markov_rank=256),
)
"""DeepSeek-V4-Flash-0731."""

FEWEST_LAYERS = 4  # one of every kind, and three that the drafter taps


@contextmanager
def sparse_checkpoint(size: float) -> Iterator[Path]:
    """A folder with a cut of Flash of at least `size` bytes; gone afterwards.

    Raises:
        RequestError: Flash cannot be cut to that size.
    """
    config = cut_flash(size)
    with TemporaryDirectory(prefix="dspark-sparse-") as directory:
        write_sparse(Path(directory), config)
        yield Path(directory)


def cut_flash(size: float) -> ModelConfig:
    """Flash with as few layers, and of those as few experts, as make at least `size` bytes on disk.

    Raises:
        RequestError: less than the fewest layers and experts make, or more than all of Flash.
    """
    smallest, largest = stored_bytes(_cut(FEWEST_LAYERS, FLASH.num_experts_per_tok)), stored_bytes(FLASH)
    if not smallest <= size <= largest:
        raise RequestError(
            f"a checkpoint of {size / 1e9:g} GB cannot be cut out of Flash; "
            f"expected {smallest / 1e9:.2f} to {largest / 1e9:.2f} GB."
        )
    layer_counts = range(FEWEST_LAYERS, FLASH.num_hidden_layers + 1)
    layers = layer_counts[bisect_left(layer_counts, size, key=lambda n: stored_bytes(_cut(n, FLASH.n_routed_experts)))]
    expert_counts = range(FLASH.num_experts_per_tok, FLASH.n_routed_experts + 1)
    return _cut(layers, expert_counts[bisect_left(expert_counts, size, key=lambda n: stored_bytes(_cut(layers, n)))])


def _cut(layers: int, experts: int) -> ModelConfig:
    assert FLASH.drafter is not None
    stages = FLASH.compress_ratios[FLASH.num_hidden_layers :]
    taps = tuple(range(layers - len(FLASH.drafter.target_layer_ids), layers))
    return replace(
        FLASH,
        num_hidden_layers=layers,
        n_routed_experts=experts,
        compress_ratios=FLASH.layer_ratios[:layers] + stages,
        drafter=replace(FLASH.drafter, target_layer_ids=taps),
    )


def stored_bytes(config: ModelConfig) -> int:
    """Bytes of all tensors of a checkpoint."""
    return sum(entry.stored_bytes for entry in _entries(config))


def write_sparse(directory: Path, config: ModelConfig) -> None:
    """Writes a whole checkpoint of zeros into a folder, sharded as the official release."""
    shards: dict[str, list[Entry]] = {}
    for entry in _entries(config):
        shards.setdefault(shard_key(entry.names[0]), []).append(entry)
    weight_map: dict[str, str] = {}
    for number, key in enumerate(sorted(shards, key=shard_order), start=1):
        file = shard_name(number, len(shards))
        _write_holes(directory / file, shards[key])
        weight_map |= dict.fromkeys(tensor_names(tuple(shards[key])), file)
    write_json(directory / INDEX_FILE, index(weight_map, stored_bytes(config)))
    write_json(directory / CONFIG_FILE, config.to_dict())


def _write_holes(path: Path, entries: list[Entry]) -> None:
    """A safetensors file whose header is written and whose data is one hole."""
    header, stop = {}, 0
    for entry in entries:
        for name in entry.names:
            start, stop = stop, stop + entry.stored_bytes // len(entry.names)
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(LENGTH_BYTES + len(text) + stop)


def _entries(config: ModelConfig) -> tuple[Entry, ...]:
    return layout(abstract_model(config, numerics_of("float32")))  # numerics change no weight
