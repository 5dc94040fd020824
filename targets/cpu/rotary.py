"""Head norms, rotary positions and the write into the cache: one pass over the heads of a row."""

from __future__ import annotations

import math
from collections.abc import Callable

from edgeq.targets.cpu.compiled import COUNT, inline, word
from edgeq.targets.cpu.pages import (
    HEAD_DIM,
    HEADS,
    INT8_KV,
    KV_HEADS,
    PADDED,
    POSITIONS,
    SLOTS,
    X_ROW,
    X,
    half_bytes,
    keys_at,
)
from edgeq.targets.cpu.vector import get_f32, get_i32, get_i64, put_f16, put_f32, put_i8

Kernel = Callable[[int, int, int, int], None]

Q_OFFSET, K_OFFSET, V_OFFSET, COSINES, SINES, ANGLE_ROW, Q_GAIN, K_GAIN, EPSILON = 11, 12, 13, 14, 15, 16, 17, 18, 19
"""Table words: byte offsets in a row of x, angles, f32 gains of the head norms or 0, their epsilon (bits of an f32)."""


@inline
def normalize(x, dim, gain, epsilon):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(dim):
        total += get_f32(x + 4 * i) * get_f32(x + 4 * i)
    factor = 1.0 / math.sqrt(total / dim + epsilon)
    for i in range(dim):
        put_f32(x + 4 * i, get_f32(x + 4 * i) * factor * get_f32(gain + 4 * i))


@inline
def put_vector(x, dim, base, step, lane, scales, code):  # type: ignore[no-untyped-def]
    """A head's numbers to base, base + step ...; for int8 their scale to lane `lane` of `scales`."""
    if code == INT8_KV:
        largest = 0.0
        for i in range(dim):
            largest = max(largest, abs(get_f32(x + 4 * i)))
        inverse = 127.0 / largest if largest > 1e-30 else 0.0
        put_f32(scales + 4 * lane, largest / 127.0 if largest > 1e-30 else 0.0)
        for i in range(dim):
            put_i8(base + step * i, round(get_f32(x + 4 * i) * inverse))
    else:
        for i in range(dim):
            put_f16(base + step * i, min(max(get_f32(x + 4 * i), -65504.0), 65504.0))


def rotate(code: int) -> Kernel:
    """Head norms and rotary positions in place; keys and values into the cache.  A unit is one head of one row."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        heads, kv_heads, dim, padded = word(row, HEADS), word(row, KV_HEADS), word(row, HEAD_DIM), word(row, PADDED)
        units = heads + kv_heads
        epsilon, half = get_f32(row + 8 * EPSILON), dim // 2
        for unit in range(part, get_i64(word(row, COUNT)) * units, parts):
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
                keys, lane = keys_at(row, r, slot, head, code), slot % POSITIONS
                values, number = keys + half_bytes(padded, code), 1 if code == INT8_KV else 2
                put_vector(x, dim, keys + number * lane, number * POSITIONS, lane, keys + POSITIONS * padded, code)
                v = source + word(row, V_OFFSET) + 4 * dim * head
                put_vector(v, dim, values + number * padded * lane, number, lane, values + POSITIONS * padded, code)

    return kernel
