"""Rotary positions, the cache, and attention over it.

A cache page holds 64 positions of all layers: for each layer and key/value head the keys as f16 [head_dim][64], so that a dot
product with a query runs over positions in lanes and needs no horizontal sum, then the values as f16 [64][head_dim].  Head_dim is
padded to 16.  A run first writes the keys and values of all its rows, then every row attends to the slots it sees, page by page
with a running maximum (online softmax: Milakov and Gimelshein 2018), in an order that depends on the slots alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from edgeq.targets.cpu.compiled import COUNT, inline, word
from edgeq.targets.cpu.vector import (
    get_f32,
    get_i32,
    get_i64,
    put_f16,
    put_f32,
    vadd,
    vexp,
    vfma,
    vkeep,
    vload,
    vload_f16,
    vmax,
    vmaximum,
    vmul,
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


def scratch_bytes(padded: int) -> int:
    """Per thread: a query, a result, and the weights of a page."""
    return 4 * (2 * padded + POSITIONS)


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


@inline
def page_scores(keys, query, dim, weights, first, last):  # type: ignore[no-untyped-def]
    """Dot products of the query with 64 keys, kept in weights; positions outside [first, last) count for nothing.

    Returns the largest.
    """
    s0, s1, s2, s3 = vsplat(0.0), vsplat(0.0), vsplat(0.0), vsplat(0.0)
    for i in range(dim):
        q, k = vsplat(get_f32(query + 4 * i)), keys + 2 * POSITIONS * i
        s0 = vfma(vload_f16(k), q, s0)
        s1 = vfma(vload_f16(k + 32), q, s1)
        s2 = vfma(vload_f16(k + 64), q, s2)
        s3 = vfma(vload_f16(k + 96), q, s3)
    if first > 0 or last < POSITIONS:
        s0, s1 = vkeep(s0, first, last), vkeep(s1, first - 16, last - 16)
        s2, s3 = vkeep(s2, first - 32, last - 32), vkeep(s3, first - 48, last - 48)
    vstore(weights, s0)
    vstore(weights + 64, s1)
    vstore(weights + 128, s2)
    vstore(weights + 192, s3)
    return vmaximum(vmax(vmax(s0, s1), vmax(s2, s3)))


@inline
def page_weights(weights, largest):  # type: ignore[no-untyped-def]
    """exp(score - largest) in place; returns their sum."""
    total, shift = vsplat(0.0), vsplat(largest)
    for i in range(0, 4 * POSITIONS, 64):
        e = vexp(vsub(vload(weights + i), shift))
        vstore(weights + i, e)
        total = vadd(total, e)
    return vsum(total)


@inline
def add_values(values, weights, padded, result, decay):  # type: ignore[no-untyped-def]
    """result = result * decay + sum of the page's values by weight; two sums, of even and of odd positions."""
    for c in range(0, padded, 16):
        even, odd = vmul(vload(result + 4 * c), vsplat(decay)), vsplat(0.0)
        v = values + 2 * c
        for j in range(0, POSITIONS, 2):
            even = vfma(vload_f16(v + 2 * padded * j), vsplat(get_f32(weights + 4 * j)), even)
            odd = vfma(vload_f16(v + 2 * padded * (j + 1)), vsplat(get_f32(weights + 4 * j + 4)), odd)
        vstore(result + 4 * c, vadd(even, odd))


def attend() -> Kernel:
    """A unit is one query head of one row; the heads that share keys follow each other, so a page is read from memory once."""

    def kernel(row, thread, threads):  # type: ignore[no-untyped-def]
        heads, dim, padded = word(row, HEADS), word(row, HEAD_DIM), word(row, PADDED)
        shared = heads // word(row, KV_HEADS)
        scale, window = get_f32(row + 8 * SCALE), word(row, WINDOW)
        query = word(row, SCRATCH) + thread * (4 * (2 * padded + POSITIONS))
        result, weights = query + 4 * padded, query + 8 * padded
        units = get_i64(word(row, COUNT)) * heads
        for unit in range(units * thread // threads, units * (thread + 1) // threads):
            r, head = unit // heads, unit % heads
            slot = get_i32(word(row, SLOTS) + 4 * r)
            begin = max(0, slot + 1 - window) if window > 0 else 0
            x = word(row, X) + r * word(row, X_ROW) + word(row, Q_OFFSET) + 4 * dim * head
            for i in range(dim):
                put_f32(query + 4 * i, get_f32(x + 4 * i) * scale)
            for c in range(0, padded, 16):
                vstore(result + 4 * c, vsplat(0.0))
            largest, total = -1e30, 0.0
            for start in range(begin // POSITIONS * POSITIONS, slot + 1, POSITIONS):
                keys = page_of(row, r, start, head // shared)
                top = max(largest, page_scores(keys, query, dim, weights, begin - start, slot + 1 - start))
                decay = math.exp(largest - top)
                total = total * decay + page_weights(weights, top)
                add_values(keys + 2 * POSITIONS * padded, weights, padded, result, decay)
                largest = top
            out = word(row, OUT) + r * word(row, OUT_ROW) + 4 * dim * head
            for i in range(dim):
                put_f32(out + 4 * i, get_f32(result + 4 * i) / total)

    return kernel
