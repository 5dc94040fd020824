"""Attention over a page of an int4 cache.

Its numbers are offset + scale * code, the last dimensions of a head with codes of 8 bits and numbers of their own.  Scales and
offsets belong to positions, so the products are with the codes alone: a score is scale * (query . codes) + offset * (sum of the
query), and a result the codes' sum by weight * scale and, the same for all its dimensions, the sum of weight * offset.
"""

from __future__ import annotations

from typing import Any

from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.deferred import always_inline, inline
from edgeq.targets.cpu.jit.simd import get_f32, put_f32, vfma, vload, vmul, vsplat, vstore, vsum
from edgeq.targets.cpu.kernels.attention.attention_plain import plain_weight
from edgeq.targets.cpu.kernels.attention.attention_state import DECAY, OF_CODEC, SCORES_BYTES, VECTOR_BYTES, CacheFunctions
from edgeq.targets.cpu.kernels.attention.attention_tile import BYTES, NIBBLES, score_tile, value_tile
from edgeq.targets.cpu.kernels.attention.kv_layout import POSITIONS, pair_bytes, scales_at

# What a state has besides: two vectors of weighted offsets, the sums of the query, and scores or weights for the dimensions in
# 8 bits; those for the dimensions in 4 bits lie where any cache has them.
LOW_OFFSETS, HIGH_OFFSETS, LOW_QUERY = OF_CODEC, OF_CODEC + VECTOR_BYTES, OF_CODEC + 2 * VECTOR_BYTES
HIGH_QUERY, HIGH_SCORES = LOW_QUERY + 4, LOW_QUERY + VECTOR_BYTES
QUERY = HIGH_SCORES + SCORES_BYTES


def state_bytes(dim: int, high: int) -> int:
    """Scratch for a query: the state, the query and its result."""
    return QUERY + 4 * (padded(dim) + int(low_columns.py_func(dim, high)) + padded(high))


@inline
def low_columns(dim, high):
    """Numbers of a result that the dimensions in 4 bits take: of every 32 first the even ones, then the odd ones."""
    return (dim - high + 31) // 32 * 32


@inline
def scores_from_codes(head, page, state):
    """From products with the codes to scores."""
    low_scale, high_scale = scales_at(page.keys, head.dim, head.high)
    low_query, high_query = vsplat(get_f32(state + LOW_QUERY)), vsplat(get_f32(state + HIGH_QUERY))
    for i in range(0, SCORES_BYTES, VECTOR_BYTES):
        total = vsplat(0.0)
        if head.high < head.dim:
            total = vfma(vload(state + i), vload(low_scale + i), vmul(vload(low_scale + SCORES_BYTES + i), low_query))
        if head.high > 0:
            total = vfma(vload(high_scale + SCORES_BYTES + i), high_query, total)
            total = vfma(vload(state + HIGH_SCORES + i), vload(high_scale + i), total)
        vstore(state + i, total)


@inline
def scale_weights(head, page, state):
    """From weights to those of the codes, and the sums of weighted offsets."""
    low_scale, high_scale = scales_at(page.values, head.dim, head.high)
    decay = vload(state + DECAY)
    low_offsets, high_offsets = vmul(vload(state + LOW_OFFSETS), decay), vmul(vload(state + HIGH_OFFSETS), decay)
    for i in range(0, SCORES_BYTES, VECTOR_BYTES):
        weight = vload(state + i)
        if head.high > 0:
            vstore(state + HIGH_SCORES + i, vmul(weight, vload(high_scale + i)))
            high_offsets = vfma(weight, vload(high_scale + SCORES_BYTES + i), high_offsets)
        if head.high < head.dim:
            vstore(state + i, vmul(weight, vload(low_scale + i)))
            low_offsets = vfma(weight, vload(low_scale + SCORES_BYTES + i), low_offsets)
    vstore(state + LOW_OFFSETS, low_offsets)
    vstore(state + HIGH_OFFSETS, high_offsets)


@inline
def begin_query(head, state):
    """The sums of the query over its dimensions in 4 and in 8 bits."""
    low_sum, high_sum, low = 0.0, 0.0, head.dim - head.high
    for i in range(low):
        low_sum += get_f32(state + QUERY + 4 * i)
    for i in range(low, head.dim):
        high_sum += get_f32(state + QUERY + 4 * i)
    put_f32(state + LOW_QUERY, low_sum)
    put_f32(state + HIGH_QUERY, high_sum)
    vstore(state + LOW_OFFSETS, vsplat(0.0))
    vstore(state + HIGH_OFFSETS, vsplat(0.0))


@inline
def end_query(head, state, out, total):
    """The result, in the order of the dimensions."""
    result, low = state + QUERY + 4 * head.padded, head.dim - head.high
    offset = vsum(vload(state + LOW_OFFSETS))
    for i in range(low):
        column = i // 32 * 32 + i % 2 * 16 + i % 32 // 2
        put_f32(out + 4 * i, (get_f32(result + 4 * column) + offset) / total)
    result, offset = result + 4 * low_columns(head.dim, head.high), vsum(vload(state + HIGH_OFFSETS))
    for i in range(head.high):
        put_f32(out + 4 * (low + i), (get_f32(result + 4 * i) + offset) / total)


def codec(vectors: int) -> CacheFunctions:
    """`vectors`: of sixteen positions, or columns of the values, that a tile takes; an even number."""

    def score(queries: int) -> Any:
        low_tile, high_tile = (score_tile(kind, queries, vectors) for kind in (NIBBLES, BYTES))

        @always_inline
        def scores(head, page, state):
            query, pairs, step = state + QUERY, pair_bytes(head.dim, head.high), head.state_bytes
            ahead = page.values - page.keys
            for p in range(0, 4, vectors):
                line, place = page.keys + 16 * p, state + VECTOR_BYTES * p
                low_tile(line, ahead, query, step, pairs, place)
                line, others = line + POSITIONS * pairs, query + 4 * (head.dim - head.high)
                high_tile(line, ahead, others, step, head.high, place + HIGH_SCORES)

        return scores

    def accumulate(queries: int) -> Any:
        low_tile, low_narrow = value_tile(NIBBLES, queries, vectors), value_tile(NIBBLES, queries, 2)
        high_tile = value_tile(BYTES, queries, 1)

        @always_inline
        def results(head, page, state):
            pairs, low = pair_bytes(head.dim, head.high), low_columns(head.dim, head.high)
            row, line, step, decay = pairs + head.high, page.values, head.state_bytes, state + DECAY
            ahead, positions, result, c = page.next_keys, (page.seen, row), state + QUERY + 4 * head.padded, 0
            while low - c >= 16 * vectors:
                low_tile(line, ahead, positions, state, (result + 4 * c, decay), step)
                c, line = c + 16 * vectors, line + 8 * vectors
            while c < low:
                low_narrow(line, ahead, positions, state, (result + 4 * c, decay), step)
                c, line = c + 32, line + 16
            for high in range(0, head.high, 16):
                line, place = page.values + pairs + high, result + 4 * (low + high)
                high_tile(line, ahead, positions, state + HIGH_SCORES, (place, decay), step)

        return results

    return CacheFunctions(QUERY, begin_query, score, scores_from_codes, plain_weight, scale_weights, accumulate, end_query)
