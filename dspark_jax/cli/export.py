"""`dspark export`: a trained drafter as a checkpoint."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from dspark_jax.assets import TINY_V4
from dspark_jax.checkpoint.fingerprint import fingerprint
from dspark_jax.cli.terminal import RESULT, print_json
from dspark_jax.errors import RequestError
from dspark_jax.training.export import export as export_drafter
from dspark_jax.training.run import load_parameters, read_contract


def export(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR", help_behavior_hint="(default: the packaged tiny-v4)")] = TINY_V4,
    run: Annotated[Path, arg(metavar="DIR")],
    out: Annotated[Path, arg(metavar="DIR")],
    json: bool = False,
) -> int:
    """Write a trained drafter back as a checkpoint that `dspark generate` loads.

    What was not trained keeps its bytes; shards without trained tensors are links to the source's where possible.

    Args:
        checkpoint: The one that was trained.
        run: Folder of the run.
        out: Folder to be made.
        json: Print the result as JSON.
    """
    contract = read_contract(run)
    found = fingerprint(checkpoint)
    if contract.get("checkpoint") != found:
        raise RequestError(
            f"{run}: was trained from the checkpoint with fingerprint {contract.get('checkpoint')}, and {checkpoint} "
            f"has {found}; name the one that was trained."
        )
    step, parameters = load_parameters(run)
    names = export_drafter(checkpoint, parameters, out, contract | {"steps_taken": step})
    result = {"out": str(out), "steps_taken": step, "trained_tensors": len(names)}
    if json:
        print_json(result)
    else:
        RESULT.print(f"{out}: {len(names)} tensors after {step} steps; the others as they were.", soft_wrap=True)
    return 0
