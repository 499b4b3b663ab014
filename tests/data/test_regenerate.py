"""The model answers every turn itself: with a model made of arithmetic, and through the command with a small one."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Dspark

from dspark_jax.config import ModelConfig
from dspark_jax.data.documents import DocumentReader
from dspark_jax.data.regenerate import answer, read_dialogues, write_lines
from dspark_jax.decoding.generate import Completion
from dspark_jax.decoding.statistics import Counters, Statistics
from dspark_jax.errors import NotFiniteError, RequestError
from dspark_jax.jobs.prompts import Job, PromptReader
from dspark_jax.jobs.results import Results
from dspark_jax.jobs.text import Text
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import PRESETS

BOS, EOS, USER, ASSISTANT, THINK, THINK_END = range(6)
COMMON = {"model": "fingerprint", "numerics": "float32"}
STATISTICS = Statistics.of(Counters.zeros(1, 3))


@pytest.fixture(scope="module")
def reader(small: Path) -> PromptReader:
    model = abstract_model(ModelConfig.from_file(small / "config.json"), PRESETS["float32"])
    return PromptReader({"seed": 40}, 1, "off", Text.of(small), model)


def lines(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(prompt: Sequence[int], seed: int) -> list[int]:
    """The arithmetical model: two words that depend on every token before them and on the seed."""
    mixed = sum(place * token for place, token in enumerate(prompt, start=1)) + seed
    return [10 + mixed % 80, 10 + mixed % 77]


class Killed(Exception): ...


class Model:
    """Completes in reverse order; killed after some answers."""

    def __init__(self, answers: int = 1000, thought: tuple[int, ...] = (), finish_reason: Any = "stop") -> None:
        self.left, self.thought, self.finish_reason = answers, thought, finish_reason

    def complete(self, jobs: Sequence[Job], done: int, turn: int) -> Iterator[tuple[int, Completion]]:
        for number in reversed(range(len(jobs))):
            if not self.left:
                raise Killed
            self.left -= 1
            request = jobs[number].request
            tokens = [*self.thought, *said(request.prompt, request.seed), EOS]
            yield number, Completion(tokens, self.finish_reason, STATISTICS, None, None)


def regenerate(path: Path, reader: PromptReader, out: Path, model: Model) -> list[dict[str, Any]]:
    dialogues = read_dialogues(path, reader)
    answer(dialogues, reader, out.with_suffix(".turns"), COMMON, model.complete)
    write_lines(dialogues, out)
    return [json.loads(line) for line in out.read_text().splitlines()]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


OLD = {"role": "assistant", "content": "w9 w9 w9", "reasoning_content": "w9"}
DIALOGUE = [user("w30"), OLD, user("w31 w32"), OLD, user("w33")]


def test_every_turn_follows_the_models_own_answers(reader: PromptReader, tmp_path: Path) -> None:
    path = lines(tmp_path, {"id": "first", "prompt_ids": [50]}, {"id": "talk", "messages": DIALOGUE, "note": 1})
    first, talk = regenerate(path, reader, tmp_path / "out.jsonl", Model())

    ids, mask = [BOS], [0]
    for question in ([30], [31, 32], [33]):
        ids += [USER, *question, ASSISTANT, THINK_END]
        answered = [*said(ids, seed=41), EOS]
        ids += answered
        mask += [0] * (3 + len(question)) + [1] * len(answered)
    assert (talk["ids"], talk["loss_mask"]) == (ids, mask)
    assert [message["role"] for message in talk["dialogue"]] == ["user", "assistant"] * 3
    assert talk["dialogue"][1]["content"].strip() == f"w{ids[5]} w{ids[6]}" and "w9" not in json.dumps(talk["dialogue"])
    assert talk["finish_reasons"] == ["stop"] * 3
    assert {name: talk["settings"][name] for name in (*COMMON, "seed", "thinking")} == COMMON | {
        "seed": 41,
        "thinking": "off",
    }
    assert first["ids"] == [50, *said([50], seed=40), EOS] and first["loss_mask"] == [0, 1, 1, 1]


def test_the_lines_are_training_data(small: Path, reader: PromptReader, tmp_path: Path) -> None:
    path = lines(tmp_path, {"id": 1, "messages": DIALOGUE, "samples": 2})
    rows = regenerate(path, reader, tmp_path / "out.jsonl", Model())
    documents = DocumentReader(reader.text, vocabulary=96, end_id=EOS, min_supervised=9).read(tmp_path / "out.jsonl")
    assert len(documents) == len(rows) == 2 and rows[0]["ids"] != rows[1]["ids"]
    for number, row in enumerate(rows):
        assert documents[number].ids.tolist() == row["ids"]
        assert documents[number].supervised.astype(int).tolist() == row["loss_mask"]


def test_lines_of_generate_are_training_data_too(reader: PromptReader, tmp_path: Path) -> None:
    jobs = [job for name in (1, 2) for job in reader.jobs_of(name, {"prompt": "w30 w31"})]
    with Results(tmp_path / "out.jsonl", COMMON) as results:
        for number, completion in Model().complete(jobs, 0, 0):
            results.append(jobs[number], completion, reader.text)
    documents = DocumentReader(reader.text, vocabulary=96, end_id=EOS, min_supervised=2).read(tmp_path / "out.jsonl")
    assert [document.ids.tolist() for document in documents.documents] == [[30, 31, *said([30, 31], 40), EOS]] * 2
    assert documents[0].supervised.tolist() == [False] * 2 + [True] * 3


def test_where_it_thinks_each_turn_is_a_document(reader: PromptReader, tmp_path: Path) -> None:
    path = lines(tmp_path, {"id": 1, "messages": DIALOGUE[:3], "thinking": "low"})
    one, two = regenerate(path, reader, tmp_path / "out.jsonl", Model(thought=(60, 61, THINK_END)))
    assert one["ids"].count(60) == two["ids"].count(60) == 1, "the second prompt has no reasoning of the first turn"
    own = two["ids"].index(31)
    assert two["ids"][own:-6] == [31, 32, ASSISTANT, THINK] and two["loss_mask"] == [0] * (own + 4) + [1] * 6
    thoughts = [m["reasoning_content"] for m in two["dialogue"] if m["role"] == "assistant"]
    assert [thought.strip() for thought in thoughts] == ["w60 w61"] * 2


def test_behind_a_tool_result_nothing_is_asked(reader: PromptReader, tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"role": "tool", "content": "w1", "tool_call_id": "c"}
    messages = [user("w30"), OLD | {"tool_calls": [call]}, tool, OLD, user("w33")]
    [row] = regenerate(lines(tmp_path, {"id": 1, "messages": messages}), reader, tmp_path / "out.jsonl", Model())
    assert len(row["finish_reasons"]) == 1


def test_a_dialogue_that_cannot_go_on_ends(reader: PromptReader, tmp_path: Path) -> None:
    """Two answers in a row: the second has no question."""
    path = lines(tmp_path, {"id": 1, "messages": [user("w30"), OLD, OLD]}, {"id": 2, "messages": DIALOGUE})
    one, other = regenerate(path, reader, tmp_path / "out.jsonl", Model())
    assert (len(one["finish_reasons"]), len(other["finish_reasons"])) == (1, 3)


def test_a_killed_job_goes_on_to_the_same_bytes(reader: PromptReader, tmp_path: Path) -> None:
    rows = [{"id": i, "messages": DIALOGUE[: 1 + 2 * (i % 3)], "samples": 1 + i % 2} for i in range(7)]
    path = lines(tmp_path, *rows)
    regenerate(path, reader, tmp_path / "undisturbed.jsonl", Model())
    out, turns = tmp_path / "out.jsonl", tmp_path / "out.turns"
    kills = 0
    while not out.exists():
        try:
            regenerate(path, reader, out, Model(answers=4))
        except Killed:
            kills += 1
            last = max(turns.iterdir())
            last.write_bytes(last.read_bytes() + b'{"id": 1, "sa')
    assert kills >= 4
    assert out.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    again = Model(answers=0)
    regenerate(path, reader, out, again)  # asks for nothing

    other = lines(tmp_path, {"id": 0, "messages": DIALOGUE})
    with pytest.raises(RequestError, match="which the prompts do not ask for"):
        regenerate(other, reader, out, Model())


def test_logits_that_are_not_finite_are_told(reader: PromptReader, tmp_path: Path) -> None:
    path = lines(tmp_path, {"id": 1, "messages": DIALOGUE})
    with pytest.raises(NotFiniteError, match="not finite in 1 answers, first in that of id 1"):
        regenerate(path, reader, tmp_path / "out.jsonl", Model(finish_reason="not_finite"))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": DIALOGUE}, "line 1: has no id"),
        ({"id": 1}, "line 1: expected one of prompt, prompt_ids, messages; found none"),
        ({"id": 1, "messages": []}, "line 1: there is no user message"),
        ({"id": 1, "messages": [OLD]}, "line 1: there is no user message"),
        ({"id": 1, "messages": 3}, "line 1: the dialogue: holds no messages"),
        ({"id": 1, "messages": DIALOGUE, "prompt": "w7"}, "line 1: expected one of .*; found prompt and messages"),
        ({"id": 1, "messages": DIALOGUE, "seed": -1}, "line 1: seed is -1"),
    ],
)
def test_a_line_that_cannot_be_is_named(
    row: dict[str, Any], complaint: str, reader: PromptReader, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=complaint):
        read_dialogues(lines(tmp_path, row), reader)


# The commands --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_from_prompts_to_a_cache(small: Path, dspark: Dspark, tmp_path: Path) -> None:
    """One model is compiled for each command, so one test has them all."""
    prompts = lines(tmp_path, *({"id": i, "messages": DIALOGUE[:3], "samples": 1 + i % 2} for i in range(3)))
    out, folder, checkpoint = tmp_path / "data.jsonl", tmp_path / "cache", ("--checkpoint", str(small))
    asked = ("data", "regenerate", *checkpoint, "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "9")
    ran = dspark(*asked, "--thinking", "off", "--batch-size", "4", "--json")
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert (summary["dialogues"], summary["answers"], summary["new_answers"]) == (4, 8, 8)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["settings"]["temperature"] for row in rows} == {1.0}
    assert {row["settings"]["seed"] for row in rows} == {0, 1, 1 + 0x9E3779B1, 2}
    assert sum(sum(row["loss_mask"]) for row in rows) == summary["answer_tokens"]
    whole = out.read_bytes()
    out.unlink()
    again = dspark(*asked, "--thinking", "off", "--batch-size", "4")
    assert again.code == 0 and out.read_bytes() == whole and "new answers" in again.out

    reading = ("--max-length", "32", "--min-supervised", "2")
    told = json.loads(dspark("data", "describe", str(out), *checkpoint, *reading, "--json").out)
    tokens = sum(min(len(row["ids"]), 32) for row in rows)
    assert (told["documents"], told["tokens"], told["dropped"]) == (len(rows), tokens, 0)
    assert told["padding_padded"] == pytest.approx(1 - tokens / (32 * len(rows)))

    write = ("data", "cache", *checkpoint, "--documents", str(out), "--out", str(folder), *reading, "--json")
    ran = dspark(*write)
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    size = 6 + 2 * 64 * 2  # one tap, width 64
    assert ran.err.startswith(f"{tokens} tokens of {size} bytes are ")
    assert (summary["tokens"], summary["new_tokens"], summary["bytes"]) == (tokens, tokens, tokens * size)
    assert json.loads(dspark(*write).out)["new_tokens"] == 0

    cached = json.loads(dspark("data", "describe", str(folder), *checkpoint, "--json").out)
    same = set(told) - {"rows", "truncated", "dropped"}
    assert {name: cached[name] for name in same} == {name: told[name] for name in same}
    assert cached["bytes"] == tokens * size + 56 * len(rows)
    assert cached["written_with"]["numerics"] == "bfloat16"
    for_people = dspark("data", "describe", str(folder))
    assert for_people.code == 0 and f"{size} bytes a token" in for_people.out

    other = Path(__file__).parents[1] / "golden" / "tiny-a"
    ran = dspark("data", "describe", str(folder), "--checkpoint", str(other))
    assert ran.code == 2 and "has model_fingerprint" in ran.err
    ran = dspark(*write, "--max-length", "31")
    assert ran.code == 2 and "and this run" in ran.err


def test_commands_refuse_in_one_line(small: Path, dspark: Dspark, tmp_path: Path) -> None:
    path = lines(tmp_path, {"id": 1, "prompt": "w7"})
    checkpoint = ("--checkpoint", str(small))
    for arguments, complaint in (
        (("describe", str(tmp_path)), "has no manifest.json, so it is no feature cache"),
        (("describe", str(path), *checkpoint), "line 1: expected a row of one kind"),
        (("regenerate", "--prompts", str(path), "--out", str(path), *checkpoint), "holds the prompts; name another"),
        (
            ("regenerate", "--prompts", str(path), "--out", str(small / "config.json"), *checkpoint),
            "config.json: is there, and no config.json.turns of which it was made; name another --out.",
        ),
        (("cache", "--documents", str(path), "--out", str(tmp_path / "c"), *checkpoint), "expected a row of one kind"),
    ):
        ran = dspark("data", *arguments)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert ran.err.startswith("dspark: ") and complaint in ran.err
