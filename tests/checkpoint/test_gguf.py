"""GGUF files of the drafter: the plan at full size, both families there and back, faults by name.

The PyPI package `gguf` reads what we write: its container, its names of types and its decoders share nothing with ours.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from conftest import Dspark
from gguf_drafters import CONFIG, FILES, rewrite
from random_model import random_model
from tokenizers import Tokenizer, models, pre_tokenizers

import dspark_jax
from dspark_jax.bench.sparse import FLASH
from dspark_jax.checkpoint.fingerprint import fingerprint
from dspark_jax.checkpoint.gguf.convert import convert
from dspark_jax.checkpoint.gguf.drafter import DrafterFile
from dspark_jax.checkpoint.gguf.file import GGUFFile, TensorInfo
from dspark_jax.checkpoint.gguf.layout import Build, Spelling, places, planned
from dspark_jax.checkpoint.gguf.metadata import metadata
from dspark_jax.checkpoint.verify import verify
from dspark_jax.cli.options import ONE_DEVICE, Drafting
from dspark_jax.errors import CheckpointError
from dspark_jax.formats import e4m3, mxfp4
from dspark_jax.formats.ggml import BF16, F16, Q8_0, Type
from pallas_kernels.block_scaled import BlockScaled, Unpacked
from pallas_kernels.mxfp4_experts import Matrices, mxfp4_experts

FORMATS = {"e4m3": e4m3, "e2m1": mxfp4}


@pytest.fixture(scope="module")
def model() -> dspark_jax.Model:
    return random_model(CONFIG)


class TestThePlanOfFlash:
    """Numbers of the two published drafter_files, and of their metadata."""

    @pytest.mark.parametrize(
        "build, spelling, size, census",
        [
            ("llama.cpp-bf16", "llama.cpp", 11_309_579_164, {"MXFP4": 9, "F32": 41, "BF16": 31}),
            ("llama.cpp-q8_0", "llama.cpp", 10_890_804_124, {"MXFP4": 9, "F32": 41, "Q8_0": 25, "BF16": 6}),
            ("ds4-q2k", "entrpi", 6.49 * 2**30, {"Q2_K": 9, "F32": 45, "Q8_0": 25, "F16": 2}),
            ("ds4-q2k", "upstream", 6.49 * 2**30, {"Q2_K": 9, "F32": 45, "Q8_0": 25, "F16": 2}),
            ("ds4-q4k", "entrpi", (6.49 + 4.22) * 2**30, {"Q4_K": 9, "F32": 45, "Q8_0": 25, "F16": 2}),
        ],
    )
    def test_tensors_types_and_bytes(self, build: Build, spelling: Spelling, size: float, census: dict) -> None:
        infos = planned(FLASH, build, spelling)
        total = sum(info.bytes for info in infos.values())
        assert len(infos) == 81 and Counter(info.type.name for info in infos.values()) == census
        assert total == size if isinstance(size, int) else total == pytest.approx(size, rel=1e-3)

    @pytest.mark.parametrize(
        "spelling, name, dimensions",
        [
            ("llama.cpp", "blk.2.attn_output_a.weight", (4096, 8192)),
            ("llama.cpp", "blk.0.ffn_down_exps.weight", (2048, 4096, 256)),
            ("llama.cpp", "fc.weight", (12288, 4096)),
            ("llama.cpp", "conf_proj.weight", (4352, 1)),
            ("entrpi", "dspark.1.hc_ffn_fn.weight", (16384, 24)),
            ("entrpi", "dspark.markov_w2.weight", (256, 129280)),
            ("upstream", "mtp.2.exp_probs_b.bias", (256,)),
            ("upstream", "mtp.2.hc_head_scale.weight", (1,)),
            ("upstream", "mtp.2.markov_head.markov_w1.weight", (256, 129280)),
        ],
    )
    def test_names_and_dimensions(self, spelling: Spelling, name: str, dimensions: tuple[int, ...]) -> None:
        build: Build = "llama.cpp-bf16" if spelling == "llama.cpp" else "ds4-q4k"
        assert planned(FLASH, build, spelling)[name].shape == dimensions[::-1]

    @pytest.mark.parametrize(
        "spelling, key, value",
        [
            ("llama.cpp", "general.architecture", "dflash"),
            ("llama.cpp", "dflash.block_size", np.uint32(5)),
            ("llama.cpp", "dflash.target_layers", np.array([41, 42, 43], np.int32)),
            ("llama.cpp", "dflash.attention.compress_ratios", np.zeros(3, np.int32)),
            ("llama.cpp", "dflash.attention.layer_norm_rms_epsilon", np.float32(1e-6)),
            ("llama.cpp", "dflash.swiglu_clamp_exp", np.full(3, 10, np.float32)),
            ("llama.cpp", "dflash.expert_weights_norm", True),
            ("llama.cpp", "tokenizer.ggml.mask_token_id", np.uint32(128799)),
            ("entrpi", "general.architecture", "deepseek4-dspark"),
            ("entrpi", "deepseek4.dspark.target_layers", np.array([40, 41, 42], np.int32)),
            ("entrpi", "deepseek4.dspark.expert_count", np.uint32(256)),
            ("upstream", "dspark.target_layer_ids", np.array([40, 41, 42], np.uint32)),
            ("upstream", "dspark.stage_count", np.uint32(3)),
            ("upstream", "dspark.n_layers", np.uint32(3)),
        ],
    )
    def test_metadata(self, spelling: Spelling, key: str, value: Any, tmp_path: Path) -> None:
        found = metadata(FLASH, spelling, "Flash", tmp_path)
        assert type(found[key]) is type(value) and np.array_equal(found[key], value)
        assert not isinstance(value, np.ndarray) or found[key].dtype == value.dtype
        assert "dflash.embedding_length_out" not in found

    def test_every_weight_of_the_drafter_is_named_once(self) -> None:
        for spelling in ("llama.cpp", "entrpi", "upstream"):
            names = [place.names[spelling] for place in places(FLASH)]
            assert len({*names}) == 81


class TestFilesReadByThePackageGguf:
    @pytest.mark.parametrize("build, spelling", FILES)
    def test_names_types_shapes_and_values(
        self, build: Build, spelling: Spelling, drafter_files: dict[str, Path], model: dspark_jax.Model
    ) -> None:
        reader = gguf.GGUFReader(drafter_files[build])
        weights = {
            jax.tree_util.keystr(path, simple=True, separator="."): variable.get_value()
            for path, variable in jax.tree.leaves_with_path(
                model.drafter, is_leaf=lambda node: hasattr(node, "get_value")
            )
        }
        info, ours = planned(CONFIG, build, spelling), GGUFFile(drafter_files[build])
        assert [tensor.name for tensor in reader.tensors] == list(info) == list(ours.tensors)
        for tensor in reader.tensors:
            expected = info[tensor.name]
            assert tensor.tensor_type.name == expected.type.name
            assert tuple(tensor.shape.tolist()) == expected.shape[::-1]
            held = ours.tensors[tensor.name]
            assert tensor.data_offset == held.start and tensor.data_offset % 32 == 0
            assert held.type.decode is not None
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(values.ravel(), held.type.decode(ours.read(held)).ravel())
        if spelling == "llama.cpp":
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            for name, weight, error in (
                ("blk.1.ffn_gate_exps.weight", weights["stages.1.ffn.experts.w1"], 0),
                ("blk.0.ffn_down_exps.weight", weights["stages.0.ffn.experts.w2"], 0),
                ("blk.0.attn_q_a.weight", weights["stages.0.attn.wq_a"], 0 if build == "llama.cpp-bf16" else 0.01),
                ("fc.weight", weights["main_proj"], 0 if build == "llama.cpp-bf16" else 0.01),
            ):
                values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
                wanted = FORMATS[weight.format].dequantise(np.asarray(weight.payload), np.asarray(weight.scales))
                assert np.abs(values.reshape(wanted.shape) - wanted).max() <= error * np.abs(wanted).max()

    def test_metadata_survive(self, drafter_files: dict[str, Path]) -> None:
        for build, _ in FILES:
            ours, theirs = GGUFFile(drafter_files[build]).metadata, gguf.GGUFReader(drafter_files[build])
            for key, value in ours.items():
                found = theirs.fields[key].contents()
                assert found == (value.tolist() if isinstance(value, np.ndarray | np.generic) else value), key

    def test_a_file_of_their_writer_is_read(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "theirs", "dflash")
        writer.add_array("words", ["a", "ö", ""])
        writer.add_array("numbers", [1, -2])
        writer.add_float64("wide", 0.1)
        values = np.arange(6, dtype=np.float32).reshape(2, 3)
        writer.add_tensor("x", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        ours = GGUFFile(tmp_path / "theirs")
        assert ours.metadata["words"] == ["a", "ö", ""] and ours.metadata["numbers"].tolist() == [1, -2]
        assert ours.metadata["wide"] == 0.1 and ours.tensors["x"].shape == (2, 3)
        assert np.array_equal(ours.read(ours.tensors["x"]).view(np.float32), values)


class TestThereAndBack:
    def load(self, wide: Path, file: Path, **options: Any) -> Any:
        return dspark_jax.load(wide, drafter=file, **options)

    @pytest.mark.parametrize("build", ["llama.cpp-bf16", "llama.cpp-q8_0"])
    def test_experts_keep_their_bytes(
        self, build: Build, wide: Path, drafter_files: dict[str, Path], model: dspark_jax.Model
    ) -> None:
        loaded = self.load(wide, drafter_files[build])
        for stage, wanted in zip(loaded.drafter.stages, model.drafter.stages, strict=True):
            for matrix in ("w1", "w2", "w3"):
                found, expected = (getattr(s.ffn.experts, matrix).get_value() for s in (stage, wanted))
                assert np.array_equal(found.payload, expected.payload)
                assert np.array_equal(found.scales, expected.scales)

    def test_the_exact_build_gives_the_checkpoint_back(
        self, wide: Path, drafter_files: dict[str, Path], model: dspark_jax.Model, tmp_path: Path
    ) -> None:
        loaded = self.load(wide, drafter_files["llama.cpp-bf16"])
        assert jax.tree.structure(loaded) == jax.tree.structure(model)
        dspark_jax.save(loaded, tmp_path / "again")
        assert verify(wide, tmp_path / "again").same

    @pytest.mark.parametrize("build, spelling", FILES)
    def test_what_is_loaded_is_what_the_file_holds(
        self, build: Build, spelling: Spelling, wide: Path, drafter_files: dict[str, Path]
    ) -> None:
        loaded, file = self.load(wide, drafter_files[build]), DrafterFile(drafter_files[build])
        stage = loaded.drafter.stages[1]
        for name, found in (
            ("mtp.1.attn.wo_b", stage.attn.wo_b.get_value().decode()),
            ("mtp.1.markov_head.markov_w2", loaded.drafter.markov_head.markov_w2[...]),
            ("mtp.1.ffn.gate", stage.ffn.gate.weight[...]),
        ):
            assert np.array_equal(np.asarray(found, np.float32), file.values(name, slice(0, found.shape[0])))
        experts = stage.ffn.experts.w2.get_value()
        assert isinstance(experts, BlockScaled if spelling == "llama.cpp" else Unpacked)
        assert np.array_equal(experts.decode()[1], file.values("mtp.1.ffn.experts.w2", 1))

    @pytest.mark.parametrize(
        "name, type",
        [
            ("mtp.0.ffn_gate_inp.weight", Q8_0),
            ("mtp.1.markov_head.markov_w2.weight", Q8_0),
            ("mtp.1.hc_attn_fn.weight", F16),
            ("mtp.0.attn_norm.weight", F16),
            ("mtp.0.ffn_up_exps.weight", BF16),
        ],
    )
    def test_other_types_that_ds4_writes_are_read(
        self, name: str, type: Type, wide: Path, drafter_files: dict[str, Path], tmp_path: Path
    ) -> None:
        old = GGUFFile(drafter_files["ds4-q4k"])
        info = dataclasses.replace(old.tensors[name], type=type)
        values = np.random.default_rng(0).standard_normal(info.shape).astype(np.float32)
        assert type.encode and type.decode
        stored = type.encode(values)
        file = rewrite(drafter_files["ds4-q4k"], tmp_path / "x", x=(name, info, stored))
        stages = self.load(wide, file).drafter.stages
        found = {
            "mtp.0.ffn_gate_inp.weight": stages[0].ffn.gate.weight,
            "mtp.1.markov_head.markov_w2.weight": self.load(wide, file).drafter.markov_head.markov_w2,
            "mtp.1.hc_attn_fn.weight": stages[1].hc_attn.fn,
            "mtp.0.attn_norm.weight": stages[0].attn_norm,
            "mtp.0.ffn_up_exps.weight": stages[0].ffn.experts.w3,
        }[name].get_value()
        held = found.values if isinstance(found, Unpacked) else found
        assert np.array_equal(np.asarray(held, np.float32), type.decode(stored))

    def test_an_axis_of_one_may_be_dropped(self, wide: Path, drafter_files: dict[str, Path], tmp_path: Path) -> None:
        old = GGUFFile(drafter_files["llama.cpp-bf16"])
        info = old.tensors["conf_proj.weight"]
        dropped = ("conf_proj.weight", TensorInfo(info.type, info.shape[1:]), old.read(info).reshape(-1))
        file = rewrite(drafter_files["llama.cpp-bf16"], tmp_path / "x", x=dropped)
        found, wanted = (self.load(wide, path).drafter.confidence[...] for path in (file, old.path))
        assert np.array_equal(found, wanted) and verify(wide, file).same

    def test_values_that_were_rounded_are_not_saved(
        self, wide: Path, drafter_files: dict[str, Path], tmp_path: Path
    ) -> None:
        with pytest.raises(CheckpointError, match=r"drafter\.main_proj holds values that were rounded"):
            dspark_jax.save(self.load(wide, drafter_files["ds4-q2k"]), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_on_a_mesh(self, wide: Path, drafter_files: dict[str, Path]) -> None:
        mesh = dspark_jax.make_mesh(expert=2, tensor=2)
        for build in ("llama.cpp-bf16", "ds4-q2k"):
            one, many = self.load(wide, drafter_files[build]), self.load(wide, drafter_files[build], mesh=mesh)
            for a, b in zip(jax.tree.leaves(one.drafter), jax.tree.leaves(many.drafter), strict=True):
                assert np.array_equal(np.asarray(a), np.asarray(b))
            assert not jax.tree.leaves(many.drafter.stages[0].ffn.experts)[0].is_fully_replicated

    def test_a_target_without_its_own_drafter_takes_one(
        self, wide: Path, drafter_files: dict[str, Path], tmp_path: Path
    ) -> None:
        alone = dspark_jax.load(wide, parts=("target",))
        dspark_jax.save(alone, tmp_path / "target")
        loaded = self.load(tmp_path / "target", drafter_files["llama.cpp-bf16"])
        assert loaded.target is not None and loaded.drafter is not None

    def test_products_with_unpacked_experts_are_those_of_their_values(
        self, wide: Path, drafter_files: dict[str, Path]
    ) -> None:
        experts = self.load(wide, drafter_files["ds4-q4k"]).drafter.stages[0].ffn.experts
        matrices = [getattr(experts, name).get_value() for name in ("w1", "w3", "w2")]
        x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
        picks, shares = np.array([[0, 1], [1, 2], [3, 0]], np.int32), np.full((3, 2), 0.5, np.float32)
        found = mxfp4_experts(x, picks, shares, np.array([True, True, False]), Matrices(*matrices), 10.0)
        gate, up, down = (np.asarray(matrix.values, np.float64) for matrix in matrices)
        for row in range(2):
            wanted = 0.0
            for expert in picks[row]:
                g, u = np.minimum(gate[expert] @ x[row], 10), np.clip(up[expert] @ x[row], -10, 10)
                wanted = wanted + down[expert] @ (0.5 * g / (1 + np.exp(-g)) * u)
            assert np.allclose(found[row], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
        assert not np.any(found[2])


class TestVerify:
    def test_the_exact_build_is_the_checkpoint(self, wide: Path, drafter_files: dict[str, Path]) -> None:
        found = verify(wide, drafter_files["llama.cpp-bf16"])
        assert found.same and "max|diff| = 0.0" in found.verdict and len(found.rows) == 57

    def test_a_wrong_bit_is_found(self, wide: Path, drafter_files: dict[str, Path], tmp_path: Path) -> None:
        """Of an expert's code, of an expert's scale and of a norm: the tensor, and nothing else, differs."""
        file = GGUFFile(drafter_files["llama.cpp-bf16"])
        for name, byte in (
            ("blk.0.ffn_up_exps.weight", 5),
            ("blk.1.ffn_down_exps.weight", 17),
            ("output_norm.weight", 3),
        ):
            content = bytearray(drafter_files["llama.cpp-bf16"].read_bytes())
            content[file.tensors[name].start + byte] ^= 1
            (tmp_path / "wrong").write_bytes(content)
            rows = [row for row in verify(wide, tmp_path / "wrong").rows if not row.exact]
            official = {place.names["llama.cpp"]: place.official for place in places(CONFIG)}
            assert [row.name for row in rows] == [official[name]] and rows[0].max_abs

    def test_experts_exchanged_by_a_permutation_of_codes_are_found(self, wide: Path, tmp_path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            right = mxfp4.to_gguf

            def wrong(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
                blocks = right(packed, scales).reshape(-1, 17)
                blocks[:, 1:] = blocks[:, :0:-1]
                return blocks.reshape(len(packed), -1)

            patch.setattr(mxfp4, "to_gguf", wrong)
            convert(wide, "llama.cpp-bf16", tmp_path / "wrong", "llama.cpp")
        differ = {row.name for row in verify(wide, tmp_path / "wrong").rows if not row.exact}
        assert differ == {f"mtp.{stage}.ffn.experts.w{number}" for stage in range(2) for number in (1, 2, 3)}

    def test_both_spellings_of_ds4_are_the_same(
        self, wide: Path, drafter_files: dict[str, Path], tmp_path: Path
    ) -> None:
        convert(wide, "ds4-q2k", tmp_path / "upstream", "upstream", search=False)
        assert verify(drafter_files["ds4-q2k"], tmp_path / "upstream").same

    def test_errors_are_those_of_the_types(self, wide: Path, drafter_files: dict[str, Path]) -> None:
        rows = {row.name: row for row in verify(wide, drafter_files["ds4-q2k"]).rows}
        assert rows["mtp.0.attn_norm"].exact and rows["mtp.0.ffn.gate"].exact
        assert rows["mtp.0.attn.wkv"].relative_rms == pytest.approx(0.0055, rel=0.2)
        assert rows["mtp.0.ffn.experts.w1"].types == ("MXFP4", "Q2_K")
        assert 0.2 < (rows["mtp.0.ffn.experts.w1"].relative_rms or 0) < 0.4

    def test_other_drafters_are_told_apart(self, wide: Path, drafter_files: dict[str, Path], tmp_path: Path) -> None:
        narrower = dataclasses.replace(CONFIG, q_lora_rank=32, compress_ratios=(0, 4, 0))
        dspark_jax.save(random_model(narrower, parts=("drafter",)), tmp_path / "narrow")
        found = verify(tmp_path / "narrow", drafter_files["llama.cpp-bf16"])
        faults = {row.name: row.fault for row in found.rows if row.fault}
        assert not found.same and faults["mtp.1.attn.wkv"] == "only in B"
        assert faults["mtp.0.attn.wq_a"] == "shape [32, 256] in A and [64, 256] in B"


class TestCommands:
    def test_convert_verify_and_inspect(self, wide: Path, dspark: Dspark, tmp_path: Path) -> None:
        out = tmp_path / "new" / "drafter.gguf"
        ran = dspark("convert", str(out), "--checkpoint", str(wide), "--to", "llama.cpp-bf16")
        assert ran.code == 0 and str(out) in ran.out.replace("\n", "")
        again = dspark("convert", str(out), "--checkpoint", str(wide), "--to", "ds4-q4k")
        assert again.code == 2 and "is there already" in again.err
        assert dspark("verify", str(wide), str(out)).code == 0
        plain = ("--to", "ds4-q4k", "--plain", "--naming", "upstream", "--overwrite")
        assert dspark("convert", str(out), "--checkpoint", str(wide), *plain).code == 0
        ran = dspark("verify", str(wide), str(out))
        assert ran.code == 1 and "Not the same: " in ran.out
        ran = dspark("inspect", str(out))
        assert ran.code == 0 and "mtp.1.ffn_up_exps.weight" in ran.out and "dspark.noise_token_id" in ran.out
        assert '"deepseek4-dspark"' in dspark("inspect", str(out), "--json").out
        ran = dspark("convert", str(out), "--to", "llama.cpp-bf16", "--naming", "entrpi")
        assert ran.code == 2 and "--naming" in ran.err

    def test_an_interrupted_conversion_leaves_nothing(self, wide: Path, tmp_path: Path) -> None:
        def interrupt(done: int, total: int) -> None:
            if done > total / 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(wide, "llama.cpp-bf16", tmp_path / "out", "llama.cpp", progress=interrupt)
        assert [*tmp_path.iterdir()] == []

    def test_progress_ends_with_all_bytes(self, wide: Path, tmp_path: Path) -> None:
        told: list[tuple[int, int]] = []
        size = convert(wide, "llama.cpp-q8_0", tmp_path / "out", "llama.cpp", progress=lambda *step: told.append(step))
        assert told[-1] == (size, size) and told == sorted(told)


class TestWhereADrafterIsAskedFor:
    def test_progress_of_loading_ends_with_all_bytes(self, wide: Path, drafter_files: dict[str, Path]) -> None:
        told: list[tuple[int, int]] = []
        dspark_jax.load(wide, drafter=drafter_files["ds4-q2k"], progress=lambda *step: told.append(step))
        assert told == sorted(told) and told[-1][0] == told[-1][1] and len({total for _, total in told}) == 1

    def test_the_commands_take_it_from_the_file(self, wide: Path, drafter_files: dict[str, Path]) -> None:
        loading = Drafting(wide, "float32", drafter=drafter_files["ds4-q2k"])
        model = loading.model(ONE_DEVICE, lambda done, total: None)
        assert model.drafter and isinstance(model.drafter.main_proj.get_value(), Unpacked)

    def test_another_file_is_another_fingerprint(self, wide: Path, drafter_files: dict[str, Path]) -> None:
        assert len({fingerprint(wide), *(fingerprint(wide, file) for file in drafter_files.values())}) == 1 + len(FILES)


class TestTokenizers:
    def test_a_folder_without_one_is_told(self, wide: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        convert(wide, "llama.cpp-bf16", tmp_path / "out", "llama.cpp")
        assert "the file gets no tokenizer" in caplog.text
        assert [key for key in GGUFFile(tmp_path / "out").metadata if key.startswith("tokenizer.")] == [
            "tokenizer.ggml.mask_token_id"
        ]

    def test_a_byte_pair_encoding_is_embedded(self, wide: Path, tmp_path: Path) -> None:
        tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.add_special_tokens(["<end>"])
        tokenizer.add_tokens(["word"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_bytes((wide / "config.json").read_bytes())
        found = metadata(CONFIG, "llama.cpp", "x", tmp_path)
        tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
        assert tokens[:6] == ["a", "b", "ab", "<end>", "word", "[PAD5]"] and len(tokens) == CONFIG.vocab_size
        assert types[:6].tolist() == [1, 1, 1, 3, 4, 5] and found["tokenizer.ggml.merges"] == ["a b"]
        assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "gpt-2"
