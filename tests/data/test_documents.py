"""Rows of text to documents: what is supervised, what is refused, what is left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_oracle import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark_jax.data.document import Document
from dspark_jax.data.documents import DocumentReader
from dspark_jax.data.turns import Turn, join
from dspark_jax.errors import RequestError
from dspark_jax.jobs.text import Text

BOS, EOS, USER, ASSISTANT, THINK, THINK_END = CONTROL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
FIRST_WORD = len(CONTROL)


@pytest.fixture(scope="module")
def text() -> Text:
    """Control tokens 0 to 5, then word `w6` to `w95`; words are split at spaces."""
    words = [*CONTROL, *(f"w{i}" for i in range(FIRST_WORD, 96))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w95"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(CONTROL))
    return Text(Path("somewhere"), tokenizer, "0731")


@pytest.fixture(scope="module")
def reader(text: Text) -> DocumentReader:
    return DocumentReader(text, vocabulary=96, end_id=1, max_length=64, min_supervised=2)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def facts(documents: list[Document]) -> list[tuple[list[int], list[int]]]:
    assert all(d.ids.dtype == np.int32 and d.supervised.dtype == bool for d in documents)
    return [(document.ids.tolist(), document.supervised.astype(int).tolist()) for document in documents]


# Kinds of rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "ids", "mask"),
    [
        ({"text": "w7 w8 w9"}, [7, 8, 9], [1, 1, 1]),
        ({"ids": [7, 8, 9]}, [7, 8, 9], [1, 1, 1]),
        ({"ids": [7, 8, 9], "loss_mask": [0, 1, 1]}, [7, 8, 9], [0, 1, 1]),
        ({"prompt": "w7 w8", "response": "w9 w10"}, [7, 8, 9, 10, 1], [0, 0, 1, 1, 1]),
        ({"prompt_ids": [7], "response_ids": [9, 1]}, [7, 9, 1], [0, 1, 1]),
        ({"prompt_ids": [7], "tokens": [9, 10], "text": "w9 w10", "id": 0}, [7, 9, 10], [0, 1, 1]),
    ],
)
def test_each_kind(row: dict[str, Any], ids: list[int], mask: list[int], reader: DocumentReader) -> None:
    assert facts(reader.documents_of(row)) == [(ids, mask)]


def test_a_dialogue_without_thinking_is_one_document(reader: DocumentReader) -> None:
    dialogue = [
        {"role": "system", "content": words(10)},
        {"role": "user", "content": words(11, 12)},
        {"role": "assistant", "content": words(13, 14)},
        {"role": "user", "content": words(15)},
        {"role": "assistant", "content": words(16)},
    ]
    ids = [0, 10, 2, 11, 12, 3, 5, 13, 14, 1, 2, 15, 3, 5, 16, 1]
    mask = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert facts(reader.documents_of({"messages": dialogue})) == [(ids, mask)]


def test_where_it_thinks_each_turn_has_the_context_that_the_model_had(reader: DocumentReader) -> None:
    """The second turn's prompt has no reasoning of the first, so no one sequence is both turns."""
    dialogue = [
        {"role": "user", "content": words(11)},
        {"role": "assistant", "reasoning_content": words(20, 21), "content": words(13)},
        {"role": "user", "content": words(15)},
        {"role": "assistant", "reasoning_content": words(22), "content": words(16)},
    ]
    first = [2, 11, 3, 4, 20, 21, 5, 13, 1]
    second = [2, 11, 3, 5, 13, 1, 2, 15, 3, 4, 22, 5, 16, 1]
    documents = facts(reader.documents_of({"messages": dialogue, "thinking": "low"}))
    assert [ids[-len(own) :] for (ids, _), own in zip(documents, (first, second), strict=True)] == [first, second]
    assert [[i for i, on in zip(*document, strict=True) if on] for document in documents] == [
        [20, 21, 5, 13, 1],
        [22, 5, 16, 1],
    ]
    with pytest.raises(RequestError, match=r"message 1 \(assistant\): has reasoning_content, which is left out"):
        reader.documents_of({"messages": dialogue})


WORDS = st.lists(st.integers(FIRST_WORD, 94), min_size=1, max_size=4)


@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_masks_against_a_scan_of_the_tokens(turns: list[tuple[list[int], list[int]]], reader: DocumentReader) -> None:
    """An oracle that knows no prefixes: from behind the assistant's marker and </think> to the end of the sentence."""
    dialogue = []
    for question, answer in turns:
        dialogue += [{"role": "user", "content": words(*question)}, {"role": "assistant", "content": words(*answer)}]
    rendered = oracle(
        dialogue,
        thinking=False,
        effort="",
        drop_thinking=True,
        generation=False,
        texts=None,  # type: ignore[arg-type]
    )
    ids = reader.text.encode(rendered)
    mask, on = [], False
    for number, token in enumerate(ids):
        mask.append(int(on))
        on = (on or ids[max(number - 1, 0) : number + 1] == [3, 5]) and token != 1
    assert facts(reader.documents_of({"messages": dialogue})) == [(ids, mask)]
    assert sum(mask) == sum(len(answer) + 1 for _, answer in turns)


def test_turns_part_where_a_prompt_does_not_go_on_from_the_turn_before() -> None:
    one, on, other = Turn([5], [6, 7]), Turn([5, 6, 7, 8], [9]), Turn([5, 6, 4, 8], [9])
    assert facts(join([one, on])) == [([5, 6, 7, 8, 9], [0, 1, 1, 0, 1])]
    assert facts(join([one, other])) == [([5, 6, 7], [0, 1, 1]), ([5, 6, 4, 8, 9], [0, 0, 0, 0, 1])]
    assert facts(join([on, one])) == [([5, 6, 7, 8, 9], [0, 0, 0, 0, 1]), ([5, 6, 7], [0, 1, 1])]


# Files ---------------------------------------------------------------------------------------------------------------


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "line 2: is no JSON"),
        ({}, "line 2: expected a row of one kind: text; ids; prompt and response; .*; found none of them."),
        ({"prompt": "w7"}, "line 2: expected a row of one kind: .*; found prompt."),
        ({"text": "w7", "ids": [7]}, "line 2: expected a row of one kind: .*; found ids and text."),
        ({"text": 7}, "line 2: text is 7; expected text."),
        ({"ids": [96]}, "line 2: ids: token id 96 is outside the vocabulary; expected 0 to 95."),
        ({"ids": "w7"}, "line 2: ids: expected a list of token ids"),
        ({"ids": [7, 8], "loss_mask": [1]}, "line 2: loss_mask has 1 values for 2 ids; expected one for each."),
        ({"ids": [7, 8], "loss_mask": [1, 2]}, "line 2: loss_mask: expected a list of 0 and 1."),
        ({"ids": [7], "loss_mask": "1"}, "line 2: loss_mask: expected a list of 0 and 1."),
        ({"tokens": [7]}, "line 2: has tokens and no prompt_ids; expected a line of `dspark generate`"),
        ({"tokens": [7], "prompt_ids": [7], "finish_reason": "not_finite"}, "line 2: finish_reason is 'not_finite'"),
        ({"messages": [{"role": "user", "content": "w7"}]}, "line 2: the dialogue has no assistant message"),
        ({"messages": [{"role": "assistant", "content": "w7"}]}, "line 2: there is no user message"),
        ({"messages": 7}, "line 2: the dialogue: holds no messages"),
    ],
)
def test_a_line_that_cannot_be_is_named(row: Any, complaint: str, reader: DocumentReader, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=complaint):
        reader.read(lines(tmp_path, {"text": "w7 w8 w9"}, row))


def test_long_documents_are_cut_and_those_with_little_to_learn_are_dropped(text: Text, tmp_path: Path) -> None:
    reader = DocumentReader(text, vocabulary=96, end_id=1, max_length=6, min_supervised=3)
    path = lines(
        tmp_path,
        {"ids": [7, 8, 9, 10, 11, 12, 13]},  # cut
        "",
        {"prompt_ids": [7, 8, 9], "response_ids": [10, 11, 1]},  # as long as allowed
        {"prompt_ids": [7, 8, 9, 10], "response_ids": [10, 11, 1]},  # two supervised tokens are left
        {"ids": [7, 8, 9, 10, 11], "loss_mask": [1, 0, 1, 0, 1]},  # three, and no two in a row to start from
        {"ids": [7, 8, 9, 10, 11], "loss_mask": [1, 1, 0, 0, 1]},
        {"ids": []},
    )
    seen: list[tuple[int, int]] = []
    documents = reader.read(path, lambda done, total: seen.append((done, total)))
    assert documents.lengths.tolist() == [6, 6, 5] == [len(documents[number]) for number in range(len(documents))]
    assert documents[0].ids.tolist() == [7, 8, 9, 10, 11, 12]
    assert (documents.rows, documents.truncated, documents.dropped) == (6, 2, 3)
    assert seen == [(done, 6) for done in range(1, 7)]
    with pytest.raises(RequestError, match="none of its 1 rows has 3 supervised tokens among the first 6, two of them"):
        reader.read(lines(tmp_path, {"ids": [7, 8]}))


def test_without_a_tokenizer_there_are_ids(tmp_path: Path) -> None:
    reader = DocumentReader(Text(Path("folder"), None, "0731"), vocabulary=96, end_id=1, min_supervised=2)
    assert len(reader.read(lines(tmp_path, {"ids": [7, 8]}))) == 1
    with pytest.raises(RequestError, match="line 1: folder: has no tokenizer"):
        reader.read(lines(tmp_path, {"text": "w7 w8"}))
