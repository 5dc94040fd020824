"""How runs are cut into calls."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.targets.cpu.threads.pieces import FINER, PARTS_OF_A_PIECE, split


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("count", [2, 10, 86])
def test_each_piece_of_an_operation_has_parts_for_all_threads(threads: int, count: int) -> None:
    """Where a piece was one part, the second thread of two waited through attention over 4,096 patches."""
    table = np.zeros((3, 5), np.int64)
    table[:, -1] = 4 * threads
    before, *pieces, after = split(table, 1, np.array([1, count, 1]), threads)
    assert (before.start, after.start) == (0, 2) and {piece.start for piece in pieces} == {1}
    bounds = [(piece.first, piece.last) for piece in pieces]
    assert [last for _, last in bounds[:-1]] == [first for first, _ in bounds[1:]] and bounds[0][0] == 0
    assert all(last - first >= PARTS_OF_A_PIECE * threads for first, last in bounds) and 1 < len(bounds) <= count
    assert {int(piece.table[0, -1]) for piece in pieces} == {bounds[-1][1]} and bounds[-1][1] <= FINER * 4 * threads


def test_one_thread_has_as_many_pieces_as_are_asked_for() -> None:
    table = np.full((2, 5), 4, np.int64)
    pieces = split(table, 1, np.array([86, 1]), 1)
    assert [(piece.first, piece.last) for piece in pieces[:-1]] == [(i, i + 1) for i in range(86)]
