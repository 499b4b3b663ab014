"""The new domain of tiny-v4's drafter: which tables, which side, and the files that the commands read."""

import json
from pathlib import Path

import pytest

from dspark_jax.errors import CorpusError
from dspark_jax.training.tiny_v4 import __main__ as command
from dspark_jax.training.tiny_v4 import domain


@pytest.fixture(scope="module")
def encodings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of 60 character sets, and modules that are none."""
    folder = tmp_path_factory.mktemp("encodings")
    for number in range(60):
        lines = "".join(f"    'x'  # 0x{line:02x} -> LETTER {number}\n" for line in range(80))
        (folder / f"cp{number}.py").write_text(f"decoding_table = (\n{lines})\n")
    (folder / "aliases.py").write_text("aliases = {}\n")
    (folder / "decoding_table.txt").write_text("decoding_table")
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_tables_are_read(encodings: Path) -> None:
    found = [file.path for file in domain.collect(encodings).files]
    assert found == sorted(found) and len(found) == 60
    assert {domain.side_of(f"cp{number}.py") for number in range(200)} == {"train", "validation", "test"}


def test_the_running_interpreter_has_some() -> None:
    assert len(domain.collect().files) > 50


def test_no_table_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds no tables of character sets; name the folder"):
        domain.collect(tmp_path)


def test_files_of_a_fine_tuning(encodings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["domain", "--encodings", str(encodings), "--out", str(tmp_path)])
    said = json.loads(capsys.readouterr().out)
    names = ("text.jsonl", "prompts.jsonl", "held-out.jsonl", "held-out-text.jsonl")
    text, prompts, held_out, unseen = (rows(tmp_path / name) for name in names)
    assert said["lines"] == dict(zip(names, map(len, (text, prompts, held_out, unseen)), strict=True))
    assert [row["id"] for row in unseen] == [row["id"] for row in held_out]
    assert [row["id"] for row in text] == [row["id"] for row in prompts]
    assert len({row["id"] for row in text + held_out}) == len(text) + len(held_out)
    for passage, prompt in zip(text, prompts, strict=True):
        assert passage["text"].startswith(prompt["prompt"])
        assert len(passage["text"]) > len(prompt["prompt"]) >= domain.PROMPT_CHARACTERS
    sides = [{domain.side_of(row["id"].rsplit("-", 1)[0]) for row in some} for some in (text, held_out)]
    assert sides[0] == {"train"} and sides[1] and sides[1] <= {"validation", "test"}

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    domain.write(domain.collect(encodings), tmp_path)
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
