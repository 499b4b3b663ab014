"""Which documents share a row."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

Row = tuple[int, ...]
"""Numbers of the documents of a row, in order."""


def one_a_row(lengths: np.ndarray) -> list[Row]:
    """Every document in a row of its own."""
    return [(number,) for number in range(len(lengths))]


def pack(lengths: np.ndarray, length: int) -> list[Row]:
    """Rows of at most `length` tokens that hold every document once and whole.

    The longest documents come first, and each goes into the fullest row that has room for it ("best fit decreasing",
    which needs at most 11/9 of the fewest rows possible, and a few more). Equal lengths give equal rows.

    Args:
        lengths: int [N], each at most `length`.
        length: tokens of a row.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens of room -> rows
    rooms: list[int] = []  # the keys that have rows, ascending
    for number in np.argsort(-lengths, kind="stable").tolist():
        needed = int(lengths[number])
        place = bisect_left(rooms, needed)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(number)
        if room - needed not in with_room:
            insort(rooms, room - needed)
        with_room.setdefault(room - needed, []).append(row)
    return [tuple(row) for row in rows]


def padding_share(lengths: np.ndarray, rows: Sequence[Row], length: int) -> float:
    """Part of the tokens in rows of `length` that belongs to no document."""
    return 1 - float(lengths.sum()) / (len(rows) * length)
