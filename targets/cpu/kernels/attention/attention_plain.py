"""Attention over a page of an f16 or int8 cache.

Scales of an int8 cache belong to positions, so those of keys multiply scores and those of values multiply weights.
"""

from __future__ import annotations

from typing import Any

from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.deferred import always_inline, inline
from edgeq.targets.cpu.jit.simd import get_f32, put_f32, vdiv, vload, vmul, vsplat, vstore
from edgeq.targets.cpu.kernels.attention.attention_state import DECAY, OF_CODEC, SCORES_BYTES, VECTOR_BYTES, CacheFunctions
from edgeq.targets.cpu.kernels.attention.attention_tile import score_tile, value_tile
from edgeq.targets.cpu.kernels.attention.kv_layout import INT8_KV, POSITIONS

QUERY = OF_CODEC


def state_bytes(dim: int) -> int:
    """Scratch for a query: what every state has, the query and its result."""
    return QUERY + 8 * padded(dim)


@inline
def nothing_to_begin(head, state):
    return None


@inline
def nothing_to_scale(head, page, state):
    return None


@inline
def plain_weight(weight, head, page, i):
    return weight


@inline
def int8_scores(head, page, state):
    scales = page.keys + POSITIONS * head.padded
    for i in range(0, SCORES_BYTES, VECTOR_BYTES):
        vstore(state + i, vmul(vload(state + i), vload(scales + i)))


@inline
def int8_weight(weight, head, page, i):
    return vmul(weight, vload(page.values + POSITIONS * head.padded + i))


@inline
def end_query(head, state, out, total):
    result, whole, divisor = state + QUERY + 4 * head.padded, head.dim // 16 * 16, vsplat(total)
    for i in range(0, whole, 16):
        vstore(out + 4 * i, vdiv(vload(result + 4 * i), divisor))
    for i in range(whole, head.dim):
        put_f32(out + 4 * i, get_f32(result + 4 * i) / total)


def codec(code: int, vectors: int) -> CacheFunctions:
    """`vectors`: of sixteen positions, or columns of the values, that a tile takes."""
    number = 1 if code == INT8_KV else 2

    def score(queries: int) -> Any:
        tile = score_tile(code, queries, vectors)

        @always_inline
        def scores(head, page, state):
            for p in range(0, 4, vectors):
                line, ahead = page.keys + 16 * number * p, page.values - page.keys
                tile(line, ahead, state + QUERY, head.state_bytes, head.dim, state + VECTOR_BYTES * p)

        return scores

    def accumulate(queries: int) -> Any:
        tile, narrow = value_tile(code, queries, vectors), value_tile(code, queries, 1)

        @always_inline
        def results(head, page, state):
            decay, result, row = state + DECAY, state + QUERY + 4 * head.padded, number * head.padded
            ahead, c, positions = page.next_keys, 0, (page.seen, row)
            while head.padded - c >= 16 * vectors:
                line = page.values + number * c
                tile(line, ahead, positions, state, (result + 4 * c, decay), head.state_bytes)
                c += 16 * vectors
            while c < head.padded:
                line = page.values + number * c
                narrow(line, ahead, positions, state, (result + 4 * c, decay), head.state_bytes)
                c += 16

        return results

    scaled = code == INT8_KV
    return CacheFunctions(
        QUERY, nothing_to_begin, score, int8_scores if scaled else nothing_to_scale,
        int8_weight if scaled else plain_weight, nothing_to_scale, accumulate, end_query,
    )  # fmt: skip
