"""Records of the oracle, of other shapes than the golden ones, compare clean; planted faults do not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle
import pytest
from conftest import GOLDEN
from random_model import random_model
from safetensors.numpy import load_file, save_file

import dspark_jax
from dspark_jax.config import ModelConfig
from dspark_jax.crosscheck.compare import Report, Row, compare, judge

Arrays = dict[str, np.ndarray]


# Records of other shapes, made with the oracle -----------------------------------------------------------------------

PROMPT, FORCED, EMITTED = 133, 6, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with blocks of 3, a ratio of 128, two taps, 5 sinkhorn iterations and a noise id inside."""
    config = ModelConfig.tiny(
        compress_ratios=[0, 4, 128, 0],
        dspark_block_size=3,
        dspark_markov_rank=5,
        dspark_noise_token_id=40,
        dspark_target_layer_ids=[0, 2],
        hc_sinkhorn_iters=5,
    )
    directory = tmp_path_factory.mktemp("random") / "checkpoint"
    dspark_jax.save(random_model(config, seed=3), directory)
    return directory


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Arrays:
    """Part of the keys of a record, from the oracle: no short prompt, no operations, one loop."""
    config, weights = ModelConfig.from_file(folder / "config.json"), oracle.read_weights(folder)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, PROMPT + FORCED)
    main = oracle.target(config, weights, ids)
    emitted, margins = oracle.greedy(config, weights, ids[:9].tolist(), EMITTED)
    prompt = ids[:9].astype(np.int32)
    loop = oracle.target(config, weights, np.concatenate([prompt, emitted]))
    start = PROMPT + 1
    draft = oracle.draft(config, weights, main.taps[: start + 1], int(ids[start + 1]))
    first = oracle.draft(config, weights, loop.taps[:9], emitted[0])
    picks = np.full((PROMPT, config.index_topk + 2), -1, np.int32)  # wider than any row needs
    for row, chosen in zip(picks, main.index_picks[1], strict=False):
        row[: len(chosen)] = sorted(chosen)
    return {
        "exact/prompt_ids": ids[:PROMPT].astype(np.int32),
        "exact/prefill_logits": main.logits[:PROMPT][-10:].astype(np.float32),
        "exact/prefill_main_hidden": main.taps[:PROMPT].astype(np.float32),
        "exact/indexer/layer1/prefill_topk": picks,
        "exact/decode/forced_ids": ids[PROMPT:].astype(np.int32),
        "exact/decode/logits": main.logits[PROMPT:].astype(np.float32),
        "exact/draft/start_pos": np.array([start], np.int32),
        "exact/draft/anchor_ids": ids[start + 1 : start + 2].astype(np.int32),
        "exact/draft/logits": draft.logits[None].astype(np.float32),
        "exact/draft/output_ids": np.array([[ids[start + 1], *draft.ids]], np.int32),
        "exact/draft/confidence": draft.confidence[None].astype(np.float32),
        "exact/loop_other/prompt_ids": prompt,
        "exact/loop_other/stream": np.array(emitted, np.int32),
        "exact/loop_other/start_pos": np.array([8], np.int32),
        "exact/loop_other/output_ids": np.array([[emitted[0], *first.ids]], np.int32),
        "exact/greedy/prompt_ids": prompt,
        "exact/greedy/tokens": np.array(emitted, np.int32),
        "exact/greedy/margins": np.array(margins, np.float32),
        "notes/of_the_author": np.zeros(3, np.float32),
    }


def comparison(folder: Path, recorded: Arrays, path: Path) -> Report:
    save_file({key: np.ascontiguousarray(values) for key, values in recorded.items()}, path)
    return compare(folder, path)


def test_a_record_of_other_shapes_compares_clean(folder: Path, recorded: Arrays, tmp_path: Path) -> None:
    report = comparison(folder, recorded, tmp_path / "record.safetensors")
    assert report.not_compared == ["notes/of_the_author"]
    assert report.ok, [row for row in report.rows if not row.ok]
    assert len(report.rows) == 11


def changed(key: str, change: Callable[[np.ndarray], None]) -> Callable[[Arrays], None]:
    def apply(recorded: Arrays) -> None:
        recorded[key] = recorded[key].copy()
        change(recorded[key])

    return apply


FAULTS = {
    "exact/prefill_logits": lambda v: v.__setitem__((0, 0), v[0, 0] + 4e-4),
    "exact/decode/logits": lambda v: v.__setitem__((-1, -1), np.nan),
    "exact/indexer/layer1/prefill_topk": lambda v: v.__setitem__((-1, -3), v[-1, -3] ^ 1),
    "exact/draft/output_ids": lambda v: v.__setitem__((0, -1), v[0, -1] ^ 1),
    "exact/draft/confidence": lambda v: v.__setitem__((0, 0), v[0, 0] - 1e-3),
    "exact/loop_other/stream": lambda v: v.__setitem__(-1, v[-1] ^ 1),
}


def test_planted_faults_are_found_and_nothing_else(folder: Path, recorded: Arrays, tmp_path: Path) -> None:
    faulty = dict(recorded)
    for key, change in FAULTS.items():
        changed(key, change)(faulty)
    report = comparison(folder, faulty, tmp_path / "record.safetensors")
    assert not report.ok
    assert {row.key for row in report.rows if not row.ok} == set(FAULTS)


def test_a_record_without_anything_to_judge_is_not_a_success(folder: Path, tmp_path: Path) -> None:
    report = comparison(folder, {"notes/x": np.zeros(2, np.float32)}, tmp_path / "record.safetensors")
    assert not report.ok
    assert report.not_compared == ["notes/x"]


def test_groups_without_what_they_build_on_are_left_out(tmp_path: Path) -> None:
    """A sinkhorn example without a prompt, and drafts along forced tokens that the record does not have."""
    golden = GOLDEN / "tiny-a"
    whole = load_file(golden / "expected.safetensors")
    sinkhorn = {key: values for key, values in whole.items() if key.startswith("exact/sinkhorn/")}
    report = comparison(golden, sinkhorn, tmp_path / "sinkhorn.safetensors")
    assert report.ok
    assert report.not_compared == ["exact/sinkhorn/mixes"]

    part = {key: values for key, values in whole.items() if key.startswith(("exact/draft/", "exact/short/"))}
    part["exact/prompt_ids"] = whole["exact/prompt_ids"]
    report = comparison(golden, part, tmp_path / "part.safetensors")
    assert report.ok
    assert {row.key for row in report.rows} == {
        f"exact/short/{key}" for key in ("hc_streams", "hc_head_out", "logits_last")
    }
    assert all(key.startswith("exact/draft/") for key in report.not_compared)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("exact/prompt_ids", np.array([1, 96], np.int32), "token id 96 is outside the vocabulary"),
        ("exact/draft/start_pos", np.array([500], np.int32), "position 500; expected 0 to"),
    ],
)
def test_a_record_that_cannot_be_replayed_gets_a_sentence(
    folder: Path, recorded: Arrays, tmp_path: Path, key: str, values: np.ndarray, message: str
) -> None:
    with pytest.raises(dspark_jax.RequestError, match=message):
        comparison(folder, recorded | {key: values}, tmp_path / "record.safetensors")


# Single rows ---------------------------------------------------------------------------------------------------------


def row(key: str, computed: object, recorded: object, dtype: type = np.float32) -> Row:
    return judge(key, np.asarray(computed, dtype), np.asarray(recorded, dtype))


def test_tolerances_belong_to_keys() -> None:
    assert row("exact/prefill_logits", [1.0], [1.0002]).ok
    assert not row("exact/prefill_logits", [1.0], [1.0004]).ok
    assert not row("exact/sinkhorn/comb", [0.5], [0.50002]).ok
    assert row("ops/fp8_gemm_wq_b_f32", [100.0], [100.005]).ok
    assert not row("ops/fp8_gemm_wq_b_f32", [1.0], [1.002]).ok


def test_quantisers_are_compared_bit_for_bit() -> None:
    assert not row("ops/act_quant64_inplace", [0.0], [-0.0]).ok
    assert not row("dequant/layers.0.attn.wkv", [1.0], [np.nextafter(np.float32(1), 2)]).ok


def test_picks_of_the_indexer_are_sets() -> None:
    assert row("exact/indexer/layer1/decode_topk", [[2, 5, -1]], [[-1, 5, 2]], np.int32).ok
    assert row("exact/indexer/layer1/decode_topk", [[2, 5]], [[-1, -1, 2, 5]], np.int32).ok
    assert not row("exact/indexer/layer1/decode_topk", [[2, 5]], [[2, 6]], np.int32).ok


def test_other_shapes_are_a_mismatch_with_a_note() -> None:
    result = row("exact/prefill_logits", np.zeros((2, 3)), np.zeros((2, 4)))
    assert not result.ok
    assert result.note == "shape [2, 3], recorded [2, 4]"


def test_streams_of_another_shape_count_as_a_mismatch() -> None:
    result = row("inference/short/hc_streams", np.zeros((2, 3)), np.zeros((2, 4)))
    assert result.judged
    assert not result.ok


def test_whole_runs_in_official_numerics_are_reported_only() -> None:
    assert not row("inference/prefill_logits", [1.0], [9.0]).judged
