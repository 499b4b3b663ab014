"""A tiny target as a GGUF file that llama.cpp runs (`deepseek4`), all in F32: for tests alone.

What a layer shares with a stage of the drafter is named by the drafter's own table; the other names are here. The
values are those that the oracle of the tests reads from the checkpoint.
"""

from pathlib import Path

import numpy as np
from oracle import Array, Weights, read_weights

from dspark_jax import ModelConfig
from dspark_jax.checkpoint.gguf.file import TensorInfo, Value, write_gguf
from dspark_jax.checkpoint.gguf.layout import rows
from dspark_jax.checkpoint.gguf.metadata import LLAMA, facts, tokenizer_metadata
from dspark_jax.formats.ggml import F32, TYPES

ARCHITECTURE = "deepseek4"
DRAFTING = ("block_size", "target_layers")  # ends of the keys that a target has no use for
INDEX_HEAD = 64  # llama.cpp rotates an indexer's heads by so many channels
STORED = {np.dtype(np.float64): F32, np.dtype(np.int64): TYPES[26]}

# Official name and llama.cpp's, of the whole model and within a layer.
MODEL = {
    "embed": "token_embd",
    "head": "output",
    "norm": "output_norm",
    "hc_head_fn": "output_hc_fn",
    "hc_head_base": "output_hc_base",
    "hc_head_scale": "output_hc_scale",
}
LAYER = {
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.ape": "attn_compressor_ape",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.compressor.wkv": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate": "indexer_compressor_gate",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
}


def write_target(checkpoint: Path, out: Path) -> None:
    """Writes the target of a checkpoint in the official layout."""
    config = ModelConfig.from_file(checkpoint / "config.json")
    of_target = {name: values for name, values in read_weights(checkpoint).items() if not name.startswith("mtp.")}
    weights = _with_wide_index(config, _stacked(config, of_target))
    names = _names(config)
    tensors = {names[official]: values for official, values in weights.items()}
    infos = {name: TensorInfo(STORED[values.dtype], values.shape) for name, values in tensors.items()}

    def contents(name: str) -> list[Array]:
        return [tensors[name].astype(np.float32 if infos[name].type == F32 else np.int32)]

    write_gguf(out, _metadata(config, checkpoint), infos, contents, overwrite=False)


def _names(config: ModelConfig) -> dict[str, str]:
    """Official name -> llama.cpp's."""
    layers = config.num_hidden_layers
    shared = {official.replace("mtp.", "layers."): names["llama.cpp"] for official, _, names in rows(layers)}
    own = {
        f"layers.{layer}.{official}": f"blk.{layer}.{name}.weight"
        for layer in range(layers)
        for official, name in LAYER.items()
    }
    return shared | own | {official: f"{name}.weight" for official, name in MODEL.items()}


def _stacked(config: ModelConfig, weights: Weights) -> Weights:
    """The experts of a layer in one array, whose name lacks their number."""
    stacked = {name: values for name, values in weights.items() if ".experts." not in name}
    for name in weights:
        if ".experts.0." in name:
            each = [weights[name.replace(".0.w", f".{expert}.w")] for expert in range(config.n_routed_experts)]
            stacked[name.replace(".0.w", ".w")] = np.stack(each)
    return stacked


def _with_wide_index(config: ModelConfig, weights: Weights) -> Weights:
    """An indexer that chooses the same entries with heads of `INDEX_HEAD` channels, of which the first are zero.

    Its scores change by one factor. The mean square of an entry is over all channels: what the zeros take from it, the
    weight of its norm takes back.
    """

    def wide(values: Array) -> Array:
        """Zeros in front of each head of the first axis."""
        heads = values.reshape(-1, config.index_head_dim, *values.shape[1:])
        more = [(0, 0)] * heads.ndim
        more[1] = (INDEX_HEAD - config.index_head_dim, 0)
        return np.pad(heads, more).reshape(-1, *values.shape[1:])

    changed: Weights = {}
    for name, values in weights.items():
        if name.endswith(("indexer.wq_b", "indexer.compressor.wkv", "indexer.compressor.wgate")):
            changed[name] = wide(values)
        elif name.endswith("indexer.compressor.ape"):
            changed[name] = wide(values.T).T
        elif name.endswith("indexer.compressor.norm"):
            changed[name] = wide(values) * (config.index_head_dim / INDEX_HEAD) ** 0.5
    return weights | changed


def _metadata(config: ModelConfig, checkpoint: Path) -> dict[str, Value]:
    """What a drafter's file repeats of the target, and what is the target's own."""
    repeated = {
        key.removeprefix(f"{LLAMA}."): value
        for key, value in facts(config, "llama.cpp").items()
        if key.startswith(LLAMA) and not key.endswith(DRAFTING)
    }
    clamp = np.full(config.num_hidden_layers, config.swiglu_limit, np.float32)
    own: dict[str, Value] = {
        "block_count": np.uint32(config.num_hidden_layers),
        "embedding_length_out": np.uint32(config.hidden_size * config.hc_mult),
        "attention.compress_ratios": np.array(config.layer_ratios, np.int32),
        "attention.indexer.key_length": np.uint32(INDEX_HEAD),
        "swiglu_clamp_exp": clamp,
        "swiglu_clamp_shexp": clamp,
        "hash_layer_count": np.uint32(config.num_hash_layers),
    }
    values = {f"{ARCHITECTURE}.{key}": value for key, value in (repeated | own).items()}
    return {"general.architecture": ARCHITECTURE} | values | tokenizer_metadata(config, checkpoint)
