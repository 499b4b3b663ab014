"""The folder writer: every byte comes back, and nothing half-written ever stands under the final name."""

import json
import os
import signal
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from dspark_jax.checkpoint import write as write_module
from dspark_jax.checkpoint.folder import INDEX_FILE, CheckpointFolder
from dspark_jax.checkpoint.safetensors import DTYPES
from dspark_jax.checkpoint.write import new_file, write_folder
from dspark_jax.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {"model_type": "deepseek_v4", "compress_ratios": [0, 4]}
Shard = dict[str, np.ndarray]


def two_shards() -> list[Shard]:
    return [{"a": np.arange(3, dtype=np.int8)}, {"b": np.ones((2, 2), np.float32), "c": np.arange(2)}]


def refusal(directory: Path, shards: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        write_folder(directory, CONFIG, shards)
    return str(caught.value)


def test_a_folder_has_the_official_layout(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", CONFIG, iter(two_shards()))
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", first, second, INDEX_FILE]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert json.loads((tmp_path / "out" / INDEX_FILE).read_text()) == {
        "metadata": {"total_size": 3 + 16 + 16},
        "weight_map": {"a": first, "b": second, "c": second},
    }
    with safe_open(tmp_path / "out" / first, "np") as library:
        assert library.metadata() == {"format": "pt"}


@pytest.mark.parametrize("golden", ["tiny-a", "tiny-b"])
def test_golden_folders_survive_byte_by_byte(golden: str, tmp_path: Path) -> None:
    source = CheckpointFolder.open(GOLDEN / golden)
    config = json.loads((GOLDEN / golden / "config.json").read_text())
    files = sorted({source.file_of(name).name for name in source.names})
    shards = ({n: source.read(n) for n in source.names if source.file_of(n).name == file} for file in files)
    write_folder(tmp_path / "out", config, shards)
    copy = CheckpointFolder.open(tmp_path / "out")
    assert copy.names == source.names
    for name in source.names:
        assert copy.file_of(name).name == source.file_of(name).name
        assert (copy.info(name).dtype, copy.info(name).shape) == (source.info(name).dtype, source.info(name).shape)
        assert copy.read(name).tobytes() == source.read(name).tobytes()
    read, written = (json.loads((place / INDEX_FILE).read_text()) for place in (GOLDEN / golden, tmp_path / "out"))
    assert read == written and config == json.loads((tmp_path / "out" / "config.json").read_text())


def test_every_dtype_survives_in_any_memory_layout(tmp_path: Path) -> None:
    tensors: Shard = {}
    for stored, dtype in DTYPES.items():
        data = np.arange(96, dtype=np.uint8) % (2 if stored == "BOOL" else 251)
        full = data.view(dtype).reshape(4, 3, -1)
        tensors |= {f"{stored}.full": full, f"{stored}.transposed": full.T, f"{stored}.strided": full[::-2, 1:]}
        tensors |= {f"{stored}.scalar": full[1, 1, 0].reshape(()), f"{stored}.empty": full[:0]}
    write_folder(tmp_path / "out", CONFIG, [tensors])
    copy = CheckpointFolder.open(tmp_path / "out")
    for name, tensor in tensors.items():
        read = copy.read(name)
        assert copy.info(name).dtype == name.split(".")[0]
        assert (read.dtype, read.shape, read.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())


def test_an_earlier_shard_is_gone_when_the_next_is_built(tmp_path: Path) -> None:
    class Traced(dict[str, np.ndarray]):
        """A dict that a weak reference can follow."""

    built: list[weakref.ref[Any]] = []

    def build(number: int) -> Traced:
        assert all(earlier() is None for earlier in built)
        array = np.full(100, number, np.float32)
        shard = Traced({f"t{number}": array.T})
        built.extend((weakref.ref(shard), weakref.ref(array)))
        return shard

    write_folder(tmp_path / "out", CONFIG, map(build, range(3)))
    assert len(built) == 6 and CheckpointFolder.open(tmp_path / "out").read("t2")[0] == 2


def test_parents_are_made_and_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for place in (tmp_path / "new" / "deep" / "out", tmp_path / "link"):
        write_folder(str(place), CONFIG, two_shards())
        assert CheckpointFolder.open(place).names == {"a", "b", "c"}
    assert (tmp_path / "link").is_symlink()


def test_others_may_read_what_the_umask_lets_them_read(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        write_folder(tmp_path / "out", CONFIG, two_shards())
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o640}


def test_everything_is_flushed_before_it_gets_its_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []

    def record(path: Path) -> None:
        assert not (tmp_path / "out").exists()
        flushed.append(path.name)

    monkeypatch.setattr(write_module, "_flush", record)
    write_folder(tmp_path / "out", CONFIG, two_shards())
    assert set(os.listdir(tmp_path / "out")) < set(flushed) and flushed[-1].endswith(".partial")


def never() -> Iterator[Shard]:
    raise AssertionError("the shards were asked for")
    yield {}


def test_an_occupied_place_is_refused_before_any_shard_is_built(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for place in ("full", "file"):
        assert f"{tmp_path / place}: is not empty" in refusal(tmp_path / place, never())
    assert (tmp_path / "full" / "keep").read_text() == (tmp_path / "file").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]


def test_a_mount_point_is_refused_before_any_shard_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: path == tmp_path)
        assert "mount point; name a folder that does not exist yet" in refusal(tmp_path, never())


def test_a_place_that_becomes_occupied_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def shards() -> Iterator[Shard]:
        yield from two_shards()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "keep").write_text("precious")

    assert f"{tmp_path / 'out'}: cannot be written (Directory not empty)" in refusal(tmp_path / "out", shards())
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["keep"]


BAD_SHARDS: dict[str, tuple[list[Shard], str]] = {
    "none": ([], "expected at least one shard of tensors to write, found none."),
    "empty": ([{"a": np.zeros(1)}, {}], "shard 2: holds no tensors"),
    "twice": (
        [{"a": np.zeros(1)}, {"b": np.zeros(1)}, {"a": np.zeros(1)}],
        "tensor 'a' comes twice, in shards 1 and 3",
    ),
    "own name": ([{"__metadata__": np.zeros(1)}], "shard 1: '__metadata__' is the format's own name"),
    "fp4": (
        [{"w": np.zeros(2, ml_dtypes.float4_e2m1fn)}],
        "shard 1: tensor 'w' is float4_e2m1fn, expected one of bool,",
    ),
    "swapped": ([{"w": np.zeros(2, ">f4")}], "shard 1: tensor 'w' is >f4"),
    "text": ([{"w": np.array(["x"])}], "shard 1: tensor 'w' is <U1"),
}


@pytest.mark.parametrize(("shards", "expected"), BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_shards_that_cannot_be_stored_are_refused_and_leave_nothing(
    tmp_path: Path, shards: list[Shard], expected: str
) -> None:
    assert expected in refusal(tmp_path / "out", shards)
    assert os.listdir(tmp_path) == []


def test_a_configuration_that_is_no_json_fails_before_any_shard_is_built(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_folder(tmp_path / "out", {"x": np.zeros(1)}, never())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError("mine"), OSError(5, "mine"), KeyboardInterrupt("mine")])
def test_a_failure_of_the_iterator_passes_unchanged_and_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def shards() -> Iterator[Shard]:
        yield two_shards()[0]
        assert len(os.listdir(tmp_path)) == 1 and not (tmp_path / "out").exists()
        raise error

    with pytest.raises(type(error), match="mine") as caught:
        write_folder(tmp_path / "out", CONFIG, shards())
    assert caught.value is error and os.listdir(tmp_path) == []
    write_folder(tmp_path / "out", CONFIG, two_shards())
    assert CheckpointFolder.open(tmp_path / "out").names == {"a", "b", "c"}


# The packages' own __init__ files import jax: it takes seconds, and its threads do not survive a fork.
WITHOUT_JAX = """
import os, signal, sys, types
from pathlib import Path

for package in ("dspark_jax", "dspark_jax.checkpoint"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [package.replace(".", "/")]

import numpy as np
from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.write import write_folder
from dspark_jax.errors import CheckpointError

assert "jax" not in sys.modules
"""


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX + script, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


KILLED_IN_THE_ITERATOR = """
def shards():
    yield {"a": np.arange(3, dtype=np.int8)}
    os.kill(os.getpid(), signal.SIGKILL)

write_folder(sys.argv[1], {}, shards())
"""


def test_a_killed_run_shows_nothing_and_does_not_block_the_next(tmp_path: Path) -> None:
    assert run(KILLED_IN_THE_ITERATOR, tmp_path / "out").returncode == -signal.SIGKILL
    (left_over,) = os.listdir(tmp_path)
    assert left_over.startswith(".out.") and left_over.endswith(".partial")
    assert len(os.listdir(tmp_path / left_over)) == 2  # the configuration and the first shard: killed midway indeed
    write_folder(tmp_path / "out", CONFIG, two_shards())
    assert CheckpointFolder.open(tmp_path / "out").read("c")[1] == 1


# Forks a writer again and again and kills it at its first, second, ... call to the system, until one survives.
KILLED_EVERYWHERE = """
def write(target, fatal_call):
    calls = 0
    def count(event, arguments):
        nonlocal calls
        if event == "open" or event.startswith(("os.", "shutil.")):
            calls += 1
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    write_folder(target, {}, [{"a": np.arange(3.0)}, {"b": np.arange(2)}])
    os._exit(0)

target, outcomes = Path(sys.argv[1]), []
for fatal_call in range(1, 1000):
    child = os.fork() or write(target, fatal_call)
    _, status = os.waitpid(child, 0)
    if target.exists():
        folder = CheckpointFolder.open(target)
        assert folder.read("a")[2] == 2 and folder.read("b")[1] == 1
        assert sorted(p.suffix for p in target.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]
        target.rename(target.with_name(f"whole-{fatal_call}"))
        outcomes.append("whole")
    else:
        outcomes.append("nothing")
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(outcomes.count("nothing"), outcomes.count("whole"), outcomes == sorted(outcomes), outcomes[-1])
"""


def test_a_run_killed_at_any_point_shows_all_or_nothing(tmp_path: Path) -> None:
    result = run(KILLED_EVERYWHERE, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    nothing, whole, in_order, last = result.stdout.split()
    assert int(nothing) > 10 and int(whole) >= 1 and (in_order, last) == ("True", "whole")


DISK_FULL = """
import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    write_folder(sys.argv[1], {}, [{"a": np.zeros(100)}, {"b": np.zeros(10_000)}])
except CheckpointError as error:
    print(error)
"""


def test_a_disk_that_refuses_is_explained_and_nothing_is_left(tmp_path: Path) -> None:
    result = run(DISK_FULL, tmp_path / "out")
    assert "shard-00002: cannot be written (" in result.stdout and "File too large" in result.stdout, result.stderr
    assert os.listdir(tmp_path) == []


class TestSingleFiles:
    """`new_file`."""

    def refusal(self, path: Path, overwrite: bool = False) -> str:
        with pytest.raises(CheckpointError) as error, new_file(path, overwrite) as file:
            file.write(b"new")
        assert str(path) in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_file_that_appears_meanwhile_is_replaced_only_on_demand(self, overwrite: bool, tmp_path: Path) -> None:
        path = tmp_path / "out"
        refused = pytest.raises(CheckpointError, match=r"out: .*File exists")
        with nullcontext() if overwrite else refused, new_file(path, overwrite) as file:
            file.write(b"new")
            path.write_bytes(b"precious")
        assert path.read_bytes() == (b"new" if overwrite else b"precious") and os.listdir(tmp_path) == ["out"]

    def test_only_a_regular_file_is_overwritten(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "folder").mkdir()
        (tmp_path / "loop").symlink_to("loop")
        before = {path.name: path.lstat() for path in tmp_path.iterdir()}
        for path in (*tmp_path.iterdir(), Path("/dev/null")):
            assert "is no regular file; name another place" in self.refusal(path, overwrite=True)
        assert {path.name: path.lstat() for path in tmp_path.iterdir()} == before

    def test_a_link_to_a_file_stays_one(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"old")
        (tmp_path / "link").symlink_to("file")
        with new_file(tmp_path / "link", overwrite=True) as file:
            file.write(b"new")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"

    def test_what_the_disk_refuses_is_explained(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "File exists" in self.refusal(tmp_path / "file" / "out")
        assert "Not a directory" in self.refusal(tmp_path / "file" / "new" / "out")
        assert "File name too long" in self.refusal(tmp_path / "new" / ("a" * 300))
        assert "File name too long" in self.refusal(tmp_path / "new" / ("a" * 300) / "out")
        assert os.listdir(tmp_path) == ["file"]

    def test_a_failure_removes_the_folders_that_it_made(self, tmp_path: Path) -> None:
        (tmp_path / "old").mkdir()
        with pytest.raises(ZeroDivisionError), new_file(tmp_path / "old" / "a" / "b" / "out", False):
            raise ZeroDivisionError
        assert [*tmp_path.rglob("*")] == [tmp_path / "old"]
