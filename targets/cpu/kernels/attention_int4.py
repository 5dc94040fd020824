"""Attention over a page of an int4 cache.

Its numbers are offset + scale * code, the last dimensions of a head with codes of 8 bits and numbers of their own.  Scales and
offsets belong to positions, so the products are with the codes alone: a score is scale * (query . codes) + offset * (sum of the
query), and a result the codes' sum by weight * scale and, the same for all its dimensions, the sum of weight * offset.
"""

from __future__ import annotations

from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.compile import inline
from edgeq.targets.cpu.jit.simd import get_f32, put_f32, vfma, vload, vmul, vsplat, vstore, vsum
from edgeq.targets.cpu.kernels.attention_tile import BYTES, NIBBLES, score_tile, value_tile
from edgeq.targets.cpu.kernels.kv_layout import POSITIONS, pair_bytes, scales_at

# What a query keeps behind its numbers for any cache (from MORE): two vectors of weighted offsets, the sums of the query, and
# scores or weights for the dimensions in 8 bits; those for the dimensions in 4 bits lie where any cache has them.
MORE = 448
LOW_OFFSETS, HIGH_OFFSETS, LOW_QUERY, HIGH_QUERY, HIGH_SCORES = MORE, MORE + 64, MORE + 128, MORE + 132, MORE + 192
QUERY = HIGH_SCORES + 4 * POSITIONS


def columns(dim: int, high: int) -> int:
    """Numbers of a result."""
    return int(low_columns.py_func(dim, high)) + padded(high)


@inline
def low_columns(dim, high):
    """Numbers of a result that the dimensions in 4 bits take: of every 32 first the even ones, then the odd ones."""
    return (dim - high + 31) // 32 * 32


@inline
def score(tile, vectors, keys, ahead, state, step, dim, high):
    """Products of the codes of a page with `tile` queries, the first of which keeps its numbers at `state`."""
    query, pairs = state + QUERY, pair_bytes(dim, high)
    for p in range(0, 4, vectors):
        line = keys + 16 * p
        score_tile(NIBBLES, tile, vectors, line, ahead, query, step, pairs, state + 64 * p)
        line, others = line + POSITIONS * pairs, state + HIGH_SCORES + 64 * p
        score_tile(BYTES, tile, vectors, line, ahead, query + 4 * (dim - high), step, high, others)


@inline
def scores_from_codes(state, keys, dim, high):
    """From products with the codes to scores."""
    low_scale, high_scale = scales_at(keys, dim, high)
    low_query, high_query = vsplat(get_f32(state + LOW_QUERY)), vsplat(get_f32(state + HIGH_QUERY))
    for i in range(0, 4 * POSITIONS, 64):
        total = vsplat(0.0)
        if high < dim:
            total = vfma(vload(state + i), vload(low_scale + i), vmul(vload(low_scale + 4 * POSITIONS + i), low_query))
        if high > 0:
            total = vfma(vload(high_scale + 4 * POSITIONS + i), high_query, total)
            total = vfma(vload(state + HIGH_SCORES + i), vload(high_scale + i), total)
        vstore(state + i, total)


@inline
def scale_weights(state, values, decay, dim, high):
    """From weights to those of the codes, and the sums of weighted offsets."""
    low_scale, high_scale = scales_at(values, dim, high)
    low_offsets, high_offsets = vmul(vload(state + LOW_OFFSETS), decay), vmul(vload(state + HIGH_OFFSETS), decay)
    for i in range(0, 4 * POSITIONS, 64):
        weight = vload(state + i)
        if high > 0:
            vstore(state + HIGH_SCORES + i, vmul(weight, vload(high_scale + i)))
            high_offsets = vfma(weight, vload(high_scale + 4 * POSITIONS + i), high_offsets)
        if high < dim:
            vstore(state + i, vmul(weight, vload(low_scale + i)))
            low_offsets = vfma(weight, vload(low_scale + 4 * POSITIONS + i), low_offsets)
    vstore(state + LOW_OFFSETS, low_offsets)
    vstore(state + HIGH_OFFSETS, high_offsets)


@inline
def gather(tile, vectors, values, ahead, count, dim, high, state, decay, step):
    """Adds the codes of `count` values of a page to the results of `tile` queries by their weights."""
    pairs, low, result = pair_bytes(dim, high), low_columns(dim, high), state + QUERY + 4 * ((dim + 15) // 16 * 16)
    row, c, line = pairs + high, 0, values
    while low - c >= 16 * vectors:
        value_tile(NIBBLES, tile, vectors, line, ahead, count, row, state, result + 4 * c, decay, step)
        c, line = c + 16 * vectors, line + 8 * vectors
    while c < low:
        value_tile(NIBBLES, tile, 2, line, ahead, count, row, state, result + 4 * c, decay, step)
        c, line = c + 32, line + 16
    for c in range(0, high, 16):
        place = result + 4 * (low + c)
        value_tile(BYTES, tile, 1, values + pairs + c, ahead, count, row, state + HIGH_SCORES, place, decay, step)


@inline
def begin_query(state, dim, high):
    """Nothing seen so far; the query is there."""
    low_sum, high_sum = 0.0, 0.0
    for i in range(dim - high):
        low_sum += get_f32(state + QUERY + 4 * i)
    for i in range(dim - high, dim):
        high_sum += get_f32(state + QUERY + 4 * i)
    put_f32(state + LOW_QUERY, low_sum)
    put_f32(state + HIGH_QUERY, high_sum)
    vstore(state + LOW_OFFSETS, vsplat(0.0))
    vstore(state + HIGH_OFFSETS, vsplat(0.0))


@inline
def end_query(state, out, total, dim, high):
    """The result, in the order of the dimensions."""
    result, low = state + QUERY + 4 * ((dim + 15) // 16 * 16), dim - high
    offset = vsum(vload(state + LOW_OFFSETS))
    for i in range(low):
        column = i // 32 * 32 + i % 2 * 16 + i % 32 // 2
        put_f32(out + 4 * i, (get_f32(result + 4 * column) + offset) / total)
    result, offset = result + 4 * low_columns(dim, high), vsum(vload(state + HIGH_OFFSETS))
    for i in range(high):
        put_f32(out + 4 * (low + i), (get_f32(result + 4 * i) + offset) / total)
