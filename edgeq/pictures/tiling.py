"""How processors cut a picture into tiles: by a longest edge (Idefics3), or by its proportion (GOT-OCR2, LFM2-VL)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TILED_EDGE = 4096
"""To which Idefics3's processor shrinks a picture, whatever the settings say."""


@dataclass(frozen=True)
class Tiling:
    """How a picture is cut: resized to `first`, then to `size`, height and width each, which are rows x columns tiles; where it
    is one tile, rows and columns are 0.  What is cut by its aspect is resized once, and as a whole apart, to `whole`; 0, 0: the
    whole one is made of the tiled one.
    """

    first: tuple[int, int]
    size: tuple[int, int]
    rows: int
    columns: int
    whole: tuple[int, int] = (0, 0)

    @property
    def pieces(self) -> int:
        """Tiles, and the whole picture."""
        return self.rows * self.columns + 1

    @classmethod
    def nearest(cls, height: int, width: int, tile: int, pairs: Sequence[tuple[int, int]], whole: tuple[int, int]) -> Tiling:
        """The rule of GOT-OCR2's processor and of LFM2-VL's.  Of two that are as near the later one is taken, if the picture
        has more than half as many pixels as that.

        pairs   of columns and rows, those with more tiles later
        """
        aspect, best, nearest = width / height, (1, 1), math.inf
        for columns, rows in pairs:
            apart = abs(aspect - columns / rows)
            if apart < nearest or apart == nearest and height * width > 0.5 * tile * tile * columns * rows:
                best, nearest = (columns, rows), apart
        columns, rows = best
        size = rows * tile, columns * tile
        return cls(size, size, rows, columns, whole) if rows * columns > 1 else cls(size, size, 0, 0)

    @classmethod
    def of(cls, height: int, width: int, longest: int, tile: int) -> Tiling:
        """The rule of Idefics3's processor, rounding and all."""
        first = _longest(height, width, longest, even=True)
        if max(first) > MAX_TILED_EDGE:
            first = _longest(*first, MAX_TILED_EDGE)
        height, width = first
        aspect, along = width / height, -(-max(first) // tile) * tile
        if width >= height:
            size = -(-int(along / aspect) // tile) * tile, along
        else:
            size = along, -(-int(along * aspect) // tile) * tile
        rows, columns = size[0] // tile, size[1] // tile
        return cls(first, size, *((rows, columns) if rows * columns > 1 else (0, 0)))


def tile_pairs(least: int, most: int) -> list[tuple[int, int]]:
    """Columns and rows of `least` to `most` tiles, as GOT-OCR2's processor goes through them."""
    pairs = [(c, r) for c in range(1, most + 1) for r in range(1, most // c + 1) if c * r >= least]
    return sorted(pairs, key=math.prod)


def tile_pairs_of_set(least: int, most: int) -> list[tuple[int, int]]:
    """The same as LFM2-VL's processor does: pairs of as many tiles follow one another as in a set that grew in this order."""
    found = {
        (c, r)
        for n in range(least, most + 1)
        for c in range(1, n + 1)
        for r in range(1, n + 1)
        if least <= c * r <= most
    }  # fmt: skip
    return sorted(found, key=math.prod)


def _longest(height: int, width: int, longest: int, even: bool = False) -> tuple[int, int]:
    """Height and width with `longest` as the longer edge; `even`: the other is an even number, but 1 where it would be 0."""
    aspect = width / height
    other = int(longest / aspect) if width >= height else int(longest * aspect)
    other = max(1, other + (even and other % 2))
    return (other, longest) if width >= height else (longest, other)
