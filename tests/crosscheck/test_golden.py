"""The golden records of the PyTorch path compare clean, and a layer that misses one quantisation does not."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import GOLDEN
from safetensors.numpy import load_file

import dspark_jax
from dspark_jax.crosscheck.compare import LAYER_RMS, Report, compare, judge
from dspark_jax.crosscheck.official import layer_by_layer
from dspark_jax.crosscheck.record import Record
from dspark_jax.model.numerics import PRESETS


@pytest.fixture(scope="module")
def report(golden: Path) -> Report:
    return compare(golden, golden / "expected.safetensors")


def test_golden_records_compare_clean(report: Report) -> None:
    assert report.ok
    assert report.not_compared == []
    assert sum(row.judged for row in report.rows) >= 62
    assert [row.key for row in report.rows if row.judged and not row.ok] == []


def test_the_golden_numbers_are_far_inside_the_tolerance(report: Report) -> None:
    continuous = [row for row in report.rows if row.key.startswith("exact/") and row.tolerance > 1e-4]
    assert max(row.max_abs for row in continuous) < 5e-5


def test_layers_in_official_numerics_agree_almost_to_the_bit(report: Report) -> None:
    [row] = [row for row in report.rows if row.key == "inference/short/hc_streams"]
    assert row.relative < LAYER_RMS / 10


@pytest.mark.parametrize("switch", ["quantise_kv", "quantise_linear_inputs"])
def test_a_layer_without_one_quantisation_is_caught(switch: str) -> None:
    golden = GOLDEN / "tiny-b"
    model = dspark_jax.load(golden, numerics=replace(PRESETS["official"], **{switch: False}))
    record = Record(golden / "expected.safetensors", model.config)
    [(key, streams)] = layer_by_layer(model, record)
    assert not judge(key, streams, record[key]).ok


def test_golden_records_cover_every_kind_of_key(golden: Path, report: Report) -> None:
    inputs = {"prompt_ids", "forced_ids", "start_pos", "anchor_ids", "x"}
    keys = {key for key in load_file(golden / "expected.safetensors") if key.rsplit("/", 1)[-1] not in inputs}
    assert keys == {row.key for row in report.rows}
