"""A drafter 256 wide, so that K-quants take its rows, and the kinds of GGUF files that it is converted to."""

from dspark_jax import ModelConfig
from dspark_jax.checkpoint.gguf_layout import Build, Spelling

CONFIG = ModelConfig.tiny(
    hidden_size=256,
    num_hidden_layers=2,
    moe_intermediate_size=256,
    q_lora_rank=64,
    o_lora_rank=64,
    compress_ratios=[0, 4, 0, 0],
    num_hash_layers=0,
    dspark_target_layer_ids=[0, 1],
)
FILES: tuple[tuple[Build, Spelling], ...] = (
    ("llama.cpp-bf16", "llama.cpp"),
    ("llama.cpp-q8_0", "llama.cpp"),
    ("ds4-q2k", "entrpi"),
    ("ds4-q4k", "upstream"),
)
