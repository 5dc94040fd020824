"""The key/value cache of one session: pages of 64 positions, which a fork shares until one of the two writes to them."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.targets.rows import PAGE, Page
from edgeq.targets.target import Program


class KVCache:
    """Pages are made when positions are first reserved and kept until the session ends.

    A page that another cache may hold too is copied before the first write to it.
    """

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self._shared: set[int] = set()  # indices of pages that another cache may hold

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

    def contents(self, program: Program, positions: int) -> Iterator[bytes]:
        """The bytes of the pages that hold the first `positions` positions."""
        return (program.save_page(page) for page in self.pages[: -(-positions // PAGE)])
