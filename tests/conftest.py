"""Every test sees eight CPU devices, strict dtype promotion, and warnings as errors.

`JAX_PLATFORMS=cuda,cpu` runs the GPU tests on a machine that has one.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

if "JAX_PLATFORMS" not in os.environ:  # most programs take longer to compile than to run
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=2"

import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

GOLDEN = Path(__file__).parent / "golden"
QUICK = {"xla_backend_optimization_level": 0}  # for programs that take longer to compile than to run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")


@pytest.fixture(params=["tiny-a", "tiny-b"], scope="module")
def golden(request: pytest.FixtureRequest) -> Path:
    """A golden folder: a checkpoint, and `expected.safetensors` with the numbers that PyTorch gives for it."""
    return GOLDEN / request.param


# The command line ----------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Dspark = Callable[..., Ran]


@pytest.fixture
def dspark(capsys: pytest.CaptureFixture[str]) -> Dspark:
    from dspark_jax.cli import main  # a machine that has a GPU may lack what it needs

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 0
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-a with a tokenizer: token i is the word `w<i>`; w1, the golden models' EOS, is special."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["w1"])
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-a"
    shutil.copytree(GOLDEN / "tiny-a", folder, ignore=shutil.ignore_patterns("expected*", "README*"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


BOUNDS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
CONTROL = (*BOUNDS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint with the control tokens of DeepSeek-V4 and words `w7` to `w95`."""
    from random_model import random_model
    from tiny_configs import CONFIGS
    from tokenizers import Tokenizer, models, pre_tokenizers

    import dspark_jax

    folder = tmp_path_factory.mktemp("small")
    dspark_jax.save(random_model(CONFIGS["two-streams"]), folder)
    words = [*CONTROL, *(f"w{i}" for i in range(len(CONTROL), 96))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w7"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(BOUNDS))
    tokenizer.add_tokens(list(CONTROL[len(BOUNDS) :]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# GGUF files of a drafter ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of `gguf_drafters.CONFIG`."""
    from gguf_drafters import CONFIG
    from random_model import random_model

    import dspark_jax

    folder = tmp_path_factory.mktemp("checkpoint") / "wide"
    dspark_jax.save(random_model(CONFIG), folder)
    return folder


@pytest.fixture(scope="session")
def drafter_files(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Its drafter as each of `gguf_drafters.FILES`, K-quants without search: build -> file."""
    from gguf_drafters import FILES

    from dspark_jax.checkpoint.gguf.convert import convert

    out = tmp_path_factory.mktemp("gguf")
    for build, spelling in FILES:
        convert(wide, build, out / build, spelling, search=False)
    return {build: out / build for build, _ in FILES}


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """What `QUICK` does, for programs that are compiled out of a test's reach."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
