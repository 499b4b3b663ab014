"""Documents to batches: nothing lost, nothing split, and the same step is the same example for ever."""

from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data.assemble import assemble, refuse_packed
from dspark_jax.data.batches import Batches
from dspark_jax.data.document import Document
from dspark_jax.data.documents import Documents
from dspark_jax.data.example import Example, Features
from dspark_jax.data.packing import one_a_row, pack, padding_share
from dspark_jax.errors import RequestError

LENGTH = 16


def corpus(lengths: list[int], features: bool = False) -> Documents:
    """Document i holds the ids 100 i, 100 i + 1, ...; every third token is supervised, and features name the token."""

    def document(number: int, length: int) -> Document:
        ids = 100 * number + np.arange(length, dtype=np.int32)
        own = Features(ids[:, None] + np.float32([0.25, 0.5]), ids[:, None] + np.float32([0.75]))  # type: ignore[arg-type]
        return Document(ids, ids % 3 == 0, own if features else None)

    return Documents([document(number, length) for number, length in enumerate(lengths)], len(lengths), 0, 0)


def documents_in(example: Example) -> list[list[int]]:
    """Ids of the documents, found by their numbers alone."""
    found = []
    for ids, numbers in zip(np.asarray(example.ids), np.asarray(example.document), strict=True):
        found += [ids[numbers == number].tolist() for number in range(numbers.max() + 1)]
    return found


lengths = st.lists(st.integers(1, LENGTH), min_size=1, max_size=60)


# Packing -------------------------------------------------------------------------------------------------------------


@given(lengths)
@settings(deadline=None)
def test_rows_hold_every_document_once_and_whole(lengths: list[int]) -> None:
    rows = pack(np.array(lengths), LENGTH)
    assert sorted(chain(*rows)) == list(range(len(lengths)))
    assert max(sum(lengths[number] for number in row) for row in rows) <= LENGTH


@given(lengths)
@settings(deadline=None)
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    fill = sorted(sum(lengths[number] for number in row) for row in pack(np.array(lengths), LENGTH))
    assert len(fill) < 2 or fill[0] + fill[1] > LENGTH


def test_packing_against_a_slow_best_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, LENGTH + 1, 300)
    rows: list[list[int]] = []
    for number in sorted(range(300), key=lambda number: -lengths[number]):
        rooms = [LENGTH - sum(lengths[other] for other in row) for row in rows]
        fitting = [room for room in rooms if room >= lengths[number]]
        if fitting:
            last = max(place for place, room in enumerate(rooms) if room == min(fitting))
            rows[last].append(number)
        else:
            rows.append([number])
    packed = pack(lengths, LENGTH)
    assert sorted(map(len, packed)) == sorted(map(len, rows))
    assert padding_share(lengths, packed, LENGTH) == pytest.approx(1 - lengths.sum() / (LENGTH * len(rows)))
    assert padding_share(lengths, packed, LENGTH) < 0.05 < padding_share(lengths, one_a_row(lengths), LENGTH)


# Examples ------------------------------------------------------------------------------------------------------------


@given(lengths)
@settings(max_examples=40, deadline=None)
def test_an_epoch_has_every_document_in_order_and_its_own_features(lengths: list[int]) -> None:
    documents = corpus(lengths, features=True)
    batches = Batches(documents, length=LENGTH, batch_size=1, packed=True)
    examples = [batches[step] for step in range(batches.steps_per_epoch)]
    found = sorted(chain(*map(documents_in, examples)))
    assert found == sorted(document.ids.tolist() for document in documents.documents)
    for example in examples:
        assert example.features is not None
        ids, real = np.asarray(example.ids), np.asarray(example.document) >= 0
        expected = ids[..., None] + np.float32([0.25, 0.5, 0.75])
        features = np.concatenate([example.features.taps, example.features.hidden], axis=-1)
        np.testing.assert_array_equal(features, np.where(real[..., None], expected, 0))
        np.testing.assert_array_equal(example.supervised, (ids % 3 == 0) & real)
        assert (np.diff(real.astype(int)) <= 0).all(), "padding is behind the documents"
        positions = np.where(real, np.asarray(example.positions), 0)
        np.testing.assert_array_equal(positions, np.where(real, ids % 100, 0))


def test_dtypes_and_an_example_by_hand() -> None:
    example = assemble(corpus([3, 2, 4]), [(2,), (0, 1), ()], length=6)
    assert np.asarray(example.ids).tolist() == [[200, 201, 202, 203, 0, 0], [0, 1, 2, 100, 101, 0], [0] * 6]
    assert np.asarray(example.document).tolist() == [[0] * 4 + [-1] * 2, [0, 0, 0, 1, 1, -1], [-1] * 6]
    assert np.asarray(example.supervised).astype(int).tolist() == [[0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert example.features is None
    dtypes = [leaf.dtype for leaf in (example.ids, example.supervised, example.document)]
    assert dtypes == [np.int32, np.bool_, np.int32]


def test_packed_rows_are_refused_by_who_computes_features() -> None:
    documents = corpus([3, 2, 4])
    refuse_packed(assemble(documents, [(2,), (0,)], LENGTH))
    with pytest.raises(RequestError, match="row 1 holds several documents, which a target cannot keep apart"):
        refuse_packed(assemble(documents, [(2,), (0, 1)], LENGTH))


# Epochs and steps ----------------------------------------------------------------------------------------------------


def plans(batches: Batches, first: int, count: int) -> list[list[tuple[int, ...]]]:
    return [batches.plan(step) for step in range(first, first + count)]


def test_epochs_are_shuffled_by_seed_and_number() -> None:
    documents = corpus([5] * 23)
    batches = Batches(documents, length=LENGTH, batch_size=4, seed=7)
    assert batches.steps_per_epoch == 5
    epochs = [list(chain(*plans(batches, 5 * epoch, 5))) for epoch in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 20, "the rest of an epoch is left out, and nothing comes twice"
    assert len({tuple(epoch) for epoch in epochs}) == 3
    left_out = [set(range(23)) - {number for (number,) in epoch} for epoch in epochs]
    assert len(set(map(frozenset, left_out))) > 1, "not the same ones every time"
    again = Batches(documents, length=LENGTH, batch_size=4, seed=7)
    assert plans(again, 0, 15) == plans(batches, 0, 15)
    other = Batches(documents, length=LENGTH, batch_size=4, seed=8)
    assert plans(other, 0, 5) != plans(batches, 0, 5)


@pytest.mark.parametrize("packed", [False, True])
def test_going_on_is_asking_for_the_next_step(packed: bool) -> None:
    lengths = np.random.default_rng(1).integers(1, LENGTH + 1, 30).tolist()
    batches = Batches(corpus(lengths), length=LENGTH, batch_size=3, packed=packed, seed=1)
    count = 2 * batches.steps_per_epoch + 1
    whole = list(islice(batches.starting_at(0), count))
    for first in (0, 1, batches.steps_per_epoch, count - 2):
        again = list(islice(batches.starting_at(first), count - first))
        for example, expected, asked in zip(
            again, whole[first:], map(batches.__getitem__, range(first, count)), strict=True
        ):
            for leaf in ("ids", "supervised", "document"):
                np.testing.assert_array_equal(getattr(example, leaf), getattr(expected, leaf))
                np.testing.assert_array_equal(getattr(example, leaf), getattr(asked, leaf))


def test_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RequestError, match="document 1 has 17 tokens and a row 16; make the rows longer"):
        Batches(corpus([3, 17]), length=LENGTH, batch_size=1)
    with pytest.raises(RequestError, match="3 documents fill 1 rows, and a batch has 2; give more data"):
        Batches(corpus([3, 4, 5]), length=LENGTH, batch_size=2, packed=True)
    with pytest.raises(RequestError, match="seed is -1; expected an integer from 0 to 4294967295"):
        Batches(corpus([3]), length=LENGTH, batch_size=1, seed=-1)
    with pytest.raises(RequestError, match="batch_size is 0"):
        Batches(corpus([3]), length=LENGTH, batch_size=0)


def test_padding_share() -> None:
    lengths = [16, 8, 4, 4, 12, 4]
    assert Batches(corpus(lengths), length=LENGTH, batch_size=1).padding_share == pytest.approx(0.5)
    assert Batches(corpus(lengths), length=LENGTH, batch_size=1, packed=True).padding_share == 0
