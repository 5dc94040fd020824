"""The clocks that machine code reads: the processor's counter between operations, the clock of Python around a call; and how
counts become seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from edgeq.targets.cpu.jit.deferred import cgutils, intrinsic, types
from edgeq.targets.cpu.jit.processor import current
from edgeq.targets.cpu.jit.simd import I32, I64, call, store
from edgeq.targets.cpu.threads.pieces import TablePiece
from edgeq.targets.times import RunTimes


@intrinsic
def note_time(typing: Any, address: Any) -> Any:
    """Store the processor's clock: counts of a constant rate, the same for all cores, that cost 10 ns or so to read.

    On Arm the virtual counter: a program may not read the cycle counter there.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if current().is_arm:
            # By name and not in assembly, for which llvmlite has a parser for its own processor only.
            kind = ir.FunctionType(I64, [ir.MetaDataType()])
            function = cgutils.get_or_insert_function(b.module, kind, "llvm.read_volatile_register.i64")
            now = b.call(function, [b.module.add_metadata(["cntvct_el0"])])
        else:
            now = call(b, "llvm.readcyclecounter", I64)
        store(b, now, args[0], 8)
        return context.get_dummy_value()

    return types.void(types.intp), codegen


# clockid_t of what perf_counter reads: CLOCK_MONOTONIC of Linux, CLOCK_UPTIME_RAW of macOS.
LINUX_CLOCK, MACOS_CLOCK = 1, 8


@intrinsic
def note_python_time(typing: Any, address: Any) -> Any:
    """Store the time of Python's clock, as two int64: seconds, and nanoseconds of one."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        clock = ir.Constant(I32, LINUX_CLOCK if current().is_linux else MACOS_CLOCK)
        call(b, "clock_gettime", I32, clock, b.inttoptr(args[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


class CallTimes(NamedTuple):
    """What was noted in a call of the target.

    before, after   the machine code of the call, in seconds of Python's clock
    started         the count when it began, before other threads were woken
    counts          int64 [threads, 2 * operations + 1]: of each operation when the thread came to it, and when no part of it
                    was left to take and others were not done with theirs, 0 if they were; then of the end.  0: it was not
                    there.  Of a thread alone [1, operations + 1]: when each began, and the end
    """

    piece: TablePiece
    before: float
    after: float
    started: int
    counts: NDArray[np.int64]


JUMPED = 0.5
"""A rate over all runs that is so much less than within one is of counts that went on while the clock of Python stood."""


class Clock:
    """Seconds per count, from the runs so far."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._rate = np.inf

    def _learn(self, reading: CallTimes) -> None:
        """Seconds from before the first count to after the last one are always too many, whatever came between: the least of
        them is the nearest.  Over all runs so far the calls count little, and in this run an interruption of the first.

        A machine that was asleep in between may have counted on, or begun at 0: then the runs before it are forgotten.
        """
        start, end = reading.started, int(reading.counts[0, -1])
        if end > start:
            self._rate = min(self._rate, (reading.after - reading.before) / (end - start))
        if self._first is not None and end > self._first[1]:
            overall = (reading.after - self._first[0]) / (end - self._first[1])
            if overall > JUMPED * self._rate:
                self._rate = min(self._rate, overall)
                return
        self._first = reading.before, start

    def times(self, operations: int, readings: Sequence[CallTimes]) -> RunTimes:
        """The times of a run of so many operations, from those of its calls.

        An operation of several pieces begins with the first of them and has the time of all.  Threads are woken before the
        operations run.
        """
        for reading in readings:
            self._learn(reading)
        found = np.full((len(readings[0].counts), operations, 3), np.nan)
        inside = 0.0
        for (start, table, *_), before, after, started, noted in readings:
            inside += after - before - (int(noted[0, 0]) - started) * self._rate
            counts = noted.copy() if len(noted) > 1 else np.repeat(noted, 2, 1)[:, 1:]
            end = counts[0, -1]
            began, left, after_it = counts[:, :-1:2], counts[:, 1::2], counts[:, 2::2]
            # Who waited for nobody went on at once.
            np.copyto(left, after_it, where=(began > 0) & (left == 0))
            # A thread may note its end a moment after the caller has returned.
            late = (counts == 0) & (np.arange(counts.shape[1]) == counts.shape[1] - 1)
            noted = np.where(late, end, np.minimum(counts, end))
            there = (began > 0) & (left >= began)
            started_at = after - (end - noted[:, :-1:2]) * self._rate
            spent = np.diff(noted, axis=1).reshape(len(counts), -1, 2) * self._rate
            new = np.where(there[..., None], np.concatenate([started_at[..., None], np.maximum(spent, 0)], 2), np.nan)
            here = found[:, start : start + len(table)]
            here[:] = np.where(np.isnan(here), new, here + np.nan_to_num(new) * (0, 1, 1))
        return RunTimes(found, readings[0].before, readings[-1].after, inside)
