"""Attention over the cache.

A run first writes the keys and values of all its rows (rotary.py), then every row attends to the slots it sees, page by page
with a running maximum (online softmax: Milakov and Gimelshein 2018), in an order that depends on the slots alone.
"""

from __future__ import annotations

from edgeq.targets.cpu.jit.args import float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.buffers import padded as padded_to_16
from edgeq.targets.cpu.jit.compile import Kernel, inline
from edgeq.targets.cpu.jit.simd import (
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    vadd,
    vdiv,
    vexp,
    vkeep,
    vload,
    vmax,
    vmaximum,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from edgeq.targets.cpu.kernels import attention_int4 as int4
from edgeq.targets.cpu.kernels.args import CacheArgs
from edgeq.targets.cpu.kernels.attention_tile import score_tile, value_tile
from edgeq.targets.cpu.kernels.kv_layout import INT4_KV, INT8_KV, POSITIONS, half_bytes, keys_at


class AttentionArgs(CacheArgs):
    """q_offset       bytes to the queries in a row of x
    window         causal: positions that a row sees, or 0 for all
    spans          else: int32 per row the first slot that it sees; `span_stride` bytes later, the one after the last
    scale          of the softmax
    scratch        ROWS_PER_UNIT x queries that share a head x state_bytes, of every thread
    """

    q_offset = nbytes()
    out = pointer()
    out_stride = nbytes()
    window = number()
    spans = pointer(0)
    span_stride = nbytes(0)
    scale = float32()
    scratch = pointer()
    state_bytes = nbytes()


# What a query keeps while the pages pass: scores or weights of a page, a number and two vectors, the query and its result.
LARGEST, DECAY, TOTALS = 0, 64, 128
NUMBERS = 192
QUERY = 4 * POSITIONS + NUMBERS

ROWS_PER_UNIT = 4


def state_bytes(dim: int, high: int, code: int) -> int:
    """Scratch for a query."""
    if code == INT4_KV:
        return int4.QUERY + 4 * (padded_to_16(dim) + int4.columns(dim, high))
    return QUERY + 8 * padded_to_16(dim)


@inline
def score(code, tile, vectors, keys, ahead, state, step, dim):
    """The scores of a page for `tile` queries, the first of which keeps its numbers at `state`."""
    number = 1 if code == INT8_KV else 2
    for p in range(0, 4, vectors):
        score_tile(code, tile, vectors, keys + 16 * number * p, ahead, state + QUERY, step, dim, state + 64 * p)


@inline
def gather(code, tile, vectors, values, ahead, count, padded, state, step):
    """Adds `count` values of a page to the results of `tile` queries by their weights."""
    number, decay, result = 1 if code == INT8_KV else 2, state + 4 * POSITIONS + DECAY, state + QUERY + 4 * padded
    c = 0
    while padded - c >= 16 * vectors:
        value_tile(code, tile, vectors, values + number * c, ahead, count, number * padded, state, result + 4 * c, decay, step)
        c += 16 * vectors
    while c < padded:
        value_tile(code, tile, 1, values + number * c, ahead, count, number * padded, state, result + 4 * c, decay, step)
        c += 16


@inline
def visible_range(least, end, window, start):
    """The positions begin <= i < end of the page from `start` on that a query sees: slots least ... end - 1, at most the last
    `window`."""
    return (max(least, end - window) if window > 0 else max(least, start)) - start, end - start


@inline
def in_one_unit(args, spans, r, slot, begin, rows):
    """Whether row r + rows may join the rows from r on in a unit: it has the next slot, or with spans the same range."""
    following = r + rows
    if get_i64(args.page_tables + 8 * following) != get_i64(args.page_tables + 8 * r):
        return False
    if spans:
        place = args.spans + 4 * following
        return get_i32(place) == begin and get_i32(place + args.span_stride) == slot + 1
    return get_i32(args.slots + 4 * following) == slot + rows


@inline
def sees(begin, end):
    """Whether a query that sees positions begin <= i < end of a page sees any."""
    return end > 0 and begin < POSITIONS


@inline
def weigh_peak(state, begin, end, key_scales, code):
    """Updates the largest score of one query that sees positions begin <= i < end of a page, and says by how much its result so
    far decays.  Scales of an int8 cache belong to positions, so keys' multiply scores and values' multiply weights.
    """
    scores, numbers = state, state + 4 * POSITIONS
    decay = vsplat(1.0)
    if sees(begin, end):
        if code == INT8_KV:
            for i in range(0, 4 * POSITIONS, 64):
                vstore(scores + i, vmul(vload(scores + i), vload(key_scales + i)))
        if begin > 0 or end < POSITIONS:
            for i in range(4):
                vstore(scores + 64 * i, vkeep(vload(scores + 64 * i), begin - 16 * i, end - 16 * i))
        peak = vmax(vmax(vload(scores), vload(scores + 64)), vmax(vload(scores + 128), vload(scores + 192)))
        before, largest = get_f32(numbers + LARGEST), vmaximum(peak)
        if largest > before:
            put_f32(numbers + LARGEST, largest)
            decay = vexp(vsplat(before - largest))
    vstore(numbers + DECAY, decay)


@inline
def weigh(state, begin, end, value_scales, code):
    """From the scores of a page to weights, for one query; updates the sum of its weights."""
    scores, numbers = state, state + 4 * POSITIONS
    if sees(begin, end):
        shift = vsplat(get_f32(numbers + LARGEST))
        totals = vmul(vload(numbers + TOTALS), vload(numbers + DECAY))
        for i in range(0, 4 * POSITIONS, 64):
            e = vexp(vsub(vload(scores + i), shift))
            vstore(scores + i, vmul(e, vload(value_scales + i)) if code == INT8_KV else e)
            totals = vadd(totals, e)
        vstore(numbers + TOTALS, totals)
    else:
        for i in range(0, 4 * POSITIONS, 64):
            vstore(scores + i, vsplat(0.0))


@inline
def begin_query(state, step, query, x, dim, padded, scale):
    """Nothing seen so far.  The query goes to `query`, and behind it its result until the `step` bytes of the state end."""
    whole, factor = dim // 16 * 16, vsplat(scale)
    for i in range(0, whole, 16):
        vstore(query + 4 * i, vmul(vload(x + 4 * i), factor))
    for i in range(whole, dim):
        put_f32(query + 4 * i, get_f32(x + 4 * i) * scale)
    for result in range(query + 4 * padded, state + step, 64):
        vstore(result, vsplat(0.0))
    put_f32(state + 4 * POSITIONS + LARGEST, -1e30)
    vstore(state + 4 * POSITIONS + TOTALS, vsplat(0.0))


@inline
def end_query(state, out, total, dim, padded):
    result, whole, divisor = state + QUERY + 4 * padded, dim // 16 * 16, vsplat(total)
    for i in range(0, whole, 16):
        vstore(out + 4 * i, vdiv(vload(result + 4 * i), divisor))
    for i in range(whole, dim):
        put_f32(out + 4 * i, get_f32(result + 4 * i) / total)


def attend(code: int, tile: int, vectors: int, spans: int) -> Kernel:
    """A unit is a few rows of one session with all query heads that share one key head: a page is read and widened once for
    them.  `spans`: rows see the slots that they name; else those up to their own.

    Queries are taken `tile` at a time against `vectors` x 16 positions.  What one query computes depends on nothing else.
    """

    def kernel(record, part, parts, thread):
        args = AttentionArgs(record)
        kv_heads, dim, padded, high = args.kv_heads, args.head_dim, args.padded_dim, args.high
        shared = args.heads // kv_heads
        scale, window, step = args.scale, args.window, args.state_bytes
        states = args.scratch + thread * (ROWS_PER_UNIT * shared * step)
        count = get_i64(args.rows)
        blocks = (count + ROWS_PER_UNIT - 1) // ROWS_PER_UNIT
        for unit in range(part, blocks * kv_heads, parts):
            head, r = unit % kv_heads, unit // kv_heads * ROWS_PER_UNIT
            stop = min(r + ROWS_PER_UNIT, count)
            while r < stop:
                # Rows that follow each other in one session, first to last, or that see the same: `slot` is the last that the
                # first row sees, each row after it sees `advance` more.
                slot, begin_slot, advance, rows = get_i32(args.slots + 4 * r), 0, 1, 1
                if spans:
                    begin_slot, slot = get_i32(args.spans + 4 * r), get_i32(args.spans + args.span_stride + 4 * r) - 1
                    advance = 0
                while r + rows < stop and in_one_unit(args, spans, r, slot, begin_slot, rows):
                    rows += 1
                last = slot + (rows - 1) * advance
                queries = rows * shared
                for q in range(queries):
                    source = args.x + (r + q // shared) * args.x_stride + args.q_offset
                    state, x = states + q * step, source + 4 * dim * (head * shared + q % shared)
                    begin_query(state, step, state + (int4.QUERY if code == INT4_KV else QUERY), x, dim, padded, scale)
                    if code == INT4_KV:
                        int4.begin_query(state, dim, high)
                oldest = max(0, slot + 1 - window) if window > 0 else begin_slot
                for start in range(oldest // POSITIONS * POSITIONS, last + 1, POSITIONS):
                    keys, seen = keys_at(args, r, start, head, code), min(last + 1 - start, POSITIONS)
                    values, scales = keys + half_bytes(dim, high, code), POSITIONS * padded
                    following = min(start + POSITIONS, last)
                    ahead = keys_at(args, r, following, head, code) - values
                    q = 0
                    while queries - q >= tile:
                        if code == INT4_KV:
                            int4.score(tile, vectors, keys, values - keys, states + q * step, step, dim, high)
                        else:
                            score(code, tile, vectors, keys, values - keys, states + q * step, step, dim)
                        q += tile
                    while q < queries:
                        if code == INT4_KV:
                            int4.score(1, vectors, keys, values - keys, states + q * step, step, dim, high)
                        else:
                            score(code, 1, vectors, keys, values - keys, states + q * step, step, dim)
                        q += 1
                    # In two passes: a largest number takes long to find, and other queries' need not wait for it.
                    for q in range(queries):
                        begin, end = visible_range(begin_slot, slot + q // shared * advance + 1, window, start)
                        state = states + q * step
                        if code == INT4_KV:
                            int4.scores_from_codes(state, keys, dim, high)
                        weigh_peak(state, begin, end, keys + scales, code)
                    for q in range(queries):
                        begin, end = visible_range(begin_slot, slot + q // shared * advance + 1, window, start)
                        state = states + q * step
                        weigh(state, begin, end, values + scales, code)
                        if code == INT4_KV:
                            int4.scale_weights(state, values, vload(state + 4 * POSITIONS + DECAY), dim, high)
                    q = 0
                    while queries - q >= tile:
                        state = states + q * step
                        if code == INT4_KV:
                            decay = state + 4 * POSITIONS + DECAY
                            int4.gather(tile, vectors, values, ahead, seen, dim, high, state, decay, step)
                        else:
                            gather(code, tile, vectors, values, ahead, seen, padded, state, step)
                        q += tile
                    while q < queries:
                        state = states + q * step
                        if code == INT4_KV:
                            decay = state + 4 * POSITIONS + DECAY
                            int4.gather(1, vectors, values, ahead, seen, dim, high, state, decay, step)
                        else:
                            gather(code, 1, vectors, values, ahead, seen, padded, state, step)
                        q += 1
                for q in range(queries):
                    out = args.out + (r + q // shared) * args.out_stride
                    out += 4 * dim * (head * shared + q % shared)
                    state = states + q * step
                    total = vsum(vload(state + 4 * POSITIONS + TOTALS))
                    if code == INT4_KV:
                        int4.end_query(state, out, total, dim, high)
                    else:
                        end_query(state, out, total, dim, padded)
                r += rows

    return kernel
