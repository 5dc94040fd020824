"""Attention over the cache.

A run first writes the keys and values of all its rows (rope_kv_write.py), then every row attends to the slots it sees, page by
page with a running maximum (online softmax: Milakov and Gimelshein 2018), in an order that depends on the slots alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgeq.targets.cpu.jit.args import float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, inline
from edgeq.targets.cpu.jit.simd import (
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    vadd,
    vexp,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
)
from edgeq.targets.cpu.kernels.args import CacheArgs
from edgeq.targets.cpu.kernels.attention import attention_int4, attention_plain
from edgeq.targets.cpu.kernels.attention.attention_state import (
    DECAY,
    MAX_SCORE,
    NOTHING,
    SCORES_BYTES,
    TOTALS,
    VECTOR_BYTES,
    CachePage,
    Head,
    add_slope,
    cap_scores,
    raise_largest,
    store_query,
    total_weight,
)
from edgeq.targets.cpu.kernels.attention.kv_layout import INT4_KV, POSITIONS, half_bytes, keys_at


class AttentionArgs(CacheArgs):
    """q_offset       bytes to the queries in a row of x
    window         causal: positions that a row sees, or 0 for all
    spans          else: int32 per row the first slot that it sees; `span_stride` bytes later, the one after the last
    scale          of the softmax
    sinks          f32 [heads]: scores whose shares go nowhere, or 0
    cap            scores z become cap tanh(z / cap), or 0: they stay
    scratch        queries_per_unit x state_bytes, of every thread
    slopes         f32 [heads]: by how much scores grow from a slot to the next, of a kernel that has slopes
    """

    q_offset = nbytes()
    out = pointer()
    out_stride = nbytes()
    window = number()
    spans = pointer(0)
    span_stride = nbytes(0)
    scale = float32()
    sinks = pointer(0)
    cap = float32(0.0)
    scratch = pointer()
    state_bytes = nbytes()
    slopes = pointer(0)


ROWS_PER_UNIT = 4
"""Neighbouring rows of a session whose queries read a page together."""
QUERIES_PER_UNIT, BLOCKS = 32, 16
"""A unit of a long run has more rows, until there are so many queries: what no cache holds comes from memory once for them.
So many units for each key head stay, for threads to share."""


@inline
def queries_per_unit(shared):
    """The most queries of a unit, of which so many share a key head."""
    return max(ROWS_PER_UNIT * shared, QUERIES_PER_UNIT)


def state_bytes(dim: int, high: int, code: int) -> int:
    """Scratch for a query."""
    return attention_int4.state_bytes(dim, high) if code == INT4_KV else attention_plain.state_bytes(dim)


@inline
def visible_range(least, end, window, start):
    """The positions begin <= i < end of the page from `start` on that a query sees: slots least ... end - 1, at most the last
    `window`."""
    return (max(least, end - window) if window > 0 else max(least, start)) - start, end - start


@inline
def in_one_unit(args, spans, r, seen, rows, advance):
    """Whether row r + rows may join the rows from r on in a unit: it has the next slot, or with spans the same range, or one
    that ends `advance` slots after that of the row before, and begins with the same slot or as the window says.

    seen   the first slot that row r sees, and the last
    """
    following, (begin, slot) = r + rows, seen
    if get_i64(args.page_tables + 8 * following) != get_i64(args.page_tables + 8 * r):
        return False
    if spans:
        place = args.spans + 4 * following
        first, end = get_i32(place), get_i32(place + args.span_stride)
        slides = advance == 1 and args.window > 0 and first == end - args.window
        return (first == begin or slides) and end == slot + 1 + rows * advance
    return get_i32(args.slots + 4 * following) == slot + rows


@inline
def sees(begin, end):
    """Whether a query that sees positions begin <= i < end of a page sees any."""
    return end > 0 and begin < POSITIONS


def in_tiles(tiles: Sequence[tuple[int, Any]]) -> Any:
    """A function (head, page, states, q, queries): `function(head, page, state)` of every (queries of a tile, function) for the
    queries from `q` on, as many tiles of the first as there are, the others after it."""
    (size, function), *others = tiles
    rest = in_tiles(others) if others else nothing_left

    @always_inline
    def all_queries(head, page, states, q, queries):
        while queries - q >= size:
            function(head, page, states + q * head.state_bytes)
            q += size
        rest(head, page, states, q, queries)

    return all_queries


@inline
def nothing_left(head, page, states, q, queries):
    return None


def attend(code: int, high: int, tile: int, spans: int, slopes: int = 0) -> Kernel:
    """A unit is a few rows of one session with all query heads that share one key head: a page is read and widened once for
    them.  `spans`: rows see the slots that they name; else those up to their own.  `slopes`: scores grow with the slot (ALiBi).

    Queries are taken `high` at a time (0: never) against 16 positions, then `tile` against `tile` x 16.
    What one query computes depends on nothing else.
    """
    codec = attention_int4.codec(tile) if code == INT4_KV else attention_plain.codec(code, tile)
    sizes = [*([(high, attention_plain.codec(code, 1))] if high else []), (tile, codec), (1, codec)]
    query_at, begin_query, end_query = codec.query, codec.begin, codec.end
    scores_from_codes, scaled_weight, scale_weights = codec.scores_from_codes, codec.scaled_weight, codec.scale_weights
    score = in_tiles([(queries, each.score(queries)) for queries, each in sizes])
    accumulate = in_tiles([(queries, each.accumulate(queries)) for queries, each in sizes])

    def kernel(record, part, parts, thread):
        args = AttentionArgs(record)
        kv_heads, window, step = args.kv_heads, args.window, args.state_bytes
        head, scale = Head(args.head_dim, args.padded_dim, args.high, step), args.scale
        shared = args.heads // kv_heads
        states, count = args.scratch + thread * (queries_per_unit(shared) * step), get_i64(args.rows)
        height = max(ROWS_PER_UNIT, min(QUERIES_PER_UNIT // shared, count // BLOCKS))
        blocks = (count + height - 1) // height
        for unit in range(part, blocks * kv_heads, parts):
            kv_head, r = unit // blocks, unit % blocks * height
            stop = min(r + height, count)
            while r < stop:
                # Rows that follow each other in one session, first to last, or that see the same: `slot` is the last that the
                # first row sees, each row after it sees `advance` more.
                slot, begin_slot, advance, rows = get_i32(args.slots + 4 * r), 0, 1, 1
                if spans:
                    begin_slot, slot = get_i32(args.spans + 4 * r), get_i32(args.spans + args.span_stride + 4 * r) - 1
                    advance = int(r + 1 < stop and in_one_unit(args, spans, r, (begin_slot, slot), 1, 1))
                    window = args.window * advance
                while r + rows < stop and in_one_unit(args, spans, r, (begin_slot, slot), rows, advance):
                    rows += 1
                last = slot + (rows - 1) * advance
                queries = rows * shared
                for q in range(queries):
                    source = args.x + (r + q // shared) * args.x_stride + args.q_offset
                    state = states + q * step
                    query = state + query_at
                    store_query(query, source + 4 * head.dim * (kv_head * shared + q % shared), head, scale)
                    for result in range(query + 4 * head.padded, state + step, VECTOR_BYTES):
                        vstore(result, vsplat(0.0))
                    put_f32(state + MAX_SCORE, NOTHING)
                    vstore(state + TOTALS, vsplat(0.0))
                    if args.sinks != 0:
                        # It is there before all others, with a weight of 1 and no value.
                        sink = get_f32(args.sinks + 4 * (kv_head * shared + q % shared))
                        put_f32(state + MAX_SCORE, max(sink, np.float32(NOTHING)))
                        put_f32(state + TOTALS, np.float32(1))
                    begin_query(head, state)
                oldest = max(begin_slot, slot + 1 - window) if window > 0 else begin_slot
                for start in range(oldest // POSITIONS * POSITIONS, last + 1, POSITIONS):
                    keys = keys_at(args, r, start, kv_head, code)
                    values = keys + half_bytes(head.dim, head.high, code)
                    following = keys_at(args, r, min(start + POSITIONS, last), kv_head, code)
                    page = CachePage(keys, values, following - values, min(last + 1 - start, POSITIONS))
                    score(head, page, states, 0, queries)
                    # In two passes: a largest number takes long to find, and other queries' need not wait for it.
                    for q in range(queries):
                        state = states + q * step
                        begin, end = visible_range(begin_slot, slot + q // shared * advance + 1, window, start)
                        if sees(begin, end):
                            scores_from_codes(head, page, state)
                            if args.cap > 0:
                                cap_scores(state, args.cap)
                            if slopes:
                                slope = get_f32(args.slopes + 4 * (kv_head * shared + q % shared))
                                add_slope(state, slope, start - slot - q // shared * advance)
                            raise_largest(state, begin, end)
                        else:
                            vstore(state + DECAY, vsplat(1.0))
                    for q in range(queries):
                        state = states + q * step
                        begin, end = visible_range(begin_slot, slot + q // shared * advance + 1, window, start)
                        if sees(begin, end):
                            shift = vsplat(get_f32(state + MAX_SCORE))
                            totals = vmul(vload(state + TOTALS), vload(state + DECAY))
                            for i in range(0, SCORES_BYTES, VECTOR_BYTES):
                                weight = vexp(vsub(vload(state + i), shift))
                                vstore(state + i, scaled_weight(weight, head, page, i))
                                totals = vadd(totals, weight)
                            vstore(state + TOTALS, totals)
                        else:
                            for i in range(0, SCORES_BYTES, VECTOR_BYTES):
                                vstore(state + i, vsplat(0.0))
                        scale_weights(head, page, state)
                    accumulate(head, page, states, 0, queries)
                for q in range(queries):
                    out = args.out + (r + q // shared) * args.out_stride
                    state = states + q * step
                    out += 4 * head.dim * (kv_head * shared + q % shared)
                    end_query(head, state, out, total_weight(state))
                r += rows

    return kernel
