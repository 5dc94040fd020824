"""The key/value cache of one session: pages of 64 positions, and how many of the positions are in use."""

from __future__ import annotations

from edgeq.targets import Program
from edgeq.targets.operations import PAGE, Page


class KVCache:
    """Pages are made when positions are first reserved and kept until the session ends."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.pages: list[Page] = []
        self.length = 0

    def reserve(self, positions: int) -> None:
        """Have pages for `positions` more than are in use."""
        while len(self.pages) * PAGE < self.length + positions:
            self.pages.append(self._program.new_page())

    def trim(self, length: int) -> None:
        """Set the number of positions in use; what lies behind is overwritten by the next rows."""
        if not 0 <= length <= len(self.pages) * PAGE:
            raise ValueError(f"length {length} outside the {len(self.pages) * PAGE} reserved positions")
        self.length = length
