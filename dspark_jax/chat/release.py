"""Which release of DeepSeek-V4 a checkpoint folder is: the names of the effort levels moved between them."""

import ast
from pathlib import Path
from typing import Literal

from dspark_jax.errors import CheckpointError

Release = Literal["0731", "preview"]

# The constant of the encoding file that holds the effort texts, in each release.
_MARKS: dict[str, Release] = {"REASONING_EFFORT_PROMPTS": "0731", "REASONING_EFFORT_MAX": "preview"}


def release_of(checkpoint: Path) -> Release:
    """The release, from the encoding file that the folder ships, which is read and never run.

    Args:
        checkpoint: folder of a checkpoint. One without `encoding/*.py`, as most copies are, counts as 0731.

    Raises:
        CheckpointError: the encoding file is that of another model, or cannot be read.
    """
    files = sorted((checkpoint / "encoding").glob("*.py"))
    found = {_MARKS[name] for path in files for name in _constants(path) if name in _MARKS}
    if not files:
        return "0731"
    if len(found) != 1:
        raise CheckpointError(
            f"{files[0]}: defines {'both' if found else 'neither'} of {' and '.join(_MARKS)}, so that the effort "
            "levels are unknown; expected the encoding file of DeepSeek-V4, preview or 0731. Name the release yourself."
        )
    return found.pop()


def _constants(path: Path) -> set[str]:
    """Names assigned at the top of a Python file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as Python ({error}); fetch the file again.") from error
    assigned = [target for node in tree.body for target in _targets(node)]
    return {target.id for target in assigned if isinstance(target, ast.Name)}


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []
