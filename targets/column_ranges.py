"""Ranges of the columns of a buffer: what is left of one after operations have written some of them."""

from __future__ import annotations

Columns = list[tuple[int, int]]
"""Ranges [begin, end), none with another."""


def without(columns: Columns, begin: int, end: int) -> Columns:
    """The ranges less columns [begin, end)."""
    parts = ((part, rest) for start, stop in columns for part, rest in ((start, min(stop, begin)), (max(start, end), stop)))
    return [(start, stop) for start, stop in parts if start < stop]
