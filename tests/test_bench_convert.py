"""`dspark bench convert`: the figures belong together, and each is of the encoder that it names."""

import json
from typing import Any

import numpy as np
import pytest

from dspark_jax.bench import convert
from dspark_jax.bench.convert import ConvertReport, FormatSpeed
from dspark_jax.cli import bench as bench_command
from dspark_jax.cli import main
from dspark_jax.formats import q2_k, q4_k, q8_0


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SAMPLE", (2, 256))
    assert main(["bench", "convert", "--format", "q8_0", "q2_k", "q8_0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["values"], told["stack"]) == (512, [256, 2048, 4096])
    assert [speed["format"] for speed in told["speeds"]] == ["q8_0", "q2_k"]
    assert [speed["plain_values_per_second"] is None for speed in told["speeds"]] == [True, False]
    for speed in told["speeds"]:
        assert speed["stack_seconds"] == 256 * 2048 * 4096 / speed["values_per_second"]


def test_programs_are_the_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is timed is run once, in the order of the report."""
    ran: list[Any] = []

    def run_once(*programs: Any) -> list[convert.Timing]:
        ran.extend(program() for program in programs)
        return [convert.Timing(float(place + 1), 0.5) for place in range(len(programs))]

    monkeypatch.setattr(convert, "SAMPLE", (2, 256))
    monkeypatch.setattr(convert, "time_in_turns", run_once)
    report = convert.bench_convert(("q2_k", "q4_k", "q8_0"))
    copy, *encoded = ran
    plain = [q2_k.encode(copy, search=False), q4_k.encode(copy, search=False)]
    expected = [q2_k.encode(copy), plain[0], q4_k.encode(copy), plain[1], q8_0.encode(copy)]
    for made, wanted in zip(encoded, expected, strict=True):
        np.testing.assert_array_equal(made, wanted)
    assert report.copy_values_per_second == 512
    assert report.speeds == (
        FormatSpeed("q2_k", 512 / 2, 512 / 3, 0.5 / 2),
        FormatSpeed("q4_k", 512 / 4, 512 / 5, 0.5 / 4),
        FormatSpeed("q8_0", 512 / 6, None, 0.5 / 6),
    )


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = (FormatSpeed("q2_k", 8e6, 80e6, 0.05), FormatSpeed("q8_0", 100e6, None, 0.01))
    monkeypatch.setattr(bench_command, "bench_convert", lambda _: ConvertReport(512, 1e9, speeds))
    assert main(["bench", "convert"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["q2_k", "8.0", "268", "s", "10.0%", "0.8%", "5.0%"] in lines
    assert ["q8_0", "100.0", "21", "s", "-", "10.0%", "1.0%"] in lines
