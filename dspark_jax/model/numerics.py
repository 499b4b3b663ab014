"""Numerics as data: which dtype activations have, which of the official fake quantisations are simulated.

Layers ask a `Numerics`; nobody asks which preset it is. There is no field for matmul precision: a float32 product is
always taken at the highest precision, and a product of bfloat16 operands is exact before its float32 accumulation, so
a switch would have no user.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp

from dspark_jax.errors import RequestError
from pallas_kernels.implementation import Implementation
from pallas_kernels.precision import round_to


@dataclass(frozen=True)
class Numerics:
    """How activations are rounded.

    Attributes:
        activations: dtype of everything stored between operations and in the caches: float32 or bfloat16.
        quantise_linear_inputs: simulate E4M3 inputs, 128 channels a scale, before every FP8 and FP4 matrix.
        quantise_kv: simulate E4M3 keys and entries, 64 channels a scale, on the channels without RoPE.
        quantise_index: rotate the indexer's queries and entries (Hadamard) and simulate E2M1, 32 channels a scale.
        implementation: of the operations in `pallas_kernels`. None takes a kernel wherever there is one; "xla" none;
            "mosaic" is for tests: it refuses what no kernel takes, such as long prompts.
        rsqrt: reciprocal square root of the per-head query norm; the cross-check puts that of PyTorch on a CPU here.
    """

    activations: jnp.dtype
    quantise_linear_inputs: bool = False
    quantise_kv: bool = False
    quantise_index: bool = False
    implementation: Implementation | None = None
    rsqrt: Callable[[jax.Array], jax.Array] = jax.lax.rsqrt

    def __post_init__(self) -> None:
        """Raises RequestError if there is no such implementation."""
        if self.implementation not in (None, *get_args(Implementation)):
            raise RequestError(f"implementation is {self.implementation!r}; expected 'xla', 'mosaic' or None.")

    def round(self, x: jax.Array) -> jax.Array:
        """Rounds `x` to the activation dtype, in a way that XLA may not drop inside a fusion."""
        return round_to(x, self.activations)


PRESETS: dict[str, Numerics] = {
    "float32": Numerics(jnp.dtype(jnp.float32)),
    "bfloat16": Numerics(jnp.dtype(jnp.bfloat16)),
    "official": Numerics(jnp.dtype(jnp.bfloat16), quantise_linear_inputs=True, quantise_kv=True, quantise_index=True),
}
"""`float32`: parity with PyTorch; `official`: as DeepSeek serves it; `bfloat16`: only the weights are quantised."""


def numerics_of(name: str | Numerics) -> Numerics:
    """The preset called `name`, or `name` itself if it already is a Numerics.

    Raises:
        RequestError: there is no such preset.
    """
    if isinstance(name, Numerics):
        return name
    if name not in PRESETS:
        raise RequestError(f"numerics is {name!r}; expected one of {', '.join(PRESETS)}.")
    return PRESETS[name]
