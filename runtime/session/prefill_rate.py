"""How fast prompts run on this machine, which decides how long their chunks are."""

from __future__ import annotations

FIRST_TILES = 4
"""Tiles of the first chunk, before the rate is known."""


class PrefillRate:
    """How fast prompts run, shared by the sessions of a model.  `tile`: rows that the kernels multiply together."""

    def __init__(self, tile: int) -> None:
        self._tile = tile
        self._rate: float | None = None

    def rows(self, seconds: float) -> int:
        """Tokens that take so long, in whole tiles; FIRST_TILES tiles while nothing is known."""
        if self._rate is None:
            return FIRST_TILES * self._tile
        return max(self._tile, int(self._rate * seconds) // self._tile * self._tile)

    def record(self, rows: int, seconds: float, whole: bool) -> None:
        """A chunk has run; one that is not `whole` waits for memory more than it computes, so it can only raise the rate."""
        if whole or (self._rate is not None and rows > self._rate * seconds):
            self._rate = rows / seconds
