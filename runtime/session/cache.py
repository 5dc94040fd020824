"""What a session keeps of its tokens: keys and values in pages of 64 positions, which a fork shares until one of the two writes
to them, and the states of layers that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import ParamSpec, TypeVar, cast

from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.rows import PAGE, Page
from edgeq.targets.states import LOG, SessionState
from edgeq.targets.target import Program

P = ParamSpec("P")
R = TypeVar("R")


def in_turn(lock: Lock, call: Callable[P, R]) -> Callable[P, R]:
    """`call` of a program, which has one caller at a time, between the runs of other threads."""

    def waiting(*arguments: P.args, **named: P.kwargs) -> R:
        with lock:
            return call(*arguments, **named)

    return waiting


REWIND = PAGE
"""Positions before the begin of the last run that a session can always go back to: drafts that do not hold, and what was drawn
after the end of a text, are forgotten, and the end of a prompt is read again."""


def first_seen(position: int, window: int) -> int:
    """The first page that rows from REWIND before `position` on see in layers with a window."""
    return max(0, position - REWIND - window + 1) // PAGE


def windowed_pages(window: int, rows: int) -> int:
    """Pages of a session that have layers with a window, at most: for the next `rows` rows, and for the end of its prompt."""
    seen = -(-(REWIND + window) // PAGE) + 1
    return seen + -(-rows // PAGE) + seen


def complete(pages: Sequence[Page], length: int, window: int, snapshots: bool = False) -> int:
    """The most positions, up to `length`, before which nothing is dropped that the next row sees.

    snapshots   they end with a page that has a snapshot, from which states can begin
    """
    while (window or snapshots) and length > 0:
        if snapshots and (length % PAGE or pages[length // PAGE - 1].snapshot is None):
            length = (length - 1) // PAGE * PAGE
            continue
        first = -(-length // PAGE)
        while first and pages[first - 1].windowed is not None:
            first -= 1
        if not first or length - window + 1 >= first * PAGE:
            break
        length = (first - 1) * PAGE
    return length


class KVCache:
    """Pages are made when positions are first reserved and kept until the session ends, but for their layers with a window:
    those are dropped where rows that can come do not see them.

    A page that another cache may hold too is copied before the first write to it.

    Where layers have a state, there is one for all tokens, which can go back a few rows by itself, and snapshots of it where
    pages end, from which it begins again: after every `snapshot_pages`-th page, after the last one, and before the mark.

    state   of the tokens that have run; None: it begins with the snapshot of the last page when it is needed
    """

    def __init__(self, window: int, snapshot_pages: int = 0) -> None:
        """window   as Graph.window;  snapshot_pages: as of Program"""
        self.pages: list[Page] = []
        self.state: SessionState | None = None
        self._running: SessionState | None = None
        self._window, self._snapshot_pages = window, snapshot_pages
        self._shared: set[int] = set()  # indices of pages that another cache may hold
        self._mark, self._dropped = 0, 0  # before page `_dropped` all are dropped but those that rows at the mark see

    def share(self, pages: Sequence[Page]) -> None:
        """Hold `pages`, which others may hold too, in place of as many at the beginning; what was dropped stays dropped."""
        for index, (own, page) in enumerate(zip(self.pages, pages, strict=False)):
            if own.full is not page.full:
                windowed, snapshot = own.windowed and (page.windowed or own.windowed), own.snapshot and page.snapshot
                self.pages[index] = Page(page.full, windowed, snapshot or own.snapshot)
        self.pages += pages[len(self.pages) :]
        self._shared.update(range(len(pages)))

    def missing(self, start: int, end: int) -> int:
        """Pages that `reserve` would make."""
        made = max(0, -(-end // PAGE) - len(self.pages))
        return made + len(self._shared.intersection(range(start // PAGE, -(-end // PAGE)))) if self._shared else made

    def reserve(self, program: Program, start: int, end: int) -> None:
        """Make the positions from `start` to `end` writable: pages for them, of which no other cache holds one."""
        if self._window:
            self._drop(start)
        while len(self.pages) * PAGE < end:
            self.pages.append(program.new_page())
        if self._shared:
            for index in self._shared.intersection(range(start // PAGE, -(-end // PAGE))):
                self.pages[index] = program.copy_page(self.pages[index])
                self._shared.discard(index)
        if self._snapshot_pages:
            self._place_snapshots(cast(HoldsStates, program), start, end)

    def missing_snapshots(self, start: int, end: int) -> int:
        """Snapshots that `reserve` would make, at most."""
        return sum(index >= len(self.pages) or self.pages[index].snapshot is None for index in self._snapshots(start, end))

    def _snapshots(self, start: int, end: int) -> list[int]:
        """The pages after which a snapshot is taken in a run of the positions from `start` to `end`."""
        if not self._snapshot_pages:
            return []
        first, last = start // PAGE, end // PAGE
        return [index for index in range(first, last) if (index + 1) % self._snapshot_pages == 0 or index + 1 == last]

    def _place_snapshots(self, program: HoldsStates, start: int, end: int) -> None:
        """Room for the snapshots of a run; those that need not be kept any more are dropped."""
        taken = self._snapshots(start, end)
        if not taken:
            return
        for index in taken:
            if self.pages[index].snapshot is None:
                self.pages[index] = self.pages[index].with_snapshot(program.new_snapshot())
        # A state that is not there yet begins with the one before the run.
        kept_for = self._mark // PAGE, start // PAGE if self.state is None else 0
        for index in range(end // PAGE):
            kept = (index + 1) % self._snapshot_pages == 0 or index + 1 in kept_for or index in taken
            if not kept and self.pages[index].snapshot is not None:
                self.pages[index] = self.pages[index].with_snapshot(None)

    def state_of_run(self, program: Program, start: int, rows: int) -> SessionState:
        """The state that takes `rows` rows from `start` on.  If they are more than it could forget it is a copy until the run
        has ended: one that is interrupted leaves what was.
        """
        holds = cast(HoldsStates, program)
        if self.state is None:
            snapshot = self.pages[start // PAGE - 1].snapshot if start else None
            self.state = holds.start_from(snapshot, start) if snapshot is not None else holds.new_state()
        self._running = holds.fork_state(self.state) if rows > LOG else self.state
        return self._running

    def end_run(self) -> None:
        """The state has taken the rows."""
        self.state, self._running = self._running, None

    def _drop(self, start: int) -> None:
        """Drop what rows from `start` on do not see, nor those of a text that goes on from the mark again."""
        first, marked = first_seen(start, self._window), self._marked()
        for index in range(self._dropped, first):
            if index not in marked:
                self.pages[index] = self.pages[index].without_windows()
        self._dropped = max(self._dropped, first)

    def mark(self, position: int) -> None:
        """Keep what rows from `position` on see, in place of the position before: a text may go on from there again."""
        self._dropped = min(self._dropped, self._marked().start)
        self._mark = position

    def _marked(self) -> range:
        """The pages that rows at the mark see."""
        return range(first_seen(self._mark, self._window), -(-self._mark // PAGE))

    def rewind(self, length: int) -> int:
        """Forget what comes after `length`; how many positions are left, as rows can come after them: perhaps fewer."""
        left = complete(self.pages, length, self._window)
        if self._snapshot_pages and not (self.state and left and self.state.trim(left)):
            left, self.state = complete(self.pages, left, self._window, snapshots=True), None
        end = -(-left // PAGE)
        # Pages are written whole.
        whole = next((i for i in range(end, len(self.pages)) if self.pages[i].windowed is None), len(self.pages))
        if whole < len(self.pages):
            del self.pages[whole:]
            self._shared.intersection_update(range(whole))
        self._mark = min(self._mark, left)
        self._dropped = min(self._dropped, first_seen(left, self._window))
        return left

    def fork(self, positions: int) -> KVCache:
        """A cache with the first `positions` positions of this one, without their state; nothing is copied yet."""
        forked, count = KVCache(self._window, self._snapshot_pages), -(-positions // PAGE)
        forked.pages = self.pages[:count]
        forked._shared = set(range(count))
        forked._mark, forked._dropped = min(self._mark, positions), min(self._dropped, count)
        self._shared.update(range(count))
        return forked

    def pages_of(self, positions: int) -> list[Page]:
        """The pages that hold the first `positions` positions."""
        return self.pages[: -(-positions // PAGE)]
