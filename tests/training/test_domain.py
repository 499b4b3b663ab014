"""The new domain of tiny-v4's drafter: which headers, which side, and the files that the commands read."""

import json
from pathlib import Path

import pytest

from dspark_jax.errors import CorpusError
from dspark_jax.training.tiny_v4 import __main__ as command
from dspark_jax.training.tiny_v4 import domain

LEFT_OUT = ("pyconfig.h", "dynamic_annotations.h", "internal/pycore_list_generated.h", "other/package.h", "notes.txt")


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of 60 modules, each with two inner ones, and what is left out."""
    folder = tmp_path_factory.mktemp("include")
    for number in range(60):
        for name in (f"py{number}.h", f"cpython/py{number}.h", f"internal/pycore_py{number}.h"):
            text = "".join(f"PyAPI_FUNC(int) {name}_{line}(void);\n" for line in range(40))
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    for name in LEFT_OUT:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"left_out {name}\n" * 100)
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_headers_of_others_of_the_build_and_tables_are_left_out(include: Path) -> None:
    found = [file.path for file in domain.collect(include).files]
    assert found == sorted(found)
    assert len(found) == 180
    assert not set(found) & set(LEFT_OUT)


def test_a_header_and_its_inner_ones_are_on_one_side() -> None:
    for paths in (
        ["object.h", "cpython/object.h", "internal/pycore_object.h"],
        ["pystate.h", "cpython/pystate.h", "internal/pycore_pystate.h"],
    ):
        assert len({domain.side_of(path) for path in paths}) == 1
    assert {domain.side_of(f"module{number}.h") for number in range(100)} == {"train", "validation", "test"}


def test_no_header_names_nothing_but_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"holds no headers of Python; install them .* --include\."):
        domain.collect(tmp_path)


def test_files_of_a_fine_tuning(include: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["domain", "--include", str(include), "--out", str(tmp_path)])
    said = json.loads(capsys.readouterr().out)
    text, prompts, held_out = (rows(tmp_path / name) for name in ("text.jsonl", "prompts.jsonl", "held-out.jsonl"))
    assert said["lines"] == {"text.jsonl": len(text), "prompts.jsonl": len(prompts), "held-out.jsonl": len(held_out)}
    assert [row["id"] for row in text] == [row["id"] for row in prompts]
    assert len({row["id"] for row in text + held_out}) == len(text) + len(held_out)
    for passage, prompt in zip(text, prompts, strict=True):
        assert passage["text"].startswith(prompt["prompt"])
        assert len(passage["text"]) > len(prompt["prompt"]) >= domain.PROMPT_CHARACTERS
    sides = [{domain.side_of(row["id"].rsplit("-", 1)[0]) for row in some} for some in (text, held_out)]
    assert sides == [{"train"}, {"validation", "test"}]

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    domain.write(domain.collect(include), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["", "\n\n", "ab", "one\ntwo\nthree\n", "a\r\nb\x0bc\nlong line " + "x" * 50 + "\ny"])
@pytest.mark.parametrize("characters", [1, 4, 20])
def test_pieces_are_whole_lines_and_no_longer_than_they_must_be(text: str, characters: int) -> None:
    pieces = list(domain.pieces(text, characters))
    joined = "".join(pieces)
    assert text.startswith(joined)
    assert len(text) - len(joined) < characters
    for piece in pieces:
        assert len(piece) >= characters > len(piece) - len(piece.splitlines(keepends=True)[-1])


def test_spread_keeps_order_and_reaches_over_all() -> None:
    assert domain.spread(range(10), 4) == [0, 2, 5, 7]
    assert domain.spread(range(3), 4) == [0, 1, 2]
    assert domain.spread([], 4) == []
