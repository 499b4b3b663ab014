"""Two processes on one machine hold a model together: each reads its slices, and both get the numbers of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from distributed_worker import MESHES, results
from tiny_configs import random_ids

import dspark_jax

TINY_A = GOLDEN / "tiny-a"
PROCESSES, LIMIT_S = 2, 300
QUICK = "--xla_backend_optimization_level=0"  # compiling takes longer than running
Results = dict[str, np.ndarray]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def expected() -> Results:
    model = dspark_jax.load(TINY_A)
    return results(model, random_ids(model.config, 2, 16, seed=0))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each process got."""
    folder, address = tmp_path_factory.mktemp("distributed"), free_address()
    np.save(folder / "ids.npy", random_ids(dspark_jax.ModelConfig.from_file(TINY_A / "config.json"), 2, 16, seed=0))
    outs = [folder / f"{number}.npz" for number in range(PROCESSES)]
    workers = [start_worker(address, number, folder / "ids.npy", out) for number, out in enumerate(outs)]
    try:
        said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, "\n".join(said)
    return [dict(np.load(out)) for out in outs]


def start_worker(address: str, number: int, ids: Path, out: Path) -> subprocess.Popen[str]:
    tests = Path(__file__).parent
    arguments = [address, PROCESSES, number, TINY_A, ids, out]
    return subprocess.Popen(
        [sys.executable, str(tests / "distributed_worker.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]), "XLA_FLAGS": QUICK},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_every_process_has_the_numbers_of_one(mesh: str, found: list[Results], expected: Results) -> None:
    for process in found:
        for name, values in expected.items():
            difference = np.abs(process[f"{mesh}/{name}"] - values).max()
            assert difference <= 1e-5 * np.abs(values).max(), name


def test_processes_have_the_same_bits(found: list[Results]) -> None:
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name], err_msg=name)


def test_an_axis_of_experts_divides_the_reading(found: list[Results]) -> None:
    """Each process checked its slices; of 7 layers it did not touch half of 8 experts, each 3 matrices and scales."""
    assert [int(process["experts/unread"]) for process in found] == [7 * 4 * 6] * PROCESSES
    assert [int(process["sequences/unread"]) for process in found] == [0] * PROCESSES
