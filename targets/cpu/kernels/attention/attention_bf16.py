"""Attention in bf16, for rows that see ranges of slots: the towers of pictures.

Products take queries, keys, weights and values as bf16, sums are float32; a processor's matrix unit multiplies (matrix_unit.py)
or instructions for pairs of bf16 (bf16_vectors.py).  A work item is a head and up to ROWS rows of one session.  They pass over
the slots in blocks, whose keys and values are brought into the order of the products once for all of them, with a running
maximum (online softmax: Milakov and Gimelshein 2018); nothing grows with the square of their number.  What a row computes
depends on its range alone.

Scores are in powers of two: the scale of the softmax, times log2(e), is in the queries.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, inline
from edgeq.targets.cpu.jit.simd import (
    ADDRESS,
    BF16,
    I32,
    VF32,
    VI32,
    VOID,
    call,
    constant,
    f32x16,
    get_f16s,
    get_f32,
    get_i32,
    get_i64,
    primitive,
    put_f32,
    store,
    vadd,
    vdiv,
    vfirst,
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
from edgeq.targets.cpu.kernels.attention.attention import AttentionArgs
from edgeq.targets.cpu.kernels.attention.attention_state import NOTHING
from edgeq.targets.cpu.kernels.attention.bf16_panel import (
    BLOCK,
    MATRIX_UNIT,
    PANEL,
    ROWS,
    STEP,
    WEIGHTS_STRIDE,
    PanelScratch,
    matrix_products,
    vector_products,
)
from edgeq.targets.cpu.kernels.attention.kv_layout import F16_KV, POSITIONS, half_bytes, keys_at
from edgeq.targets.cpu.kernels.products.matrix_unit import ROW_BYTES, SIDE, TILE_BYTES

LOG2_E = math.log2(math.e)
EXP2 = (0.99992807, 0.69326099, 0.24261112, 0.05517166)


@primitive(VOID, ADDRESS, f32x16, f32x16)
def put_bf16s(b: Any, address: Any, x: Any, y: Any) -> None:
    """Thirty-two numbers as bf16: those of x, then those of y."""
    order = ir.Constant(ir.VectorType(I32, 32), list(range(32)))
    store(b, b.fptrunc(b.shuffle_vector(x, y, order), ir.VectorType(BF16, 32)), address, 2)


@primitive(VOID, ADDRESS, f32x16, f32x16)
def put_pairs(b: Any, address: Any, x: Any, y: Any) -> None:
    """Sixteen pairs of bf16, a number of x and one of y in each."""
    order = ir.Constant(ir.VectorType(I32, 32), [i // 2 + 16 * (i % 2) for i in range(32)])
    store(b, b.fptrunc(b.shuffle_vector(x, y, order), ir.VectorType(BF16, 32)), address, 2)


@primitive(f32x16, f32x16)
def vexp2(b: Any, x: Any) -> Any:
    """2^x within 8e-5 of it for x <= 0, at least 2^-126: what becomes a bf16 keeps 4e-3.  NaN stays.

    2^x = 2^n 2^r: to the nearest whole number n where there is no room for more, by a number whose last bit counts ones, and a
    polynomial in r of the least relative error for |r| <= 1/2.
    """
    low, whole = constant(VF32, -126.0), constant(VF32, 1.5 * 2**23)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    counted = b.fadd(x, whole)
    r, p = b.fsub(x, b.fsub(counted, whole)), constant(VF32, EXP2[3])
    for c in EXP2[2::-1]:
        p = call(b, "llvm.fmuladd.v16f32", VF32, p, r, constant(VF32, c))
    exponent = b.shl(b.bitcast(counted, VI32), constant(VI32, 23))
    return b.bitcast(b.add(b.bitcast(p, VI32), exponent), VF32)


@primitive(f32x16, f32x16)
def vfinite(b: Any, x: Any) -> Any:
    """x, and 0 for NaN: no position that is not seen may bring any."""
    return b.select(b.fcmp_ordered("==", x, x), x, constant(VF32, 0.0))


@primitive(f32x16, f32x16)
def vmark(b: Any, x: Any) -> Any:
    """0, and NaN for NaN."""
    return b.select(b.fcmp_ordered("==", x, x), constant(VF32, 0.0), constant(VF32, math.nan))


@inline
def begins_at(args, r):
    return get_i32(args.spans + 4 * r)


@inline
def ends_at(args, r):
    return get_i32(args.spans + args.span_stride + 4 * r)


@inline
def range_of(args, r, stop):
    """The slots that any of the rows [r, stop) sees."""
    begin, end = begins_at(args, r), ends_at(args, r)
    for i in range(r + 1, stop):
        begin, end = min(begin, begins_at(args, i)), max(end, ends_at(args, i))
    return begin, end


def attend_bf16(dim: int, unit: int) -> Kernel:
    """Attention of heads of `dim` channels to an f16 cache, over the ranges of `AttentionArgs.spans`; `unit` multiplies."""
    room, products = PanelScratch(dim, unit), matrix_products(dim) if unit == MATRIX_UNIT else vector_products(dim)
    begin_products, score, gather, end_products = products
    steps, columns, whole = room.steps, room.columns, dim // SIDE * SIDE
    at, column_bytes = room.at, room.column_bytes
    queries_at, keys_room, values_room, scores_at = at["queries"], at["keys"], at["values"], at["scores"]
    weights_at, results_at, totals_at, largest_at = at["weights"], at["results"], at["totals"], at["largest"]
    room_bytes, width, value_row = room.nbytes, steps * STEP, 2 * padded(dim)
    row_of_values = BLOCK // STEP * TILE_BYTES

    @inline
    def channel(line, c):
        """Channels c ... c + 15 of a row of floats, zeros after the head."""
        if c >= dim:
            return vsplat(0.0)
        if c + SIDE > dim:
            return vfirst(vload(line + 4 * c), dim - c)
        return vload(line + 4 * c)

    @always_inline
    def take_queries(args, states, head, rows):
        """Queries of rows [start, stop) of the run, and results of nothing."""
        start, stop = rows
        scale = vsplat(args.scale * LOG2_E)
        for i in range(stop - start):
            line = args.x + (start + i) * args.x_stride + args.q_offset + 4 * dim * head
            for c in range(0, width, STEP):
                low, high = vmul(channel(line, c), scale), vmul(channel(line, c + SIDE), scale)
                put_bf16s(states + queries_at + i * steps * ROW_BYTES + 2 * c, low, high)
            put_f32(states + largest_at + 4 * i, NOTHING)
            vstore(states + totals_at + ROW_BYTES * i, vsplat(0.0))
        for i in range((stop - start + PANEL - 1) // PANEL * columns * column_bytes // ROW_BYTES):
            vstore(states + results_at + ROW_BYTES * i, vsplat(0.0))

    @always_inline
    def take_slots(args, states, r, kv_head, slots):
        """Keys and values of slots [begin, end) of a block from `first` on, whole steps: channels in pairs, slots in pairs."""
        first, begin, end = slots
        for slot in range(begin, end, SIDE):
            keys = keys_at(args, r, slot, kv_head, F16_KV)
            values = keys + half_bytes(dim, 0, F16_KV) + value_row * (slot % POSITIONS)
            keys += 2 * (slot % POSITIONS)
            place = slot - first
            for i in range(0, SIDE, 2):
                row = place + i
                out = states + values_room + row // STEP * TILE_BYTES + row % STEP // 2 * ROW_BYTES
                mark = vsplat(0.0)
                mark_after = vsplat(0.0)
                for c in range(columns):
                    one, two = vsplat(0.0), vsplat(0.0)
                    if SIDE * c < dim:
                        one = get_f16s(values + value_row * i + 2 * SIDE * c)
                        two = get_f16s(values + value_row * (i + 1) + 2 * SIDE * c)
                    mark, mark_after = vadd(mark, vmark(one)), vadd(mark_after, vmark(two))
                    put_pairs(out + c * row_of_values, vfinite(one), vfinite(two))
                # The marks of 16 slots become a vector, in the room of the scores.
                put_f32(states + scores_at + 4 * i, vsum(mark))
                put_f32(states + scores_at + 4 * i + 4, vsum(mark_after))
            out, marks = states + keys_room + place // SIDE * steps * TILE_BYTES, vload(states + scores_at)
            for d in range(0, width, 2):
                one, two = vsplat(0.0), vsplat(0.0)
                if d < dim:
                    one = get_f16s(keys + 2 * POSITIONS * d)
                if d + 1 < dim:
                    two = get_f16s(keys + 2 * POSITIONS * (d + 1))
                if d == 0:
                    one = vadd(one, marks)
                put_pairs(out + d // 2 * ROW_BYTES, one, two)

    @always_inline
    def weigh(args, states, panel, row, slots):
        """The weights of a row, number `row` of its panel, for the slots [begin, end) of a block from `first` on, of which it
        sees some; what it has so far decays as its largest score grows."""
        first, begin, end, seen, seen_end = slots
        i = panel * PANEL + row
        scores, weights = states + scores_at + ROW_BYTES * row, states + weights_at + WEIGHTS_STRIDE * row
        if seen_end <= begin or seen >= end:
            for c in range(begin - first, end - first, STEP):
                vstore(weights + 2 * c, vsplat(0.0))
            return
        peak = vsplat(NOTHING)
        if seen > begin or seen_end < end:
            for c in range(begin - first, end - first, SIDE):
                place = scores + c // SIDE * column_bytes
                vstore(place, vkeep(vload(place), seen - first - c, seen_end - first - c))
        for c in range(begin - first, end - first, STEP):
            place = scores + c // SIDE * column_bytes
            peak = vmax(vmax(vload(place), vload(place + column_bytes)), peak)
        before, largest = get_f32(states + largest_at + 4 * i), vmaximum(peak)
        totals = vload(states + totals_at + ROW_BYTES * i)
        if largest > before:
            put_f32(states + largest_at + 4 * i, largest)
            decay = vexp2(vsplat(before - largest))
            totals = vmul(totals, decay)
            for c in range(columns):
                place = states + results_at + (panel * columns + c) * column_bytes + ROW_BYTES * row
                vstore(place, vmul(vload(place), decay))
        else:
            largest = before
        shift = vsplat(largest)
        for c in range(begin - first, end - first, STEP):
            place = scores + c // SIDE * column_bytes
            low, high = vexp2(vsub(vload(place), shift)), vexp2(vsub(vload(place + column_bytes), shift))
            totals = vadd(totals, vadd(low, high))
            put_bf16s(weights + 2 * c, low, high)
        vstore(states + totals_at + ROW_BYTES * i, totals)

    @always_inline
    def attend_panel(args, states, panel, rows, slots):
        """The rows [start, stop), panel `panel` of a unit, and the slots [begin, end) of a block from `first` on."""
        (start, stop), (first, begin, end) = rows, slots
        queries = states + queries_at + panel * PANEL * steps * ROW_BYTES
        keys = states + keys_room + (begin - first) // SIDE * steps * TILE_BYTES
        scores = states + scores_at + (begin - first) // SIDE * column_bytes
        score(queries, keys, (end - begin) // SIDE, stop - start, scores)
        for row in range(stop - start):
            r = start + row
            weigh(args, states, panel, row, (first, begin, end, begins_at(args, r), ends_at(args, r)))
        weights = states + weights_at + 2 * (begin - first)
        values = states + values_room + (begin - first) // STEP * TILE_BYTES
        gather(weights, values, (end - begin) // STEP, stop - start, states + results_at + panel * columns * column_bytes)

    @always_inline
    def put_results(args, states, head, rows):
        start, stop = rows
        for i in range(stop - start):
            out = args.out + (start + i) * args.out_stride + 4 * dim * head
            total = vsum(vload(states + totals_at + ROW_BYTES * i))
            if get_f32(states + largest_at + 4 * i) <= NOTHING:
                total = math.nan
            source, divisor = states + results_at + i // PANEL * columns * column_bytes + i % PANEL * ROW_BYTES, vsplat(total)
            for c in range(0, whole, SIDE):
                vstore(out + 4 * c, vdiv(vload(source + c // SIDE * column_bytes), divisor))
            for c in range(whole, dim):
                put_f32(out + 4 * c, get_f32(source + whole // SIDE * column_bytes + 4 * (c - whole)) / total)

    def kernel(record, part, parts, thread):
        args = AttentionArgs(record)
        heads, count, states = args.heads, get_i64(args.rows), args.scratch + thread * room_bytes
        shared, groups = heads // args.kv_heads, (count + ROWS - 1) // ROWS
        begin_products(states)
        for item in range(groups * heads * part // parts, groups * heads * (part + 1) // parts):
            head, start, last = item // groups, item % groups * ROWS, min(item % groups * ROWS + ROWS, count)
            while start < last:
                stop = start + 1
                pages = get_i64(args.page_tables + 8 * start)
                while stop < last and get_i64(args.page_tables + 8 * stop) == pages:
                    stop += 1
                take_queries(args, states, head, (start, stop))
                begin, end = range_of(args, start, stop)
                for first in range(begin // BLOCK * BLOCK, end, BLOCK):
                    from_slot = max(first, begin // STEP * STEP)
                    to_slot = min(first + BLOCK, (end + STEP - 1) // STEP * STEP)
                    take_slots(args, states, start, head // shared, (first, from_slot, to_slot))
                    for r in range(start, stop, PANEL):
                        r_stop = min(r + PANEL, stop)
                        seen, seen_end = range_of(args, r, r_stop)
                        seen = max(from_slot, seen // STEP * STEP)
                        seen_end = min(to_slot, (seen_end + STEP - 1) // STEP * STEP)
                        if seen < seen_end:
                            attend_panel(args, states, (r - start) // PANEL, (r, r_stop), (first, seen, seen_end))
                put_results(args, states, head, (start, stop))
                start = stop
        end_products()

    return kernel
