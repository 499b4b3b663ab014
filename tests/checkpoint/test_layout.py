"""The layout table against the official release, spelled out from its published headers, and the golden files."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors import deserialize
from test_config import CONFIGS, FLASH, PRO_0813, PRO_PREVIEW

from dspark_jax.checkpoint.layout import Entry, layout, tensor_names
from dspark_jax.config import ModelConfig
from dspark_jax.model.model import PARTS, Part, abstract_model
from dspark_jax.model.numerics import numerics_of

GOLDEN = Path(__file__).parents[1] / "golden"
ITEMSIZE = {"I8": 1, "F8_E8M0": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
MEMORY_DTYPE = {
    "I8": "uint8",
    "F8_E8M0": "uint8",
    "F8_E4M3": "uint8",
    "BF16": "bfloat16",
    "F32": "float32",
    "I64": "int32",
}
Place = tuple[str, tuple[int, ...]]  # dtype and shape on disk
Row = tuple[str, str, tuple[int, ...]] | tuple[str, str, tuple[int, ...], tuple[int, ...]]  # with the scale's shape


def entries_of(raw: dict, parts: Sequence[Part] = PARTS) -> tuple[Entry, ...]:
    return layout(abstract_model(ModelConfig.from_dict(raw), numerics_of("float32"), parts))


def places(entries: Sequence[Entry]) -> dict[str, Place]:
    return {name: (entry.dtype, entry.shape) for entry in entries for name in entry.names}


def stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor of a folder, as the safetensors library reads them."""
    return {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for shard in sorted(directory.glob("model-*.safetensors"))
        for name, tensor in deserialize(shard.read_bytes())
    }


def number_of_bytes(tensors: dict[str, Place]) -> int:
    return sum(math.prod(shape) * ITEMSIZE[dtype] for dtype, shape in tensors.values())


# The tables of the official Flash release: name, dtype, shape, and the scale's shape where there is one.
EXPERT_NAMES = [f"ffn.experts.{expert}" for expert in range(256)]
TOP: tuple[Row, ...] = (
    ("embed.weight", "BF16", (129280, 4096)),
    ("head.weight", "BF16", (129280, 4096)),
    ("norm.weight", "BF16", (4096,)),
    ("hc_head_fn", "F32", (4, 16384)),
    ("hc_head_base", "F32", (4,)),
    ("hc_head_scale", "F32", (1,)),
)
EVERY_BLOCK: tuple[Row, ...] = (
    ("attn_norm.weight", "BF16", (4096,)),
    ("ffn_norm.weight", "BF16", (4096,)),
    ("hc_attn_fn", "F32", (24, 16384)),
    ("hc_ffn_fn", "F32", (24, 16384)),
    ("hc_attn_base", "F32", (24,)),
    ("hc_ffn_base", "F32", (24,)),
    ("hc_attn_scale", "F32", (3,)),
    ("hc_ffn_scale", "F32", (3,)),
    ("attn.attn_sink", "F32", (64,)),
    ("attn.wq_a", "F8_E4M3", (1024, 4096), (8, 32)),
    ("attn.q_norm.weight", "BF16", (1024,)),
    ("attn.wq_b", "F8_E4M3", (32768, 1024), (256, 8)),
    ("attn.wkv", "F8_E4M3", (512, 4096), (4, 32)),
    ("attn.kv_norm.weight", "BF16", (512,)),
    ("attn.wo_a", "F8_E4M3", (8192, 4096), (64, 32)),
    ("attn.wo_b", "F8_E4M3", (4096, 8192), (32, 64)),
    ("ffn.gate.weight", "BF16", (256, 4096)),
    *((f"{expert}.w1", "I8", (2048, 2048), (2048, 128)) for expert in EXPERT_NAMES),
    *((f"{expert}.w3", "I8", (2048, 2048), (2048, 128)) for expert in EXPERT_NAMES),
    *((f"{expert}.w2", "I8", (4096, 1024), (4096, 64)) for expert in EXPERT_NAMES),
    ("ffn.shared_experts.w1", "F8_E4M3", (2048, 4096), (16, 32)),
    ("ffn.shared_experts.w3", "F8_E4M3", (2048, 4096), (16, 32)),
    ("ffn.shared_experts.w2", "F8_E4M3", (4096, 2048), (32, 16)),
)
HASH_ROUTER: tuple[Row, ...] = (("ffn.gate.tid2eid", "I64", (129280, 6)),)
SCORE_ROUTER: tuple[Row, ...] = (("ffn.gate.bias", "F32", (256,)),)
CSA: tuple[Row, ...] = (
    ("attn.compressor.ape", "F32", (4, 1024)),
    ("attn.compressor.norm.weight", "BF16", (512,)),
    ("attn.compressor.wkv.weight", "BF16", (1024, 4096)),
    ("attn.compressor.wgate.weight", "BF16", (1024, 4096)),
    ("attn.indexer.wq_b", "F8_E4M3", (8192, 1024), (64, 8)),
    ("attn.indexer.weights_proj.weight", "BF16", (64, 4096)),
    ("attn.indexer.compressor.ape", "F32", (4, 256)),
    ("attn.indexer.compressor.norm.weight", "BF16", (128,)),
    ("attn.indexer.compressor.wkv.weight", "BF16", (256, 4096)),
    ("attn.indexer.compressor.wgate.weight", "BF16", (256, 4096)),
)
HCA: tuple[Row, ...] = (
    ("attn.compressor.ape", "F32", (128, 512)),
    ("attn.compressor.norm.weight", "BF16", (512,)),
    ("attn.compressor.wkv.weight", "BF16", (512, 4096)),
    ("attn.compressor.wgate.weight", "BF16", (512, 4096)),
)
STAGES: tuple[Row, ...] = (
    ("mtp.0.main_proj", "F8_E4M3", (4096, 12288), (32, 96)),
    ("mtp.0.main_norm.weight", "BF16", (4096,)),
    ("mtp.2.norm.weight", "BF16", (4096,)),
    ("mtp.2.hc_head_fn", "F32", (4, 16384)),
    ("mtp.2.hc_head_base", "F32", (4,)),
    ("mtp.2.hc_head_scale", "F32", (1,)),
    ("mtp.2.markov_head.markov_w1.weight", "BF16", (129280, 256)),
    ("mtp.2.markov_head.markov_w2.weight", "BF16", (129280, 256)),
    ("mtp.2.confidence_head.proj.weight", "BF16", (1, 4352)),
)


def spelled_out(prefix: str, *tables: tuple[Row, ...]) -> Iterator[tuple[str, Place]]:
    for name, dtype, shape, *scale_shape in (row for table in tables for row in table):
        if scale_shape:
            yield f"{prefix}{name}.weight", (dtype, shape)
            yield f"{prefix}{name}.scale", ("F8_E8M0", scale_shape[0])
        else:
            yield prefix + name, (dtype, shape)


def official_flash() -> Iterator[tuple[str, Place]]:
    yield from spelled_out("", TOP, STAGES)
    for layer in range(43):
        compressed = () if layer < 2 else HCA if layer % 2 else CSA
        router = HASH_ROUTER if layer < 3 else SCORE_ROUTER
        yield from spelled_out(f"layers.{layer}.", EVERY_BLOCK, router, compressed)
    for stage in range(3):
        yield from spelled_out(f"mtp.{stage}.", EVERY_BLOCK, SCORE_ROUTER)


@pytest.fixture(scope="module")
def flash() -> tuple[Entry, ...]:
    return entries_of(FLASH)


class TestFlash:
    def test_every_tensor_is_where_the_release_has_it(self, flash: tuple[Entry, ...]) -> None:
        expected, found = dict(official_flash()), places(flash)
        assert sorted(found.keys() ^ expected.keys())[:5] == []
        assert {name: (found[name], place) for name, place in expected.items() if found[name] != place} == {}

    def test_totals(self, flash: tuple[Entry, ...]) -> None:
        assert len(places(flash)) == 72_317
        assert number_of_bytes(places(flash)) == 166_878_536_440

    def test_counts_by_dtype(self, flash: tuple[Entry, ...]) -> None:
        counts = Counter(dtype for dtype, _ in places(flash).values())
        assert counts == {"I8": 35_328, "F8_E8M0": 35_718, "F8_E4M3": 390, "BF16": 445, "F32": 433, "I64": 3}

    def test_the_drafter(self, flash: tuple[Entry, ...]) -> None:
        stages = {name: place for name, place in places(flash).items() if name.startswith("mtp.")}
        assert len(stages) == 4_705 and number_of_bytes(stages) == 10_862_838_300
        assert Counter(name.endswith(".scale") for name in stages) == {True: 2_329, False: 2_376}
        assert Counter(name.split(".")[1] for name in stages) == {"0": 1_568, "1": 1_565, "2": 1_572}

    def test_the_experts_of_a_layer(self, flash: tuple[Entry, ...]) -> None:
        experts = {name: place for name, place in places(flash).items() if name.startswith("layers.7.ffn.experts.")}
        assert len(experts) == 1_536 and number_of_bytes(experts) == 256 * 13_369_344

    def test_parts_divide_the_table_and_share_the_vocabulary(self, flash: tuple[Entry, ...]) -> None:
        target, drafter = (set(places(entries_of(FLASH, [part]))) for part in PARTS)
        assert target & drafter == {"embed.weight", "head.weight"} and target | drafter == set(places(flash))
        assert len(target) == 72_317 - 4_705 and len(drafter) == 4_705 + 2

    def test_stacks_name_the_experts_in_order(self, flash: tuple[Entry, ...]) -> None:
        stacks = [entry for entry in flash if entry.stacked]
        assert len(stacks) == 46 * 3 * 2
        for entry in stacks:
            assert entry.leaf.shape == (256, *entry.shape)
            assert [int(re.search(r"experts\.(\d+)\.", name)[1]) for name in entry.names] == list(range(256))
        assert all(len(entry.names) == 1 and entry.leaf.shape == entry.shape for entry in flash if not entry.stacked)


# Which axis the official conversion splits, and the logical axis that names it; everything else is replicated.
SPLIT: tuple[tuple[str, int, str], ...] = (
    (r"(embed|head)\.weight", 0, "vocabulary"),
    (r".*markov_w[12]\.weight", 0, "vocabulary"),
    (r".*attn\.(indexer\.)?wq_b\.(weight|scale)", 0, "heads"),
    (r".*attn\.wo_a\.(weight|scale)", 0, "heads"),
    (r".*attn\.wo_b\.(weight|scale)", 1, "heads"),
    (r".*attn\.attn_sink", 0, "heads"),
    (r".*attn\.indexer\.weights_proj\.weight", 0, "heads"),
    (r".*ffn\.experts\.\d+\.w[123]\.(weight|scale)", 0, "expert"),
    (r".*ffn\.shared_experts\.w[13]\.(weight|scale)", 0, "hidden"),
    (r".*ffn\.shared_experts\.w2\.(weight|scale)", 1, "hidden"),
)


def official_split(name: str, rank: int) -> tuple[str | None, ...]:
    for pattern, axis, logical in SPLIT:
        if re.fullmatch(pattern, name):
            return tuple(logical if i == axis else None for i in range(rank))
    return (None,) * rank


@pytest.mark.parametrize("name", CONFIGS)
class TestEveryConfig:
    def test_no_tensor_stands_twice(self, name: str) -> None:
        assert max(Counter(tensor_names(entries_of(CONFIGS[name]))).values()) == 1

    def test_axes_have_the_leafs_rank_and_the_official_split(self, name: str) -> None:
        for entry in entries_of(CONFIGS[name]):
            assert len(entry.axes) == len(entry.leaf.shape)
            assert entry.axes == official_split(entry.names[0], len(entry.leaf.shape)), entry.names[0]

    def test_leaves_keep_the_width_of_the_disk(self, name: str) -> None:
        assert all(entry.leaf.dtype == MEMORY_DTYPE[entry.dtype] for entry in entries_of(CONFIGS[name]))


@pytest.mark.parametrize("raw", [PRO_PREVIEW, PRO_0813], ids=["preview", "0813"])
def test_pro(raw: dict) -> None:
    found = places(entries_of(raw))
    assert found["layers.0.attn.compressor.ape"] == ("F32", (128, 512))  # layers 0 and 1 are HCA, not sliding
    assert found["layers.2.attn.compressor.ape"] == ("F32", (4, 1024))
    assert found["layers.60.attn.wq_b.weight"] == ("F8_E4M3", (65536, 1536))
    assert found["layers.60.attn.wo_a.weight"] == ("F8_E4M3", (16384, 4096))
    assert found["layers.60.ffn.experts.383.w2.weight"] == ("I8", (7168, 1536))
    assert sum("indexer.weights_proj" in name for name in found) == 30
    stages = {name.split(".")[1] for name in found if name.startswith("mtp.")}
    assert stages == (set() if raw is PRO_PREVIEW else {"0", "1", "2"})


@pytest.mark.parametrize("golden", ["tiny-a", "tiny-b"])
def test_golden_layouts_are_those_of_the_index_and_the_headers(golden: str) -> None:
    found = places(entries_of(CONFIGS[golden]))
    index = json.loads((GOLDEN / golden / "model.safetensors.index.json").read_text())
    assert set(found) == set(index["weight_map"])
    assert found == {name: (dtype, shape) for name, (dtype, shape, _) in stored(GOLDEN / golden).items()}
    assert number_of_bytes(found) == index["metadata"]["total_size"]
