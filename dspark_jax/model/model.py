"""Target, drafter and what they share, as one tree that goes through `jax.jit`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax

from dspark_jax.config import ModelConfig
from dspark_jax.model.numerics import Numerics
from dspark_jax.model.rope import rope_tables
from dspark_jax.model.rows import Setting
from dspark_jax.model.weights import Drafter, Target, Vocabulary
from pallas_kernels.partition import Partition

Part = Literal["target", "drafter"]
PARTS: tuple[Part, ...] = ("target", "drafter")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """A DeepSeek-V4 target with its DSpark drafter, or one of the two.

    Attributes:
        config: what the checkpoint says it is.
        numerics: how activations are rounded.
        vocabulary: embedding and LM head, shared by both.
        target: None if the drafter was loaded alone.
        drafter: None if the target was loaded alone, or has no drafter.
    """

    config: ModelConfig = field(metadata={"static": True})
    numerics: Numerics = field(metadata={"static": True})
    vocabulary: Vocabulary
    target: Target | None
    drafter: Drafter | None

    @property
    def block_size(self) -> int:
        """Drafts per round; 0 without a drafter."""
        return self.config.block_size if self.drafter is not None else 0

    @property
    def step_width(self) -> int:
        """Rows per sequence of every decoding step: the anchor and a whole block of drafts."""
        return self.config.step_width if self.drafter is not None else 1

    def setting(self, capacity: int, partition: Partition | None = None) -> Setting:
        """What layers need to run positions below `capacity`; `partition` if the weights lie on a mesh."""
        return Setting(self.config, self.numerics, rope_tables(self.config, capacity), partition)


def abstract_model(config: ModelConfig, numerics: Numerics, parts: Sequence[Part] = PARTS) -> Model:
    """The model with `jax.ShapeDtypeStruct` leaves: no array is allocated."""
    target = Target(config) if "target" in parts else None
    drafter = Drafter(config) if "drafter" in parts and config.drafter else None
    return Model(config, numerics, Vocabulary(config), target, drafter)
