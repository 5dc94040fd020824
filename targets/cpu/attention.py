"""Rotary positions, the cache, and attention over it.

A cache page holds 64 positions of all layers: for each layer and key/value head the keys as f16 [head_dim][64], so that a dot
product with a query runs over positions in lanes and needs no horizontal sum, then the values as f16 [64][head_dim].  Head_dim is
padded to 16.  A run first writes the keys and values of all its rows, then every row attends to the slots it sees, page by page
with a running maximum (online softmax: Milakov and Gimelshein 2018), in an order that depends on the slots alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edgeq.targets.cpu.compiled import COUNT, inline, word
from edgeq.targets.cpu.vector import (
    F32,
    I64,
    VF16,
    VF32,
    call,
    constant,
    get_f32,
    get_i32,
    get_i64,
    load,
    put_f16,
    put_f32,
    splat,
    store,
    vadd,
    vexp,
    vkeep,
    vload,
    vmax,
    vmaximum,
    vsplat,
    vstore,
    vsub,
    vsum,
)

Kernel = Callable[[int, int, int], None]

POSITIONS = 64
# Words that both kernels have: rows of x, heads, the cache.
X, X_ROW, HEADS, KV_HEADS, HEAD_DIM, PADDED, SLOTS, TABLES, LAYER_OFFSET = 2, 3, 4, 5, 6, 7, 8, 9, 10
"""Address and row bytes of x; heads; head_dim and its padding to 16; slots i32; page tables (i64 addresses, one per row, each of
an i64 array of page addresses); bytes from the start of a page to this layer."""
Q_OFFSET, K_OFFSET, V_OFFSET, COSINES, SINES, ANGLE_ROW, Q_GAIN, K_GAIN, EPSILON = 11, 12, 13, 14, 15, 16, 17, 18, 19
"""`rotate`: byte offsets in a row of x, angles, f32 gains of the head norms or 0, their epsilon (bits of an f32)."""
OUT, OUT_ROW, WINDOW, SCALE, SCRATCH = 12, 13, 14, 15, 16
"""`attend`: result and its row bytes, positions a row sees or 0, softmax scale (bits of an f32), scratch of all threads."""


# What a query keeps while the pages pass: scores or weights of a page, three numbers, the query and its result.
LARGEST, TOTAL, DECAY = 0, 4, 8
NUMBERS = 64


@inline
def state_bytes(padded):  # type: ignore[no-untyped-def]
    return 4 * POSITIONS + NUMBERS + 8 * padded


ROWS_TOGETHER = 4


def scratch_bytes(shared: int, padded: int) -> int:
    """Per thread, where `shared` query heads share a key head."""
    return ROWS_TOGETHER * shared * int(state_bytes.py_func(padded))


@inline
def page_of(row, r, slot, head):  # type: ignore[no-untyped-def]
    """Address of the keys of `head` in the page of `slot`; the values follow them."""
    page = get_i64(get_i64(word(row, TABLES) + 8 * r) + 8 * (slot // POSITIONS))
    return page + word(row, LAYER_OFFSET) + head * (4 * POSITIONS) * word(row, PADDED)


@inline
def normalize(x, dim, gain, epsilon):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(dim):
        total += get_f32(x + 4 * i) * get_f32(x + 4 * i)
    factor = 1.0 / math.sqrt(total / dim + epsilon)
    for i in range(dim):
        put_f32(x + 4 * i, get_f32(x + 4 * i) * factor * get_f32(gain + 4 * i))


def rotate() -> Kernel:
    """Head norms and rotary positions in place; keys and values into the cache.  A unit is one head of one row."""

    def kernel(row, thread, threads):  # type: ignore[no-untyped-def]
        heads, kv_heads, dim, padded = word(row, HEADS), word(row, KV_HEADS), word(row, HEAD_DIM), word(row, PADDED)
        units = heads + kv_heads
        epsilon, half = get_f32(row + 8 * EPSILON), dim // 2
        for unit in range(thread, get_i64(word(row, COUNT)) * units, threads):
            r, head = unit // units, unit % units
            is_query = head < heads
            source = word(row, X) + r * word(row, X_ROW)
            if is_query:
                x, gain = source + word(row, Q_OFFSET) + 4 * dim * head, word(row, Q_GAIN)
            else:
                head -= heads
                x, gain = source + word(row, K_OFFSET) + 4 * dim * head, word(row, K_GAIN)
            if gain != 0:
                normalize(x, dim, gain, epsilon)
            cosines, sines = (word(row, COSINES) + r * word(row, ANGLE_ROW), word(row, SINES) + r * word(row, ANGLE_ROW))
            for i in range(half):
                a, b = get_f32(x + 4 * i), get_f32(x + 4 * (half + i))
                cosine, sine = get_f32(cosines + 4 * i), get_f32(sines + 4 * i)
                put_f32(x + 4 * i, a * cosine - b * sine)
                put_f32(x + 4 * (half + i), b * cosine + a * sine)
            if not is_query:
                slot = get_i32(word(row, SLOTS) + 4 * r)
                keys, lane = page_of(row, r, slot, head), slot % POSITIONS
                values = keys + 2 * POSITIONS * padded + 2 * padded * lane
                v = source + word(row, V_OFFSET) + 4 * dim * head
                for i in range(dim):
                    put_f16(keys + 2 * (POSITIONS * i + lane), min(max(get_f32(x + 4 * i), -65504.0), 65504.0))
                    put_f16(values + 2 * i, min(max(get_f32(v + 4 * i), -65504.0), 65504.0))

    return kernel


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def score_tile(typing: Any, queries: Any, vectors: Any, keys: Any, query: Any, step: Any, dim: Any, scores: Any) -> Any:
    """scores[q][16 p + lane] = query q . key of that position, for `queries` queries `step` bytes apart and `vectors` x 16 positions.

    Scores of a query lie `step` bytes behind those of the one before, too.  Literals: queries, vectors.
    """
    count, width = queries.literal_value, vectors.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        keys, query, step, dim, scores = args[2:]
        sums = [[cgutils.alloca_once(b, VF32) for _ in range(width)] for _ in range(count)]
        for slot in (slot for row in sums for slot in row):
            b.store(constant(VF32, 0.0), slot)
        offsets = [b.mul(step, ir.Constant(I64, q)) for q in range(count)]
        with cgutils.for_range(b, dim) as loop:
            line = b.add(keys, b.mul(loop.index, ir.Constant(I64, 2 * POSITIONS)))
            key = [b.fpext(load(b, b.add(line, ir.Constant(I64, 32 * p)), VF16, 2), VF32) for p in range(width)]
            for q in range(count):
                at = b.add(b.add(query, offsets[q]), b.mul(loop.index, ir.Constant(I64, 4)))
                value = splat(b, load(b, at, F32, 4), VF32)
                for p in range(width):
                    b.store(call(b, "llvm.fmuladd.v16f32", VF32, key[p], value, b.load(sums[q][p])), sums[q][p])
        for q in range(count):
            for p in range(width):
                store(b, b.load(sums[q][p]), b.add(b.add(scores, offsets[q]), ir.Constant(I64, 64 * p)), 4)
        return context.get_dummy_value()

    return types.void(queries, vectors, *[types.intp] * 5), codegen


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def value_tile(typing: Any, queries: Any, values: Any, padded: Any, weights: Any, result: Any, decay: Any, step: Any) -> Any:
    """result[q] = result[q] * decay[q] + the page's values by weights[q]; two sums, of even and of odd positions.

    weights, result and decay (an f32) of a query lie `step` bytes behind those of the one before.  Literal: queries.
    """
    count = queries.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, padded, weights, result, decay, step = args[1:]
        sums = [[cgutils.alloca_once(b, VF32) for _ in range(2)] for _ in range(count)]
        offsets = [b.mul(step, ir.Constant(I64, q)) for q in range(count)]
        row = b.mul(padded, ir.Constant(I64, 2))
        with cgutils.for_range(b, b.lshr(padded, ir.Constant(I64, 4))) as columns:
            place = b.mul(columns.index, ir.Constant(I64, 64))
            for q in range(count):
                factor = splat(b, load(b, b.add(decay, offsets[q]), F32, 4), VF32)
                b.store(b.fmul(load(b, b.add(b.add(result, offsets[q]), place), VF32, 4), factor), sums[q][0])
                b.store(constant(VF32, 0.0), sums[q][1])
            first = b.add(values, b.mul(columns.index, ir.Constant(I64, 32)))
            with cgutils.for_range(b, ir.Constant(I64, POSITIONS // 2)) as pairs:
                for odd in range(2):
                    position = b.add(b.mul(pairs.index, ir.Constant(I64, 2)), ir.Constant(I64, odd))
                    value = b.fpext(load(b, b.add(first, b.mul(position, row)), VF16, 2), VF32)
                    for q in range(count):
                        at = b.add(b.add(weights, offsets[q]), b.mul(position, ir.Constant(I64, 4)))
                        weight, slot = splat(b, load(b, at, F32, 4), VF32), sums[q][odd]
                        b.store(call(b, "llvm.fmuladd.v16f32", VF32, value, weight, b.load(slot)), slot)
            for q in range(count):
                total = b.fadd(b.load(sums[q][0]), b.load(sums[q][1]))
                store(b, total, b.add(b.add(result, offsets[q]), place), 4)
        return context.get_dummy_value()

    return types.void(queries, *[types.intp] * 6), codegen


@inline
def weigh(state, padded, begin, end):  # type: ignore[no-untyped-def]
    """From the scores of a page to weights, for one query that sees its positions begin <= i < end.

    Updates the query's largest score and sum of weights, and says by how much its result so far decays.
    """
    scores, numbers = state, state + 4 * POSITIONS
    if end <= 0 or begin >= POSITIONS:
        for i in range(0, 4 * POSITIONS, 64):
            vstore(scores + i, vsplat(0.0))
        put_f32(numbers + DECAY, 1.0)
        return
    if begin > 0 or end < POSITIONS:
        for i in range(4):
            vstore(scores + 64 * i, vkeep(vload(scores + 64 * i), begin - 16 * i, end - 16 * i))
    peak = vmax(vmax(vload(scores), vload(scores + 64)), vmax(vload(scores + 128), vload(scores + 192)))
    before = get_f32(numbers + LARGEST)
    largest = max(before, vmaximum(peak))
    total, shift = vsplat(0.0), vsplat(largest)
    for i in range(0, 4 * POSITIONS, 64):
        e = vexp(vsub(vload(scores + i), shift))
        vstore(scores + i, e)
        total = vadd(total, e)
    decay = math.exp(before - largest)
    put_f32(numbers + DECAY, decay)
    put_f32(numbers + TOTAL, get_f32(numbers + TOTAL) * decay + vsum(total))
    put_f32(numbers + LARGEST, largest)


def attend(tile: int, vectors: int) -> Kernel:
    """A unit is a few rows of one session with all query heads that share one key head: a page is read and widened once for them.

    Queries are taken `tile` at a time against `vectors` x 16 positions.  What one query computes depends on nothing else.
    """

    def kernel(row, thread, threads):  # type: ignore[no-untyped-def]
        kv_heads, dim, padded = word(row, KV_HEADS), word(row, HEAD_DIM), word(row, PADDED)
        shared = word(row, HEADS) // kv_heads
        scale, window = get_f32(row + 8 * SCALE), word(row, WINDOW)
        step = state_bytes(padded)
        states = word(row, SCRATCH) + thread * (ROWS_TOGETHER * shared * step)
        numbers, query, result = 4 * POSITIONS, 4 * POSITIONS + NUMBERS, 4 * POSITIONS + NUMBERS + 4 * padded
        count = get_i64(word(row, COUNT))
        blocks = (count + ROWS_TOGETHER - 1) // ROWS_TOGETHER
        for unit in range(thread, blocks * kv_heads, threads):
            head, r = unit % kv_heads, unit // kv_heads * ROWS_TOGETHER
            stop = min(r + ROWS_TOGETHER, count)
            while r < stop:
                # Rows that follow each other in one session, first to last.
                slot = get_i32(word(row, SLOTS) + 4 * r)
                table, rows = get_i64(word(row, TABLES) + 8 * r), 1
                while r + rows < stop and (
                    get_i64(word(row, TABLES) + 8 * (r + rows)) == table
                    and get_i32(word(row, SLOTS) + 4 * (r + rows)) == slot + rows
                ):
                    rows += 1
                queries = rows * shared
                for q in range(queries):
                    source = word(row, X) + (r + q // shared) * word(row, X_ROW) + word(row, Q_OFFSET)
                    state, x = states + q * step, source + 4 * dim * (head * shared + q % shared)
                    for i in range(dim):
                        put_f32(state + query + 4 * i, get_f32(x + 4 * i) * scale)
                    for c in range(0, padded, 16):
                        vstore(state + result + 4 * c, vsplat(0.0))
                    put_f32(state + numbers + LARGEST, -1e30)
                    put_f32(state + numbers + TOTAL, 0.0)
                begin = max(0, slot + 1 - window) if window > 0 else 0
                for start in range(begin // POSITIONS * POSITIONS, slot + rows, POSITIONS):
                    keys = page_of(row, r, start, head)
                    q = 0
                    while queries - q >= tile:
                        for p in range(0, 4, vectors):
                            at = states + q * step
                            score_tile(tile, vectors, keys + 32 * p, at + query, step, dim, at + 64 * p)
                        q += tile
                    while queries - q >= 1:
                        for p in range(0, 4, vectors):
                            at = states + q * step
                            score_tile(1, vectors, keys + 32 * p, at + query, step, dim, at + 64 * p)
                        q += 1
                    for q in range(queries):
                        end = slot + q // shared + 1
                        weigh(states + q * step, padded, max(0, end - window) - start if window > 0 else 0, end - start)
                    values, q = keys + 2 * POSITIONS * padded, 0
                    while queries - q >= tile:
                        at = states + q * step
                        value_tile(tile, values, padded, at, at + result, at + numbers + DECAY, step)
                        q += tile
                    while queries - q >= 1:
                        at = states + q * step
                        value_tile(1, values, padded, at, at + result, at + numbers + DECAY, step)
                        q += 1
                for q in range(queries):
                    state = states + q * step
                    out = word(row, OUT) + (r + q // shared) * word(row, OUT_ROW) + 4 * dim * (head * shared + q % shared)
                    total = get_f32(state + numbers + TOTAL)
                    for i in range(dim):
                        put_f32(out + 4 * i, get_f32(state + result + 4 * i) / total)
                r += rows

    return kernel
