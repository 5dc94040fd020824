"""The search of a trellis (edgeq/format/trellis.py): the 16 rows of a block together, for one column after another.

For targets x_r and scales s_r of the rows of a column it finds indices with the least sum of (x_r - s_r table[index_r])^2.  The
coded bits a_r of a row and of its neighbours name a subset, of which the nearest level is taken; the bits are found by A.
Viterbi's algorithm (IEEE Transactions on Information Theory 13, 1967) over states (a_{r-1}, a_r), once for each of the four
in which a ring can begin and therefore has to end.  That is exact.

Columns share no bits, and the rows of one cost the same in GPTQ (columns.py): its error goes to later columns as ever, and a
sweep decides the rows of a block again, one column after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from edgeq.converters.rounding.column_kernel import refit, search
from edgeq.format.trellis import RING, stored_of

STATES = 4
_F32 = np.float32
_FAR = _F32(1e30)


_stored = njit(nogil=True, cache=True)(stored_of)


@njit(nogil=True, cache=True)
def _coded(stored: Any, bits: Any) -> Any:
    return stored >> 2 if bits == 3 else stored & 1


@njit(nogil=True, cache=True)
def level_at(integers: NDArray[np.uint8], first: int, row: int, column: int, bits: int) -> Any:
    """The level, as its place in order, of row `row` of the ring that begins at row `first` of what is stored."""
    mine, beside = np.int64(integers[first + row, column]), np.int64(0)
    for step in (1, RING - 1):
        other = first + (row + step) % RING
        if other < len(integers):
            beside ^= _coded(np.int64(integers[other, column]), bits)
    free = mine & 3 if bits == 3 else mine >> 1
    return 4 * free + 2 * beside + _coded(mine, bits)


@njit(nogil=True, cache=True)
def choose(x: Any, s: Any, count: Any, levels: Any, picked: Any) -> Any:
    """The least sum of squares, and in `picked` [16] the levels that have it; only `count` rows of the ring are there, others
    are stored as zeros."""
    best = np.empty((RING, 4), np.float32)
    of_best = np.empty((RING, 4), np.int64)
    for r in range(RING):
        for subset in range(4):
            least, which = _FAR, subset
            if r < count:
                for level in range(subset, len(levels), 4):
                    lost = x[r] - s[r] * levels[level]
                    if lost * lost < least:
                        least, which = lost * lost, level
            elif subset % 2 == 0:
                least = _F32(0)
            best[r, subset], of_best[r, subset] = least, which
    # [a_{r-1}, a_r][where the ring began]; before row 0 these are a_15 and a_0.
    costs, after = np.full((STATES, STATES), _FAR, np.float32), np.empty((STATES, STATES), np.float32)
    came = np.empty((RING, STATES, STATES), np.bool_)
    for start in range(STATES):
        costs[start, start] = 0
    for r in range(RING):
        for here in range(2):
            for following in range(2):
                # The subset is 2 (before xor following) + here.
                of_zero, of_one = best[r, 2 * following + here], best[r, 2 * (1 - following) + here]
                for start in range(STATES):
                    zero, one = costs[here, start] + of_zero, costs[2 + here, start] + of_one
                    came[r, 2 * here + following, start] = one < zero
                    after[2 * here + following, start] = min(zero, one)
        costs, after = after, costs
    start = 0
    for other in range(1, STATES):
        if costs[other, other] < costs[start, start]:
            start = other
    state = start
    for r in range(RING - 1, -1, -1):
        before, here, following = int(came[r, state, start]), state >> 1, state & 1
        picked[r] = of_best[r, 2 * (before ^ following) + here]
        state = 2 * before + here
    return costs[start, start]


@njit(nogil=True, cache=True)
def nearest_rings(
    weight: NDArray[np.float32], scale: NDArray[np.float32], levels: NDArray[np.float32], bits: int, integers: NDArray[np.uint8]
) -> None:
    """Fill integers [rows, columns] with what is stored of weight [rows, columns], rounded with scale [rows, columns]."""
    picked = np.empty(RING, np.int64)
    for first in range(0, len(weight), RING):
        count = min(RING, len(weight) - first)
        for i in range(weight.shape[1]):
            choose(weight[first : first + count, i], scale[first : first + count, i], count, levels, picked)
            for r in range(count):
                integers[first + r, i] = _stored(picked[r], bits)


@njit(nogil=True, cache=True)
def round_rings(
    weight: NDArray[np.float32],
    u: NDArray[np.float32],
    costs: NDArray[np.float32],
    begins: NDArray[np.int64],
    group_of: NDArray[np.int64],
    scale: NDArray[np.float32],
    of_row: NDArray[np.float32],
    levels: NDArray[np.float32],
    proxy: NDArray[np.float32],
    grid: tuple[np.float32, int, int],
    bits: int,
    integers: NDArray[np.uint8],
) -> None:
    """As `round_block` of column_kernel.py, over rings.

    levels  the least first
    proxy   those of a table of as many bits, among which scales are searched: a row's levels depend on its neighbours
    grid    the largest integer, the form and the shares of that search
    """
    x, s, picked, zero = np.empty(RING, np.float32), np.empty(RING, np.float32), np.empty(RING, np.int64), _F32(0)
    top, form, shares = grid
    columns = weight.shape[1]
    for first in range(0, len(weight), RING):
        count = min(RING, len(weight) - first)
        for i in range(columns):
            g = group_of[i]
            for r in range(count):
                row = first + r
                if begins[i] > 0:
                    ends = i + begins[i]
                    scale[row, g], zero = search(weight[row, i:ends], costs[i:ends], top, form, shares, of_row[row], proxy)
                x[r], s[r] = weight[row, i], scale[row, g]
            choose(x, s, count, levels, picked)
            after = u[i]
            for r in range(count):
                back, w = levels[picked[r]] * s[r], weight[first + r]
                error = (x[r] - back) / u[i, i]
                for j in range(i + 1, columns):
                    w[j] -= error * after[j]
                w[i] = back
                integers[first + r, i] = np.uint8(_stored(picked[r], bits))


@njit(nogil=True, cache=True)
def improve_rings(
    rounded: NDArray[np.float32],
    gradient: NDArray[np.float32],
    moments: NDArray[np.float32],
    fixed: NDArray[np.bool_],
    begins: NDArray[np.int64],
    group_of: NDArray[np.int64],
    scale: NDArray[np.float32],
    of_row: NDArray[np.float32],
    levels: NDArray[np.float32],
    bits: int,
    integers: NDArray[np.uint8],
) -> None:
    """As `improve_block` of column_kernel.py, over rings: the rows of a block of a column are decided together."""
    columns = rounded.shape[1]
    steps, product = np.empty(columns, np.float32), np.empty(columns, np.float32)
    x, s, picked = np.empty(RING, np.float32), np.empty(RING, np.float32), np.empty(RING, np.int64)
    for first in range(0, len(rounded), RING):
        count = min(RING, len(rounded) - first)
        for i in range(columns):
            g = group_of[i]
            for r in range(count if begins[i] > 0 else 0):
                row, size = first + r, begins[i]
                for k in range(size):
                    steps[k] = levels[level_at(integers, first, r, i + k, bits)]
                scale[row, g] = refit(steps[:size], i, scale[row, g], of_row[row], gradient[row], moments, product)
                for k in range(size):
                    rounded[row, i + k] = steps[k] * scale[row, g]
            if fixed[i]:
                continue
            lost = _F32(0)
            for r in range(count):
                slope = gradient[first + r, i] / moments[i, i]
                x[r], s[r] = rounded[first + r, i] - slope, scale[first + r, g]
                lost += slope * slope
            # What is there is not left for what is as good.
            if not choose(x, s, count, levels, picked) < lost:
                continue
            curve = moments[i]
            for r in range(count):
                back, slopes = levels[picked[r]] * s[r], gradient[first + r]
                change = back - rounded[first + r, i]
                if change != 0:
                    rounded[first + r, i] = back
                    for j in range(columns):
                        slopes[j] += change * curve[j]
                integers[first + r, i] = np.uint8(_stored(picked[r], bits))
