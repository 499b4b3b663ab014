"""A run of training in a process that dies in the middle: `dying_run.py FOLDER STEP`, with exit code 9."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE / "training")]


def main(folder: Path, step: int) -> None:
    """The run of `training/test_run.py`, until it has logged a step."""
    import conftest  # noqa: F401  # devices and dtypes are those of the tests
    import jax
    from random_model import random_model
    from test_run import CONFIG, go_on

    jax.config.update("jax_disable_most_optimizations", True)
    go_on(random_model(CONFIG), folder, lambda record: os._exit(9) if record["step"] == step else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
