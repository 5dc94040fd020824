"""Attention over the cache.

A run first writes the keys and values of all its rows (rotary.py), then every row attends to the slots it sees, page by page
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
from edgeq.targets.cpu.pages import (
    HEAD_DIM,
    HEADS,
    INT8_KV,
    KV_HEADS,
    PADDED,
    POSITIONS,
    SLOTS,
    TABLES,
    X_ROW,
    X,
    half_bytes,
    keys_at,
)
from edgeq.targets.cpu.vector import (
    F32,
    I8,
    I64,
    LANES,
    VF16,
    VF32,
    call,
    constant,
    get_f32,
    get_i32,
    get_i64,
    load,
    put_f32,
    splat,
    store,
    vadd,
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

Kernel = Callable[[int, int, int, int], None]

Q_OFFSET, OUT, OUT_ROW, WINDOW, SCALE, SCRATCH = 11, 12, 13, 14, 15, 16
"""Table words: byte offset of the queries in a row of x, result and its row bytes, positions a row sees or 0, softmax scale
(bits of an f32), scratch of all threads."""

# What a query keeps while the pages pass: scores or weights of a page, three numbers, the query and its result.
LARGEST, TOTAL, DECAY = 0, 4, 8
NUMBERS = 64

ROWS_TOGETHER = 4


@inline
def state_bytes(padded):  # type: ignore[no-untyped-def]
    return 4 * POSITIONS + NUMBERS + 8 * padded


def scratch_bytes(shared: int, padded: int) -> int:
    """Per thread, where `shared` query heads share a key head."""
    return ROWS_TOGETHER * shared * int(state_bytes.py_func(padded))


def widened(b: Any, address: Any, int8: bool) -> Any:
    """Sixteen numbers of the cache as float32."""
    if int8:
        return b.sitofp(load(b, address, ir.VectorType(I8, LANES)), VF32)
    return b.fpext(load(b, address, VF16, 2), VF32)


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def score_tile(
    typing: Any, code: Any, queries: Any, vectors: Any, keys: Any, query: Any, step: Any, dim: Any, scores: Any
) -> Any:
    """scores[q][16 p + lane] = query q . key of that position, for `queries` queries and `vectors` x 16 positions.

    Queries, and their scores, lie `step` bytes apart.  Literals: code of the cache, queries, vectors.
    """
    int8, count, width = code.literal_value == INT8_KV, queries.literal_value, vectors.literal_value
    number = 1 if int8 else 2

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        keys, query, step, dim, scores = args[3:]
        sums = [[cgutils.alloca_once(b, VF32) for _ in range(width)] for _ in range(count)]
        for slot in (slot for row in sums for slot in row):
            b.store(constant(VF32, 0.0), slot)
        offsets = [b.mul(step, ir.Constant(I64, q)) for q in range(count)]
        with cgutils.for_range(b, dim) as loop:
            line = b.add(keys, b.mul(loop.index, ir.Constant(I64, number * POSITIONS)))
            key = [widened(b, b.add(line, ir.Constant(I64, 16 * number * p)), int8) for p in range(width)]
            for q in range(count):
                at = b.add(b.add(query, offsets[q]), b.mul(loop.index, ir.Constant(I64, 4)))
                value = splat(b, load(b, at, F32, 4), VF32)
                for p in range(width):
                    b.store(call(b, "llvm.fmuladd.v16f32", VF32, key[p], value, b.load(sums[q][p])), sums[q][p])
        for q in range(count):
            for p in range(width):
                store(b, b.load(sums[q][p]), b.add(b.add(scores, offsets[q]), ir.Constant(I64, 64 * p)), 4)
        return context.get_dummy_value()

    return types.void(code, queries, vectors, *[types.intp] * 5), codegen


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def value_tile(
    typing: Any, code: Any, queries: Any, values: Any, padded: Any, weights: Any, result: Any, decay: Any, step: Any
) -> Any:
    """result[q] = result[q] * decay[q] + the page's values by weights[q]; two sums, of even and of odd positions.

    weights, result and decay (an f32) of a query lie `step` bytes behind those of the one before.  Literals: code of the
    cache, queries.
    """
    int8, count = code.literal_value == INT8_KV, queries.literal_value
    number = 1 if int8 else 2

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, padded, weights, result, decay, step = args[2:]
        sums = [[cgutils.alloca_once(b, VF32) for _ in range(2)] for _ in range(count)]
        offsets = [b.mul(step, ir.Constant(I64, q)) for q in range(count)]
        row = b.mul(padded, ir.Constant(I64, number))
        with cgutils.for_range(b, b.lshr(padded, ir.Constant(I64, 4))) as columns:
            place = b.mul(columns.index, ir.Constant(I64, 64))
            for q in range(count):
                factor = splat(b, load(b, b.add(decay, offsets[q]), F32, 4), VF32)
                b.store(b.fmul(load(b, b.add(b.add(result, offsets[q]), place), VF32, 4), factor), sums[q][0])
                b.store(constant(VF32, 0.0), sums[q][1])
            first = b.add(values, b.mul(columns.index, ir.Constant(I64, 16 * number)))
            with cgutils.for_range(b, ir.Constant(I64, POSITIONS // 2)) as pairs:
                for odd in range(2):
                    position = b.add(b.mul(pairs.index, ir.Constant(I64, 2)), ir.Constant(I64, odd))
                    value = widened(b, b.add(first, b.mul(position, row)), int8)
                    for q in range(count):
                        at = b.add(b.add(weights, offsets[q]), b.mul(position, ir.Constant(I64, 4)))
                        weight, slot = splat(b, load(b, at, F32, 4), VF32), sums[q][odd]
                        b.store(call(b, "llvm.fmuladd.v16f32", VF32, value, weight, b.load(slot)), slot)
            for q in range(count):
                total = b.fadd(b.load(sums[q][0]), b.load(sums[q][1]))
                store(b, total, b.add(b.add(result, offsets[q]), place), 4)
        return context.get_dummy_value()

    return types.void(code, queries, *[types.intp] * 6), codegen


@inline
def weigh(state, begin, end, key_scales, value_scales, code):  # type: ignore[no-untyped-def]
    """From the scores of a page to weights, for one query that sees its positions begin <= i < end.

    Updates the query's largest score and sum of weights, and says by how much its result so far decays.  Scales of an int8
    cache belong to positions, so keys' multiply scores and values' multiply weights.
    """
    scores, numbers = state, state + 4 * POSITIONS
    if end <= 0 or begin >= POSITIONS:
        for i in range(0, 4 * POSITIONS, 64):
            vstore(scores + i, vsplat(0.0))
        put_f32(numbers + DECAY, 1.0)
        return
    if code == INT8_KV:
        for i in range(0, 4 * POSITIONS, 64):
            vstore(scores + i, vmul(vload(scores + i), vload(key_scales + i)))
    if begin > 0 or end < POSITIONS:
        for i in range(4):
            vstore(scores + 64 * i, vkeep(vload(scores + 64 * i), begin - 16 * i, end - 16 * i))
    peak = vmax(vmax(vload(scores), vload(scores + 64)), vmax(vload(scores + 128), vload(scores + 192)))
    before = get_f32(numbers + LARGEST)
    largest = max(before, vmaximum(peak))
    total, shift = vsplat(0.0), vsplat(largest)
    for i in range(0, 4 * POSITIONS, 64):
        e = vexp(vsub(vload(scores + i), shift))
        vstore(scores + i, vmul(e, vload(value_scales + i)) if code == INT8_KV else e)
        total = vadd(total, e)
    decay = math.exp(before - largest)
    put_f32(numbers + DECAY, decay)
    put_f32(numbers + TOTAL, get_f32(numbers + TOTAL) * decay + vsum(total))
    put_f32(numbers + LARGEST, largest)


def attend(code: int, tile: int, vectors: int) -> Kernel:
    """A unit is a few rows of one session with all query heads that share one key head: a page is read and widened once for
    them.

    Queries are taken `tile` at a time against `vectors` x 16 positions.  What one query computes depends on nothing else.
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        kv_heads, dim, padded = word(row, KV_HEADS), word(row, HEAD_DIM), word(row, PADDED)
        shared = word(row, HEADS) // kv_heads
        scale, window = get_f32(row + 8 * SCALE), word(row, WINDOW)
        step = state_bytes(padded)
        states = word(row, SCRATCH) + thread * (ROWS_TOGETHER * shared * step)
        numbers, query, result = 4 * POSITIONS, 4 * POSITIONS + NUMBERS, 4 * POSITIONS + NUMBERS + 4 * padded
        count = get_i64(word(row, COUNT))
        blocks = (count + ROWS_TOGETHER - 1) // ROWS_TOGETHER
        for unit in range(part, blocks * kv_heads, parts):
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
                oldest = max(0, slot + 1 - window) if window > 0 else 0
                for start in range(oldest // POSITIONS * POSITIONS, slot + rows, POSITIONS):
                    keys = keys_at(row, r, start, head, code)
                    values, number = keys + half_bytes(padded, code), 1 if code == INT8_KV else 2
                    q = 0
                    while queries - q >= tile:
                        for p in range(0, 4, vectors):
                            at = states + q * step
                            score_tile(code, tile, vectors, keys + 16 * number * p, at + query, step, dim, at + 64 * p)
                        q += tile
                    while queries - q >= 1:
                        for p in range(0, 4, vectors):
                            at = states + q * step
                            score_tile(code, 1, vectors, keys + 16 * number * p, at + query, step, dim, at + 64 * p)
                        q += 1
                    for q in range(queries):
                        end = slot + q // shared + 1
                        begin = max(0, end - window) - start if window > 0 else 0
                        scales = POSITIONS * padded
                        weigh(states + q * step, begin, end - start, keys + scales, values + scales, code)
                    q = 0
                    while queries - q >= tile:
                        at = states + q * step
                        value_tile(code, tile, values, padded, at, at + result, at + numbers + DECAY, step)
                        q += tile
                    while queries - q >= 1:
                        at = states + q * step
                        value_tile(code, 1, values, padded, at, at + result, at + numbers + DECAY, step)
                        q += 1
                for q in range(queries):
                    state = states + q * step
                    out = word(row, OUT) + (r + q // shared) * word(row, OUT_ROW) + 4 * dim * (head * shared + q % shared)
                    total = get_f32(state + numbers + TOTAL)
                    for i in range(dim):
                        put_f32(out + 4 * i, get_f32(state + result + 4 * i) / total)
                r += rows

    return kernel
