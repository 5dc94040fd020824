"""The loop of GPTQ over the columns of a block, compiled: in torch every column would cost a dozen calls.

Output channels do not depend on each other, so that threads may share them in any way and end in the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from edgeq.converters.rounding.tables import GAUSSIAN_SCALES, TRELLIS_SCALES
from edgeq.format.codec import SCALE_CODES, Codec, ZeroKind
from edgeq.format.quantization import MIN_RANGE

ASYMMETRIC, SYMMETRIC, HALF, TABLE, TRELLIS = range(5)
"""Where the zero of a grid lies: at an integer that is searched, at 2^(bits - 1), half a step below that, or where a table says
it does; of a trellis, among levels that stand for its table's while scales are searched (tables.py)."""
FORMS: dict[ZeroKind, int] = {"integer": ASYMMETRIC, "symmetric": SYMMETRIC, "half": HALF}
SHARES = 20
"""Shares of a group's range that are tried, from the whole one down; the smallest is MIN_SHARE."""
MIN_SHARE = 0.6
MIN_STEP = 0.55
"""The smallest scale tried of a half grid, over that for a Gaussian with the mean square of the group."""
_F32 = np.float32
_STEP = _F32((1 - MIN_SHARE) / (SHARES - 1))
_RANGE = _F32(MIN_RANGE)
GAUSSIAN_STEPS = np.array([0, 0, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308], np.float32)
"""Steps of the equally spaced levels that are nearest to a unit Gaussian, by bits (J. Max, Quantizing for Minimum Distortion,
1960)."""


def form_of(codec: Codec) -> int:
    """The form of the grids of a codec."""
    if codec.coupled:
        return TRELLIS
    return TABLE if "table" in codec.parts(1, 1) else FORMS[codec.zero_kind]


@njit(nogil=True, cache=True)
def _to_f16(x: Any) -> Any:
    """A positive float32 rounded to f16, halves to even; infinity where f16 ends."""
    if not x < 65520.0:
        return _F32(np.inf)
    mantissa, exponent = math.frexp(x)
    if exponent < -13:
        return _F32(np.rint(x * 16777216.0) / 16777216.0)
    return _F32(math.ldexp(np.rint(mantissa * 2048.0) / 2048.0, exponent))


@njit(nogil=True, cache=True)
def _code(w: Any, scale: Any, zero: Any, top: Any, levels: Any) -> Any:
    if len(levels) > 0:
        x, first, last = w / scale, 0, len(levels) - 1
        while first < last:
            middle = (first + last) // 2
            if x > (levels[middle] + levels[middle + 1]) / _F32(2):
                first = middle + 1
            else:
                last = middle
        return _F32(first)
    # `zero` may lie half way between two integers; what is rounded is the distance from the one after it.
    after = _F32(math.ceil(zero))
    return min(max(_F32(np.rint(w / scale - (after - zero))) + after, _F32(0)), top)


@njit(nogil=True, cache=True)
def _level(code: Any, zero: Any, levels: Any) -> Any:
    """What the scale multiplies."""
    return levels[int(code)] if len(levels) > 0 else code - zero


@njit(nogil=True, cache=True)
def _least_share(group: Any, costs: Any, top: Any, form: Any, largest: Any, levels: Any) -> Any:
    """The smallest share of the range of a half grid or a table: few bits clip most of a range that single weights of many
    decide."""
    square, cost = _F32(0), _F32(0)
    for i in range(len(group)):
        square += costs[i] * group[i] * group[i]
        cost += costs[i]
    if not (cost > 0 and largest > 0):
        return _F32(MIN_SHARE)
    bits = int(round(math.log2(top + _F32(1))))
    steps = GAUSSIAN_STEPS[bits]
    if len(levels) > 0:
        steps = TRELLIS_SCALES[bits] if form == TRELLIS else GAUSSIAN_SCALES[bits]
    step = _F32(math.sqrt(square / cost)) * steps * _F32(MIN_STEP)
    return min(step * _reach(top, levels) / largest, _F32(MIN_SHARE))


@njit(nogil=True, cache=True)
def _reach(top: Any, levels: Any) -> Any:
    """The largest level of a half grid or a table."""
    return levels[len(levels) - 1] if len(levels) > 0 else top / _F32(2)


@njit(nogil=True, cache=True)
def search(group: Any, costs: Any, top: Any, form: Any, shares: Any, row: Any, levels: Any) -> Any:
    """(scale, zero) of the share of the group's range with the least sum of costs * error^2.

    row     what scales of four bits are shares of: all that they can be are tried; else 0
    levels  of a table its entries, the least first; else none
    """
    low, high = _F32(0), _F32(0)
    for w in group:
        low, high = min(low, w), max(high, w)
    least = _F32(MIN_SHARE)
    if form in (HALF, TABLE, TRELLIS):
        least = _least_share(group, costs, top, form, max(-low, high), levels)
    best, best_scale, best_zero = _F32(np.inf), _F32(np.nan), _F32(0)
    for step in range(len(SCALE_CODES) if row > 0 else shares):
        share = _F32(1) - _F32(step) * _STEP
        if row > 0:
            scale, zero = row * SCALE_CODES[step], top / _F32(2)
        elif form in (HALF, TABLE, TRELLIS):
            share = _F32(least ** (_F32(step) / _F32(shares - 1)))
            scale = _to_f16(max(max(-low, high) * share, _RANGE) / _reach(top, levels))
            zero = top / _F32(2)
        elif form == SYMMETRIC:
            scale = _to_f16(max(max(-low, high) * share, _RANGE) / (top / _F32(2)))
            zero = (top + _F32(1)) / _F32(2)
        else:
            scale = _to_f16(max((high - low) * share, _RANGE) / top)
            zero = min(max(-_F32(np.rint(low * share / scale)), _F32(0)), top)
        error = _F32(0)
        for i in range(len(group)):
            lost = _level(_code(group[i], scale, zero, top, levels), zero, levels) * scale - group[i]
            error += costs[i] * lost * lost
        if step == 0 or error < best:
            best, best_scale, best_zero = error, scale, zero
    return best_scale, best_zero


@njit(nogil=True, cache=True)
def search_grids(
    weight: NDArray[np.float32],
    costs: NDArray[np.float32],
    top: np.float32,
    form: int,
    shares: int,
    scale: NDArray[np.float32],
    zero: NDArray[np.float32],
    of_row: NDArray[np.float32],
    levels: NDArray[np.float32],
) -> None:
    """Fill scale and zero [rows] with the grid of each row of weight [rows, columns], one group each; costs [columns];
    form: of `form_of`; of_row [rows]: what scales of four bits are shares of, else 0; levels: of a table, else none."""
    for row in range(len(weight)):
        scale[row], zero[row] = search(weight[row], costs, top, form, shares, of_row[row], levels)


@njit(nogil=True, cache=True)
def _coded(scale: Any, row: Any) -> Any:
    """The share of `row` that scales of four bits can hold, nearest to `scale`; `row` 0: they are f16."""
    if row == 0:
        return _to_f16(scale)
    code = 0
    while code + 1 < len(SCALE_CODES) and scale < row * (SCALE_CODES[code] + SCALE_CODES[code + 1]) / _F32(2):
        code += 1
    return row * SCALE_CODES[code]


@njit(nogil=True, cache=True)
def round_block(
    weight: NDArray[np.float32],
    u: NDArray[np.float32],
    costs: NDArray[np.float32],
    begins: NDArray[np.int64],
    group_of: NDArray[np.int64],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32],
    of_row: NDArray[np.float32],
    levels: NDArray[np.float32],
    top: np.float32,
    form: int,
    shares: int,
    integers: NDArray[np.uint8],
) -> None:
    """Round the columns of weight [rows, columns] one after another; each error goes to those after it.  Left there: what the
    integers stand for.

    u         [columns, columns]: upper factor of the inverse moments of these columns
    costs     [columns]: of a square error, for the search of grids
    begins    [columns]: of how many columns the group has whose grid is to be found there; 0: it is known, or begun
    group_of  [columns]: the column of `scale` and `zero` [rows, groups]
    of_row    [rows]: what scales of four bits are shares of; else 0
    levels    of a table its entries, the least first; else none
    """
    for row in range(len(weight)):
        w = weight[row]
        for i in range(len(w)):
            g = group_of[i]
            if begins[i] > 0:
                ends = i + begins[i]
                scale[row, g], zero[row, g] = search(w[i:ends], costs[i:ends], top, form, shares, of_row[row], levels)
            code = _code(w[i], scale[row, g], zero[row, g], top, levels)
            back = _level(code, zero[row, g], levels) * scale[row, g]
            error = (w[i] - back) / u[i, i]
            after = u[i]
            for j in range(i + 1, len(w)):
                w[j] -= error * after[j]
            w[i] = back
            integers[row, i] = np.uint8(code)


@njit(nogil=True, cache=True)
def refit(steps: Any, first: Any, scale: Any, row: Any, slope: Any, moments: Any, product: Any) -> Any:
    """The scale of a group after its step to the least error; `slope` [columns] follows.

    With the integers less the zero point, or the entries of a table, as T, 0 outside of the group, its weights are scale T, and
    the error D M D^T grows by d^2 A + 2 d b where the scale grows by d: A = T M T^T, b = D M T^T, and `slope` is D M.

    steps    [columns of the group]: T
    first    the group's first column in the block
    row      what scales of four bits are shares of; else 0
    product  [columns]: room for T M
    """
    product[:] = 0
    downhill = _F32(0)
    for i in range(len(steps)):
        downhill += steps[i] * slope[first + i]
        curve = moments[first + i]
        for j in range(len(product)):
            product[j] += steps[i] * curve[j]
    bend = _F32(0)
    for i in range(len(steps)):
        bend += steps[i] * product[first + i]
    if not bend > 0:
        return scale
    wanted = _coded(max(scale - downhill / bend, _F32(0)), row)
    change = wanted - scale
    # A scale far from the range of its weights would clip many of them: what GPTQ has settled would be settled again.
    near = scale / _F32(2) <= wanted <= scale * _F32(2)
    if not near or not change * (_F32(2) * downhill + bend * change) < 0:
        return scale
    for j in range(len(product)):
        slope[j] += change * product[j]
    return wanted


@njit(nogil=True, cache=True)
def improve_block(
    rounded: NDArray[np.float32],
    gradient: NDArray[np.float32],
    moments: NDArray[np.float32],
    fixed: NDArray[np.bool_],
    begins: NDArray[np.int64],
    group_of: NDArray[np.int64],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32],
    of_row: NDArray[np.float32],
    levels: NDArray[np.float32],
    top: np.float32,
    integers: NDArray[np.uint8],
) -> None:
    """Coordinate descent over the columns of a block: each integer to the one with the least error, given all others, and the
    scale of a group before its integers.

    rounded   [rows, columns]: what the integers stand for; changed with them
    gradient  [rows, columns]: of half the squared error by these weights; changed with them
    moments   [columns, columns]: of the inputs of these columns
    fixed     [columns]: stay as they are
    begins    [columns]: of how many columns the group has whose scale is refitted there; 0: none
    of_row    [rows]: what scales of four bits are shares of; else 0
    levels    of a table its entries, the least first; else none
    """
    columns = rounded.shape[1]
    steps, product = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for row in range(len(rounded)):
        w, slope = rounded[row], gradient[row]
        for i in range(columns):
            g = group_of[i]
            if begins[i] > 0:
                size = begins[i]
                for k in range(size):
                    steps[k] = _level(_F32(integers[row, i + k]), zero[row, g], levels)
                scale[row, g] = refit(steps[:size], i, scale[row, g], of_row[row], slope, moments, product)
                for k in range(size):
                    w[i + k] = steps[k] * scale[row, g]
            if fixed[i]:
                continue
            code = _code(w[i] - slope[i] / moments[i, i], scale[row, g], zero[row, g], top, levels)
            back = _level(code, zero[row, g], levels) * scale[row, g]
            change = back - w[i]
            if change != 0:
                w[i] = back
                integers[row, i] = np.uint8(code)
                curve = moments[i]
                for j in range(columns):
                    slope[j] += change * curve[j]
