"""Every test sees eight CPU devices, strict dtype promotion, and warnings as errors.

`JAX_PLATFORMS=cuda,cpu` runs the GPU tests on a machine that has one.
"""

import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")


@pytest.fixture(params=["tiny-a", "tiny-b"], scope="module")
def golden(request: pytest.FixtureRequest) -> Path:
    """A golden folder: a checkpoint, and `expected.safetensors` with the numbers that PyTorch gives for it."""
    return GOLDEN / request.param
