"""The module tree: Flax NNX modules that hold weights and nothing else, built abstract and filled by a loader.

Attributes are named after the checkpoint's tensors, so that `checkpoint.layout` is a walk of this tree. Matrices are
[out, in] as on disk; unquantised ones stay bfloat16, the small sensitive ones float32, and the quantised ones packed.
Every leaf of a newly built module is a `jax.ShapeDtypeStruct`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import OVERLAP_RATIO, ModelConfig, halves
from pallas_kernels.block_scaled import BLOCKS, BlockScaled


class Packed(nnx.Variable):
    """A frozen `BlockScaled` matrix: not a `Param`, since nothing differentiates through its integers."""


class Table(nnx.Variable):
    """A frozen table of integers."""


def abstract(dtype: jax.typing.DTypeLike, *shape: int) -> Any:
    """A leaf that is still to be filled: a `jax.ShapeDtypeStruct` in the place of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def bf16(*shape: int) -> nnx.Param:
    """A bfloat16 weight."""
    return nnx.Param(abstract(jnp.bfloat16, *shape))


def f32(*shape: int) -> nnx.Param:
    """A float32 weight; rounding these to bfloat16 changes the model."""
    return nnx.Param(abstract(jnp.float32, *shape))


def fp8(out: int, into: int) -> Packed:
    """An E4M3 matrix with one E8M0 scale for 128 x 128 values; ragged last blocks are cut."""
    rows, columns = BLOCKS["e4m3"]
    scales = abstract(jnp.uint8, -(-out // rows), -(-into // columns))
    return Packed(BlockScaled(abstract(jnp.uint8, out, into), scales, "e4m3"))


def fp4_stack(experts: int, out: int, into: int) -> Packed:
    """One E2M1 matrix an expert, two values a byte along the input axis, one E8M0 scale for 32 of them."""
    scales = abstract(jnp.uint8, experts, out, into // BLOCKS["e2m1"][1])
    return Packed(BlockScaled(abstract(jnp.uint8, experts, out, into // 2), scales, "e2m1"))


class HyperConnection(nnx.Module):
    """Mixing weights of a site: `fn` [m, n*d], `base` [m], `scale` [3 or 1], float32; m = (2+n)*n, or n at a head."""

    def __init__(self, config: ModelConfig, site: Literal["block", "head"]) -> None:
        n = config.hc_mult
        mixes = (2 + n) * n if site == "block" else n
        self.fn = f32(mixes, n * config.hidden_size)
        self.base = f32(mixes)
        self.scale = f32(3 if site == "block" else 1)


class Compressor(nnx.Module):
    """Pools `ratio` tokens into one entry of `head_dim` channels; ratio 4 has two halves, as its windows overlap."""

    def __init__(self, config: ModelConfig, ratio: int, head_dim: int) -> None:
        width = halves(ratio) * head_dim
        self.ape = f32(ratio, width)
        self.norm = bf16(head_dim)
        self.wkv = bf16(width, config.hidden_size)
        self.wgate = bf16(width, config.hidden_size)


class Indexer(nnx.Module):
    """Scores the entries of a CSA layer."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        self.wq_b = fp8(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        self.weights_proj = bf16(config.index_n_heads, config.hidden_size)
        self.compressor = Compressor(config, ratio, config.index_head_dim)


class Attention(nnx.Module):
    """One attention: low-rank queries, one latent vector a position as key and value of all heads, grouped output."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        c = config
        self.attn_sink = f32(c.num_attention_heads)
        self.wq_a = fp8(c.q_lora_rank, c.hidden_size)
        self.q_norm = bf16(c.q_lora_rank)
        self.wq_b = fp8(c.num_attention_heads * c.head_dim, c.q_lora_rank)
        self.wkv = fp8(c.head_dim, c.hidden_size)
        self.kv_norm = bf16(c.head_dim)
        self.wo_a = fp8(c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
        self.wo_b = fp8(c.hidden_size, c.o_groups * c.o_lora_rank)
        self.compressor = Compressor(c, ratio, c.head_dim) if ratio else None
        self.indexer = Indexer(c, ratio) if ratio == OVERLAP_RATIO else None


class Gate(nnx.Module):
    """The router: a score for each expert, and either a bias for the selection or a table from token id to experts."""

    def __init__(self, config: ModelConfig, hashed: bool) -> None:
        self.weight = bf16(config.n_routed_experts, config.hidden_size)
        self.bias = None if hashed else f32(config.n_routed_experts)
        table = abstract(jnp.int32, config.vocab_size, config.num_experts_per_tok)
        self.tid2eid = Table(table) if hashed else None


class SharedExpert(nnx.Module):
    """The expert of every token: w1 gate, w3 up, w2 down."""

    def __init__(self, config: ModelConfig) -> None:
        d, f = config.hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = fp8(f, d), fp8(d, f), fp8(f, d)


class Experts(nnx.Module):
    """The routed experts, stacked along a leading axis."""

    def __init__(self, config: ModelConfig) -> None:
        e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = fp4_stack(e, f, d), fp4_stack(e, d, f), fp4_stack(e, f, d)


class MixtureOfExperts(nnx.Module):
    """Router, routed experts and shared expert."""

    def __init__(self, config: ModelConfig, hashed: bool) -> None:
        self.gate = Gate(config, hashed)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)


class Block(nnx.Module):
    """One layer of the target, or one stage of the drafter (ratio 0, never hashed)."""

    def __init__(self, config: ModelConfig, ratio: int, hashed: bool) -> None:
        self.attn_norm = bf16(config.hidden_size)
        self.ffn_norm = bf16(config.hidden_size)
        self.hc_attn = HyperConnection(config, "block")
        self.hc_ffn = HyperConnection(config, "block")
        self.attn = Attention(config, ratio)
        self.ffn = MixtureOfExperts(config, hashed)


class Vocabulary(nnx.Module):
    """The two tables that target and drafter share: `embed` and `head`, both [V, d]."""

    def __init__(self, config: ModelConfig) -> None:
        self.embed = bf16(config.vocab_size, config.hidden_size)
        self.head = bf16(config.vocab_size, config.hidden_size)


class Target(nnx.Module):
    """The DeepSeek-V4 model between the two tables of the vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        hashed = [layer < config.num_hash_layers for layer in range(config.num_hidden_layers)]
        self.layers = nnx.List([Block(config, *kind) for kind in zip(config.layer_ratios, hashed, strict=True)])
        self.hc_head = HyperConnection(config, "head")
        self.norm = bf16(config.hidden_size)


class Dense(nnx.Module):
    """A small unquantised matrix `weight` [out, in] with a `bias` [out]."""

    def __init__(self, out: int, into: int) -> None:
        self.weight = bf16(out, into)
        self.bias = f32(out)


class MarkovHead(nnx.Module):
    """Tables `markov_w1`, `markov_w2` [V, r]; `gate_proj` of the gated head, `joint_proj` of the rnn head."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.drafter is not None
        d, r, kind = config.hidden_size, config.drafter.markov_rank, config.drafter.markov_head
        self.markov_w1 = bf16(config.vocab_size, r)
        self.markov_w2 = bf16(config.vocab_size, r)
        self.gate_proj = Dense(r, d + r) if kind == "gated" else None
        self.joint_proj = Dense(3 * r, 2 * r + d) if kind == "rnn" else None


class Drafter(nnx.Module):
    """The DSpark drafter: taps projection, stages, and the Markov and confidence heads."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.drafter is not None
        d, rank = config.hidden_size, config.drafter.markov_rank
        self.main_proj = fp8(d, config.taps_width)
        self.main_norm = bf16(d)
        self.stages = nnx.List([Block(config, ratio=0, hashed=False) for _ in range(config.num_stages)])
        self.hc_head = HyperConnection(config, "head")
        self.norm = bf16(d)
        self.markov_head = MarkovHead(config)
        self.confidence = bf16(1, d + rank)
