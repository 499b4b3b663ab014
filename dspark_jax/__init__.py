"""DeepSeek-V4 and its DSpark drafter in JAX: load an official checkpoint, run it, and decode speculatively on the
device.

import dspark_jax

model = dspark_jax.load("DIR", numerics="bfloat16")
done = dspark_jax.generate(model, [[1, 2, 3]], max_new_tokens=64)
done.tokens[0], done.statistics.accepted_length
"""

from dspark_jax.checkpoint.load import load
from dspark_jax.checkpoint.save import save
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.forward import Forward, forward
from dspark_jax.decoding.generate import Completion, Completions, generate
from dspark_jax.decoding.generation import Generation, generate_fn
from dspark_jax.decoding.request import Request
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.state import LogProbs
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.decoding.stream import StreamProgress, stream
from dspark_jax.errors import (
    CalibrationError,
    CheckpointError,
    ConfigError,
    DsparkError,
    NotFiniteError,
    RequestError,
    SilentDrafterError,
)
from dspark_jax.model.model import Model
from dspark_jax.model.numerics import Numerics
from dspark_jax.sharding import make_mesh

__all__ = [
    "CalibrationError",
    "CheckpointError",
    "Completion",
    "Completions",
    "ConfigError",
    "DsparkError",
    "Forward",
    "Generation",
    "LogProbs",
    "Model",
    "ModelConfig",
    "NotFiniteError",
    "Numerics",
    "Request",
    "RequestError",
    "Sampling",
    "SilentDrafterError",
    "Statistics",
    "StreamProgress",
    "forward",
    "generate",
    "generate_fn",
    "load",
    "make_mesh",
    "save",
    "stream",
]
