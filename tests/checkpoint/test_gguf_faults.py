"""GGUF files and checkpoints that are refused, each with the name of the key or tensor that is wrong."""

import dataclasses
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_drafters import CONFIG, rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from random_model import random_model
from tokenizers import Tokenizer, models

import dspark_jax
from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.checkpoint.gguf.convert import convert
from dspark_jax.checkpoint.gguf.drafter import DrafterFile
from dspark_jax.checkpoint.gguf.file import GGUFFile, TensorInfo
from dspark_jax.checkpoint.gguf.layout import Build, Spelling, planned
from dspark_jax.checkpoint.gguf.metadata import tokenizer_metadata
from dspark_jax.checkpoint.verify import verify
from dspark_jax.errors import CheckpointError, ConfigError, RequestError
from dspark_jax.formats.ggml import F32, OTHERS

GONE: Any = (None, None)
ZEROS, NANS = np.zeros(16, np.uint8), np.full(1024, 255, np.uint8)


class TestFilesThatAreRefused:
    """Each with the name of the key or tensor, by `load`."""

    def refuse(self, wide: Path, file: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as error:
            dspark_jax.load(wide, drafter=file)
        assert str(file) in str(error.value)

    @pytest.mark.parametrize(
        "key, value, match",
        [
            ("general.architecture", "llama", "architecture 'llama'; expected deepseek4-dspark or dflash"),
            ("dflash.block_size", None, r"dflash\.block_size is missing; expected 5"),
            ("dflash.block_size", np.uint32(4), r"dflash\.block_size is 4; expected 5 by config\.json"),
            ("tokenizer.ggml.mask_token_id", None, r"mask_token_id is missing"),
            ("dflash.rope.freq_base", np.float32(20000), r"rope\.freq_base is 20000\.0; expected 10000\.0"),
            (
                "dflash.target_layers",
                np.array([7, 8], np.int32),
                r"\[7, 8\]; config\.json taps the outputs of layers \[0, 1\]",
            ),
        ],
    )
    def test_metadata(
        self, key: str, value: Any, match: str, wide: Path, drafter_files: dict[str, Path], tmp_path: Path
    ) -> None:
        self.refuse(wide, rewrite(drafter_files["llama.cpp-bf16"], tmp_path / "x", {key: value}), match)

    @pytest.mark.parametrize(
        "build, key", [("llama.cpp-bf16", "dflash.target_layers"), ("ds4-q4k", "dspark.target_layer_ids")]
    )
    def test_layers_counted_as_the_other_program_does_are_recognised(
        self,
        build: Build,
        key: str,
        wide: Path,
        drafter_files: dict[str, Path],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        counted = GGUFFile(drafter_files[build]).metadata[key]
        other = counted + np.array(-1 if build == "llama.cpp-bf16" else 1).astype(counted.dtype)
        dspark_jax.load(wide, drafter=rewrite(drafter_files[build], tmp_path / "x", {key: other}))
        assert f"{key} is {other.tolist()}" in caplog.text and str(counted.tolist()) in caplog.text

    @pytest.mark.parametrize(
        "name, info, stored, match",
        [
            ("fc.weight", *GONE, "tensor mtp.0.main_proj is missing"),
            ("d2t", TensorInfo(F32, (4,)), ZEROS, "tensor d2t is unexpected"),
            ("output_norm.weight", TensorInfo(F32, (4,)), ZEROS, r"mtp.1.norm has shape \[4\]; expected \[256\]"),
            ("output_norm.weight", TensorInfo(F32, (256,)), NANS, r"mtp.1.norm \(F32\) holds NaN"),
            ("blk.0.ffn_up_exps.weight", TensorInfo(OTHERS[0], (6, 256, 256)), np.zeros(101376, np.uint8),
             "mtp.0.ffn.experts.w3 is IQ2_XXS, which this package does not decode"),
        ],
    )  # fmt: skip
    def test_tensors(
        self,
        name: str,
        info: Any,
        stored: Any,
        match: str,
        wide: Path,
        drafter_files: dict[str, Path],
        tmp_path: Path,
    ) -> None:
        self.refuse(wide, rewrite(drafter_files["llama.cpp-bf16"], tmp_path / "x", x=(name, info, stored)), match)

    def test_scales_that_are_nan(self, wide: Path, drafter_files: dict[str, Path], tmp_path: Path) -> None:
        file = GGUFFile(drafter_files["llama.cpp-bf16"])
        content = bytearray(drafter_files["llama.cpp-bf16"].read_bytes())
        content[file.tensors["blk.1.ffn_gate_exps.weight"].start] = 255
        (tmp_path / "x").write_bytes(content)
        self.refuse(wide, tmp_path / "x", r"mtp.1.ffn.experts.w1 \(MXFP4\) holds NaN")

    @pytest.mark.parametrize(
        "damage, match",
        [
            (lambda content: content[:-100], "is cut short: tensor conf_proj.weight ends at byte"),
            (lambda content: content[:200], "is cut short"),
            (lambda content: b"", "cannot be read"),
            (lambda content: b"GGML" + content[4:], "begins with b'GGML', expected b'GGUF'"),
            (lambda content: content[:4] + struct.pack("<I", 2) + content[8:], "is of GGUF version 2, expected 3"),
            (
                lambda content: content.replace(b"blk.0.attn_norm", b"blk.1.attn_norm"),
                "blk.1.attn_norm.weight appears twice",
            ),
            (lambda content: content.replace(b"dflash.block_size", b"dflash.block_coun"), "is missing"),
            (lambda content: content.replace(*retyped("fc.weight", 30, 99)), "tensor fc.weight is of number type 99"),
            (
                lambda content: content.replace(*retyped("blk.0.attn_q_a.weight", 30, 0)),
                "tensor blk.0.attn_q_a_norm.weight overlaps tensor blk.0.attn_q_a.weight",
            ),
        ],
    )
    def test_damage(
        self, damage: Callable[[bytes], bytes], match: str, wide: Path, drafter_files: dict[str, Path], tmp_path: Path
    ) -> None:
        (tmp_path / "x").write_bytes(damage(drafter_files["llama.cpp-bf16"].read_bytes()))
        self.refuse(wide, tmp_path / "x", match)

    def test_a_file_that_is_not_there(self, wide: Path, tmp_path: Path) -> None:
        self.refuse(wide, tmp_path / "x", "cannot be read .No such file")

    def test_a_target_that_says_nothing_of_a_drafter(self, drafter_files: dict[str, Path], tmp_path: Path) -> None:
        config = dataclasses.replace(CONFIG, drafter=None, compress_ratios=CONFIG.layer_ratios)
        dspark_jax.save(random_model(config), tmp_path / "target")
        with pytest.raises(RequestError, match=r"config\.json has no dspark_"):
            dspark_jax.load(tmp_path / "target", drafter=drafter_files["llama.cpp-bf16"])

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_no_damage_to_the_header_ends_in_anything_but_a_sentence(
        self, data: st.DataObject, drafter_files: dict[str, Path]
    ) -> None:
        path = drafter_files["ds4-q2k"]
        content = bytearray(path.read_bytes())
        header = min(info.start for info in GGUFFile(path).tensors.values())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
        damaged = path.with_name("damaged")
        damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            DrafterFile(damaged)
        except CheckpointError as error:
            assert str(damaged) in str(error)


def retyped(name: str, old: int, new: int) -> tuple[bytes, bytes]:
    """The entry of a matrix in the header, up to its type, before and after."""
    shape = planned(CONFIG, "llama.cpp-bf16", "llama.cpp")[name].shape
    entry = name.encode() + struct.pack("<IQQ", 2, *shape[::-1])
    return entry + struct.pack("<I", old), entry + struct.pack("<I", new)


class TestCheckpointsThatAreRefused:
    def test_a_scale_that_bfloat16_does_not_reach_is_not_rounded(self, wide: Path, tmp_path: Path) -> None:
        """FP8 2^-9 at the scale 2^-126 is 2^-135, below the smallest bfloat16; at 2^-124 it is that smallest."""
        for scale, fits in ((1, False), (3, True)):
            folder = copy_with(wide, tmp_path / f"scale-{scale}", "mtp.0.attn.wkv", code=1, scale=scale)
            out = tmp_path / f"{scale}.gguf"
            if fits:
                convert(folder, "llama.cpp-bf16", out, "llama.cpp")
                assert verify(folder, out).same
            else:
                with pytest.raises(CheckpointError, match=r"tensor mtp.0.attn.wkv.weight does not fit BF16"):
                    convert(folder, "llama.cpp-bf16", out, "llama.cpp")
                assert [*tmp_path.glob("*.gguf")] == [] and [*tmp_path.glob(".*")] == []

    def test_rows_that_no_k_quant_takes(self, tmp_path: Path) -> None:
        narrow = dspark_jax.ModelConfig.tiny(hidden_size=128, moe_intermediate_size=256)
        dspark_jax.save(random_model(narrow, parts=("drafter",)), tmp_path / "narrow")
        with pytest.raises(
            RequestError, match=r"mtp\.0\.ffn\.experts\.w1 has rows of 128 values, and Q2_K takes blocks of 256"
        ):
            convert(tmp_path / "narrow", "ds4-q2k", tmp_path / "out", "entrpi")

    @pytest.mark.parametrize(
        "change, match",
        [
            ({"drafter": None, "compress_ratios": (0, 4)}, "has no dspark_"),
            ({"drafter": dataclasses.replace(CONFIG.drafter, markov_head="gated")}, "dspark_markov_head is 'gated'"),  # type: ignore[type-var]
        ],
    )
    def test_other_drafters(self, change: dict[str, Any], match: str, tmp_path: Path) -> None:
        dspark_jax.save(random_model(dataclasses.replace(CONFIG, **change)), tmp_path / "other")
        with pytest.raises(RequestError, match=match):
            convert(tmp_path / "other", "llama.cpp-bf16", tmp_path / "out", "llama.cpp")

    @pytest.mark.parametrize("build, spelling", [("llama.cpp-bf16", "entrpi"), ("ds4-q2k", "llama.cpp")])
    def test_spellings_of_another_program(self, build: Build, spelling: Spelling, wide: Path, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=f"{build} in the spelling of {spelling} is read by no program"):
            convert(wide, build, tmp_path / "out", spelling)

    @pytest.mark.parametrize("scale, code, fits", [(252, 7, True), (253, 5, True), (253, 14, False), (255, 0, False)])
    def test_experts_beyond_float32(self, scale: int, code: int, fits: bool, wide: Path, tmp_path: Path) -> None:
        """+-6 at 2^126 is beyond; 3 is not. A NaN is one whatever its code."""
        folder, out = copy_with(wide, tmp_path / "huge", "mtp.1.ffn.experts.2.w3", code, scale), tmp_path / "out"
        if fits:
            convert(folder, "llama.cpp-bf16", out, "llama.cpp")
            assert verify(folder, out).same
        else:
            with pytest.raises(CheckpointError, match=r"experts\.2\.w3.* does not fit MXFP4: a value is NaN or infin"):
                convert(folder, "llama.cpp-bf16", out, "llama.cpp")

    def test_a_file_that_is_read_is_not_overwritten(self, wide: Path, tmp_path: Path) -> None:
        folder = copy_with(wide, tmp_path / "read", "mtp.0.attn.wkv", code=1, scale=127)
        (tmp_path / "link").symlink_to(folder)
        before = {path: path.read_bytes() for path in folder.iterdir()}
        for path in before:
            with pytest.raises(RequestError, match="belongs to the checkpoint"):
                convert(folder, "llama.cpp-bf16", tmp_path / "link" / path.name, "llama.cpp", overwrite=True)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before

    @pytest.mark.parametrize("begin", ["x", -1, [0], True, 1.0, CONFIG.vocab_size])
    def test_a_beginning_that_is_no_token(self, begin: Any, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, {"a": 0}, bos_token_id=begin)
        with pytest.raises(
            ConfigError, match=r"config\.json: field 'bos_token_id' is .*; expected a token id below vocab_size=96"
        ):
            tokenizer_metadata(CONFIG, tmp_path)

    def test_no_end(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, {"a": 0})
        with pytest.raises(ConfigError, match=r"config\.json: field 'eos_token_id' is \[\]; expected a token id"):
            tokenizer_metadata(dataclasses.replace(CONFIG, eos_token_id=()), tmp_path)

    def test_a_tokenizer_of_another_vocabulary(self, tmp_path: Path) -> None:
        for vocabulary, added, match in (
            ({"a": 96}, [], "token 'a' has id 96"),
            ({f"a{token}": token for token in range(96)}, ["<b>"], "token '<b>' has id 96"),
        ):
            write_tokenizer(tmp_path, vocabulary, added)
            with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{match}; expected ids below 96"):
                tokenizer_metadata(CONFIG, tmp_path)


def write_tokenizer(folder: Path, vocabulary: dict[str, int], added: Sequence[str] = (), **fields: Any) -> None:
    """A tokenizer without merges, and a configuration with such fields."""
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict() | fields))


def copy_with(wide: Path, out: Path, name: str, code: int, scale: int) -> Path:
    """The wide with a matrix of zeros but for its first code, and one scale for all of it."""
    out.mkdir()
    for path in wide.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    folder = CheckpointFolder.open(out)
    for ending, first, rest in ((".weight", code, 0), (".scale", scale, scale)):
        info, path = folder.info(name + ending), folder.file_of(name + ending)
        content = bytearray(path.read_bytes())
        content[info.start : info.stop] = bytes([first]) + bytes([rest]) * (info.stop - info.start - 1)
        path.write_bytes(content)
    return out
