"""Counts of the processor as seconds of Python's clock, of all threads of a run."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.targets.cpu.threads.clock import CallTimes, Clock
from edgeq.targets.cpu.threads.pieces import TablePiece

RATE = 1e-3


def reading(
    before: float, after: float, *counts: list[int], start: int = 0, operations: int = 2, woke: int = 1000
) -> CallTimes:
    return CallTimes(TablePiece(start, np.zeros((operations, 1), np.int64), 0), before, after, woke, np.array(counts, np.int64))


def test_a_thread_alone_waits_for_nothing() -> None:
    clock = Clock()
    made = reading(5.0, 6.0, [1000, 1400, 2000])
    (times,), *around = clock.times(2, [made])
    assert around == pytest.approx([5.0, 6.0, 1.0])
    assert times == pytest.approx(np.array([[5.0, 0.4, 0.0], [5.4, 0.6, 0.0]]))


def test_threads_that_came_late_or_not_at_all_have_no_times() -> None:
    clock = Clock()
    caller = [1000, 1300, 1500, 1900, 2000]
    early = [990, 1500, 1501, 2100, 0]  # before the caller, which saw its work done before it noted so; and the end not yet
    late = [0, 0, 1600, 1900, 2000]
    stale = [0, 1200, 0, 0, 0]  # the end of an operation of the run before
    (first, second, third, none), *around = clock.times(2, [reading(4.92, 6.0, caller, early, late, stale, woke=920)])
    assert around == pytest.approx([4.92, 6.0, 1.0])  # inside: without the 0.08 s in which the others were woken
    assert first == pytest.approx(np.array([[5.0, 0.3, 0.2], [5.5, 0.4, 0.1]]))
    assert second == pytest.approx(np.array([[4.99, 0.51, 0.001], [5.501, 0.499, 0.0]]))
    assert np.isnan(third[0]).all() and third[1] == pytest.approx([5.6, 0.3, 0.1])
    assert np.isnan(none).all()


def test_who_waited_for_nobody_noted_nothing_and_went_on() -> None:
    """The first thread ends each operation last, after the second; the third left the run in the second one."""
    slowest, quick, left = [1000, 0, 1500, 1600, 2000], [1000, 1200, 1500, 0, 2001], [1100, 1300, 1500, 0, 0]
    first, second, third = Clock().times(2, [reading(5.0, 6.0, slowest, quick, left)]).threads
    assert first == pytest.approx(np.array([[5.0, 0.5, 0.0], [5.5, 0.1, 0.4]]))
    assert second == pytest.approx(np.array([[5.0, 0.2, 0.3], [5.5, 0.5, 0.0]]))
    assert third[0] == pytest.approx([5.1, 0.2, 0.2]) and np.isnan(third[1]).all()


def test_an_operation_of_several_pieces_has_the_time_of_all() -> None:
    clock = Clock()
    pieces = [reading(5.0, 6.0, [1000, 2000], operations=1), reading(7.0, 7.5, [3000, 3500], operations=1, woke=3000)]
    last = reading(8.0, 8.25, [4000, 4250], start=1, operations=1, woke=4000)
    (times,), began, ended, inside = clock.times(2, [*pieces, last])
    assert (began, ended, inside) == pytest.approx((5.0, 8.25, 1.75))
    assert times == pytest.approx(np.array([[5.0, 1.5, 0.0], [8.0, 0.25, 0.0]]))


@pytest.mark.parametrize("second", [(10_000_000, 10_001_000), (5, 1005)], ids=["counted on", "began at 0"])
def test_a_machine_that_slept_does_not_change_the_rate(second: tuple[int, int]) -> None:
    """The clock of Python stands while a machine sleeps; the processor's counts go on, or begin at 0."""
    clock = Clock()
    clock.times(1, [reading(5.0, 6.001, [1000, 2000], operations=1)])
    (times,), *_ = clock.times(1, [reading(7.0, 8.001, [*second], operations=1, woke=second[0])])
    assert times[0] == pytest.approx([7.0, 1.0, 0.0], abs=0.002)
