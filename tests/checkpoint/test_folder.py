"""The folder reader on the golden checkpoints and on folders with every kind of damage."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.checkpoint import folder as folder_module
from dspark_jax.checkpoint.folder import INDEX_FILE, CheckpointFolder
from dspark_jax.checkpoint.safetensors import DTYPES, SafetensorsFile
from dspark_jax.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WEIGHT_MAP = {"a": FIRST, "b": FIRST, "c": SECOND}


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder of two shards and three tensors."""
    save_file({"a": np.arange(2.0), "b": np.arange(3, dtype=np.int8)}, tmp_path / FIRST)
    save_file({"c": np.arange(4, dtype=np.int64)}, tmp_path / SECOND)
    write_index(tmp_path, WEIGHT_MAP)
    return tmp_path


def refusal(directory: Path, name: str | None = None) -> str:
    """The message with which a folder, or else the reading of one of its tensors, is refused."""
    if name is None:
        with pytest.raises(CheckpointError) as caught:
            CheckpointFolder.open(directory)
    else:
        folder = CheckpointFolder.open(directory)
        with pytest.raises(CheckpointError) as caught:
            folder.read(name)
    message = str(caught.value)
    assert message.startswith(str(directory)) and message.endswith(".")
    return message


@pytest.mark.parametrize("golden", ["tiny-a", "tiny-b"])
def test_golden_folders_read_completely(golden: str) -> None:
    directory = GOLDEN / golden
    index = json.loads((directory / INDEX_FILE).read_text())
    folder = CheckpointFolder.open(directory)
    assert folder.names == set(index["weight_map"])
    total = 0
    for name, file in index["weight_map"].items():
        info, tensor = folder.info(name), folder.read(name)
        assert folder.file_of(name) == directory / file
        assert (tensor.dtype, tensor.shape) == (DTYPES[info.dtype], info.shape)
        with open(directory / file, "rb") as raw:
            raw.seek(info.start)
            assert tensor.tobytes() == raw.read(info.stop - info.start)
        total += tensor.nbytes
    assert total == index["metadata"]["total_size"]


def test_golden_dtypes_are_those_of_the_specification() -> None:
    folder = CheckpointFolder.open(GOLDEN / "tiny-a")
    expected = {
        "embed.weight": "BF16",
        "hc_head_fn": "F32",
        "layers.0.ffn.gate.tid2eid": "I64",
        "layers.0.attn.wq_a.weight": "F8_E4M3",
        "layers.0.attn.wq_a.scale": "F8_E8M0",
        "layers.0.ffn.experts.0.w1.weight": "I8",
    }
    assert {name: folder.info(name).dtype for name in expected} == expected


def test_a_folder_may_be_named_by_a_string_and_hold_other_files(small: Path) -> None:
    (small / "expected.safetensors").write_bytes(b"not a shard")
    (small / "model-00001-of-00002.safetensors.incomplete").write_bytes(b"")
    (small / "config.json").write_text("{}")
    folder = CheckpointFolder.open(str(small))
    assert folder.names == {"a", "b", "c"}
    np.testing.assert_array_equal(folder.read("b"), np.arange(3, dtype=np.int8), strict=True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that the folder reader opens, as they are opened."""
    names: list[str] = []

    def recorded(path: Path) -> SafetensorsFile:
        names.append(path.name)
        return SafetensorsFile(path)

    monkeypatch.setattr(folder_module, "SafetensorsFile", recorded)
    return names


def test_each_shard_is_opened_once_and_only_when_asked_for(small: Path, opened: list[str]) -> None:
    folder = CheckpointFolder.open(small)
    assert folder.file_of("c") == small / SECOND and opened == []
    assert folder.info("a").shape == (2,) and folder.read("a")[1] == 1 and folder.read("b")[2] == 2
    assert opened == [FIRST]
    assert folder.read("c")[3] == 3 and folder.info("c").dtype == "I64"
    assert opened == [FIRST, SECOND]


def test_a_part_of_the_shards_loads_and_the_absent_one_is_named(small: Path) -> None:
    (small / FIRST).unlink()
    folder = CheckpointFolder.open(small)
    assert folder.names == {"a", "b", "c"} and folder.read("c")[3] == 3
    assert f"{FIRST}: is absent, but the index places tensor 'b' there" in refusal(small, "b")


def test_linked_shards_read_as_in_a_download_cache(small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in (FIRST, SECOND, INDEX_FILE):
        (snapshot / file).symlink_to(small / file)
    assert CheckpointFolder.open(snapshot).read("c")[3] == 3


def test_a_single_file_needs_no_index(tmp_path: Path, opened: list[str]) -> None:
    save_file({"a": np.arange(2.0)}, tmp_path / "model.safetensors")
    (tmp_path / "expected.safetensors").write_bytes(b"ignored")
    folder = CheckpointFolder.open(tmp_path)
    assert folder.names == {"a"} and folder.file_of("a") == tmp_path / "model.safetensors"
    assert folder.info("a").dtype == "F64" and folder.read("a")[1] == 1
    assert opened == ["model.safetensors"]


def test_a_damaged_single_file_is_refused_on_opening(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    assert "model.safetensors: holds 2 bytes" in refusal(tmp_path)


def test_folders_that_cannot_be_listed_are_refused(tmp_path: Path) -> None:
    assert "gone: cannot be listed (No such file or directory)" in refusal(tmp_path / "gone")
    (tmp_path / "file").write_bytes(b"")
    assert "file: cannot be listed (Not a directory)" in refusal(tmp_path / "file")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))  # chmod would not stop root

    with monkeypatch.context() as patch:
        patch.setattr("dspark_jax.checkpoint.folder.os.listdir", denied)
        message = refusal(tmp_path)
    assert "cannot be listed (Permission denied); name the folder of a checkpoint" in message


def test_a_folder_without_index_and_single_file_is_refused(
    small: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "holds no model.safetensors.index.json and 0 shards" in refusal(tmp_path_factory.mktemp("empty"))
    (small / INDEX_FILE).unlink()
    assert "holds no model.safetensors.index.json and 2 shards" in refusal(small)
    save_file({"a": np.arange(2.0)}, small / "model.safetensors")
    assert "expected an index, or a single model.safetensors and no shards" in refusal(small)


INDEX_FAULTS = {
    "not JSON": ('{"weight_map": ', "the index is not valid JSON"),
    "not UTF-8": ("\udcff", "the index is not valid JSON"),
    "not an object": ("[]", "the index: expected a JSON object, found []"),
    "no weight_map": ('{"metadata": {}}', "expected an object 'weight_map'"),
    "weight_map a list": ('{"weight_map": ["a"]}', "expected an object 'weight_map'"),
    "weight_map empty": ('{"weight_map": {}}', "expected an object 'weight_map'"),
    "tensor twice": (f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}', "name 'a' appears twice"),
}


@pytest.mark.parametrize(("text", "expected"), INDEX_FAULTS.values(), ids=INDEX_FAULTS)
def test_a_damaged_index_is_refused(small: Path, text: str, expected: str) -> None:
    (small / INDEX_FILE).write_text(text, encoding="utf-8", errors="surrogateescape")
    message = refusal(small)
    assert INDEX_FILE in message and expected in message


def test_an_index_that_cannot_be_read_is_refused(small: Path) -> None:
    (small / INDEX_FILE).unlink()
    (small / INDEX_FILE).symlink_to(small / "gone")
    assert f"{INDEX_FILE}: cannot be read (No such file or directory)" in refusal(small)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "sub/x", "..\\x", "..", ".", "", 7, None])
def test_an_index_that_leads_out_of_the_folder_is_refused(small: Path, file: Any) -> None:
    write_index(small, WEIGHT_MAP | {"evil": file})
    message = refusal(small)
    assert f"{INDEX_FILE}: places tensor 'evil' in {file!r}" in message and "plain name of a file" in message


@pytest.mark.parametrize("file", ["x" * 300, "nul\0", "\ud800"])
def test_file_names_that_no_disk_holds_are_refused_as_absent(small: Path, file: str) -> None:
    write_index(small, WEIGHT_MAP | {"odd": file})
    assert "is absent, but the index places tensor 'odd' there" in refusal(small, "odd")


def test_a_shard_that_the_index_never_names_is_refused(small: Path) -> None:
    shutil.copy(small / SECOND, small / "model-00003-of-00003.safetensors")
    assert f"holds shard 'model-00003-of-00003.safetensors' that {INDEX_FILE} never names (1 such" in refusal(small)


def test_a_tensor_that_its_shard_does_not_hold_is_refused(small: Path) -> None:
    write_index(small, WEIGHT_MAP | {"d": FIRST})
    assert f"{FIRST}: lacks tensor 'd', which the index places there" in refusal(small, "d")
    assert f"{FIRST}: lacks tensor 'd', which the index places there" in refusal(small, "a")
    write_index(small, WEIGHT_MAP | {"d": FIRST, "e": FIRST, "f": FIRST})
    assert f"{FIRST}: lacks tensor 'd' (and 2 more), which" in refusal(small, "f")
    assert CheckpointFolder.open(small).read("c")[3] == 3


def test_a_tensor_that_the_index_does_not_place_in_its_shard_is_refused(small: Path) -> None:
    write_index(small, {"a": FIRST, "c": SECOND})
    assert f"{FIRST}: holds tensor 'b', which the index places in no shard at all" in refusal(small, "a")
    save_file({"c": np.arange(4, dtype=np.int64), "b": np.zeros(1)}, small / SECOND)
    write_index(small, WEIGHT_MAP)
    assert f"{SECOND}: holds tensor 'b', which the index places in {FIRST}" in refusal(small, "c")
    assert CheckpointFolder.open(small).read("a")[1] == 1


def test_a_damaged_shard_is_refused_when_opened(small: Path) -> None:
    content = (small / SECOND).read_bytes()
    (small / SECOND).write_bytes(content[:-1])
    expected = (
        f"{SECOND}: is cut short: expected {len(content)} bytes (where tensor 'c' ends), found {len(content) - 1}"
    )
    assert expected in refusal(small, "c")
    assert CheckpointFolder.open(small).read("a")[1] == 1


def test_an_unknown_tensor_is_refused(small: Path) -> None:
    folder = CheckpointFolder.open(small)
    for ask in (folder.read, folder.info, folder.file_of):
        with pytest.raises(CheckpointError, match=r"holds no tensor 'layers\.9' \(it holds 3 others\)"):
            ask("layers.9")
