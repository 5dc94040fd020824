"""The key/value cache of one session: pages of 64 positions, which a fork shares until one of the two writes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import ParamSpec, TypeVar

from edgeq.targets.rows import PAGE, Page
from edgeq.targets.target import Program

P = ParamSpec("P")
R = TypeVar("R")


def in_turn(lock: Lock, call: Callable[P, R]) -> Callable[P, R]:
    """`call` of a program, which has one caller at a time, between the runs of other threads."""

    def waiting(*arguments: P.args, **named: P.kwargs) -> R:
        with lock:
            return call(*arguments, **named)

    return waiting


class KVCache:
    """Pages are made when positions are first reserved and kept until the session ends.

    A page that another cache may hold too is copied before the first write to it.
    """

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self._shared: set[int] = set()  # indices of pages that another cache may hold

    def share(self, pages: Sequence[Page]) -> None:
        """Hold `pages`, which others may hold too, in place of as many at the beginning."""
        self.pages[: len(pages)] = pages
        self._shared.update(range(len(pages)))

    def missing(self, start: int, end: int) -> int:
        """Pages that `reserve` would make."""
        within = range(start // PAGE, -(-end // PAGE))
        return max(0, -(-end // PAGE) - len(self.pages)) + len(self._shared.intersection(within))

    def reserve(self, program: Program, start: int, end: int) -> None:
        """Make the positions from `start` to `end` writable: pages for them, of which no other cache holds one."""
        while len(self.pages) * PAGE < end:
            self.pages.append(program.new_page())
        if self._shared:
            for index in self._shared.intersection(range(start // PAGE, -(-end // PAGE))):
                self.pages[index] = program.copy_page(self.pages[index])
                self._shared.discard(index)

    def fork(self, positions: int) -> KVCache:
        """A cache with the first `positions` positions of this one; nothing is copied yet."""
        forked, count = KVCache(), -(-positions // PAGE)
        forked.pages = self.pages[:count]
        forked._shared = set(range(count))
        self._shared.update(range(count))
        return forked

    def held(self, positions: int) -> list[Page]:
        """The pages that hold the first `positions` positions."""
        return self.pages[: -(-positions // PAGE)]
