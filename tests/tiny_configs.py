"""Six tiny models that between them have every kind of layer and odd sizes, for the tests of states and of the model.

Weights come from NumPy, which compiles nothing: a model takes milliseconds.
"""

import dataclasses
import math
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from oracle import Array, Result, Weights, read_weights

from dspark_jax import Model, ModelConfig, save
from dspark_jax.checkpoint.layout import Entry, layout
from dspark_jax.checkpoint.load import fill
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of

TOLERANCE = 3e-4  # of logits, taps, streams and caches, all of size one
NEAR_TIE = 1e-5  # float32 decides a choice whose margin is smaller by its rounding


def without_drafter(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, compress_ratios=config.layer_ratios, drafter=None)


CONFIGS = {
    "every-kind": ModelConfig.tiny(
        num_hidden_layers=4,
        compress_ratios=[0, 4, 8, 128, 0, 0],
        dspark_target_layer_ids=[1, 2, 3],
    ),
    "ragged-blocks": ModelConfig.tiny(
        num_hidden_layers=2,
        hidden_size=160,
        num_attention_heads=3,
        head_dim=48,
        qk_rope_head_dim=16,
        q_lora_rank=40,
        o_groups=3,
        o_lora_rank=44,
        moe_intermediate_size=160,
        sliding_window=11,
        compress_ratios=[4, 128, 0, 0, 0],
        index_n_heads=40,
        index_topk=2,
        num_hash_layers=0,
        hc_sinkhorn_iters=3,
        hc_eps=1e-3,
        rms_norm_eps=1e-3,
        dspark_block_size=7,
        dspark_target_layer_ids=[0, 1],
    ),
    "two-streams": ModelConfig.tiny(
        num_hidden_layers=2,
        sliding_window=6,
        compress_ratios=[8, 4, 0],
        num_hash_layers=2,
        hc_mult=2,
        hc_sinkhorn_iters=7,
        swiglu_limit=0.7,
        dspark_block_size=3,
        dspark_target_layer_ids=[1],
        dspark_markov_rank=5,
    ),
    "without-drafter": without_drafter(
        ModelConfig.tiny(
            num_hidden_layers=2,
            sliding_window=20,
            compress_ratios=[128, 4, 0],
            num_experts_per_tok=3,
            dspark_target_layer_ids=[0],
        )
    ),
    "wide-window": ModelConfig.tiny(
        sliding_window=128,
        compress_ratios=[0, 128, 4, 0],
        num_hash_layers=0,
        hc_sinkhorn_iters=1,
        dspark_target_layer_ids=[0, 2],
    ),
    "narrow-window": ModelConfig.tiny(
        sliding_window=3,
        compress_ratios=[4, 8, 4, 0, 0],
        index_topk=1,
        num_hash_layers=2,
        dspark_block_size=7,
        dspark_target_layer_ids=[2],
    ),
}


def tiny_model(config: ModelConfig, seed: int = 0) -> Model:
    """A float32 model with packed random weights that keep activations at size one."""
    rng = np.random.default_rng(seed)
    abstract = abstract_model(config, numerics_of("float32"))
    return fill(abstract, layout(abstract), lambda entry: jnp.asarray(_draw(entry, config, rng)))


def oracle_weights(model: Model, folder: Path) -> Weights:
    """The weights as the oracle reads them from the official files that `save` wrote."""
    save(model, folder)
    return read_weights(folder)


def smallest_margins(run: Result) -> Array:
    """The smallest margin of any choice of the target at each position: float [T]."""
    return np.min([*run.router_margin, *run.index_margin.values()], axis=0)


def random_ids(config: ModelConfig, *shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(config.vocab_size, size=shape, dtype=np.int32)


def _draw(entry: Entry, config: ModelConfig, rng: np.random.Generator) -> Array:
    shape, name = entry.leaf.shape, entry.names[0]
    match entry.dtype:
        case "I64":
            return rng.random((shape[0], config.n_routed_experts)).argsort(1)[:, : shape[1]].astype(np.int32)
        case "F8_E4M3":
            bits = rng.integers(256, size=shape)
            return (bits & 0x87 | (4 + bits // 8 % 4) << 3).astype(np.uint8)  # +-1/8 to +-2
        case "I8":
            return rng.integers(256, size=shape, dtype=np.uint8)
        case "F8_E8M0":
            return (_middle_scale(name, config) + rng.integers(-1, 2, size=shape)).astype(np.uint8)
    return _draw_float(name, shape, rng).astype(ml_dtypes.bfloat16 if entry.dtype == "BF16" else np.float32)


def _middle_scale(name: str, config: ModelConfig) -> int:
    """A scale that gives the rows of a packed matrix a norm of about one."""
    rms_of_codes = 2.9 if ".experts." in name else 1.2
    return 127 - round(math.log2(rms_of_codes * math.sqrt(config.hidden_size)))


def _draw_float(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    noise = rng.standard_normal(shape)
    if name.endswith(("norm.weight", "_scale")):
        return 1 + 0.1 * noise
    if len(shape) == 1 or name.endswith("ape"):
        return 0.3 * noise
    return noise if name == "embed.weight" or "markov_w1" in name else noise / math.sqrt(shape[-1])
