"""Pictures whose tokens see all of theirs: no run has a part of one, but the rest of one whose beginning is in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeq.pictures.prompt import PicturePlace


def next_run(places: Sequence[PicturePlace], start: int, count: int) -> int:
    """How many tokens from `start` on run next where it should be `count`: fewer if a picture would be cut, or all of one that
    has more."""
    end = start + count
    for place in places:
        if place.start < end < place.end:
            return (place.start if place.start > start else place.end) - start
    return count


def before_picture(places: Sequence[PicturePlace], length: int) -> int:
    """`length`, or where the picture begins that it lies in."""
    return next((place.start for place in places if place.start < length < place.start + place.tokens), length)


def seen_ends(places: Sequence[PicturePlace], slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """The slot after the last that each of `slots`, which follow one another, sees.  ValueError: the end of a picture is not
    among them."""
    ends = slots + 1
    start, end = int(slots[0]), int(slots[-1]) + 1
    for place in places:
        low, high = max(place.start, start), min(place.end, end)
        if low < high < place.end:
            raise ValueError(f"a run up to slot {end} cuts the picture from {place.start} to {place.end}")
        if low < high:
            ends[low - start : high - start] = high
    return ends


def seen_ranges(ranges: Sequence[int], slots: NDArray[np.int32], ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows.spans of rows that see up to `ends`; `ranges`: as of ModelConfig."""
    return np.array([(np.maximum(slots + 1 - w, 0) if w else 0 * slots, ends) for w in ranges], np.int32)
