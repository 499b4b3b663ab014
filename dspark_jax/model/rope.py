"""Rotary positions: interleaved pairs on the last channels of a vector, with YaRN where a layer has compressed entries.

The tables are made on the host and gathered by position: the angle is the float32 product of position and frequency, as
in the official code, whose rounding is visible at positions of 10^5; cosine and sine are then taken in float64.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RopeTables:
    """Cosine and sine for every position, float32 [P, k/2, 2].

    Attributes:
        plain: base `rope_theta`, for layers and stages with a window only.
        compressed: base `compress_rope_theta` with YaRN, for everything in a layer with compressed entries.
    """

    plain: jax.Array
    compressed: jax.Array

    def of(self, ratio: int) -> jax.Array:
        """The table of a layer with this compression ratio."""
        return self.compressed if ratio else self.plain


def rope_tables(config: ModelConfig, length: int) -> RopeTables:
    """Tables for positions 0 ... length-1."""
    plain, compressed = _tables(config, length)
    return RopeTables(jnp.asarray(plain), jnp.asarray(compressed))


@lru_cache(maxsize=2)
def _tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Both tables on the host; kept, since a million positions take seconds."""
    plain = frequencies(config.qk_rope_head_dim, config.rope_theta)
    compressed = yarn(frequencies(config.qk_rope_head_dim, config.compress_rope_theta), config)
    return _table(plain, length), _table(compressed, length)


def frequencies(width: int, base: float) -> np.ndarray:
    """float32 [width/2]: base^(-2i/width)."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1) / np.power(np.float32(base), exponents)


def yarn(theta: np.ndarray, config: ModelConfig) -> np.ndarray:
    """YaRN (Peng et al. 2023): slow frequencies are divided by the factor, fast ones kept, with a ramp between."""
    scaling = config.rope_scaling
    low = max(math.floor(_pair_with_turns(scaling.beta_fast, config)), 0)
    high = min(math.ceil(_pair_with_turns(scaling.beta_slow, config)), config.qk_rope_head_dim - 1)
    index = np.arange(len(theta), dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1)  # 1e-3: the ends may coincide
    return theta / np.float32(scaling.factor) * ramp + theta * (1 - ramp)


def _pair_with_turns(turns: float, config: ModelConfig) -> float:
    """The (fractional) channel pair that turns `turns` times over the original context."""
    span = config.rope_scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return config.qk_rope_head_dim * math.log(span) / (2 * math.log(config.compress_rope_theta))


def _table(theta: np.ndarray, length: int) -> np.ndarray:
    angles = np.arange(length, dtype=np.float32)[:, None] * theta[None, :]
    angles = angles.astype(np.float64)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def angles_at(table: jax.Array, positions: jax.Array) -> jax.Array:
    """Gathers table rows: int32 [...] -> float32 [..., k/2, 2]. Positions outside the table (dead rows) are clipped."""
    return table.at[positions].get(mode="clip")


def rotate(x: jax.Array, angles: jax.Array, inverse: bool = False) -> jax.Array:
    """Rotates the last k channels of `x` [..., D] pair by pair; float32 inside.

    Args:
        x: vectors; the first D - k channels pass unchanged.
        angles: float32, broadcastable to [..., k/2, 2].
        inverse: rotate backwards, as attention outputs need because values carry RoPE too.

    Returns:
        float32 [..., D]; the caller rounds.
    """
    width = 2 * angles.shape[-2]
    head, tail = jnp.split(x.astype(jnp.float32), [x.shape[-1] - width], axis=-1)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    cos, sin = angles[..., 0], angles[..., 1]
    sin = -sin if inverse else sin
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([head, turned.reshape(tail.shape)], axis=-1)
