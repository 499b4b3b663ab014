"""Two processes on one machine hold a model together: each reads its slices, and both get the numbers of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed_worker import MESHES, completions, results
from random_model import random_model
from tiny_configs import random_ids

import dspark_jax

CONFIG = dspark_jax.ModelConfig.tiny(
    num_hidden_layers=2, compress_ratios=[4, 128, 0], dspark_target_layer_ids=[1], n_routed_experts=8
)
PROCESSES, LIMIT_S = 2, 300
QUICK = "--xla_backend_optimization_level=0"  # compiling takes longer than running
Results = dict[str, np.ndarray]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three blocks, and ids to run."""
    folder = tmp_path_factory.mktemp("distributed")
    dspark_jax.save(random_model(CONFIG), folder / "checkpoint")
    np.save(folder / "ids.npy", random_ids(CONFIG, 2, 16, seed=0))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dspark_jax.Model:
    return dspark_jax.load(folder / "checkpoint")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Results]:
    """What each process got."""
    address = free_address()
    outs = [folder / f"{number}.npz" for number in range(PROCESSES)]
    workers = [start_worker(address, number, folder, out) for number, out in enumerate(outs)]
    try:
        said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, "\n".join(said)
    return [dict(np.load(out)) for out in outs]


def start_worker(address: str, number: int, folder: Path, out: Path) -> subprocess.Popen[str]:
    tests = Path(__file__).parent
    arguments = [address, PROCESSES, number, folder / "checkpoint", folder / "ids.npy", out]
    return subprocess.Popen(
        [sys.executable, str(tests / "distributed_worker.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]), "XLA_FLAGS": QUICK},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_every_process_has_the_numbers_of_one(
    mesh: str, folder: Path, alone: dspark_jax.Model, found: list[Results]
) -> None:
    expected = results(alone, np.load(folder / "ids.npy"))
    for process in found:
        for name, values in expected.items():
            difference = np.abs(process[f"{mesh}/{name}"] - values).max()
            assert difference <= 1e-5 * np.abs(values).max(), name


@pytest.mark.parametrize("mesh", MESHES)
def test_every_process_completes_prompts_as_one_does(
    mesh: str, folder: Path, alone: dspark_jax.Model, found: list[Results]
) -> None:
    expected = completions(alone, np.load(folder / "ids.npy"))["tokens"]
    assert expected.shape == (2, 16)
    for process in found:
        np.testing.assert_array_equal(process[f"{mesh}/tokens"], expected)


def test_processes_have_the_same_bits(found: list[Results]) -> None:
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name], err_msg=name)


def test_an_axis_of_experts_divides_the_reading(found: list[Results]) -> None:
    """Each process checked its slices; of 3 blocks it did not touch half of 8 experts, each 3 matrices and scales."""
    assert [int(process["experts/unread"]) for process in found] == [3 * 4 * 6] * PROCESSES
    assert [int(process["sequences/unread"]) for process in found] == [0] * PROCESSES
