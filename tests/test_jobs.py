"""Files of prompts: what a line may say, what is written, and that a killed job loses and doubles nothing."""

import json
import os
import random
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import QUICK, Dspark

from dspark_jax import RequestError
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.statistics import Counters, Statistics
from dspark_jax.jobs.prompts import FIELDS, Job, PromptReader
from dspark_jax.jobs.results import Results
from dspark_jax.jobs.text import Text
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import PRESETS

Lines = Callable[..., Path]


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    def write(*rows: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="module")
def reader(folder: Path) -> PromptReader:
    model = abstract_model(ModelConfig.from_file(folder / "config.json"), PRESETS["float32"])
    return PromptReader({"seed": 10}, 1, "high", Text.of(folder), model)


# What a line may say -------------------------------------------------------------------------------------------------


def test_lines_have_settings_of_their_own(reader: PromptReader, lines: Lines) -> None:
    path = lines(
        {"id": "a", "prompt": "w7 w8", "temperature": 0.5, "answer": 42, "category": " two words "},
        "",
        {"id": 2, "prompt_ids": [1, 2, 3], "samples": 2, "seed": 2**32 - 1, "stop_ids": [9], "max_new_tokens": 5},
    )
    jobs, ignored = reader.read(path)
    assert ignored == ["answer"]
    assert [job.key for job in jobs] == [("a", 0), (2, 0), (2, 1)]
    assert [list(job.request.prompt) for job in jobs] == [[7, 8], [1, 2, 3], [1, 2, 3]]
    assert [job.category for job in jobs] == ["two words", None, None]
    assert [job.request.seed for job in jobs] == [10, 2**32 - 1, 0x9E3779B0]
    assert [job.request.temperature for job in jobs] == [0.5, 0.0, 0.0]
    assert [job.request.max_new_tokens for job in jobs] == [64, 5, 5]
    assert [list(job.request.stop_ids or ()) for job in jobs] == [[1], [9], [9]]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "line 2: is no JSON"),
        ("[1]", "line 2: is list; expected an object."),
        ({"prompt": "w1"}, "line 2: has no id; give it a text or an integer, by which the output names it."),
        ({"id": 1.5, "prompt": "w1"}, "line 2: id is 1.5"),
        ({"id": 1, "prompt": "w1"}, "line 2: id 1 is that of line 1; give each line its own."),
        ({"id": 2}, "line 2: expected one of prompt, prompt_ids, messages; found none."),
        ({"id": 2, "prompt": "w1", "prompt_ids": [1]}, "line 2: expected one of .*; found prompt and prompt_ids."),
        ({"id": 2, "prompt": [1]}, r"line 2: prompt is \[1\]; expected text, or token ids as prompt_ids."),
        ({"id": 2, "prompt": "  "}, "line 2: prompt is empty"),
        ({"id": 2, "prompt_ids": [512]}, "line 2: prompt_ids: token id 512 is outside the vocabulary"),
        ({"id": 2, "prompt_ids": 7}, "line 2: prompt_ids: expected a list of token ids"),
        ({"id": 2, "prompt_ids": [1], "temperature": "hot"}, "line 2: temperature is 'hot'; expected a number"),
        ({"id": 2, "prompt_ids": [1], "samples": 0}, "line 2: samples is 0; expected an integer of at least 1."),
        ({"id": 2, "prompt_ids": [1], "category": 5}, "line 2: category is 5; expected the name of a kind of prompts"),
        ({"id": 2, "prompt_ids": [1], "category": " "}, "line 2: category is ' '; expected"),
        ({"id": 2, "prompt_ids": [1], "category": "a\nb"}, r"line 2: category is 'a\\nb'; expected"),
        ({"id": 2, "prompt_ids": [1], "category": None}, "line 2: category is None; expected"),
        ({"id": 2, "prompt_ids": [1], "stop_ids": [-1]}, "line 2: stop_ids: token id -1 is outside"),
        ({"id": 2, "messages": []}, "line 2: "),
        ({"id": 2, "prompt_ids": [1], "max_new_tokens": 10**9}, "line 2: .* 1000000001 positions; expected at most"),
        ({"id": 2, "prompt_ids": [1], "temperature": 10**400}, "line 2: temperature is 1"),
        ('{"id": 2, "prompt": ' + "[" * 100_000, "line 2: is no JSON"),
        ('{"id": "\\ud800", "prompt": "w1"}', "line 2: is no JSON"),
    ],
)
def test_a_line_that_cannot_be_is_named(reader: PromptReader, lines: Lines, row: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        reader.read(lines({"id": 1, "prompt": "w1"}, row))


def test_files_that_cannot_be_read(reader: PromptReader, lines: Lines, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no prompt; expected JSON lines like"):
        reader.read(lines("", ""))
    with pytest.raises(RequestError, match="nowhere: cannot be read"):
        reader.read(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="binary: cannot be read"):
        reader.read(tmp_path / "binary")


# What is written -----------------------------------------------------------------------------------------------------


def completion(*tokens: int) -> Completion:
    return Completion(list(tokens), "length", Statistics.of(Counters.zeros(1, 5)), None, None)


@pytest.fixture
def jobs(reader: PromptReader) -> list[Job]:
    return [job for name in "abc" for job in reader.jobs_of(name, {"prompt_ids": [1, 2]})]


COMMON = {"numerics": "float32"}


def append(path: Path, jobs: list[Job], text: Text) -> None:
    with Results(path, COMMON) as results:
        for job in results.missing(jobs):
            results.append(job, completion(7, 1), text)


def test_a_torn_last_line_is_written_again(reader: PromptReader, jobs: list[Job], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    append(path, jobs, reader.text)
    whole = path.read_bytes()
    assert [json.loads(line)["text"] for line in whole.splitlines()] == ["w7"] * 3
    for end in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        append(path, jobs, reader.text)
        assert path.read_bytes() == whole


def test_output_of_another_job_is_refused_and_kept(reader: PromptReader, jobs: list[Job], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    append(path, jobs, reader.text)
    whole = path.read_bytes()
    hotter = [job for name in "abc" for job in reader.jobs_of(name, {"prompt_ids": [1, 2], "temperature": 1.0})]
    longer = [job for name in "abc" for job in reader.jobs_of(name, {"prompt_ids": [1, 3]})]
    for others, complaint in (
        (jobs[:2], "holds a completion of id 'c', sample 0, which the prompts do not ask for"),
        (hotter, "the completion of id 'a' has temperature 0.0 and this job 1.0; name another --out"),
        (longer, "the completion of id 'a' has prompt_sha256"),
    ):
        with pytest.raises(RequestError, match=complaint):
            append(path, others, reader.text)
    with (
        Results(path, {"numerics": "bfloat16"}) as results,
        pytest.raises(RequestError, match="numerics 'float32' and"),
    ):
        results.missing(jobs)
    assert path.read_bytes() == whole
    with pytest.raises(RequestError, match="is no regular file"):
        Results(Path("/dev/null"), COMMON)
    strange = '{"id": [], "sample": 0, "settings": {}}\n'
    for foreign in ('{"id": 1}\n', '{"id": 1}\n{"id": ', "a file without a newline", "\n", strange):
        path.write_text(foreign)
        with pytest.raises(RequestError, match="name another --out"):
            append(path, jobs, reader.text)
        assert path.read_text() == foreign


def test_text_with_separators_of_lines_stays_on_its_line(reader: PromptReader, tmp_path: Path) -> None:
    jobs = [job for name in ("a\u2028b\u0085c", "d\r\x0be\n", "f") for job in reader.jobs_of(name, {"prompt_ids": [1]})]
    path = tmp_path / "out.jsonl"
    append(path, jobs[:2], reader.text)
    with Results(path, COMMON) as results:
        assert results.missing(jobs) == jobs[2:]


def test_a_second_writer_is_refused(reader: PromptReader, jobs: list[Job], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, COMMON), pytest.raises(RequestError, match="is being written by another job"):
        append(path, jobs, reader.text)
    append(path, jobs, reader.text)
    with pytest.raises(RequestError, match="cannot be opened"):
        Results(tmp_path, COMMON)


def test_numbers_that_json_lacks_become_null(reader: PromptReader, jobs: list[Job], tmp_path: Path) -> None:
    broken = Completion([7], "not_finite", completion().statistics, [float("nan")], [float("-inf")])
    with Results(tmp_path / "out.jsonl", COMMON) as results:
        results.append(jobs[0], broken, reader.text)
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert (row["finish_reason"], row["target_logprobs"], row["drawn_logprobs"]) == ("not_finite", [None], [None])


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_dialogues_and_prompts_from_one_file(small: Path, lines: Lines, dspark: Dspark, tmp_path: Path) -> None:
    dialogue = [{"role": "user", "content": "w7 <think> w8"}]
    path = lines(
        {"id": "off", "messages": dialogue, "thinking": "off", "note": "kept out"},
        {"id": "low", "messages": dialogue, "samples": 2, "temperature": 1.0},
        {"id": "text", "prompt": "w9 w10", "stop_ids": []},
    )
    out = tmp_path / "out.jsonl"
    command = ("--prompts", str(path), "--out", str(out), "--checkpoint", str(small), "--thinking", "low")
    ran = dspark("generate", *command, "--batch-size", "2", "--max-new-tokens", "12", "--logprobs", "--json")
    assert ran.code == 0, ran.err
    assert ran.err == f"dspark: warning: {path}: not known, and ignored: note; a line may have {', '.join(FIELDS)}.\n"
    summary = json.loads(ran.out)
    assert (summary["completions"], summary["new_completions"]) == (4, 4)

    rows = {(row["id"], row["sample"]): row for row in map(json.loads, out.read_text().splitlines())}
    assert set(rows) == {("off", 0), ("low", 0), ("low", 1), ("text", 0)}
    for row in rows.values():
        assert len(row["target_logprobs"]) == len(row["drawn_logprobs"]) == len(row["tokens"]) <= 12
    assert [row["settings"]["prompt_tokens"] for row in rows.values()].count(2) == 1
    off, low, text = rows["off", 0], rows["low", 1], rows["text", 0]
    assert off["message"]["role"] == "assistant" and "reasoning_content" not in off["message"]
    assert low["settings"]["seed"] == 0x9E3779B1 and low["message"]["role"] == "assistant"
    assert "message" not in text and len(text["tokens"]) == 12
    assert (off["settings"]["thinking"], text["settings"]["thinking"]) == ("off", None)

    (tmp_path / "dialogue.json").write_text(json.dumps({"messages": dialogue}))
    alone = ("--messages", str(tmp_path / "dialogue.json"), "--checkpoint", str(small), "--max-new-tokens", "12")
    told = json.loads(dspark("generate", *alone, "--thinking", "off", "--json").out)
    assert told["tokens"] == off["tokens"] and told["message"] == off["message"]
    for_people = dspark("generate", *alone, "--thinking", "off")
    assert for_people.out.startswith(off["message"]["content"] + "\n")


SETTINGS = ("--batch-size", "3", "--max-new-tokens", "40", "--temperature", "0.8", "--seed", "5", "--samples", "2")


QUICK_FLAGS = " ".join(f"--{name}={value}" for name, value in QUICK.items())


class Command:
    """The command in processes of its own, which share what they compile: 60 prompts."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint, self.prompts = checkpoint, folder / "prompts.jsonl"
        rng = np.random.default_rng(1)
        rows = [{"id": i, "prompt_ids": rng.integers(0, 96, 5).tolist()} for i in range(60)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        thresholds = ("MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES")
        self.environment = os.environ | {f"JAX_PERSISTENT_CACHE_{name}": "0" for name in thresholds}
        self.environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "XLA_FLAGS": QUICK_FLAGS}

    def start(self, out: Path) -> subprocess.Popen[str]:
        files = ["--prompts", str(self.prompts), "--out", str(out), "--checkpoint", str(self.checkpoint)]
        dspark = Path(sysconfig.get_path("scripts")) / "dspark"
        return subprocess.Popen(
            [dspark, "generate", *files, *SETTINGS, "--json"], env=self.environment, stdout=subprocess.PIPE, text=True
        )

    def run(self, out: Path) -> dict[str, Any]:
        process = self.start(out)
        told, _ = process.communicate()
        assert process.returncode == 0
        return json.loads(told)


def test_a_job_killed_three_times_writes_what_an_undisturbed_one_writes(small: Path, tmp_path: Path) -> None:
    """`kill -9` at random moments after the first new line; no line is lost, doubled or torn, and none differs."""
    command, undisturbed, out = Command(small, tmp_path), tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    assert command.run(undisturbed)["new_completions"] == 120
    moments = random.Random(0)
    for _ in range(3):
        before = out.stat().st_size if out.exists() else 0
        process = command.start(out)
        while process.poll() is None and (not out.exists() or out.stat().st_size == before):
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the job was still running"
    assert 0 < command.run(out)["new_completions"] < 118

    written = out.read_text().splitlines()
    assert sorted(written) == sorted(undisturbed.read_text().splitlines())
    assert len({(row["id"], row["sample"]) for row in map(json.loads, written)}) == len(written) == 120
