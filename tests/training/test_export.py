"""A trained drafter back in the official layout: what was not trained keeps its bytes, the source all of them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from safetensors import safe_open
from safetensors.numpy import save_file

import dspark_jax
from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.errors import CheckpointError
from dspark_jax.model.model import Model
from dspark_jax.training import export as exporting
from dspark_jax.training.export import export
from dspark_jax.training.parameters import Parameters, masters, names_in, release, weights_of

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
FULL = "drafter.stages.1.ffn.experts.w2"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with more than weights in its folder."""
    folder = tmp_path / "source"
    shutil.copytree(GOLDEN / "tiny-a", folder, ignore=shutil.ignore_patterns("expected*"))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "inference").mkdir()
    (folder / "inference" / "model.py").write_text("x = 1\n")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "note").write_text("hidden")
    return folder


@pytest.fixture(scope="module")
def drafter() -> Model:
    return dspark_jax.load(GOLDEN / "tiny-a", parts=("drafter",))


@pytest.fixture(scope="module")
def parameters(drafter: Model) -> Parameters:
    """Masters of the heads, of one FP8 matrix and of one stack of experts, moved off their grids."""
    names = [*names_in(drafter, "heads"), "drafter.stages.0.attn.wq_a", FULL]
    moved = masters(drafter, names)
    return {name: values + 0.02 * jax.random.normal(jax.random.key(1), values.shape) for name, values in moved.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def shards_of(folder: Path, names: list[str]) -> set[str]:
    found = CheckpointFolder.open(folder)
    return {found.file_of(name).name for name in names}


class TestBytes:
    def test_what_was_trained_is_what_is_released_and_the_rest_keeps_its_bytes(
        self, source: Path, parameters: Parameters, drafter: Model, tmp_path: Path
    ) -> None:
        before = contents(source)
        names = export(source, parameters, tmp_path / "out", {"steps_taken": 7})
        assert contents(source) == before
        experts = drafter.config.n_routed_experts
        assert len(names) == len(set(names)) == 3 + 2 + 2 * experts  # packed matrices have scales
        old, new = CheckpointFolder.open(source), CheckpointFolder.open(tmp_path / "out")
        assert old.names == new.names
        changed = {name for name in old.names if old.read(name).tobytes() != new.read(name).tobytes()}
        assert changed <= set(names) and {name for name in names if name.endswith("weight")} <= changed
        assert all(old.info(name) == new.info(name) for name in names), "headers and places are the same"
        loaded = dict(weights_of(dspark_jax.load(tmp_path / "out", parts=("drafter",))))
        for name, weight in weights_of(release(drafter, parameters)):
            for one, other in zip(*(jax.tree.leaves(w.get_value()) for w in (loaded[name], weight)), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=name)

    def test_other_files_are_kept_and_what_was_trained_how_is_written_beside(
        self, source: Path, parameters: Parameters, tmp_path: Path
    ) -> None:
        (source / "training.json").write_text('{"steps_taken": 1}')
        names = export(source, parameters, tmp_path / "out", {"steps_taken": 7})
        old, new = contents(source), contents(tmp_path / "out")
        provenance = json.loads(new.pop("training.json"))
        assert provenance.pop("trained_sha256") and provenance == {"steps_taken": 7, "source": '{"steps_taken": 1}'}
        assert "README.md" in old and "README.md" not in new, "it describes other weights"
        del old["README.md"]
        assert json.loads(old.pop("training.json")) == {"steps_taken": 1}
        trained = shards_of(source, names)
        assert 0 < len(trained) < len(SHARDS)
        untouched = {name: data for name, data in old.items() if name not in trained and not name.startswith(".")}
        assert untouched.keys() >= {"config.json", "tokenizer.json", os.path.join("inference", "model.py")}
        assert {name: data for name, data in new.items() if name not in trained} == untouched

    def test_untouched_shards_are_links_and_trained_ones_are_not(
        self, source: Path, parameters: Parameters, tmp_path: Path
    ) -> None:
        trained = shards_of(source, export(source, parameters, tmp_path / "out", {}))
        assert trained < set(SHARDS)
        for shard in SHARDS:
            assert os.path.samefile(source / shard, tmp_path / "out" / shard) is (shard not in trained)
        for shard in trained:  # writing through one reaches nobody else
            before = (source / shard).read_bytes()
            (tmp_path / "out" / shard).write_bytes(b"gone")
            assert (source / shard).read_bytes() == before

    def test_where_there_are_no_links_shards_are_copied(
        self, source: Path, parameters: Parameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        export(source, parameters, tmp_path / "linked", {})

        def no_links(*paths: Any) -> None:
            raise OSError("no links here")

        monkeypatch.setattr(os, "link", no_links)
        export(source, parameters, tmp_path / "copied", {})
        assert contents(tmp_path / "copied") == contents(tmp_path / "linked")
        assert not any(os.path.samefile(source / shard, tmp_path / "copied" / shard) for shard in SHARDS)

    def test_a_folder_of_symbolic_links_as_the_hub_lays_it_out(
        self, source: Path, parameters: Parameters, tmp_path: Path
    ) -> None:
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
        blobs.mkdir()
        snapshot.mkdir(parents=True)
        for number, path in enumerate(path for path in sorted(source.iterdir()) if path.is_file()):
            blob = blobs / f"blob{number}"
            blob.write_bytes(path.read_bytes())
            blob.chmod(0o444)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
        before = contents(blobs)
        export(snapshot, parameters, tmp_path / "out", {})
        export(source, parameters, tmp_path / "plain", {})
        assert contents(blobs) == before
        assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
        expected = contents(tmp_path / "plain")
        assert contents(tmp_path / "out") == {n: d for n, d in expected.items() if not n.startswith("inference")}

    def test_another_reader_finds_the_numbers(self, source: Path, parameters: Parameters, tmp_path: Path) -> None:
        export(source, parameters, tmp_path / "out", {})
        folder = CheckpointFolder.open(tmp_path / "out")
        (name,) = (name for name in folder.names if name.endswith("markov_w2.weight"))
        with safe_open(folder.file_of(name), "flax") as file:
            found = file.get_tensor(name)
        (master,) = (values for path, values in parameters.items() if path.endswith("markov_w2"))
        np.testing.assert_array_equal(found, master.astype(jnp.bfloat16))

    def test_a_single_file(self, source: Path, parameters: Parameters, tmp_path: Path) -> None:
        whole = tmp_path / "whole"
        whole.mkdir()
        folder = CheckpointFolder.open(source)
        save_file({name: np.array(folder.read(name)) for name in folder.names}, whole / "model.safetensors")
        shutil.copyfile(source / "config.json", whole / "config.json")
        before = contents(whole)
        export(source, parameters, tmp_path / "shards", {})
        export(whole, parameters, tmp_path / "out", {})
        assert contents(whole) == before
        out, shards = CheckpointFolder.open(tmp_path / "out"), CheckpointFolder.open(tmp_path / "shards")
        for name in out.names:
            assert out.read(name).tobytes() == shards.read(name).tobytes(), name


class TestRefusals:
    def test_an_occupied_folder(self, source: Path, parameters: Parameters, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("")
        with pytest.raises(CheckpointError, match=r"out: is not empty, not a folder, or a mount point; name a folder"):
            export(source, parameters, tmp_path / "out", {})
        with pytest.raises(CheckpointError, match="source: lies in the folder of the source"):
            export(source, parameters, source, {})
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]

    def test_weights_that_the_checkpoint_lacks(self, source: Path, parameters: Parameters, tmp_path: Path) -> None:
        foreign = {"drafter.stages.9.attn.wq_a": jnp.zeros((2, 2))}
        with pytest.raises(CheckpointError, match=r"has no place for the trained weight drafter.stages.9.attn.wq_a;"):
            export(source, parameters | foreign, tmp_path / "out", {})
        with pytest.raises(CheckpointError, match=r"has no place for the trained weight target\.norm"):
            export(source, {"target.norm": jnp.zeros(2)}, tmp_path / "out", {})
        self.nothing_is_left(tmp_path)

    def test_weights_of_other_sizes(self, source: Path, parameters: Parameters, tmp_path: Path) -> None:
        (name,) = (name for name in parameters if name.endswith("markov_w1"))
        with pytest.raises(
            CheckpointError, match=r"markov_w1.weight is BF16 \[.*\] there and was trained as .*\[3, 4\]"
        ):
            export(source, {name: jnp.zeros((3, 4))}, tmp_path / "out", {})
        self.nothing_is_left(tmp_path)

    def test_a_failure_in_the_middle_leaves_nothing(
        self, source: Path, parameters: Parameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, written = contents(source), list[str]()
        put = exporting._overwrite

        def failing(folder: CheckpointFolder, name: str, values: np.ndarray, work: Path) -> None:
            if len(written) == 3:
                raise CheckpointError("the disk is full")
            put(folder, name, values, work)
            written.append(name)

        monkeypatch.setattr(exporting, "_overwrite", failing)
        with pytest.raises(CheckpointError, match="the disk is full"):
            export(source, parameters, tmp_path / "out", {})
        assert len(written) == 3 and contents(source) == before
        self.nothing_is_left(tmp_path)

    @staticmethod
    def nothing_is_left(folder: Path) -> None:
        assert [path.name for path in folder.iterdir()] == ["source"]
