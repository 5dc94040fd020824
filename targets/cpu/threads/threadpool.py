"""A few threads that walk a table of operations together.

A run is one wake-up.  An operation is cut into parts; every thread, the caller's included, takes the next part that is left
until there are none, and goes on to the next operation when all parts of this one are done (well under a microsecond, where a
parallel region per operation costs 1.5 to 50).  No thread waits for one that has not come: one that the system has put aside,
or a slow core, holds up the part that it is on and nothing else.  Results do not depend on who does which part.

Between runs a thread spins for a moment, because the next token is near, then sleeps in the kernel: no processor time is used
while nothing decodes.  The threads are Python's, running machine code without the GIL.  So nothing depends on an OpenMP library
or on Numba's threading layer, and other users of either are left alone.  On a processor with cores of several kinds they keep
to the fast ones.

Asked to, every thread notes the time before and after every operation: all that a profiler needs.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from edgeq.errors import ResourceError
from edgeq.system import machine
from edgeq.targets.cpu.jit.compile import Entry
from edgeq.targets.cpu.jit.deferred import cgutils, inline, intrinsic, types
from edgeq.targets.cpu.jit.processor import current
from edgeq.targets.cpu.jit.simd import I32, I64, call, load
from edgeq.targets.cpu.threads.clock import note_time
from edgeq.targets.cpu.threads.notes import COUNTS, ROOM, NotedRun, Notes, begin_note, call_words, count_words, end_note
from edgeq.targets.cpu.threads.pieces import TablePiece, split

Table = NDArray[np.int64]

# The number of the futex system call (linux/asm/unistd.h); elsewhere an idle thread sleeps and looks again.
FUTEX = {"x86_64": 202, "aarch64": 98}
WAIT_PRIVATE, WAKE_PRIVATE = 128, 129
NAP_MICROSECONDS = 100

# int64 words of the shared block: RUN and SLEEPERS on cache lines of their own, then what describes a run.
RUN, SLEEPERS, TABLE, LENGTH, ACTIVE, END, LAST, PLACE, NEXT, ROW_SLOT = 0, 8, 16, 17, 18, 19, 20, 21, 22, 23
# From here a line for each operation: the run's number with the next part to be taken, and how many parts are done.  Then
# what notes.py describes.
STEPS, LINE_BYTES = 24, 64
TAG_BITS = 32
SPINS_BEFORE_YIELD = 2_000
SPINS_BEFORE_SLEEP = 20_000
"""Times `pause`, 10 to 50 ns each: longer than it takes to sample a token."""


def _relax(b: Any) -> None:
    """The processor's hint for a spinning thread."""
    if current().is_arm:
        call(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))
    elif current().is_x86:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())


@intrinsic
def read(typing: Any, address: Any) -> Any:
    """Atomic load of an int64 that orders what follows after it, and itself after every `add` before it.

    An Arm processor may run a load that only acquires before what `add` stores is seen, and miss a thread that goes to sleep.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.intp), codegen


@intrinsic
def publish(typing: Any, address: Any, value: Any) -> Any:
    """Atomic store of an int64 after everything before it."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:
    """Atomic fetch-and-add; returns the value before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def exchange(typing: Any, address: Any, expected: Any, value: Any) -> Any:
    """Atomic compare-and-swap; whether `expected` was there."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        place = b.inttoptr(args[0], I64.as_pointer())
        return b.extract_value(b.cmpxchg(place, args[1], args[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.intp, types.int64, types.int64), codegen


@intrinsic
def relax(typing: Any, spins: Any) -> Any:
    """Wait a little: `pause` at first, later let others run, who may be what is waited for."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        with b.if_else(b.icmp_signed(">", args[0], ir.Constant(I64, SPINS_BEFORE_YIELD))) as (long, short):
            with long:
                b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])
            with short:
                _relax(b)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def futex(typing: Any, address: Any, operation: Any, value: Any) -> Any:
    """Sleep while the low 32 bits at `address` are `value` (WAIT), or wake up to `value` sleepers (WAKE)."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        address, operation, value = args
        number = FUTEX.get(current().arch, 0) if current().is_linux else 0
        if number:
            kind = ir.FunctionType(I64, [I64], var_arg=True)
            function = cgutils.get_or_insert_function(b.module, kind, "syscall")
            zero = ir.Constant(I64, 0)
            b.call(function, [ir.Constant(I64, number), address, operation, value, zero, zero, zero])
        else:
            with b.if_then(b.icmp_signed("==", operation, ir.Constant(I64, WAIT_PRIVATE))):
                call(b, "usleep", I32, ir.Constant(I32, NAP_MICROSECONDS))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64, types.int64), codegen


@intrinsic
def invoke(typing: Any, row: Any, part: Any, parts: Any, thread: Any) -> Any:
    """Call the kernel whose address is in the first slot of the op record."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
        b.call(b.inttoptr(load(b, args[0], I64, 8), kind.as_pointer()), args)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


def _walk(shared, tag, table, length, row_bytes, thread, counts, last):
    """Take part in run `tag`.  The last slot of an op record is its number of parts; `last`, not 0: the run ends there.

    A thread that comes too late finds another run's number on the operation, and leaves.  `counts`: 0, or where the thread's
    clock goes: of each operation when it comes to it and when it begins to wait for others; then of the end.
    """
    for i in range(length):
        if counts:
            note_time(counts + 16 * i)
        row, step = table + i * row_bytes, shared + 8 * STEPS + LINE_BYTES * i
        parts: int = read(row + row_bytes - 8)
        end = last if last > 0 else parts
        while True:
            ticket = read(step)
            if ticket >> TAG_BITS != tag:
                return
            part = ticket & ((1 << TAG_BITS) - 1)
            if part >= end:
                break
            if exchange(step, ticket, ticket + 1):
                invoke(row, part, parts, thread)
                add(step + 8, 1)
        spins = 0
        while read(step + 8) < end:
            if counts and spins == 0:
                # Here, and not before the loop: who is waited for, the slowest, does not read the clock.
                note_time(counts + 16 * i + 8)
            if read(step) >> TAG_BITS != tag:
                return
            spins += 1
            relax(spins)
    if counts:
        note_time(counts + 16 * length)


walk = inline(_walk)


def _walk_alone(shared, table, length, row_bytes, first, last):
    """A whole run of one thread, which waits for nothing."""
    place = begin_note(shared + 8 * NEXT, table, length, 1, first, last)
    counts = place + 8 * COUNTS
    for i in range(length):
        row = table + i * row_bytes
        if place:
            note_time(counts + 8 * i)
        if last > 0:
            for part in range(first, last):
                invoke(row, part, read(row + row_bytes - 8), 0)
        else:
            invoke(row, 0, 1, 0)
    if place:
        note_time(counts + 8 * length)
    end_note(place)


walk_alone = Entry(_walk_alone, 6)


def _work(shared, row_bytes, thread):
    """A thread's life until END: wait for a run, walk if it takes part, wait again.

    RUN is odd while a run is being described.  A thread may still be reading about a run when the next one comes; it believes
    what it read only if RUN is the same after it as before.
    """
    seen, spins = 0, 0
    while read(shared + 8 * END) == 0:
        current: int = read(shared + 8 * RUN)
        if current == seen or current & 1:
            spins += 1
            if spins < SPINS_BEFORE_SLEEP:
                relax(0)
            else:
                add(shared + 8 * SLEEPERS, 1)
                futex(shared + 8 * RUN, WAIT_PRIVATE, current & 0xFFFFFFFF)
                add(shared + 8 * SLEEPERS, -1)
            continue
        length, threads, table = read(shared + 8 * LENGTH), read(shared + 8 * ACTIVE), read(shared + 8 * TABLE)
        last, place = read(shared + 8 * LAST), read(shared + 8 * PLACE)
        if read(shared + 8 * RUN) != current:
            continue
        seen, spins = current, 0
        if thread < threads:
            counts = place + 8 * (COUNTS + thread * count_words(length, threads)) if place else 0
            walk(shared, current & 0x7FFFFFFF, table, length, row_bytes, thread, counts, last)


work = Entry(_work, 3)


@inline
def announce(shared, table, length, threads, place, first, last):
    """Tell the other threads that there is a run, for the first `threads` of them, of the parts [first, last) if `last` is not
    0; returns its number.  `place`: 0, or where the call is noted."""
    tag = (add(shared + 8 * RUN, 1) + 2) & 0x7FFFFFFF
    for i in range(length):
        step = shared + 8 * STEPS + LINE_BYTES * i
        # First the ticket, so that a late thread of the last run cannot take what it finds done for its own.
        publish(step, tag << TAG_BITS | first)
        publish(step + 8, first)
    publish(shared + 8 * ACTIVE, threads)
    publish(shared + 8 * TABLE, table)
    publish(shared + 8 * LENGTH, length)
    publish(shared + 8 * LAST, last)
    publish(shared + 8 * PLACE, place)
    add(shared + 8 * RUN, 1)
    if read(shared + 8 * SLEEPERS) > 0:
        futex(shared + 8 * RUN, WAKE_PRIVATE, 1 << 20)
    return tag


def _run_together(shared, table, length, row_bytes, threads, first, last):
    """A whole run in one call: an interrupt taken in the middle would leave the others at work on what Python then frees."""
    place = begin_note(shared + 8 * NEXT, table, length, threads, first, last)
    counts = place + 8 * COUNTS if place else 0
    walk(shared, announce(shared, table, length, threads, place, first, last), table, length, row_bytes, 0, counts, last)
    end_note(place)


run_together = Entry(_run_together, 7)


def _dismiss(shared):
    """End the threads.  Another thread of Python's may still make runs: a word of its own, which no run can overwrite."""
    publish(shared + 8 * END, 1)
    # Still even, and another number: a thread that is about to sleep does not.
    add(shared + 8 * RUN, 2)
    if read(shared + 8 * SLEEPERS) > 0:
        futex(shared + 8 * RUN, WAKE_PRIVATE, 1 << 20)


dismiss = Entry(_dismiss, 1)


def _live(shared: Table, row_bytes: int, thread: int) -> None:
    """`shared` is the array itself, not its address: it must not end before its last thread does."""
    cores = machine.big_cores()
    if cores:
        # 0 is the calling thread.  Without leave to choose, the system's choice of cores stays.
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
    work(shared.ctypes.data, row_bytes, thread)


def _stop(shared: Table, workers: list[threading.Thread], threads: int) -> None:
    # Not by `workers`: an interrupt may come between the start of one and its entry there.
    if threads > 1:
        dismiss(shared.ctypes.data)
    for worker in workers:
        worker.join()


def entries(threads: int) -> list[Entry]:
    """What a pool of so many threads calls."""
    return [walk_alone, run_together, work, dismiss] if threads > 1 else [walk_alone]


class ThreadPool:
    """`threads` threads, the caller being one of them, for tables of up to `operations` rows.  One caller at a time.

    row_slot_address   of an int32 that every run is recorded with, or 0
    """

    def __init__(self, threads: int, operations: int, row_words: int, row_slot_address: int = 0) -> None:
        self.threads, self.operations = threads, operations
        self._row_bytes = 8 * row_words
        # The memory of a whole number of cache lines more: the block starts on one.
        self._tables: tuple[Table | None, Table | None] = (None, None)
        self._pieces: tuple[Table | None, int, list[TablePiece]] = (None, 0, [])
        lines, line = LINE_BYTES // 8 * (operations + 1), LINE_BYTES // 8
        place = max(call_words(operations, 1), call_words(operations, threads))
        noted = max(1, ROOM // place) * place
        self._memory = np.zeros(STEPS + lines + noted + line, np.int64)
        self._shared = self._memory[-self._memory.ctypes.data % LINE_BYTES // 8 :]
        # A thread that comes late still writes there: part of the block, which lives as long as the threads.
        self._notes = Notes(self._shared[NEXT : ROW_SLOT + 1], self._shared[STEPS + lines :][:noted], place)
        self.record, self.times = self._notes.switch, self._notes.times
        self._address = self._shared.ctypes.data
        self._shared[ROW_SLOT] = row_slot_address
        workers: list[threading.Thread] = []
        # Before the first thread: whatever interrupts this, those that have begun end with the pool.
        self.close = weakref.finalize(self, _stop, self._shared, workers, threads)
        try:
            for i in range(1, threads):
                worker = threading.Thread(target=_live, args=(self._shared, self._row_bytes, i), name=f"edgeq-{i}", daemon=True)
                worker.start()
                workers.append(worker)
        except RuntimeError:
            self.close()
            given = f"the system gives only {len(workers) + 1} of {threads} threads"
            raise ResourceError(f"{given}; pass fewer `threads`") from None

    def run(
        self,
        table: Table,
        threads: int,
        pieces: int = 1,
        cuts: NDArray[np.int64] | None = None,
        what: Any = None,
        kept: Any = None,
    ) -> None:
        """Walk the rows of `table` with the first `threads` threads; returns when every operation is done.

        With several pieces Python can take an interrupt between two of them.  `cuts`, for each row: an operation of several is
        cut as well, into so many.  `what`: what all runs of this table are, for `recorded`; None: they are not recorded.
        `kept`: what this run is recorded with.
        """
        notes = self._notes
        for piece in self._split(table, threads, pieces, cuts):
            if notes.on:
                notes.expect(piece, len(table), what, kept)
            self._walk(piece, threads)

    def recorded(self) -> list[NotedRun]:
        """The runs that ended since the last time while `record` was on; of their calls `times` works out how long."""
        return self._notes.taken()

    def _split(self, table: Table, threads: int, pieces: int, cuts: NDArray[np.int64] | None) -> list[TablePiece]:
        """The pieces of a table; those of the last run again where it was the same.  ValueError: it has no room here."""
        if len(table) > self.operations:
            raise ValueError(f"{len(table)} operations; this pool has room for {self.operations}")
        if cuts is not None:
            return split(table, pieces, cuts, threads)
        if self._pieces[0] is not table or self._pieces[1] != pieces:
            self._pieces = table, pieces, split(table, pieces, None)
        return self._pieces[2]

    def _walk(self, piece: TablePiece, threads: int) -> None:
        _, table, address, first, last = piece
        # A thread that comes late still reads the table.
        self._tables = (self._tables[1], table)
        if threads > 1:
            run_together(self._address, address, len(table), self._row_bytes, threads, first, last)
        else:
            walk_alone(self._address, address, len(table), self._row_bytes, first, last)
