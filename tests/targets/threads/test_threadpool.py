"""The threads that walk a table together."""

import gc
import threading
from itertools import pairwise

import numpy as np
import pytest

from edgeq.targets.cpu.jit.args import RECORD_SLOTS
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.kernels.rows.elementwise import SelectArgs, select
from edgeq.targets.cpu.threads import threadpool as pool_module
from edgeq.targets.cpu.threads.threadpool import RUN, SLEEPERS, ThreadPool
from tests.waiting import wait_until


def chain(steps, width=64, parts=3):
    """A table whose operation i copies row i of a matrix to row i + 1; each needs the whole of the one before."""
    data = np.zeros((steps + 1, width), np.float32)
    data[0] = np.arange(width)
    indices, count = np.zeros(width // 16, np.int32), np.array([width // 16], np.int64)
    indices[:] = np.arange(width // 16)[::-1]
    table = np.zeros((steps, RECORD_SLOTS), np.int64)
    for i in range(steps):
        source, target = (data[j].ctypes.data for j in (i, i + 1))
        args = SelectArgs(
            rows=count.ctypes.data, x=source, x_stride=64, width=16, out=target, out_stride=64, indices=indices.ctypes.data
        )
        table[i] = args.record(address(select), parts)
    return data, table, (indices, count)


def test_threads_meet_behind_every_operation():
    for threads, parts in ((1, 1), (2, 1), (2, 4), (4, 3), (3, 16)):
        data, table, kept = chain(501, parts=parts)
        pool = ThreadPool(threads, 501, RECORD_SLOTS)
        for _ in range(20):
            data[1:] = -1
            pool.run(table, threads)
            # 501 reversals of the four blocks of sixteen
            assert np.array_equal(data[-1].reshape(4, 16), data[0].reshape(4, 16)[::-1])
        pool.close()
        assert kept


def test_runs_may_follow_each_other_with_other_numbers_of_threads():
    data, table, kept = chain(7)
    pool = ThreadPool(4, 501, RECORD_SLOTS)
    for i in range(500):
        data[1:] = -1
        pool.run(table, 1 + i * 7 % 4)
        assert np.array_equal(data[-1].reshape(4, 16), data[0].reshape(4, 16)[::-1])
    pool.close()
    assert kept


def test_an_interrupt_leaves_no_run_half_done(monkeypatch):
    """Python takes an interrupt when a call has returned: none of them may leave other threads at work."""
    calls = ("run_together", "walk_alone", "dismiss")

    def interrupting(real):
        def call(*arguments):
            real(*arguments)
            raise KeyboardInterrupt

        return call

    data, table, kept = chain(7)
    pool = ThreadPool(3, 7, RECORD_SLOTS)
    for threads in (1, 3):
        data[1:] = -1
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(pool_module, name, interrupting(getattr(pool_module, name)))
            with pytest.raises(KeyboardInterrupt):
                pool.run(table, threads)
        assert np.array_equal(data[-1].reshape(4, 16), data[0].reshape(4, 16)[::-1]) and kept
    pool.close()


def test_threads_begun_before_an_interrupt_end_with_the_pool(monkeypatch):
    begun, start = [], threading.Thread.start

    def interrupted(self):
        start(self)
        begun.append(self)
        if len(begun) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ThreadPool(4, 7, RECORD_SLOTS)
    gc.collect()
    for thread in begun:
        thread.join(60)
    assert len(begun) == 2 and not any(thread.is_alive() for thread in begun)


def test_a_run_right_behind_the_dismissal_does_not_keep_threads():
    data, table, kept = chain(1)
    for _ in range(100):
        before = set(threading.enumerate())
        pool = ThreadPool(2, 1, RECORD_SLOTS)
        (own,) = set(threading.enumerate()) - before
        pool_module.dismiss(pool._shared.ctypes.data)
        pool.run(table, 2)
        pool.close()
        assert not own.is_alive() and np.array_equal(data[1].reshape(4, 16), data[0].reshape(4, 16)[::-1]) and kept


def test_a_table_longer_than_the_pool_is_refused():
    table = chain(7)[1]
    pool = ThreadPool(2, 6, RECORD_SLOTS)
    pool.record(True)
    with pytest.raises(ValueError, match="7 operations; this pool has room for 6"):
        pool.run(table, 2, what="run")
    assert not pool.recorded()
    pool.close()


def test_idle_threads_sleep_and_wake():
    data, table, kept = chain(2)
    pool = ThreadPool(3, 501, RECORD_SLOTS)
    assert wait_until(lambda: pool._shared[SLEEPERS] == 2)
    pool.run(table, 3)
    assert np.array_equal(data[2], data[0]) and pool._shared[RUN] == 2 and kept
    pool.close()


def test_closing_a_pool_ends_its_threads():
    # Its own: a pool that an earlier test left behind may end meanwhile.
    before = set(threading.enumerate())
    pool = ThreadPool(4, 501, RECORD_SLOTS)
    own = set(threading.enumerate()) - before
    assert len(own) == 3
    pool.close()
    assert not any(thread.is_alive() for thread in own)


def test_a_kernel_is_compiled_once():
    assert address(select) == address(select)


def test_a_table_walked_in_pieces_gives_the_same():
    data, table, kept = chain(7)
    for threads in (1, 3):
        pool = ThreadPool(threads, 7, RECORD_SLOTS)
        for pieces in (1, 2, 7, 50):
            data[1:] = -1
            pool.run(table, threads, pieces)
            assert np.array_equal(data[-1].reshape(4, 16), data[0].reshape(4, 16)[::-1])
            found = pool.times(timed(pool, table, threads, pieces))
            times = found.threads
            assert times.shape == (threads, 7, 3) and kept
            began, seconds = times[0, :, 0], times[0, :, 1:]
            assert (seconds >= 0).all() and (np.diff(began) >= seconds[:-1].sum(1) - 1e-9).all()
            there = ~np.isnan(times[1:])
            assert (times[1:, :, 1:][there[:, :, 1:]] >= 0).all() and (
                times[1:, :, 0][there[:, :, 0]] > found.began - 1e-4
            ).all()
        pool.close()


def timed(pool, table, threads, pieces):
    """A run; its calls."""
    pool.record(True)
    pool.run(table, threads, pieces, what=table)
    pool.record(False)
    (run,) = pool.recorded()
    assert run.what is table and len(run.calls) == min(pieces, len(table))
    return run.calls


def test_runs_keep_their_times_whatever_room_they_had():
    data, table, kept = chain(7)
    for threads in (1, 2):
        number = np.zeros(1, np.int32)
        pool = ThreadPool(threads, 7, RECORD_SLOTS, number.ctypes.data)
        words = len(pool._notes._block)
        pool.record(True)
        for i in range(count := words // 20):  # several blocks full
            number[0] = i
            pool.run(table, threads, 1 + i % 3, what="a table", kept=i if i % 5 else None)
        pool.record(False)
        pool.run(table, threads, what="not recorded")
        runs = pool.recorded()
        assert [run.number for run in runs] == list(range(count)) and not pool.recorded()
        assert all(run.kept == (i if i % 5 else None) and len(run.calls) == 1 + i % 3 for i, run in enumerate(runs))
        times = [pool.times(run.calls) for run in runs[:: 1 if threads == 1 else 7]]
        began = np.array([run.threads[0, :, 0] for run in times]).ravel()
        assert (np.diff(began) > 0).all() and all(a.ended < b.began for a, b in pairwise(times)) and kept
        # The clock of Python was read right before the first operation and after the last.
        assert times[0].began < began[0] and began[-1] < times[-1].ended
        for run in times[1:]:
            assert run.threads[0, :, 1:].sum() <= run.inside <= run.ended - run.began
        pool.close()


def test_what_was_noted_stays_when_the_room_is_needed_again():
    _, table, kept = chain(7)
    pool = ThreadPool(1, 7, RECORD_SLOTS)
    calls = timed(pool, table, 1, 2)
    expected = pool.times(calls)
    for _ in range(3):
        timed(pool, table, 1, 1)
    found = pool.times(calls)
    assert np.allclose(found.threads, expected.threads) and found[1:] == pytest.approx(expected[1:]) and kept
    pool.close()


def test_a_run_that_was_interrupted_between_pieces_is_not_recorded(monkeypatch):
    _, table, kept = chain(7)
    pool, walk = ThreadPool(1, 7, RECORD_SLOTS), ThreadPool._walk
    pool.record(True)

    def interrupted(self, piece, threads):
        walk(self, piece, threads)
        if piece.start:
            raise KeyboardInterrupt

    pool.run(table, 1, 3, what="run", kept="before")
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPool, "_walk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.run(table, 1, 3, what="run", kept="interrupted")
    pool.run(table, 1, 1, what="run", kept="after")
    assert [(run.kept, len(run.calls)) for run in pool.recorded()] == [("before", 3), ("after", 1)] and kept
    pool.close()


def test_an_operation_that_is_cut_belongs_to_its_run():
    _, table, kept = chain(3, parts=4)
    pool = ThreadPool(1, 3, RECORD_SLOTS)
    pool.record(True)
    for cut in ([4, 1, 1], [1, 1, 4], [2, 3, 4]):
        pool.run(table, 1, 1, np.array(cut), what="cut", kept=cut)
    pool.run(table, 1)  # as of nothing that is recorded
    found = pool.recorded()
    assert [run.kept for run in found] == [[4, 1, 1], [1, 1, 4], [2, 3, 4]] and [len(run.calls) for run in found] == [5, 5, 9]
    many = [3000, 2500, 1]
    for i in range(3):  # more calls than the block has room for
        pool.run(table, 1, 1, np.array(many), what="cut", kept=i)
    more = pool.recorded()
    assert [(run.kept, len(run.calls)) for run in more] == [(i, sum(many)) for i in range(3)]
    for run in found + more:
        times = pool.times(run.calls).threads
        assert times.shape == (1, 3, 3) and (np.diff(times[0, :, 0]) > 0).all() and kept
    pool.close()
