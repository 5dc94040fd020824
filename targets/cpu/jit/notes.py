"""Where the machine code of runs notes its clocks, and how that is read: later, for many runs at once.

Where a run reads more than the caches hold, every object that Python touches after it comes from memory again, some 0.1 µs
each: what can wait is not done with the run.  What a call notes are int64 words: a line of ENTERED and LEFT, each two words of
Python's clock, and STARTED; then for each thread whole lines with its counts, as `Reading` has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cpu.jit.clock import Clock, Reading
from edgeq.targets.cpu.jit.pieces import Piece
from edgeq.targets.target import RunTimes

Words = NDArray[np.int64]

ENTERED, LEFT, STARTED, COUNTS = 0, 2, 4, 8
"""Words of a call: when its machine code began and ended; the count when it began; where the counts of the threads begin."""
LINE = 8
"""Words of a cache line: threads write to lines of their own."""
ROOM = 1 << 16
"""Words of the block, at least: a hundred calls of a large model."""


def call_words(threads: int, operations: int) -> int:
    """Words of a call, whole lines."""
    return COUNTS + threads * ((2 * operations + LINE) // LINE * LINE)


class Page:
    """What the block held at a time: the block itself, and later a copy; `address` is always that of the block."""

    def __init__(self, words: Words) -> None:
        self.words, self.address = words, words.ctypes.data


Noted = list[Any]
"""Calls, of each four entries: the page and the address where it was noted, what was run, and with how many threads.  Not a
tuple of each: what is kept of a run has to be made in new memory, and every line of that comes from far away."""


def _kept(page: Page, offset: int, count: int) -> Words:
    """A copy of words of a page from a byte on, while another thread's run may turn it."""
    while True:
        held = page.words
        words = held[offset // held.itemsize :][:count].copy()
        # The block is cleared after the page has its copy.
        if page.words is held:
            return words


def _reading(page: Page, address: int, piece: Piece, threads: int) -> Reading:
    operations = len(piece.table)
    words = _kept(page, address - page.address, call_words(threads, operations))
    counts = operations + 1 if threads == 1 else 2 * operations + 1
    spaced = (call_words(threads, operations) - COUNTS) // threads
    each = words[COUNTS : COUNTS + threads * spaced].reshape(threads, spaced)[:, :counts]
    before, after = (words.item(at) + words.item(at + 1) / 1e9 for at in (ENTERED, LEFT))
    return Reading(piece, before, after, words.item(STARTED), each)


class Notes:
    """The notes of all calls of a pool, in `block`, whose first word begins a cache line.

    free   the addresses of places that no call of this page has
    page   that the calls are on
    """

    def __init__(self, block: Words, place: int) -> None:
        """place   words of one"""
        self._block, self._place = block, place
        self.page = Page(block)
        self.free = self._places()
        self._clock = Clock()

    def _places(self) -> list[int]:
        """The first of them last."""
        address = self.page.address
        return [address + 8 * first for first in range(0, len(self._block), self._place)][::-1]

    def turn(self) -> int:
        """Begin another page; returns a place.

        It must be 0: of an operation that a thread never comes to nothing is written.
        """
        self.page.words = self._block.copy()
        self._block[:] = 0
        self.page, self.free = Page(self._block), self._places()
        return self.free.pop()

    def times(self, calls: Noted) -> RunTimes:
        """`Clock.times` of a run that these are the calls of."""
        readings = [_reading(*calls[i : i + 4]) for i in range(0, len(calls), 4)]
        last = max((each.piece for each in readings), key=lambda piece: piece.start)
        return self._clock.times(last.start + len(last.table), readings)
