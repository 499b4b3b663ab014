"""The one table between the drafter and its GGUF files: official name, kind, and a name in each of three spellings.

Two programs run these files. llama.cpp (architecture `dflash`) has one spelling; ds4 (`deepseek4-dspark`) has two,
that of its extraction script (`entrpi`) and that of its own quantiser (`upstream`). All have the same tensors, 24 for a
stage and nine more, in the orientation of the checkpoint; what differs beside the names is the number types, which
follow from the kind of a tensor and the build of the file.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark_jax.checkpoint.gguf.file import TensorInfo
from dspark_jax.checkpoint.layout import Entry, layout
from dspark_jax.config import ModelConfig
from dspark_jax.errors import RequestError
from dspark_jax.formats.ggml import BF16, F16, F32, MXFP4, Q2_K, Q4_K, Q8_0, Type
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of
from pallas_kernels.block_scaled import BLOCKS

Kind = Literal["small", "router", "projection", "experts", "markov", "confidence"]
Spelling = Literal["llama.cpp", "entrpi", "upstream"]
Build = Literal["llama.cpp-bf16", "llama.cpp-q8_0", "ds4-q2k", "ds4-q4k"]

# Official name within a stage, kind, and the name within a stage that all three spellings share.
_STAGE: tuple[tuple[str, Kind, str], ...] = (
    ("attn_norm", "small", "attn_norm.weight"),
    ("attn.wq_a", "projection", "attn_q_a.weight"),
    ("attn.q_norm", "small", "attn_q_a_norm.weight"),
    ("attn.wq_b", "projection", "attn_q_b.weight"),
    ("attn.wkv", "projection", "attn_kv.weight"),
    ("attn.kv_norm", "small", "attn_kv_a_norm.weight"),
    ("attn.wo_a", "projection", "attn_output_a.weight"),
    ("attn.wo_b", "projection", "attn_output_b.weight"),
    ("attn.attn_sink", "small", "attn_sinks.weight"),
    ("ffn_norm", "small", "ffn_norm.weight"),
    ("ffn.gate", "router", "ffn_gate_inp.weight"),
    ("ffn.gate.bias", "small", "exp_probs_b.bias"),
    ("ffn.experts.w1", "experts", "ffn_gate_exps.weight"),
    ("ffn.experts.w3", "experts", "ffn_up_exps.weight"),
    ("ffn.experts.w2", "experts", "ffn_down_exps.weight"),
    ("ffn.shared_experts.w1", "projection", "ffn_gate_shexp.weight"),
    ("ffn.shared_experts.w3", "projection", "ffn_up_shexp.weight"),
    ("ffn.shared_experts.w2", "projection", "ffn_down_shexp.weight"),
    ("hc_attn_fn", "small", "hc_attn_fn.weight"),
    ("hc_attn_base", "small", "hc_attn_base.weight"),
    ("hc_attn_scale", "small", "hc_attn_scale.weight"),
    ("hc_ffn_fn", "small", "hc_ffn_fn.weight"),
    ("hc_ffn_base", "small", "hc_ffn_base.weight"),
    ("hc_ffn_scale", "small", "hc_ffn_scale.weight"),
)
_STAGE_PREFIXES: dict[Spelling, str] = {"llama.cpp": "blk", "entrpi": "dspark", "upstream": "mtp"}

# Official name, kind, and the names in llama.cpp and of entrpi; upstream keeps the official one.
_SHARED: tuple[tuple[str, Kind, str, str], ...] = (
    ("mtp.0.main_proj", "projection", "fc.weight", "dspark.main_proj.weight"),
    ("mtp.0.main_norm", "small", "enc.output_norm.weight", "dspark.main_norm.weight"),
    ("mtp.{last}.norm", "small", "output_norm.weight", "dspark.norm.weight"),
    ("mtp.{last}.hc_head_fn", "small", "output_hc_fn.weight", "dspark.hc_head_fn.weight"),
    ("mtp.{last}.hc_head_base", "small", "output_hc_base.weight", "dspark.hc_head_base.weight"),
    ("mtp.{last}.hc_head_scale", "small", "output_hc_scale.weight", "dspark.hc_head_scale.weight"),
    ("mtp.{last}.markov_head.markov_w1", "markov", "markov_w1.weight", "dspark.markov_w1.weight"),
    ("mtp.{last}.markov_head.markov_w2", "markov", "markov_w2.weight", "dspark.markov_w2.weight"),
    ("mtp.{last}.confidence_head.proj", "confidence", "conf_proj.weight", "dspark.conf_proj.weight"),
)

_LLAMA: dict[Kind, Type] = {
    "small": F32, "router": BF16, "projection": BF16, "experts": MXFP4, "markov": BF16, "confidence": BF16
}  # fmt: skip
_DS4: dict[Kind, Type] = {
    "small": F32, "router": F32, "projection": Q8_0, "experts": Q2_K, "markov": F16, "confidence": F32
}  # fmt: skip
# ds4 takes BF16 nowhere, and its two loaders take exactly these types in either spelling.
TYPES: dict[Build, dict[Kind, Type]] = {
    "llama.cpp-bf16": _LLAMA,
    "llama.cpp-q8_0": _LLAMA | {"projection": Q8_0},
    "ds4-q2k": _DS4,
    "ds4-q4k": _DS4 | {"experts": Q4_K},
}


PIECE_VALUES = 1 << 24  # 64 MB in float32
Piece = int | slice
"""An expert, or rows."""


@dataclass(frozen=True)
class Place:
    """One tensor of a drafter.

    Attributes:
        official: its name in the checkpoint, without `.weight`, and for stacked experts without their number.
        kind: what decides its number type.
        names: its name in each spelling.
        shape: in values, [out, in] and [experts, out, in] of matrices.
        entries: where the checkpoint keeps it: one entry, or, of quantised weights, codes and scales.
    """

    official: str
    kind: Kind
    names: dict[Spelling, str]
    shape: tuple[int, ...]
    entries: tuple[Entry, ...]


def places(config: ModelConfig, where: str | Path = "the configuration") -> tuple[Place, ...]:
    """The tensors of a configuration's drafter, stage by stage; `where` begins every refusal.

    Raises:
        RequestError: the configuration has no drafter, or one that no GGUF file can express.
    """
    if config.drafter is None:
        raise RequestError(f"{where}: has no dspark_* fields; name a checkpoint that has a drafter.")
    if config.drafter.markov_head != "vanilla":
        raise RequestError(
            f"{where}: dspark_markov_head is {config.drafter.markov_head!r}, an extension of this package that no "
            "program reads from GGUF; expected the vanilla head."
        )
    entries = _entries(config)
    found = tuple(
        Place(official, kind, names, _shape(kind, entries[official]), entries[official])
        for official, kind, names in rows(config.num_stages)
    )
    assert len(found) == len(entries), "the table does not name every weight of the drafter"
    return found


def rows(stages: int) -> Iterator[tuple[str, Kind, dict[Spelling, str]]]:
    """Official name, kind and names of every tensor of a drafter with so many stages."""
    for stage in range(stages):
        for official, kind, name in _STAGE:
            names = {spelling: f"{prefix}.{stage}.{name}" for spelling, prefix in _STAGE_PREFIXES.items()}
            yield f"mtp.{stage}.{official}", kind, names
    for official, kind, llama, entrpi in _SHARED:
        official = official.format(last=stages - 1)
        yield official, kind, {"llama.cpp": llama, "entrpi": entrpi, "upstream": f"{official}.weight"}


def _entries(config: ModelConfig) -> dict[str, tuple[Entry, ...]]:
    """Official name as in `Place` -> the entries of a drafter's weight."""
    found: dict[str, tuple[Entry, ...]] = {}
    for entry in layout(abstract_model(config, numerics_of("float32"), parts=("drafter",))):
        name = entry.names[0]
        if name.startswith("mtp."):
            official = re.sub(r"\.experts\.\d+\.", ".experts.", name).removesuffix(".weight").removesuffix(".scale")
            found[official] = (*found.get(official, ()), entry)
    return found


def _shape(kind: Kind, entries: tuple[Entry, ...]) -> tuple[int, ...]:
    *leading, columns = entries[0].leaf.shape
    return (*leading, columns * (2 if kind == "experts" else 1))  # two codes a byte


def bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape, but of a matrix with one row that of the row: some writers drop the other axis."""
    return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape


def pieces(shape: tuple[int, ...]) -> Iterator[Piece]:
    """What is worked on at once: an expert, a vector, or about `PIECE_VALUES` in rows that cut no FP8 block."""
    if len(shape) == 1:
        yield slice(None)
        return
    if len(shape) == 3:
        yield from range(shape[0])
        return
    block, _ = BLOCKS["e4m3"]
    count = max(PIECE_VALUES // math.prod(shape[1:]) // block, 1) * block
    yield from (slice(first, min(first + count, shape[0])) for first in range(0, shape[0], count))


def scale_rows(rows: slice) -> slice:
    """The rows of FP8 scales that belong to a piece's rows of codes."""
    block, _ = BLOCKS["e4m3"]
    return slice(rows.start // block, -(-rows.stop // block))


def planned(
    config: ModelConfig, build: Build, spelling: Spelling, where: str | Path = "the configuration"
) -> dict[str, TensorInfo]:
    """Name, type and shape of every tensor of a file, in the file's order; `where` begins every refusal.

    Raises:
        RequestError: as `places`; the build's program reads another spelling; rows that do not divide into the blocks
            of their number type, by the tensor's name.
    """
    if build.startswith("llama.cpp") != (spelling == "llama.cpp"):
        raise RequestError(
            f"{where}: {build} in the spelling of {spelling} is read by no program; expected llama.cpp's own spelling "
            "for its builds, and entrpi or upstream for those of ds4."
        )
    infos = {}
    for place in places(config, where):
        type = TYPES[build][place.kind]
        if place.shape[-1] % type.block:
            raise RequestError(
                f"{where}: tensor {place.official} has rows of {place.shape[-1]} values, and {type.name} takes "
                f"blocks of {type.block}: it cannot be stored so; choose another build."
            )
        infos[place.names[spelling]] = TensorInfo(type, place.shape)
    return infos
