"""One of several processes that hold a model together; tests/test_distributed.py starts them.

`python distributed_worker.py ADDRESS PROCESSES NUMBER CHECKPOINT IDS OUT`: over meshes of all processes it loads the
checkpoint, checks what this process reads, runs the ids (an .npy file), and writes its own view of the results (.npz).
"""

import sys
from pathlib import Path

import jax
import numpy as np
from watched_reads import assert_only_own_slices_were_read, watched_reads

import dspark_jax
from dspark_jax.placement import fetch

DEVICES = 2  # of each process
MESHES = {"experts": dict(expert=2, tensor=2), "sequences": dict(data=2, tensor=2)}  # the first axis spans processes


def results(model: dspark_jax.Model, ids: np.ndarray) -> dict[str, np.ndarray]:
    """What every process must find the same, by name."""
    step = fetch(dspark_jax.forward(model, ids, chunk=16))
    return {"logits": step.logits, "taps": step.taps}


def completions(model: dspark_jax.Model, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Tokens of a greedy and a sampled row, which every process must find the same."""
    done = dspark_jax.generate(model, ids[:, :5], 16, stop_ids=(), temperature=[0.0, 0.8], seed=7)
    return {"tokens": np.array(done.tokens)}


def main(address: str, processes: str, number: str, checkpoint: str, ids: str, out: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(number))
    assert (jax.local_device_count(), jax.device_count()) == (DEVICES, DEVICES * int(processes))
    found = {}
    for name, shape in MESHES.items():
        with watched_reads() as reads:
            model = dspark_jax.load(checkpoint, mesh=dspark_jax.make_mesh(**shape))
        found[f"{name}/unread"] = np.array(assert_only_own_slices_were_read(model, reads))
        found |= {f"{name}/{key}": values for key, values in results(model, np.load(ids)).items()}
        found |= {f"{name}/{key}": values for key, values in completions(model, np.load(ids)).items()}
    alone = dspark_jax.load(checkpoint, parts=("drafter",))
    assert alone.vocabulary.embed[...].devices() == {jax.local_devices()[0]}
    np.savez(Path(out), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
