"""The key/value cache of one session: pages of 64 positions."""

from __future__ import annotations

from edgeq.targets.rows import PAGE, Page
from edgeq.targets.target import Program


class KVCache:
    """Pages are made when positions are first reserved and kept until the session ends."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.pages: list[Page] = []

    def reserve(self, positions: int) -> None:
        """Allocate pages until there is room for so many positions in all."""
        while len(self.pages) * PAGE < positions:
            self.pages.append(self._program.new_page())
