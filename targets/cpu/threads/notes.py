"""Where the machine code of runs notes its clocks, and how that is read: later, for many runs at once.

Where a run reads more than the caches hold, every object that Python touches after it comes from memory again, some 0.1 µs
each: of a run that is recorded Python keeps none.  The machine code itself takes the next place of a block, and notes there
what it runs and its clocks; Python only counts the places that are left.

What a call notes are int64 words: a line of ENTERED and LEFT, each two words of Python's clock, of STARTED and of what was
run; then for each thread whole lines with its counts, as `CallTimes` has them.  With what was run goes a number that its caller
had written where it told the pool to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_i32, get_i64, put_i64
from edgeq.targets.cpu.threads.clock import CallTimes, Clock, note_python_time, note_time
from edgeq.targets.cpu.threads.pieces import TablePiece
from edgeq.targets.times import RunTimes

Words = NDArray[np.int64]

ENTERED, LEFT, STARTED, TABLE, SIZE, PARTS, COUNTS = 0, 2, 4, 5, 6, 7, 8
"""Words of a call: when its machine code began and ended; the count when it began; the address of its operations; how many
there are, the threads and the caller's number; of which parts of one, as in `TablePiece`; where the threads' counts begin."""
OPERATION_BITS, HALF = 20, 32
"""Where the threads begin in SIZE, above the number of operations; where the upper half of a word does."""
LINE = 8
"""Words of a cache line: threads write to lines of their own."""
ROOM = 1 << 16
"""Words of the block, at least: a hundred calls of a large model."""


@inline
def count_words(operations, threads):
    """Words for the counts of one of so many threads: whole lines.  Who is alone waits for nobody."""
    counts = operations if threads == 1 else 2 * operations
    return (counts + LINE) // LINE * LINE


@inline
def call_words(operations, threads):
    """Words of a call."""
    return COUNTS + threads * count_words(operations, threads)


@inline
def begin_note(cursor, table, operations, threads, first, last):
    """Take the place that is next, whose address is at `cursor`, and begin to note there a call; 0: none is to be noted.

    After it lies the address of the caller's number, or 0.
    """
    place: int = get_i64(cursor)
    if place != 0:
        number, told = 0, get_i64(cursor + 8)
        if told != 0:
            number = get_i32(told)
        put_i64(cursor, place + 8 * call_words(operations, threads))
        put_i64(place + 8 * TABLE, table)
        put_i64(place + 8 * SIZE, number << HALF | threads << OPERATION_BITS | operations)
        put_i64(place + 8 * PARTS, last << HALF | first)
        note_python_time(place + 8 * ENTERED)
        note_time(place + 8 * STARTED)
    return place


@inline
def end_note(place):
    """The machine code of the call is done."""
    if place != 0:
        note_python_time(place + 8 * LEFT)


class Expected(NamedTuple):
    """What a call of a piece belongs to: a table of so many operations, and what its caller says that it is."""

    piece: TablePiece
    operations: int
    what: Any


class NotedCall(NamedTuple):
    """A call that was noted, in words that nobody overwrites."""

    words: Words
    piece: TablePiece
    threads: int
    first: int
    last: int

    def reading(self) -> CallTimes:
        operations, threads = len(self.piece.table), self.threads
        spaced = count_words(operations, threads)
        counts = operations + 1 if threads == 1 else 2 * operations + 1
        each = self.words[COUNTS:].reshape(threads, spaced)[:, :counts]
        before, after = (self.words.item(at) + self.words.item(at + 1) / 1e9 for at in (ENTERED, LEFT))
        return CallTimes(self.piece, before, after, self.words.item(STARTED), each)


class NotedRun(NamedTuple):
    """A run that was recorded: what it was, its caller's number, what else it was to be kept with, and its calls."""

    what: Any
    number: int
    kept: Any
    calls: list[NotedCall]


class _Page(NamedTuple):
    """Words of the block, what their calls are of, and what the runs of the calls at some of them are kept with."""

    words: Words
    expected: dict[tuple[int, int], Expected]
    kept: dict[int, Any]


class Notes:
    """The notes of the calls of a pool, in `block`, whose first word begins a cache line.

    on   whether calls are noted
    """

    def __init__(self, cursor: Words, block: Words, place: int) -> None:
        """cursor   int64 [2]: the address of the next place, or 0, and that of the caller's number
        place    words of the longest call
        """
        self._cursor, self._block, self._place = cursor, block, place
        self._next = self._first = block.ctypes.data
        self._left = len(block) // place
        self._taken = list[_Page]()
        self._expected, self._kept = dict[tuple[int, int], Expected](), dict[int, Any]()
        self._last: TablePiece | None = None
        self.on = False
        self._clock = Clock()

    def switch(self, on: bool) -> None:
        """Whether the next calls are noted."""
        if on != self.on:
            if not on:
                self._next = int(self._cursor[0])
            self._cursor[0] = self._next if on else 0
            self.on = on

    def expect(self, piece: TablePiece, operations: int, what: Any, kept: Any) -> None:
        """Before a call that is noted: what all runs of the table are, and what this one is kept with, unless it is None."""
        if not self._left:
            self._begin_again()
        self._left -= 1
        if piece is not self._last:
            self._last = piece
            self._expected[piece.address, len(piece.table)] = Expected(piece, operations, what)
        if kept is not None:
            self._kept[self._used] = kept

    @property
    def _used(self) -> int:
        """Words of the page: of the block since `_first`, the address where the calls begin of which there is no copy."""
        return ((int(self._cursor[0]) if self.on else self._next) - self._first) // self._block.itemsize

    def _turn(self) -> None:
        """Copy what is noted, and begin another page after it: a thread that comes late still writes to this one."""
        used, at = self._used, (self._first - self._block.ctypes.data) // self._block.itemsize
        self._taken.append(_Page(self._block[at : at + used].copy(), self._expected, self._kept))
        self._expected, self._kept, self._last = {}, {}, None
        self._first += used * self._block.itemsize

    def _begin_again(self) -> None:
        """The block from its beginning.  It must be 0: of an operation that a thread never comes to nothing is written."""
        self._turn()
        self._block[:] = 0
        self._cursor[0] = self._first = self._block.ctypes.data
        self._left = len(self._block) // self._place

    def taken(self) -> list[NotedRun]:
        """The runs that were noted since the last time, in order.

        Left out are those that were interrupted between two calls, and those that are nothing.
        """
        self._turn()
        pages, self._taken = self._taken, []
        found, run = list[NotedRun](), NotedRun(None, 0, None, [])
        for page in pages:
            at = 0
            while at < len(page.words):
                call, number, of = _call(page, at)
                start, table = call.piece.start, call.piece.table
                if start == 0 and call.first == 0:
                    run = NotedRun(of.what, number, page.kept.get(at), [])
                run.calls.append(call)
                if start + len(table) == of.operations and call.last in (0, int(table[-1, -1])) and of.what is not None:
                    found.append(run)
                at += len(call.words)
        return found

    def times(self, calls: Sequence[NotedCall]) -> RunTimes:
        """`Clock.times` of a run that these are the calls of."""
        last = calls[-1].piece
        return self._clock.times(last.start + len(last.table), [call.reading() for call in calls])


def _call(page: _Page, at: int) -> tuple[NotedCall, int, Expected]:
    """The call at a word of a page, its caller's number, and what it is of."""
    address, size, parts = (page.words.item(at + field) for field in (TABLE, SIZE, PARTS))
    operations, threads = size & (1 << OPERATION_BITS) - 1, size >> OPERATION_BITS & (1 << HALF - OPERATION_BITS) - 1
    of = page.expected[address, operations]
    words = page.words[at : at + call_words(operations, threads)]
    return NotedCall(words, of.piece, threads, parts & (1 << HALF) - 1, parts >> HALF), size >> HALF, of
