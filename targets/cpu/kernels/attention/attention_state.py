"""What attention keeps for a query while the pages of the cache pass, and what a codec of the cache must do with it.

A state is the scores, later the weights, of a page (f32 [64]), a number and two vectors, then what the codec adds, the query
and its result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import inline, types
from edgeq.targets.cpu.jit.simd import (
    I32,
    LANES,
    VF32,
    VI32,
    f32x16,
    get_f32,
    primitive,
    put_f32,
    splat,
    vadd,
    vdiv,
    vexp,
    vfma,
    vkeep,
    vload,
    vmax,
    vmaximum,
    vmul,
    vsplat,
    vstore,
    vsum,
)
from edgeq.targets.cpu.kernels.attention.kv_layout import POSITIONS

VECTOR_BYTES = 64
SCORES_BYTES = 4 * POSITIONS
MAX_SCORE, DECAY, TOTALS = SCORES_BYTES, SCORES_BYTES + VECTOR_BYTES, SCORES_BYTES + 2 * VECTOR_BYTES
"""The largest score so far; by how much the result so far decays, and the sums of the weights, vectors."""
OF_CODEC = SCORES_BYTES + 3 * VECTOR_BYTES
"""Where the codec goes on."""
NOTHING = -1e30
"""The largest score of a query that has seen nothing, and what `vkeep` puts for positions that it does not see."""


class Head(NamedTuple):
    """Sizes: dimensions, padded to 16, those in 8 bits of an int4 cache, and bytes of a state."""

    dim: int
    padded: int
    high: int
    state_bytes: int


class CachePage(NamedTuple):
    """Keys and values of one head in a page; bytes from the values to the next page's keys; how many positions are filled."""

    keys: int
    values: int
    next_keys: int
    seen: int


class CacheFunctions(NamedTuple):
    """The functions of one kind of cache; `state` is that of the first of the queries they take.

    query              where a state has the query, bytes
    begin              (head, state): nothing seen so far; the query is there
    score, accumulate  (queries) -> (head, page, state): the products of so many queries with the keys of a page, and of their
                       weights with its values, added to the decayed results
    scores_from_codes  (head, page, state): from products with stored numbers to scores
    scaled_weight      (weight, head, page, i): sixteen weights for stored numbers, from byte i on
    scale_weights      (head, page, state): what is left to do to the weights
    end                (head, state, out, total): the result over the sum of the weights
    """

    query: int
    begin: Any
    score: Any
    scores_from_codes: Any
    scaled_weight: Any
    scale_weights: Any
    accumulate: Any
    end: Any


@inline
def cap_scores(state, cap):
    """Scores z become cap tanh(z / cap); tanh u is 2 / (1 + exp(-2 u)) - 1."""
    inner, outer, less = vsplat(np.float32(-2.0) / cap), vsplat(np.float32(2.0) * cap), vsplat(-cap)
    for i in range(0, SCORES_BYTES, VECTOR_BYTES):
        grown = vadd(vsplat(1.0), vexp(vmul(vload(state + i), inner)))
        vstore(state + i, vadd(vdiv(outer, grown), less))


@primitive(f32x16, types.int64)
def count_from(b: Any, start: Any) -> Any:
    """start, start + 1 ... as numbers, below 2^24 exactly."""
    lanes = ir.Constant(VI32, list(range(LANES)))
    return b.sitofp(b.add(splat(b, b.trunc(start, I32), VI32), lanes), VF32)


@inline
def add_slope(state, slope, first):
    """Scores of the slots of a page from `first` on, counted from the last that the query sees, grow by `slope` from one to the
    next."""
    factor = vsplat(slope)
    for i in range(0, SCORES_BYTES, VECTOR_BYTES):
        vstore(state + i, vfma(factor, count_from(first + i // 4), vload(state + i)))


@inline
def raise_largest(state, begin, end):
    """Updates the largest score of a query that sees positions begin <= i < end of a page, and how its result decays."""
    if begin > 0 or end < POSITIONS:
        for i in range(4):
            place = state + VECTOR_BYTES * i
            vstore(place, vkeep(vload(place), begin - 16 * i, end - 16 * i))
    low, high = vmax(vload(state), vload(state + 64)), vmax(vload(state + 128), vload(state + 192))
    before, largest = get_f32(state + MAX_SCORE), vmaximum(vmax(low, high))
    decay = vsplat(1.0)
    if largest > before:
        put_f32(state + MAX_SCORE, largest)
        decay = vexp(vsplat(before - largest))
    vstore(state + DECAY, decay)


@inline
def total_weight(state):
    """The sum of the weights; NaN where no score is above NOTHING: positions that are not seen would weigh as much."""
    return vsum(vload(state + TOTALS)) if get_f32(state + MAX_SCORE) > NOTHING else np.float32(np.nan)


@inline
def store_query(query, x, head, scale):
    """x times the softmax scale, then a result of zeros (until the state ends)."""
    whole, factor = head.dim // 16 * 16, vsplat(scale)
    for i in range(0, whole, 16):
        vstore(query + 4 * i, vmul(vload(x + 4 * i), factor))
    for i in range(whole, head.dim):
        put_f32(query + 4 * i, get_f32(x + 4 * i) * scale)
