"""What a drafter's GGUF file says of itself, in each spelling; the types of the values are those of the file."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.gguf.file import ALIGNMENT, ALIGNMENT_KEY, Value
from dspark_jax.checkpoint.gguf.layout import Spelling
from dspark_jax.checkpoint.write import CONFIG_FILE
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError, ConfigError

LLAMA, DS4 = "dflash", "deepseek4-dspark"
ARCHITECTURES: dict[Spelling, str] = {"llama.cpp": LLAMA, "entrpi": DS4, "upstream": DS4}
TARGET_LAYERS: dict[Spelling, str] = {
    "llama.cpp": "dflash.target_layers",
    "entrpi": "deepseek4.dspark.target_layers",
    "upstream": "dspark.target_layer_ids",
}
SETTINGS = {
    "block size": ("block_size",),
    "noise token": ("noise_token_id", "mask_token_id"),
    "tapped layers": ("target_layers", "target_layer_ids"),
}
"""What drafting needs, and the ends of the keys that say it."""
NEEDED = tuple(end for ends in SETTINGS.values() for end in ends)

TAP_SHIFT: dict[Spelling, int] = {"llama.cpp": 1, "entrpi": 0, "upstream": 0}
"""llama.cpp counts the layer whose input is tapped, the others the one whose output it is."""

MOSTLY_MXFP4, QUANTIZATION_VERSION, SQRT_SOFTPLUS = 38, 2, 4  # llama.cpp's numbers
_log = logging.getLogger(__name__)

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's types of tokens


def metadata(config: ModelConfig, spelling: Spelling, name: str, checkpoint: Path) -> dict[str, Value]:
    """All keys and values of a file.

    Args:
        config: of a checkpoint with a drafter.
        name: of the model, for people.
        checkpoint: its folder, whose tokenizer llama.cpp's files embed.
    """
    values: dict[str, Value] = {"general.architecture": ARCHITECTURES[spelling], "general.name": name}
    if spelling == "upstream":
        values[ALIGNMENT_KEY] = np.uint32(ALIGNMENT)
    if spelling == "llama.cpp":
        values |= {
            "general.type": "model",
            "general.file_type": np.uint32(MOSTLY_MXFP4),
            "general.quantization_version": np.uint32(QUANTIZATION_VERSION),
        }
        values |= tokenizer_metadata(config, checkpoint)
    return values | facts(config, spelling)


def facts(config: ModelConfig, spelling: Spelling) -> dict[str, Value]:
    """What a file says of the drafter that is in it."""
    return {"llama.cpp": _llama, "entrpi": _entrpi, "upstream": _upstream}[spelling](config)


def settings(metadata: Mapping[str, Value], spelling: Spelling) -> dict[str, list[Any]]:
    """What drafting needs and no weight tells, in the checkpoint's way of counting; [] of what a file does not say."""
    found: dict[str, list[Any]] = {}
    for what, ends in SETTINGS.items():
        values = [value for key, value in metadata.items() if key.rpartition(".")[2] in ends]
        shift = TAP_SHIFT[spelling] if what == "tapped layers" else 0
        numbers = [number for value in values for number in np.atleast_1d(value).tolist()]
        found[what] = [number - shift if isinstance(number, int) else number for number in numbers]
    return found


def target_layers(config: ModelConfig, spelling: Spelling) -> list[int]:
    """The tapped layers as a spelling counts them."""
    assert config.drafter is not None
    return [layer + TAP_SHIFT[spelling] for layer in config.drafter.target_layer_ids]


def _llama(c: ModelConfig) -> dict[str, Value]:
    """The hyper-parameters of llama.cpp's converter: it repeats the target's, some of which no drafter reads."""
    assert c.drafter is not None
    stages, u32, f32 = c.num_stages, np.uint32, np.float32
    clamp = np.full(stages, c.swiglu_limit, f32)
    values: dict[str, Value] = {
        "block_count": u32(stages),
        "context_length": u32(c.max_position_embeddings),
        "embedding_length": u32(c.hidden_size),
        "attention.head_count": u32(c.num_attention_heads),
        "attention.head_count_kv": u32(1),
        "attention.key_length": u32(c.head_dim),
        "attention.value_length": u32(c.head_dim),
        "attention.layer_norm_rms_epsilon": f32(c.rms_norm_eps),
        "attention.q_lora_rank": u32(c.q_lora_rank),
        "attention.output_group_count": u32(c.o_groups),
        "attention.output_lora_rank": u32(c.o_lora_rank),
        "attention.sliding_window": u32(c.sliding_window),
        "attention.compress_ratios": np.zeros(stages, np.int32),
        "attention.compress_rope_freq_base": f32(c.compress_rope_theta),
        "attention.indexer.head_count": u32(c.index_n_heads),
        "attention.indexer.key_length": u32(c.index_head_dim),
        "attention.indexer.top_k": u32(c.index_topk),
        "rope.dimension_count": u32(c.qk_rope_head_dim),
        "rope.freq_base": f32(c.rope_theta),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": f32(c.rope_scaling.factor),
        "rope.scaling.original_context_length": u32(c.rope_scaling.original_max_position_embeddings),
        "rope.scaling.yarn_beta_fast": f32(c.rope_scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": f32(c.rope_scaling.beta_slow),
        "expert_count": u32(c.n_routed_experts),
        "expert_used_count": u32(c.num_experts_per_tok),
        "expert_shared_count": u32(1),
        "expert_feed_forward_length": u32(c.moe_intermediate_size),
        "expert_gating_func": u32(SQRT_SOFTPLUS),
        "expert_weights_scale": f32(c.routed_scaling_factor),
        "expert_weights_norm": True,
        "swiglu_clamp_exp": clamp,
        "swiglu_clamp_shexp": clamp,
        "hyper_connection.count": u32(c.hc_mult),
        "hyper_connection.sinkhorn_iterations": u32(c.hc_sinkhorn_iters),
        "hyper_connection.epsilon": f32(c.hc_eps),
        "hash_layer_count": u32(0),  # of the stages; the target's own do not count here
        "block_size": u32(c.drafter.block_size),
        "target_layers": np.array(target_layers(c, "llama.cpp"), np.int32),
    }
    noise = {"tokenizer.ggml.mask_token_id": u32(c.drafter.noise_token_id)}
    return {f"{LLAMA}.{key}": value for key, value in values.items()} | noise


def _entrpi(c: ModelConfig) -> dict[str, Value]:
    assert c.drafter is not None
    values: dict[str, Value] = {
        "layer_count": np.uint32(c.num_stages),
        "block_size": np.uint32(c.drafter.block_size),
        "markov_rank": np.uint32(c.drafter.markov_rank),
        "noise_token_id": np.uint32(c.drafter.noise_token_id),
        "expert_count": np.uint32(c.n_routed_experts),
        "target_layers": np.array(target_layers(c, "entrpi"), np.int32),
    }
    return {f"deepseek4.dspark.{key}": value for key, value in values.items()}


def _upstream(c: ModelConfig) -> dict[str, Value]:
    assert c.drafter is not None
    values: dict[str, Value] = {
        "stage_count": np.uint32(c.num_stages),
        "n_layers": np.uint32(c.num_stages),
        "block_size": np.uint32(c.drafter.block_size),
        "markov_rank": np.uint32(c.drafter.markov_rank),
        "noise_token_id": np.uint32(c.drafter.noise_token_id),
        "target_layer_ids": np.array(target_layers(c, "upstream"), np.uint32),
    }
    return {f"dspark.{key}": value for key, value in values.items()}


def tokenizer_metadata(config: ModelConfig, checkpoint: Path) -> dict[str, Value]:
    """The checkpoint's tokenizer, if it is a byte-pair encoding, the one kind that V4 has; {} with a warning if not.

    Raises:
        CheckpointError: `tokenizer.json` is there but is not a tokenizer, or has ids beyond the vocabulary.
        ConfigError: `config.json` names no token that ends a text, or one that begins it and is not in the vocabulary.
    """
    from dspark_jax.checkpoint.tokenizer import (
        TOKENIZER_FILE,
        read_tokenizer,
    )  # of a library that loading can do without

    tokenizer = json.loads(known.to_str()) if (known := read_tokenizer(checkpoint)) else {"model": {}}
    if tokenizer["model"].get("type") != "BPE":
        _log.warning(
            "%s: holds no %s with a byte-pair encoding, so the file gets no tokenizer, and llama.cpp will not run it; "
            "put the tokenizer there and convert again.",
            checkpoint,
            TOKENIZER_FILE,
        )
        return {}
    tokens, types = _tokens(tokenizer, config.vocab_size, checkpoint / TOKENIZER_FILE)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    values: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(tokenizer),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    }
    path = checkpoint / CONFIG_FILE
    begin = json.loads(path.read_text(encoding="utf-8")).get("bos_token_id")
    if begin is not None:
        if type(begin) is not int or not 0 <= begin < config.vocab_size:
            raise ConfigError(
                f"{path}: field 'bos_token_id' is {begin!r}; expected a token id below vocab_size={config.vocab_size}."
            )
        values["tokenizer.ggml.bos_token_id"] = np.uint32(begin)
    if not config.eos_token_id:
        raise ConfigError(
            f"{path}: field 'eos_token_id' is []; expected a token id, since llama.cpp would take another."
        )
    values["tokenizer.ggml.eos_token_id"] = np.uint32(config.eos_token_id[0])
    values["tokenizer.ggml.add_bos_token"] = False  # official prompts spell out their special tokens
    return values


def _tokens(tokenizer: dict[str, Any], vocab_size: int, path: Path) -> tuple[list[str], list[int]]:
    """Every token and its type by its id; ids of the model that the tokenizer does not use are filled up."""
    tokens, types = [f"[PAD{token}]" for token in range(vocab_size)], [UNUSED] * vocab_size
    known = [(token, text, NORMAL) for text, token in tokenizer["model"]["vocab"].items()]
    for added in tokenizer.get("added_tokens", ()):
        known.append((added["id"], added["content"], CONTROL if added["special"] else USER_DEFINED))
    for token, text, type in known:
        if token >= vocab_size:
            raise CheckpointError(
                f"{path}: token {text!r} has id {token}; expected ids below {vocab_size}, vocab_size of config.json. "
                "The two do not belong together."
            )
        tokens[token], types[token] = text, type
    return tokens, types


def _pre_tokenizer(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name for how text is cut before it is encoded.

    V4 cuts like V3, by a sequence of expressions; the packaged model like GPT-2, whose one `ByteLevel` brings along.
    """
    return "gpt-2" if (tokenizer.get("pre_tokenizer") or {}).get("type") == "ByteLevel" else "deepseek-v3"
