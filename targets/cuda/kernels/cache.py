"""What a page of the cache holds: for each layer the keys of every kv head, then the values of every kv head, in halves.

    f16    [64 positions][head_dim]
    int8   codes i8 [64][head_dim], then scales f32 [64]
    int4   bytes [64][(head_dim - high + 1) / 2 + high]: two dimensions in a byte, the first in its low half, then each of the
           `high` last ones in a byte; then scales f32 [64] and offsets f32 [64] of the dimensions in 4 bits, and after them of
           those in 8, where there are any.  A number is offset + scale * code

pool      the address that page offsets count from, as numbers or bytes;  numbers: the same as f32
pages     int64, in units of 16 bytes: offset of each page of each session of the run
tables    int32 per token row: where its session's pages begin in `pages`
slots     int32 per token row: its place in the cache of its session
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import INFINITY_BITS, MAX_F32, NAN_BITS, THREADS
from edgeq.targets.rows import PAGE

MAX_F16 = 65504.0
WARPS = THREADS // 32


def rounded(x):
    """x as f16: limited to its range, infinities and NaN as NaN."""
    finite = T.abs(x) <= T.float32(MAX_F32)
    limited = T.max(T.min(x, T.float32(MAX_F16)), T.float32(-MAX_F16))
    return T.Cast("float16", T.if_then_else(finite, limited, T.reinterpret("float32", T.uint32(NAN_BITS))))


@T.inline
def put_f16(pool, page, half, slot, dimension, head_dim, value):
    """One number of a half of a page."""
    inside: T.let = (half * PAGE + slot % PAGE) * head_dim + dimension
    pool[page * T.int64(8) + T.Cast("int64", inside)] = rounded(value)


def cache_write():
    """Keys k and values v [token rows, width] into the slots of their rows, as f16; an infinity becomes NaN."""

    @T.prim_func
    def cache_write_(k_: T.handle, v_: T.handle, pool_: T.handle, pages_: T.handle, tables_: T.handle, slots_: T.handle,
                     tokens: T.int32, width: T.int32, kv_heads: T.int32, head_dim: T.int32, layer: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nk, nv, np, ng, nt, ns = T.int32(), T.int32(), T.int64(), T.int32(), T.int32(), T.int32()
        k = T.match_buffer(k_, (nk,), "float32")
        v = T.match_buffer(v_, (nv,), "float32")
        pool = T.match_buffer(pool_, (np,), "float16")
        pages = T.match_buffer(pages_, (ng,), "int64")
        tables = T.match_buffer(tables_, (nt,), "int32")
        slots = T.match_buffer(slots_, (ns,), "int32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(kv_heads * head_dim, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        unit: T.let = part * THREADS + warp * 32 + lane
        if unit < kv_heads * head_dim:
            slot: T.let = slots[row]
            page: T.let = pages[tables[row] + slot // PAGE]
            keys: T.let = layer * 2 * kv_heads + unit // head_dim
            put_f16(pool, page, keys, slot, unit % head_dim, head_dim, k[row * width + unit])
            put_f16(pool, page, keys + kv_heads, slot, unit % head_dim, head_dim, v[row * width + unit])

    return cache_write_


@T.inline
def range_of(span, bits, x, first, count, lane):
    """span: the least and the largest of x[first : first + count] in every lane; bits: the largest |x|, as its bits."""
    span[0] = T.float32(MAX_F32)
    span[1] = T.float32(-MAX_F32)
    bits[0] = T.uint32(0)
    for i in T.serial(T.ceildiv(count, 32)):
        if i * 32 + lane < count:
            bits[0] = T.max(bits[0], T.reinterpret("uint32", x[first + i * 32 + lane]) & T.uint32(0x7FFFFFFF))
            span[0] = T.min(span[0], x[first + i * 32 + lane])
            span[1] = T.max(span[1], x[first + i * 32 + lane])
    for level in T.unroll(5):
        bits[0] = T.max(bits[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), bits[0], 1 << level, 32, 32))
        span[0] = T.min(span[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), span[0], 1 << level, 32, 32))
        span[1] = T.max(span[1], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), span[1], 1 << level, 32, 32))


@T.inline
def put_int8(pool, numbers, page, half, slot, x, at, head_dim, lane):
    """By one warp: x[at : at + head_dim] into a half of a page."""
    span = T.alloc_local((2,), "float32")
    bits = T.alloc_local((1,), "uint32")
    unit = T.alloc_local((2,), "float32")
    inside: T.let = half * (PAGE * (head_dim + 4))
    range_of(span, bits, x, at, head_dim, lane)
    unit[0] = T.reinterpret("float32", bits[0]) / T.float32(127)
    if bits[0] >= T.uint32(INFINITY_BITS):
        unit[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
    unit[1] = T.if_then_else(unit[0] > T.float32(0), unit[0], T.float32(1))
    for i in T.serial(T.ceildiv(head_dim, 32)):
        if i * 32 + lane < head_dim:
            to: T.let = page * T.int64(16) + T.Cast("int64", inside + slot % PAGE * head_dim + i * 32 + lane)
            pool[to] = T.int8(0)
            if bits[0] < T.uint32(INFINITY_BITS):
                pool[to] = T.Cast("int8", T.max(T.min(
                    T.nearbyint(x[at + i * 32 + lane] / unit[1]), T.float32(127)), T.float32(-127)))  # fmt: skip
    if lane == 0:
        numbers[page * T.int64(4) + T.Cast("int64", inside // 4 + PAGE * head_dim // 4 + slot % PAGE)] = unit[0]


def cache_write_int8():
    """Keys and values as integers of -127 ... 127 with a scale max|x| / 127 per position and head; a warp has one head.

    A head with a number that is not finite has the scale NaN.
    """

    @T.prim_func
    def cache_write_int8_(k_: T.handle, v_: T.handle, pool_: T.handle, numbers_: T.handle, pages_: T.handle, tables_: T.handle,
                          slots_: T.handle, tokens: T.int32, width: T.int32, kv_heads: T.int32, head_dim: T.int32,
                          layer: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nk, nv, np, nn, ng, nt, ns = T.int32(), T.int32(), T.int64(), T.int64(), T.int32(), T.int32(), T.int32()
        k = T.match_buffer(k_, (nk,), "float32")
        v = T.match_buffer(v_, (nv,), "float32")
        pool = T.match_buffer(pool_, (np,), "int8")
        numbers = T.match_buffer(numbers_, (nn,), "float32")
        pages = T.match_buffer(pages_, (ng,), "int64")
        tables = T.match_buffer(tables_, (nt,), "int32")
        slots = T.match_buffer(slots_, (ns,), "int32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(2 * kv_heads, WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        half: T.let = part * WARPS + warp
        slot: T.let = slots[row]
        if half < 2 * kv_heads:
            page: T.let = pages[tables[row] + slot // PAGE]
            place: T.let = layer * 2 * kv_heads + half
            if half < kv_heads:
                put_int8(pool, numbers, page, place, slot, k, row * width + half * head_dim, head_dim, lane)
            if half >= kv_heads:
                put_int8(pool, numbers, page, place, slot, v, row * width + (half - kv_heads) * head_dim, head_dim, lane)

    return cache_write_int8_


@T.inline
def put_int4(pool, numbers, page, half, slot, x, at, head_dim, high, top, with_zero, lane):
    """By one warp: x[at : at + head_dim] into a half of a page; `with_zero`: the range has 0 in it."""
    span = T.alloc_local((2,), "float32")
    bits = T.alloc_local((1,), "uint32")
    unit = T.alloc_local((2,), "float32")
    code = T.alloc_local((2,), "uint32")

    @T.inline
    def measure(first, count, levels):
        range_of(span, bits, x, first, count, lane)
        if with_zero:
            span[0] = T.min(span[0], T.float32(0))
            span[1] = T.max(span[1], T.float32(0))
        for i in T.unroll(2):
            span[i] = T.max(T.min(span[i], T.float32(MAX_F16)), T.float32(-MAX_F16))
        unit[0] = (span[1] - span[0]) / levels
        if bits[0] >= T.uint32(INFINITY_BITS):
            unit[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
        unit[1] = T.if_then_else(unit[0] > T.float32(0), unit[0], T.float32(1))

    @T.inline
    def encode(index, value, levels):
        code[index] = T.uint32(0)
        if bits[0] < T.uint32(INFINITY_BITS):
            limited: T.let = T.max(T.min(value, T.float32(MAX_F16)), T.float32(-MAX_F16))
            code[index] = T.Cast("uint32", T.max(T.min(
                T.nearbyint((limited - span[0]) / unit[1]), levels), T.float32(0)))  # fmt: skip

    low: T.let = head_dim - high
    each: T.let = (low + 1) // 2 + high
    extra: T.let = T.if_then_else(low > 0, 8, 0) + T.if_then_else(high > 0, 8, 0)
    inside: T.let = half * (PAGE * (each + extra))
    place: T.let = slot % PAGE
    scales: T.let = page * T.int64(4) + T.Cast("int64", inside // 4 + PAGE * each // 4 + place)
    if low > 0:
        measure(at, low, top)
        for i in T.serial(T.ceildiv((low + 1) // 2, 32)):
            pair: T.let = i * 32 + lane
            if pair * 2 < low:
                encode(0, x[at + pair * 2], top)
                code[1] = T.uint32(0)
                if pair * 2 + 1 < low:
                    encode(1, x[at + pair * 2 + 1], top)
                pool[page * T.int64(16) + T.Cast("int64", inside + place * each + pair)] = T.Cast(
                    "uint8", code[0] | (code[1] << T.uint32(4))
                )
        if lane == 0:
            numbers[scales] = unit[0]
            numbers[scales + T.int64(PAGE)] = span[0]
    if high > 0:
        measure(at + low, high, T.float32(255))
        for i in T.serial(T.ceildiv(high, 32)):
            if i * 32 + lane < high:
                encode(0, x[at + low + i * 32 + lane], T.float32(255))
                byte: T.let = inside + place * each + (low + 1) // 2 + i * 32 + lane
                pool[page * T.int64(16) + T.Cast("int64", byte)] = T.Cast("uint8", code[0])
        if lane == 0:
            numbers[scales + T.Cast("int64", T.if_then_else(low > 0, 2 * PAGE, 0))] = unit[0]
            numbers[scales + T.Cast("int64", T.if_then_else(low > 0, 3 * PAGE, PAGE))] = span[0]


def cache_write_int4():
    """Keys and values as codes 0 ... `top` over the range of a head, its last `high` dimensions as 0 ... 255 over theirs.

    The range of keys has 0 in it.  A range with a number that is not finite has the scale NaN.  A warp has one head.
    """

    @T.prim_func
    def cache_write_int4_(k_: T.handle, v_: T.handle, pool_: T.handle, numbers_: T.handle, pages_: T.handle, tables_: T.handle,
                          slots_: T.handle, tokens: T.int32, width: T.int32, kv_heads: T.int32, head_dim: T.int32,
                          layer: T.int32, high: T.int32, top: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nk, nv, np, nn, ng, nt, ns = T.int32(), T.int32(), T.int64(), T.int64(), T.int32(), T.int32(), T.int32()
        k = T.match_buffer(k_, (nk,), "float32")
        v = T.match_buffer(v_, (nv,), "float32")
        pool = T.match_buffer(pool_, (np,), "uint8")
        numbers = T.match_buffer(numbers_, (nn,), "float32")
        pages = T.match_buffer(pages_, (ng,), "int64")
        tables = T.match_buffer(tables_, (nt,), "int32")
        slots = T.match_buffer(slots_, (ns,), "int32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(2 * kv_heads, WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        half: T.let = part * WARPS + warp
        slot: T.let = slots[row]
        if half < 2 * kv_heads:
            page: T.let = pages[tables[row] + slot // PAGE]
            place: T.let = layer * 2 * kv_heads + half
            if half < kv_heads:
                put_int4(pool, numbers, page, place, slot, k, row * width + half * head_dim, head_dim, high, top, True, lane)
            if half >= kv_heads:
                put_int4(pool, numbers, page, place, slot, v, row * width + (half - kv_heads) * head_dim, head_dim, high, top,
                         False, lane)  # fmt: skip

    return cache_write_int4_
