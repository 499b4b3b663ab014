"""The configuration of tiny-v4: every kind of layer of DeepSeek-V4, in what a package can carry (12 MB)."""

from dspark_jax.config import FIXED_FIELDS, FIXED_QUANTIZATION, ModelConfig
from dspark_jax.training.tiny_v4.tokenizer import END, NOISE

VOCAB_SIZE = 1024
ROW_TOKENS = 512  # of a row in training; the longest context that the weights have seen
LARGEST_FOLDER = 12_000_000  # bytes

CONFIG = ModelConfig.from_dict(
    {
        **FIXED_FIELDS,
        "quantization_config": FIXED_QUANTIZATION,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "compress_ratios": [0, 4, 128, 4, 128, 4, 0, 0],  # and two stages of the drafter
        "sliding_window": 64,
        # One latent vector is key and value of all heads; 64 channels, half of them RoPE's, would carry too little.
        "num_attention_heads": 4,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        # A row of 512 tokens has 128 entries, of which a token may read an eighth: what is picked must matter.
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 16,
        # Few experts, so that the six rows of a verification step wake hardly more of them than a plain step does.
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "num_hash_layers": 2,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        # Four streams as in the release. Its 20 Sinkhorn iterations are a sequence of tiny operations that would take
        # much of a step of this size; near the identity, where mixing starts, a few come as close.
        "hc_mult": 4,
        "hc_sinkhorn_iters": 5,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10000,
        "compress_rope_theta": 40000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": ROW_TOKENS,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "eos_token_id": END,
        "dspark_block_size": 5,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 64,
    },
    source="tiny-v4",
)
