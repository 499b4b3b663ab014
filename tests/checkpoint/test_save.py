"""Saving: what was loaded comes back byte for byte, sharded as the official release, and never over something else."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from random_model import random_model
from test_layout import GOLDEN, places, stored
from test_load import assert_equal, is_needed

import dspark_jax
from dspark_jax.checkpoint.layout import layout
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.model.model import PARTS, Part

INDEX_FILE = "model.safetensors.index.json"


def eight_device_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("golden", ["tiny-a", "tiny-b"])
@pytest.mark.parametrize("parts", [PARTS, ("target",), ("drafter",)], ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "mesh"])
def test_every_tensor_survives(golden: str, parts: Sequence[Part], sharded: bool, tmp_path: Path) -> None:
    model = dspark_jax.load(GOLDEN / golden, mesh=eight_device_mesh() if sharded else None, parts=parts)
    dspark_jax.save(model, tmp_path / "out")
    original, copy = stored(GOLDEN / golden), stored(tmp_path / "out")
    assert copy == {name: tensor for name, tensor in original.items() if is_needed(name, parts)}
    assert ModelConfig.from_file(tmp_path / "out" / "config.json") == model.config
    assert_equal(dspark_jax.load(tmp_path / "out", parts=parts), model)


def test_the_written_config_keeps_the_values_of_the_file_it_came_from(tmp_path: Path) -> None:
    dspark_jax.save(dspark_jax.load(GOLDEN / "tiny-a"), tmp_path / "out")
    original, written = (
        json.loads((place / "config.json").read_text()) for place in (GOLDEN / "tiny-a", tmp_path / "out")
    )
    assert {name: original[name] for name in written} == written


def shard_contents(directory: Path) -> list[set[str]]:
    """What lies in each shard, in the order of the shards: a layer, a stage, or a tensor of its own."""
    weight_map: dict[str, str] = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    place = re.compile(r"(layers|mtp)\.\d+(?=\.)|.*")
    files = sorted(set(weight_map.values()))
    return [{place.match(name)[0] for name, file in weight_map.items() if file == shard} for shard in files]


HEAD = {"norm.weight", "head.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (PARTS, [{"embed.weight"}, *[{f"layers.{n}"} for n in range(4)], HEAD, *[{f"mtp.{n}"} for n in range(3)]]),
        (("target",), [{"embed.weight"}, *[{f"layers.{n}"} for n in range(4)], HEAD]),
        (("drafter",), [{"embed.weight"}, {"head.weight"}, *[{f"mtp.{n}"} for n in range(3)]]),
    ],
    ids=["both", "target", "drafter"],
)
def test_shards_are_those_of_the_official_release(
    parts: Sequence[Part], expected: list[set[str]], tmp_path: Path
) -> None:
    dspark_jax.save(dspark_jax.load(GOLDEN / "tiny-a", parts=parts), tmp_path / "out")
    assert shard_contents(tmp_path / "out") == expected
    count = len(expected)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*names, "config.json", INDEX_FILE])


def test_shards_beyond_nine_are_in_the_order_of_the_layers(tmp_path: Path) -> None:
    ratios = [0, 4, *[0] * 10, 0]
    dspark_jax.save(random_model(ModelConfig.tiny(num_hidden_layers=12, compress_ratios=ratios)), tmp_path / "out")
    layers = [{f"layers.{number}"} for number in range(12)]
    assert shard_contents(tmp_path / "out") == [{"embed.weight"}, *layers, HEAD, {"mtp.0"}]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 160, "moe_intermediate_size": 96, "q_lora_rank": 136},  # ragged FP8 blocks
        {"compress_ratios": [4, 128, 0, 0], "num_hash_layers": 3},
        {"eos_token_id": [1, 5], "n_routed_experts": 11},
    ],
    ids=str,
)
def test_any_model_survives(changes: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(ModelConfig.tiny(**changes))
    dspark_jax.save(model, tmp_path / "out")
    assert {name: tensor[:2] for name, tensor in stored(tmp_path / "out").items()} == places(layout(model))
    assert_equal(dspark_jax.load(tmp_path / "out"), model)


def test_a_changed_weight_is_what_is_written(tmp_path: Path) -> None:
    model = dspark_jax.load(GOLDEN / "tiny-a")
    model.drafter.norm[...] = jax.numpy.full_like(model.drafter.norm[...], 1.5)
    dspark_jax.save(model, tmp_path / "out")
    original, copy = stored(GOLDEN / "tiny-a"), stored(tmp_path / "out")
    assert [name for name in original if copy[name] != original[name]] == ["mtp.2.norm.weight"]
    assert np.frombuffer(copy["mtp.2.norm.weight"][2], np.uint16).tolist() == [0x3FC0] * 128  # 1.5 in bfloat16


class TestPlaces:
    def test_an_occupied_folder_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        place = tmp_path / "out"
        place.mkdir()
        (place / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=r"out: is not empty, .*; name a folder that does not exist yet"):
            dspark_jax.save(dspark_jax.load(GOLDEN / "tiny-a"), place)
        assert os.listdir(tmp_path) == ["out"] and os.listdir(place) == ["notes.txt"]

    def test_the_folder_it_was_loaded_from_is_refused(self, tmp_path: Path) -> None:
        dspark_jax.save(dspark_jax.load(GOLDEN / "tiny-a"), tmp_path / "out")
        before = stored(tmp_path / "out")
        with pytest.raises(CheckpointError, match="is not empty"):
            dspark_jax.save(dspark_jax.load(tmp_path / "out"), tmp_path / "out")
        assert stored(tmp_path / "out") == before

    def test_an_empty_folder_and_a_string_will_do(self, tmp_path: Path) -> None:
        model = dspark_jax.load(GOLDEN / "tiny-a")
        (tmp_path / "out").mkdir()
        dspark_jax.save(model, str(tmp_path / "out"))
        dspark_jax.save(model, str(tmp_path / "a" / "b"))
        assert stored(tmp_path / "out") == stored(tmp_path / "a" / "b") == stored(GOLDEN / "tiny-a")


def test_loading_all_of_a_saved_part_says_how_to_load_the_part(tmp_path: Path) -> None:
    dspark_jax.save(dspark_jax.load(GOLDEN / "tiny-a", parts=("target",)), tmp_path / "target")
    with pytest.raises(dspark_jax.CheckpointError, match=r"is missing.*load another part \(parts="):
        dspark_jax.load(tmp_path / "target")
