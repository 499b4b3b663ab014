"""A tiny drafter and rows for it, made so that a step of training compiles in seconds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.data.example import Example, Features

VOCABULARY, BLOCK = 106, 3  # twice a prime, so that a shape says what it is of, and two devices share it


def tiny(**changes: Any) -> ModelConfig:
    """One sliding layer and one stage, with as few operations as there can be."""
    fewest: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 1,
        "compress_ratios": [0, 0],
        "num_hash_layers": 0,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 1,
        "n_routed_experts": 4,
        "dspark_target_layer_ids": [0],
        "dspark_block_size": BLOCK,
    }
    return ModelConfig.tiny(**fewest | changes)


def example_of(config: ModelConfig, batch: int = 4, length: int = 20, features: bool = True, seed: int = 0) -> Example:
    """Random rows of different lengths, supervised behind a prompt, with features out of the air if any."""
    rng = np.random.default_rng(seed)
    index = np.arange(length)[None]
    document = np.where(index < length - np.arange(batch)[:, None], 0, -1).astype(np.int32)
    made = None
    if features:
        taps, hidden = (
            rng.standard_normal((batch, length, width), np.float32) for width in (config.taps_width, config.hidden_size)
        )
        made = Features(jnp.asarray(taps), jnp.asarray(hidden))
    ids = rng.integers(0, config.vocab_size, (batch, length), dtype=np.int32)
    return Example(ids, (document == 0) & (index > 3), document, made)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rows:
    """Examples by step, an epoch of three."""

    config: ModelConfig
    features: bool = True

    steps_per_epoch: int = 3

    def starting_at(self, step: int) -> Iterator[Example]:
        while True:
            yield example_of(self.config, features=self.features, seed=step % self.steps_per_epoch)
            step += 1
