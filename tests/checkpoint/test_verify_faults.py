"""What a comparison of drafters must not overlook, and files that only look like one."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_drafters import rewrite

from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.gguf.file import GGUFFile, TensorInfo
from dspark_jax.checkpoint.verify import verify
from dspark_jax.errors import CheckpointError
from dspark_jax.formats.ggml import F32


@pytest.fixture
def bf16(drafter_files: dict[str, Path]) -> Path:
    return drafter_files["llama.cpp-bf16"]


@pytest.mark.parametrize(
    ("key", "value", "clause"),
    [
        ("dflash.block_size", np.uint32(9), r"block size \[5\] in A and \[9\] in B"),
        ("tokenizer.ggml.mask_token_id", None, r"noise token \[\d+\] in A and \[\] in B"),
        ("dflash.target_layers", np.array([2, 3], np.int32), r"tapped layers \[0, 1\] in A and \[1, 2\] in B"),
    ],
)
def test_settings_that_weights_do_not_tell(
    key: str, value: Any, clause: str, wide: Path, bf16: Path, tmp_path: Path
) -> None:
    told = verify(wide, rewrite(bf16, tmp_path / "x", {key: value}))
    assert all(row.exact for row in told.rows) and not told.same
    assert re.search(clause, told.verdict), told.verdict


def test_nan_in_a_folder(wide: Path, bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = CheckpointFolder.read

    def spoilt(folder: CheckpointFolder, name: str) -> np.ndarray:
        values = read(folder, name)
        return np.full_like(values, np.nan) if name == "mtp.1.norm.weight" else values

    monkeypatch.setattr(CheckpointFolder, "read", spoilt)
    for pair in ((wide, bf16), (bf16, wide), (wide, wide)):
        with pytest.raises(CheckpointError, match=r"tensor mtp\.1\.norm holds NaN or infinity"):
            verify(*pair)


def test_names_of_the_checkpoint(bf16: Path, tmp_path: Path) -> None:
    """A tensor under both names would be one tensor, of which the last one counted."""
    extra = {"more": ("mtp.0.attn_norm", TensorInfo(F32, (256,)), np.zeros(1024, np.uint8))}
    with pytest.raises(CheckpointError, match=r"mtp\.0\.attn_norm .* expected blk\.0\.attn_norm\.weight"):
        verify(bf16, rewrite(bf16, tmp_path / "x", None, **extra))


def test_no_tensor_of_a_drafter(bf16: Path, tmp_path: Path) -> None:
    gone: Any = {f"t{i}": (name, None, None) for i, name in enumerate(GGUFFile(bf16).tensors)}
    with pytest.raises(CheckpointError, match="holds no tensor of a drafter"):
        verify(bf16, rewrite(bf16, tmp_path / "x", None, **gone))


def test_an_architecture_that_is_no_name(bf16: Path, tmp_path: Path) -> None:
    file = rewrite(bf16, tmp_path / "x", {"general.architecture": np.array([1, 2], np.int32)})
    with pytest.raises(CheckpointError, match="is of architecture array"):
        verify(file, bf16)


def test_tensors_without_values_and_files_that_are_none(bf16: Path, tmp_path: Path) -> None:
    empty = {"none": ("x", TensorInfo(F32, (3, 0)), np.zeros(0, np.uint8))}
    with pytest.raises(CheckpointError, match=r"tensor x has shape \[3, 0\], so no values"):
        GGUFFile(rewrite(bf16, tmp_path / "x", None, **empty))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"pipe: cannot be read \(it is no regular file"):
        GGUFFile(tmp_path / "pipe")
