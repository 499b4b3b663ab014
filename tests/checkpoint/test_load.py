"""Loading: the golden folders arrive byte for byte, every tensor once, on one device or a mesh; damage is named."""

import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from test_layout import GOLDEN, stored
from watched_reads import assert_only_own_slices_were_read, watched_reads

import dspark_jax
from dspark_jax import sharding as sharding_module
from dspark_jax.checkpoint import load as load_module
from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.layout import Entry, layout
from dspark_jax.checkpoint.write import write_folder
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError, ConfigError, DsparkError, RequestError
from dspark_jax.model.model import PARTS, Model, Part
from dspark_jax.model.numerics import PRESETS
from pallas_kernels.block_scaled import BlockScaled

TINY_A, TINY_B = GOLDEN / "tiny-a", GOLDEN / "tiny-b"
VOCABULARY = {"embed.weight", "head.weight"}
Tensors = dict[str, np.ndarray]
Raw = dict[str, Any]


def is_needed(name: str, parts: Sequence[Part]) -> bool:
    return name in VOCABULARY or ("drafter" if name.startswith("mtp.") else "target") in parts


def leaves_by_name(model: Model) -> Iterator[tuple[str, Entry, jax.Array]]:
    """Every tensor of the layout with the part of a leaf that it fills."""
    for entry, leaf in zip(layout(model), jax.tree.leaves(model), strict=True):
        values = np.asarray(leaf)
        for name, value in zip(entry.names, values if entry.stacked else values[None], strict=True):
            yield name, entry, value


def assert_filled_from(model: Model, directory: Path, parts: Sequence[Part]) -> None:
    """The leaves hold the bytes of exactly the tensors that the parts need."""
    tensors, names = stored(directory), set()
    for name, entry, value in leaves_by_name(model):
        content = value.astype(np.int64) if entry.dtype == "I64" else value
        assert content.tobytes() == tensors[name][2], name
        names.add(name)
    assert names == {name for name in tensors if is_needed(name, parts)}


def assert_equal(model: Model, other: Model) -> None:
    leaves, structure = jax.tree.flatten(model)
    others, structure_of_other = jax.tree.flatten(other)
    assert structure == structure_of_other
    for leaf, expected in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected), strict=True)


@pytest.fixture(scope="module")
def tiny_a() -> Model:
    return dspark_jax.load(TINY_A)


@pytest.fixture(scope="module")
def contents() -> Tensors:
    """All tensors of tiny-a, to be damaged and written elsewhere."""
    folder = CheckpointFolder.open(TINY_A)
    return {name: folder.read(name) for name in sorted(folder.names)}


@pytest.fixture
def sharded_folder(tiny_a: Model, tmp_path: Path) -> Path:
    """tiny-a in shards like the official release: a layer or stage each."""
    dspark_jax.save(tiny_a, tmp_path / "sharded")
    return tmp_path / "sharded"


class TestGolden:
    @pytest.mark.parametrize("directory", [TINY_A, TINY_B], ids=["tiny-a", "tiny-b"])
    @pytest.mark.parametrize("parts", [PARTS, ("drafter", "target"), ("target",), ("drafter",), ["target"]], ids=str)
    def test_every_leaf_is_an_array_with_the_files_bytes(self, directory: Path, parts: Sequence[Part]) -> None:
        model = dspark_jax.load(directory, parts=parts)
        assert (model.target is not None, model.drafter is not None) == ("target" in parts, "drafter" in parts)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))
        assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(model))
        assert_filled_from(model, directory, parts)

    def test_both_is_the_default_and_the_order_of_parts_is_free(self, tiny_a: Model) -> None:
        assert_equal(tiny_a, dspark_jax.load(str(TINY_A), parts=("drafter", "target")))

    def test_the_config_is_the_files(self, tiny_a: Model) -> None:
        assert tiny_a.config == ModelConfig.from_file(TINY_A / "config.json")

    @pytest.mark.parametrize("numerics", ["float32", "official", "bfloat16", PRESETS["official"]])
    def test_numerics_change_no_weight(self, tiny_a: Model, numerics: Any) -> None:
        model = dspark_jax.load(TINY_A, numerics=numerics)
        assert model.numerics == PRESETS.get(numerics, numerics)
        leaves = jax.tree.leaves(model), jax.tree.leaves(tiny_a)
        assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*leaves, strict=True))

    def test_a_checkpoint_without_drafter_gives_a_target_alone(self, contents: Tensors, tmp_path: Path) -> None:
        target = {name: tensor for name, tensor in contents.items() if not name.startswith("mtp.")}
        write_folder(tmp_path / "target", without_dspark(golden_config()), [target])
        model = dspark_jax.load(tmp_path / "target")
        assert model.drafter is None and model.config.drafter is None and model.block_size == 0
        assert_filled_from(model, tmp_path / "target", ("target",))


# Tensors whose place in the module tree is not simply their own name.
PLACES = {
    "embed": "vocabulary.embed",
    "head": "vocabulary.head",
    "norm": "target.norm",
    "hc_head_fn": "target.hc_head.fn",
    "hc_head_base": "target.hc_head.base",
    "hc_head_scale": "target.hc_head.scale",
    "mtp.0.main_proj": "drafter.main_proj",
    "mtp.0.main_norm": "drafter.main_norm",
    "mtp.2.norm": "drafter.norm",
    "mtp.2.hc_head_fn": "drafter.hc_head.fn",
    "mtp.2.hc_head_base": "drafter.hc_head.base",
    "mtp.2.hc_head_scale": "drafter.hc_head.scale",
    "mtp.2.markov_head.markov_w1": "drafter.markov_head.markov_w1",
    "mtp.2.markov_head.markov_w2": "drafter.markov_head.markov_w2",
    "mtp.2.confidence_head.proj": "drafter.confidence",
}


def value_of(name: str, model: Model) -> jax.Array:
    """The part of the module tree that should hold a tensor, found by attributes."""
    place = re.sub(r"(?<!\.gate)\.(weight|scale)$", "", name)
    place = PLACES.get(place, place.replace("mtp.", "drafter.stages.").replace("layers.", "target.layers."))
    place = re.sub(r"(hc_attn|hc_ffn)_", r"\1.", re.sub(r"\.experts\.\d+", ".experts", place))
    keys = place.split(".")
    value = reduce(lambda node, key: node[int(key)] if key.isdigit() else getattr(node, key), keys, model).get_value()
    if isinstance(value, BlockScaled):
        value = value.scales if name.endswith(".scale") else value.payload
    expert = re.search(r"\.experts\.(\d+)", name)
    return value[int(expert[1])] if expert else value


def test_every_attribute_holds_the_tensor_of_its_name(tiny_a: Model) -> None:
    size = 0
    for name, (dtype, _, content) in stored(TINY_A).items():
        value = value_of(name, tiny_a)
        assert np.asarray(value, np.int64 if dtype == "I64" else None).tobytes() == content, name
        size += value.nbytes
    assert size == sum(leaf.nbytes for leaf in jax.tree.leaves(tiny_a))


class TestReading:
    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        counts: Counter[str] = Counter()
        read = CheckpointFolder.read

        def counted(folder: CheckpointFolder, name: str) -> np.ndarray:
            counts[name] += 1
            return read(folder, name)

        monkeypatch.setattr(CheckpointFolder, "read", counted)
        return counts

    @pytest.mark.parametrize("parts", [PARTS, ("target",), ("drafter",)], ids=str)
    def test_every_tensor_is_consumed_exactly_once(self, parts: Sequence[Part], reads: Counter[str]) -> None:
        dspark_jax.load(TINY_A, parts=parts)
        names = json.loads((TINY_A / "model.safetensors.index.json").read_text())["weight_map"]
        assert reads == {name: 1 for name in names if is_needed(name, parts)}

    def test_the_drafter_needs_only_its_own_shards_and_the_vocabularys(
        self, sharded_folder: Path, tiny_a: Model
    ) -> None:
        shards = shards_of(sharded_folder, lambda name: name.startswith("layers."))
        assert len(shards) == 4
        for shard in shards:
            (sharded_folder / shard).unlink()
        model = dspark_jax.load(sharded_folder, parts=("drafter",))
        assert_equal(model, Model(tiny_a.config, tiny_a.numerics, tiny_a.vocabulary, None, tiny_a.drafter))
        with pytest.raises(CheckpointError, match=r"is absent, but the index places tensor 'layers\.0\."):
            dspark_jax.load(sharded_folder)

    def test_the_target_needs_no_shard_of_the_drafter(self, sharded_folder: Path, tiny_a: Model) -> None:
        for shard in shards_of(sharded_folder, lambda name: name.startswith("mtp.")):
            (sharded_folder / shard).unlink()
        model = dspark_jax.load(sharded_folder, parts=("target",))
        assert_equal(model, Model(tiny_a.config, tiny_a.numerics, tiny_a.vocabulary, tiny_a.target, None))

    @pytest.mark.parametrize("parts", [PARTS, ("target",), ("drafter",)], ids=str)
    def test_progress_rises_to_the_bytes_of_the_model(self, parts: Sequence[Part]) -> None:
        told: list[tuple[int, int]] = []
        model = dspark_jax.load(TINY_A, parts=parts, progress=lambda done, total: told.append((done, total)))
        leaves = jax.tree.leaves(model)
        size = sum(leaf.nbytes for leaf in leaves)
        done = [bytes_read for bytes_read, _ in told]
        assert done == sorted(set(done)) and done[0] == leaves[0].nbytes and done[-1] == size
        assert {total for _, total in told} == {size} and len(told) == len(leaves)


def golden_config() -> Raw:
    return json.loads((TINY_A / "config.json").read_text())


def without_dspark(raw: Raw) -> Raw:
    return {name: value for name, value in raw.items() if not name.startswith("dspark_")}


def shards_of(directory: Path, chosen: Callable[[str], bool]) -> list[str]:
    """Files that hold a tensor of a chosen name."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return sorted({file for name, file in weight_map.items() if chosen(name)})


def refusal(directory: Path, kind: type[DsparkError] = CheckpointError, **options: Any) -> str:
    """The sentence with which a folder is refused."""
    with pytest.raises(kind) as caught:
        dspark_jax.load(directory, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(str(directory)) and message.endswith("."), message
    return message


def with_value(tensor: np.ndarray, index: Any, value: int) -> np.ndarray:
    """A copy with other bytes in one place."""
    copy = np.array(tensor)
    copy.view(np.int64 if copy.dtype == np.int64 else np.uint8)[index] = value
    return copy


MISSING = (
    ("layers.1.attn.wkv.weight", "F8_E4M3 [128, 128]"),
    ("layers.1.attn.wkv.scale", "F8_E8M0 [1, 1]"),
    ("layers.2.ffn.experts.7.w2.weight", "I8 [128, 64]"),
    ("layers.0.ffn.gate.tid2eid", "I64 [512, 2]"),
    ("layers.3.hc_ffn_scale", "F32 [3]"),
    ("head.weight", "BF16 [512, 128]"),
    ("mtp.0.main_proj.scale", "F8_E8M0 [1, 3]"),
    ("mtp.2.confidence_head.proj.weight", "BF16 [1, 144]"),
)
UNEXPECTED = (
    "layers.4.attn_norm.weight",
    "layers.0.attn.compressor.ape",  # a sliding layer has no compressor
    "layers.0.ffn.gate.bias",  # a hash layer has no bias
    "layers.2.ffn.experts.8.w1.weight",
    "layers.0.attn.wq_a.weight_scale_inv",
    "model.embed_tokens.weight",
    "mtp.3.attn_norm.weight",
    "mtp.0.norm.weight",  # only the last stage has one
)
MISSHAPEN: tuple[tuple[str, Callable[[np.ndarray], np.ndarray], str, str], ...] = (
    ("norm.weight", lambda x: x[:64], "BF16 [64]", "BF16 [128]"),
    ("embed.weight", lambda x: x.T, "BF16 [128, 512]", "BF16 [512, 128]"),
    ("hc_head_scale", lambda x: x.reshape(()), "F32 []", "F32 [1]"),
    ("layers.3.ffn.experts.5.w1.weight", lambda x: np.concatenate([x, x], 1), "I8 [128, 128]", "I8 [128, 64]"),
    ("layers.1.attn.attn_sink", lambda x: x.astype(ml_dtypes.bfloat16), "BF16 [2]", "F32 [2]"),
    ("layers.1.attn_norm.weight", lambda x: x.astype(np.float32), "F32 [128]", "BF16 [128]"),
    ("layers.0.ffn.gate.tid2eid", lambda x: x.astype(np.int32), "I32 [512, 2]", "I64 [512, 2]"),
    ("layers.2.attn.wq_a.scale", lambda x: x.view(np.uint8), "U8 [1, 1]", "F8_E8M0 [1, 1]"),
    ("layers.2.attn.wo_b.weight", lambda x: x.view(np.int8), "I8 [128, 128]", "F8_E4M3 [128, 128]"),
    ("mtp.1.ffn.experts.0.w2.weight", lambda x: x.view(np.uint8), "U8 [128, 64]", "I8 [128, 64]"),
)
NAN = (
    ("layers.1.attn.wo_a.scale", 0xFF, "F8_E8M0"),
    ("layers.2.ffn.experts.6.w3.scale", 0xFF, "F8_E8M0"),
    ("mtp.0.main_proj.scale", 0xFF, "F8_E8M0"),
    ("layers.3.attn.wq_b.weight", 0x7F, "F8_E4M3"),
    ("mtp.1.ffn.shared_experts.w2.weight", 0xFF, "F8_E4M3"),
)


class TestDamage:
    @pytest.fixture
    def damaged(self, contents: Tensors, tmp_path: Path) -> Callable[..., Path]:
        """Writes tiny-a with some tensors changed (None removes one), or another configuration."""

        def write(changes: dict[str, np.ndarray | None], config: Raw | None = None) -> Path:
            tensors = {name: tensor for name, tensor in (contents | changes).items() if tensor is not None}
            write_folder(tmp_path / "damaged", config or golden_config(), [tensors])
            return tmp_path / "damaged"

        return write

    def test_the_writer_of_these_tests_does_no_damage(self, damaged: Callable[..., Path], tiny_a: Model) -> None:
        assert_equal(dspark_jax.load(damaged({})), tiny_a)

    @pytest.mark.parametrize(("name", "expected"), MISSING)
    def test_a_missing_tensor_is_named(self, name: str, expected: str, damaged: Callable[..., Path]) -> None:
        message = refusal(damaged({name: None}))
        assert f"tensor {name} is missing" in message and expected in message

    @pytest.mark.parametrize("name", UNEXPECTED)
    def test_an_unexpected_tensor_is_named(self, name: str, damaged: Callable[..., Path]) -> None:
        message = refusal(damaged({name: np.zeros(128, np.float32)}))
        assert f"tensor {name} is unexpected; config.json has no place for it" in message
        assert "model-00001-of-00001.safetensors" in message

    def test_unexpected_tensors_are_counted(self, damaged: Callable[..., Path]) -> None:
        message = refusal(damaged({f"layers.{layer}.norm.weight": np.zeros(1) for layer in range(3)}))
        assert "tensor layers.0.norm.weight and 2 more is unexpected" in message

    @pytest.mark.parametrize(("name", "change", "found", "expected"), MISSHAPEN)
    def test_a_misshapen_or_mistyped_tensor_is_named(
        self, name: str, change: Callable, found: str, expected: str, damaged: Callable[..., Path], contents: Tensors
    ) -> None:
        message = refusal(damaged({name: change(contents[name])}))
        assert f"tensor {name} is {found}; expected {expected} by config.json" in message

    @pytest.mark.parametrize(("name", "code", "dtype"), NAN)
    def test_nan_is_named(
        self, name: str, code: int, dtype: str, damaged: Callable[..., Path], contents: Tensors
    ) -> None:
        message = refusal(damaged({name: with_value(contents[name], (-1, -1), code)}))
        assert f"tensor {name} ({dtype}) holds NaN; expected finite values" in message

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            *(("layers.1.attn.wo_a.scale", code) for code in (0, 1, 254)),
            *(("layers.1.attn.wo_a.weight", code) for code in (0x00, 0x80, 0x7E, 0xFE)),
            *(("layers.1.ffn.experts.0.w1.weight", code) for code in (0x7F, 0xFF, 0x88)),
        ],
    )
    def test_the_codes_beside_nan_load(
        self, name: str, code: int, damaged: Callable[..., Path], contents: Tensors
    ) -> None:
        model = dspark_jax.load(damaged({name: with_value(contents[name], (-1, -1), code)}))
        found = next(value for place, _, value in leaves_by_name(model) if place == name)
        assert found[-1, -1] == code

    @pytest.mark.parametrize("expert", [-1, 8, 2**31, 2**32, -(2**32)])  # some of these are experts as int32
    def test_an_expert_that_does_not_exist_is_named(
        self, expert: int, damaged: Callable[..., Path], contents: Tensors
    ) -> None:
        name = "layers.1.ffn.gate.tid2eid"
        message = refusal(damaged({name: with_value(contents[name], (3, 1), expert)}))
        assert f"tensor {name} names experts" in message and str(expert) in message and "expected 0 to 7" in message

    def test_damage_in_the_other_part_is_not_read(self, damaged: Callable[..., Path], contents: Tensors) -> None:
        scale = "mtp.0.main_proj.scale"
        directory = damaged({scale: with_value(contents[scale], (0, 0), 0xFF), "mtp.1.norm.weight": np.zeros(3)})
        assert dspark_jax.load(directory, parts=("target",)).target is not None

    def test_an_odd_target_is_refused_to_the_drafter_too(self, damaged: Callable[..., Path]) -> None:
        message = refusal(damaged({"layers.4.attn_norm.weight": np.zeros(128)}), parts=("drafter",))
        assert "tensor layers.4.attn_norm.weight is unexpected" in message

    def test_another_config_is_refused(self, damaged: Callable[..., Path]) -> None:
        message = refusal(damaged({}, golden_config() | {"vocab_size": 640}))
        assert "tensor embed.weight is BF16 [512, 128]; expected BF16 [640, 128] by config.json" in message
        assert "do not belong together" in message


class TestLegacyPredictor:
    """The preview's one-layer MTP head lies under the same names as the DSpark stages."""

    MODULES = ("mtp.0.enorm.weight", "mtp.0.hnorm.weight", "mtp.0.e_proj.weight", "mtp.0.h_proj.weight")

    @pytest.fixture
    def preview(self, contents: Tensors, tmp_path: Path) -> Callable[[Sequence[str]], Path]:
        """The target of tiny-a with one stage, and what the preview has there."""

        def write(modules: Sequence[str]) -> Path:
            kept = {n: t for n, t in contents.items() if not n.startswith("mtp.") or n.startswith("mtp.0.attn")}
            config = without_dspark(golden_config()) | {"compress_ratios": [0, 4, 8, 4, 0]}
            write_folder(tmp_path / "preview", config, [kept | dict.fromkeys(modules, np.zeros(128, np.float32))])
            return tmp_path / "preview"

        return write

    @pytest.mark.parametrize("modules", [MODULES, *[[module] for module in MODULES]], ids=len)
    def test_it_is_refused_with_an_explanation(
        self, modules: Sequence[str], preview: Callable[[Sequence[str]], Path]
    ) -> None:
        message = refusal(preview(modules))
        assert "one-layer MTP head of the preview release, which is not a DSpark drafter" in message
        assert "mtp.0." in message and 'parts=("target",)' in message

    def test_the_target_alone_loads(self, preview: Callable[[Sequence[str]], Path], tiny_a: Model) -> None:
        model = dspark_jax.load(preview(self.MODULES), parts=("target",))
        assert model.drafter is None
        leaves = jax.tree.leaves((model.vocabulary, model.target)), jax.tree.leaves((tiny_a.vocabulary, tiny_a.target))
        assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))

    def test_it_is_recognised_where_the_config_promises_dspark(self, contents: Tensors, tmp_path: Path) -> None:
        write_folder(tmp_path / "x", golden_config(), [contents | {"mtp.0.enorm.weight": np.zeros(128, np.float32)}])
        assert "one-layer MTP head of the preview release" in refusal(tmp_path / "x")

    def test_stages_without_dspark_fields_are_not_passed_over(self, contents: Tensors, tmp_path: Path) -> None:
        write_folder(tmp_path / "x", without_dspark(golden_config()), [contents])
        message = refusal(tmp_path / "x")
        assert "tensor mtp.0." in message and "is unexpected; config.json has no place for it" in message
        assert dspark_jax.load(tmp_path / "x", parts=("target",)).drafter is None


class TestRequests:
    @pytest.mark.parametrize("numerics", ["float64", "", "FLOAT32", None])
    def test_unknown_numerics(self, numerics: Any) -> None:
        with pytest.raises(RequestError) as caught:
            dspark_jax.load(TINY_A, numerics=numerics)
        assert str(caught.value) == f"numerics is {numerics!r}; expected one of float32, bfloat16, official."

    @pytest.mark.parametrize("parts", [("targt",), ("target", "head"), (), "target", "drafter"], ids=str)
    def test_unknown_parts(self, parts: Any) -> None:
        with pytest.raises(RequestError, match=r"parts is .*; expected .*'target'.*'drafter'"):
            dspark_jax.load(TINY_A, parts=parts)

    @pytest.mark.parametrize("parts", [("drafter",), ["drafter"], ("drafter", "drafter")], ids=str)
    def test_a_drafter_that_is_not_there(self, parts: Sequence[Part], contents: Tensors, tmp_path: Path) -> None:
        target = {name: tensor for name, tensor in contents.items() if not name.startswith("mtp.")}
        write_folder(tmp_path / "target", without_dspark(golden_config()), [target])
        message = refusal(tmp_path / "target", RequestError, parts=parts)
        assert "no dspark_* fields, so there is no drafter to load" in message


class TestFolders:
    """What only the folder can get wrong; the folder reader's own tests have more."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        shutil.copytree(TINY_A, tmp_path / "copy")
        return tmp_path / "copy"

    @pytest.mark.parametrize("cut", [1, 100_000])
    def test_a_truncated_shard(self, cut: int, copy: Path) -> None:
        shard = copy / "model-00002-of-00003.safetensors"
        size = shard.stat().st_size
        os.truncate(shard, size - cut)
        message = refusal(copy)
        assert message.startswith(f"{shard}: is cut short: expected {size} bytes") and f"found {size - cut}" in message

    def test_a_shard_that_is_absent(self, copy: Path) -> None:
        (copy / "model-00003-of-00003.safetensors").unlink()
        assert "model-00003-of-00003.safetensors: is absent, but the index places tensor" in refusal(copy)

    def test_no_folder(self, tmp_path: Path) -> None:
        message = refusal(tmp_path / "gone", ConfigError)
        assert "config.json: cannot be read (No such file or directory)" in message

    def test_a_folder_without_tensors(self, tmp_path: Path) -> None:
        shutil.copy(TINY_A / "config.json", tmp_path)
        assert "holds no model.safetensors.index.json" in refusal(tmp_path)

    @pytest.mark.parametrize(
        ("config", "named"),
        [("{", "not valid JSON"), ("[]", "expected a JSON object"), ("{}", "'model_type' is missing")],
    )
    def test_a_broken_config(self, config: str, named: str, copy: Path) -> None:
        (copy / "config.json").write_text(config)
        message = refusal(copy, ConfigError)
        assert message.startswith(str(copy / "config.json")) and named in message

    def test_an_inconsistent_config(self, copy: Path) -> None:
        (copy / "config.json").write_text(json.dumps(golden_config() | {"o_groups": 5}))
        assert "field 'o_groups' is 5; expected a divisor of num_attention_heads=2" in refusal(copy, ConfigError)


def mesh_of(**axes: int) -> Mesh:
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), devices=devices)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    assert jax.device_count() == 8
    return mesh_of(data=2, expert=2, tensor=2)


class TestMesh:
    @pytest.fixture
    def warnings(self, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
        """What the rules have logged; each test starts as a new process would."""
        sharding_module._log_once.cache_clear()
        caplog.set_level(logging.WARNING, logger=sharding_module.__name__)
        return lambda: [record.getMessage() for record in caplog.records if record.name == sharding_module.__name__]

    @pytest.mark.parametrize("directory", [TINY_A, TINY_B], ids=["tiny-a", "tiny-b"])
    @pytest.mark.parametrize("parts", [PARTS, ("drafter",)], ids=str)
    def test_the_values_are_those_of_one_device(self, directory: Path, parts: Sequence[Part], mesh: Mesh) -> None:
        model = dspark_jax.load(directory, mesh=mesh, parts=parts)
        assert all(leaf.devices() == set(jax.devices()) for leaf in jax.tree.leaves(model))
        assert_equal(model, dspark_jax.load(directory, parts=parts))

    def test_every_device_holds_its_experts_and_no_others(self, mesh: Mesh, tiny_a: Model) -> None:
        model = dspark_jax.load(TINY_A, mesh=mesh)
        parts = {device: part for group in mesh.devices.reshape(2, 4) for part, device in enumerate(group)}
        stacks = [(e, leaf) for e, leaf in zip(layout(model), jax.tree.leaves(model), strict=True) if e.stacked]
        assert len(stacks) == 7 * 3 * 2
        for entry, leaf in stacks:
            assert leaf.sharding.spec == P(("expert", "tensor"), None, None)
            for shard in leaf.addressable_shards:
                first = 2 * parts[shard.device]
                assert shard.data.shape == (2, *entry.shape) and shard.index[0] == slice(first, first + 2)

    @pytest.mark.parametrize("axis", ["expert", "tensor"])
    def test_either_axis_alone_divides_the_experts(self, axis: str) -> None:
        model = dspark_jax.load(TINY_A, mesh=mesh_of(**{axis: 4}), parts=("target",))
        stack = model.target.layers[0].ffn.experts.w2.get_value().scales
        assert stack.sharding.spec == P(axis, None, None)

    @pytest.mark.parametrize(
        ("place", "spec"),
        [
            (lambda m: m.vocabulary.embed, P("tensor", None)),
            (lambda m: m.vocabulary.head, P("tensor", None)),
            (lambda m: m.drafter.markov_head.markov_w1, P("tensor", None)),
            (lambda m: m.target.layers[1].attn.attn_sink, P("tensor")),
            (lambda m: m.target.layers[1].attn.wq_b.get_value().payload, P("tensor", None)),
            (lambda m: m.target.layers[1].attn.wq_b.get_value().scales, P("tensor", None)),
            (lambda m: m.target.layers[1].attn.wo_b.get_value().payload, P(None, "tensor")),
            (lambda m: m.target.layers[1].attn.indexer.weights_proj, P("tensor", None)),
            (lambda m: m.target.layers[1].attn.wkv.get_value().payload, P(None, None)),
            (lambda m: m.target.layers[1].attn.compressor.wkv, P(None, None)),
            (lambda m: m.target.layers[1].ffn.shared_experts.w1.get_value().payload, P("tensor", None)),
            (lambda m: m.target.layers[1].ffn.shared_experts.w3.get_value().payload, P("tensor", None)),
            (lambda m: m.target.layers[1].ffn.shared_experts.w2.get_value().payload, P(None, "tensor")),
            (lambda m: m.drafter.main_proj.get_value().payload, P(None, None)),
            (lambda m: m.target.layers[1].hc_attn.fn, P(None, None)),
        ],
    )
    def test_the_official_split(self, place: Callable[[Model], Any], spec: P, mesh: Mesh) -> None:
        leaf = jax.tree.leaves(place(dspark_jax.load(TINY_A, mesh=mesh)))[0]
        assert leaf.sharding.spec == spec

    @pytest.mark.parametrize("shape", [dict(data=2, expert=2, tensor=2), dict(tensor=2), dict(expert=3)], ids=str)
    def test_callbacks_read_only_their_slices(self, shape: dict[str, int]) -> None:
        with watched_reads() as reads:
            model = dspark_jax.load(TINY_A, mesh=mesh_of(**shape))
        assert_only_own_slices_were_read(model, reads)
        split = [leaf for leaf in jax.tree.leaves(model) if not leaf.sharding.is_fully_replicated]
        assert bool(split) == ("tensor" in shape)
        for leaf in split:  # and no device gets more than its part
            assert leaf.size > max(shard.data.size for shard in leaf.addressable_shards)

    def test_a_reader_of_more_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A planted fault: whole tensors are read and then cut."""
        read_tensor = load_module._read_tensor

        def greedy(entry: Entry, name: str, index: tuple[slice, ...], out: np.ndarray, *rest: Any) -> None:
            whole = np.empty(entry.shape, out.dtype)
            read_tensor(entry, name, (slice(None),) * len(index), whole, *rest)
            out[...] = whole[index]

        monkeypatch.setattr(load_module, "_read_tensor", greedy)
        with watched_reads() as reads:
            model = dspark_jax.load(TINY_A, mesh=mesh_of(tensor=2))
        with pytest.raises(AssertionError):
            assert_only_own_slices_were_read(model, reads)

    def test_an_axis_that_does_not_divide_is_replicated_and_logged_once(
        self, tiny_a: Model, warnings: Callable[[], list[str]]
    ) -> None:
        mesh = mesh_of(expert=3)
        for _ in range(2):
            model = dspark_jax.load(TINY_A, mesh=mesh)
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(model))
        assert_equal(model, tiny_a)
        assert warnings() == ["axis 'expert' of size 8 does not divide over mesh axis 'expert' of 3: replicated"]

    def test_one_axis_may_fall_back_where_another_holds(self, warnings: Callable[[], list[str]]) -> None:
        model = dspark_jax.load(TINY_A, mesh=mesh_of(expert=2, tensor=4), parts=("target",))
        attention = model.target.layers[1].attn
        assert attention.attn_sink.get_value().sharding.is_fully_replicated  # 2 heads
        assert attention.wq_b.get_value().payload.sharding.spec == P("tensor", None)  # 256 rows
        assert any("'heads' of size 2 does not divide over mesh axis 'tensor' of 4" in line for line in warnings())
        assert len(warnings()) == len(set(warnings()))

    def test_a_mesh_without_our_axes_replicates_in_silence(self, warnings: Callable[[], list[str]]) -> None:
        model = dspark_jax.load(TINY_A, mesh=mesh_of(data=2), parts=("drafter",))
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(model))
        assert warnings() == []

    def test_damage_in_any_devices_slice_is_named(self, mesh: Mesh, contents: Tensors, tmp_path: Path) -> None:
        name = "layers.2.ffn.experts.7.w2.scale"
        write_folder(tmp_path / "x", golden_config(), [contents | {name: with_value(contents[name], (0, 0), 0xFF)}])
        assert f"tensor {name} (F8_E8M0) holds NaN" in refusal(tmp_path / "x", mesh=mesh)


def test_a_mesh_with_explicit_axes_is_taken_as_automatic() -> None:
    mesh = jax.make_mesh((2, 4), ("tensor", "expert"))
    model = dspark_jax.load(GOLDEN / "tiny-a", mesh=mesh)
    mesh_of_head = model.vocabulary.head[...].sharding.mesh
    assert mesh_of_head.axis_types == (jax.sharding.AxisType.Auto,) * 2
    with pytest.raises(dspark_jax.RequestError, match=r"mesh is 3; expected a jax\.sharding\.Mesh"):
        dspark_jax.load(GOLDEN / "tiny-a", mesh=3)
