"""How processors cut a picture into tiles: by a longest edge (Idefics3), or by the proportion of its edges (GOT-OCR2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_TILED_EDGE = 4096
"""To which Idefics3's processor shrinks a picture, whatever the settings say."""


@dataclass(frozen=True)
class Tiling:
    """How a picture is cut: resized to `first`, then to `size`, height and width each, which are rows x columns tiles; where it
    is one tile, rows and columns are 0.  What is cut by its aspect is resized once, and as a whole apart.
    """

    first: tuple[int, int]
    size: tuple[int, int]
    rows: int
    columns: int

    @property
    def pieces(self) -> int:
        """Tiles, and the whole picture."""
        return self.rows * self.columns + 1

    @classmethod
    def nearest(cls, height: int, width: int, tile: int, least: int, most: int) -> Tiling:
        """The rule of GOT-OCR2's processor.  Of two that are as near the one with more tiles is taken, if the picture has more
        than half as many pixels as that.

        least, most   tiles, at most 64
        """
        aspect, best, nearest = width / height, (1, 1), math.inf
        pairs = [(c, r) for c in range(1, most + 1) for r in range(1, most // c + 1) if c * r >= least]
        for columns, rows in sorted(pairs, key=math.prod):
            apart = abs(aspect - columns / rows)
            if apart < nearest or apart == nearest and height * width > 0.5 * tile * tile * columns * rows:
                best, nearest = (columns, rows), apart
        columns, rows = best
        size = rows * tile, columns * tile
        return cls(size, size, *((rows, columns) if rows * columns > 1 else (0, 0)))

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


def _longest(height: int, width: int, longest: int, even: bool = False) -> tuple[int, int]:
    """Height and width with `longest` as the longer edge; `even`: the other is an even number, but 1 where it would be 0."""
    aspect = width / height
    other = int(longest / aspect) if width >= height else int(longest * aspect)
    other = max(1, other + (even and other % 2))
    return (other, longest) if width >= height else (longest, other)
