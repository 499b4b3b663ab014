"""Six tiny models that between them have every kind of layer and odd sizes, for tests of states and of the model."""

import dataclasses
from pathlib import Path

import numpy as np
from oracle import Array, Result, Weights, read_weights

from dspark_jax import Model, ModelConfig, save

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


def oracle_weights(model: Model, folder: Path) -> Weights:
    """The weights as the oracle reads them from the official files that `save` wrote."""
    save(model, folder)
    return read_weights(folder)


def smallest_margins(run: Result) -> Array:
    """The smallest margin of any choice of the target at each position: float [T]."""
    return np.min([*run.router_margin, *run.index_margin.values()], axis=0)


def random_ids(config: ModelConfig, *shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(config.vocab_size, size=shape, dtype=np.int32)
