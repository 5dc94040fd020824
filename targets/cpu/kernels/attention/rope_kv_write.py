"""Head norms, rotary positions, the rotation of heads and the write into the cache: one pass over the heads of a row."""

from __future__ import annotations

import numpy as np

from edgeq.targets.cpu.jit.args import Args, float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import (
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    rint,
    vadd,
    vdiv,
    vfma,
    vload,
    vload_i8,
    vmax,
    vmin,
    vmul,
    vrint,
    vsplat,
    vstore,
    vsub,
)
from edgeq.targets.cpu.kernels.args import CacheArgs
from edgeq.targets.cpu.kernels.attention.kv_layout import INT4_KV, INT8_KV, POSITIONS, half_bytes, keys_at, pair_bytes
from edgeq.targets.cpu.kernels.attention.kv_quantize import extremes, mark_of, put_halves, put_mixed, put_symmetric
from edgeq.targets.cpu.kernels.rows.elementwise import normalize, zero_if_finite


class RopeKvWriteArgs(CacheArgs):
    """q_offset, k_offset, v_offset   bytes in a row of x
    cosines, sines                 f32 [rows][rope_pairs], angles_stride bytes from row to row
    q_gain, k_gain, epsilon        f32 [head_dim] of the head norms, or 0
    rope_first                     whether they come after the rotary positions
    matrix                         i8 [head_dim][head_dim] that rotates heads, or 0, readable a vector beyond its end
    scratch                        f32 [padded_dim] of every thread
    """

    q_offset = nbytes()
    k_offset = nbytes()
    v_offset = nbytes()
    cosines = pointer(0)
    sines = pointer(0)
    angles_stride = nbytes(0)
    rope_pairs = number(0)
    q_gain = pointer(0)
    k_gain = pointer(0)
    epsilon = float32(0.0)
    rope_first = number(0)
    matrix = pointer(0)
    matrix_scale = float32(0.0)
    scratch = pointer(0)


class ChangeHeadsArgs(Args):
    """x of the first head, gain f32 [head_dim] or 0; the others are those of RopeKvWriteArgs."""

    x = pointer()
    x_stride = nbytes()
    heads = number()
    head_dim = number()
    padded_dim = number()
    cosines = pointer(0)
    sines = pointer(0)
    angles_stride = nbytes(0)
    rope_pairs = number(0)
    gain = pointer(0)
    epsilon = float32(0.0)
    rope_first = number(0)
    matrix = pointer(0)
    matrix_scale = float32(0.0)
    scratch = pointer(0)


@inline
def apply_rope(x, half, cosines, sines):
    """Rotary positions: `half` pairs (x[i], x[half + i]), each by its angle."""
    whole = half // 16 * 16
    for i in range(0, whole, 16):
        a, b = vload(x + 4 * i), vload(x + 4 * (half + i))
        cosine, sine = vload(cosines + 4 * i), vload(sines + 4 * i)
        vstore(x + 4 * i, vsub(vmul(a, cosine), vmul(b, sine)))
        vstore(x + 4 * (half + i), vadd(vmul(b, cosine), vmul(a, sine)))
    for i in range(whole, half):
        first, second = get_f32(x + 4 * i), get_f32(x + 4 * (half + i))
        put_f32(x + 4 * i, first * get_f32(cosines + 4 * i) - second * get_f32(sines + 4 * i))
        put_f32(x + 4 * (half + i), second * get_f32(cosines + 4 * i) + first * get_f32(sines + 4 * i))


@inline
def rotate_head_int8(x, dim, padded, matrix, matrix_scale, scratch):
    """The head at x, rounded to 8 bits over a range that has 0 in it, times the matrix.

    Sums of whole numbers below 2^24 are exact in any order.  A head with NaN or an infinity becomes NaN.
    """
    mark = zero_if_finite(x, dim)
    least, most = extremes(x, dim)
    least, most = min(least, np.float32(0)), max(most, np.float32(0))
    scale = (most - least) / np.float32(255)
    divisor = scale if scale > 0 else np.float32(1)
    zero = rint(-least / divisor)
    low, high, whole = -zero, np.float32(255) - zero, dim // 16 * 16
    for i in range(0, whole, 16):
        code = vrint(vdiv(vload(x + 4 * i), vsplat(divisor)))
        vstore(x + 4 * i, vmin(vmax(code, vsplat(low)), vsplat(high)))
    for i in range(whole, dim):
        put_f32(x + 4 * i, min(max(rint(get_f32(x + 4 * i) / divisor), low), high))
    factor, c = vsplat(scale * matrix_scale + mark), 0
    while padded - c >= 64:
        sums = vsplat(0.0), vsplat(0.0), vsplat(0.0), vsplat(0.0)
        for i in range(dim):
            value, line = vsplat(get_f32(x + 4 * i)), matrix + dim * i + c
            sums = (
                vfma(value, vload_i8(line), sums[0]),
                vfma(value, vload_i8(line + 16), sums[1]),
                vfma(value, vload_i8(line + 32), sums[2]),
                vfma(value, vload_i8(line + 48), sums[3]),
            )
        vstore(scratch + 4 * c, vmul(sums[0], factor))
        vstore(scratch + 4 * c + 64, vmul(sums[1], factor))
        vstore(scratch + 4 * c + 128, vmul(sums[2], factor))
        vstore(scratch + 4 * c + 192, vmul(sums[3], factor))
        c += 64
    while c < padded:
        total = vsplat(0.0)
        for i in range(dim):
            total = vfma(vsplat(get_f32(x + 4 * i)), vload_i8(matrix + dim * i + c), total)
        vstore(scratch + 4 * c, vmul(total, factor))
        c += 16
    for i in range(dim):
        put_f32(x + 4 * i, get_f32(scratch + 4 * i))


@inline
def change_head(args, x, r, gain, thread):
    """Norm, rotary positions and rotation of the head at x of row r, in place."""
    dim, angles = args.head_dim, r * args.angles_stride
    if gain != 0 and args.rope_first == 0:
        normalize(x, dim, gain, args.epsilon)
    apply_rope(x, args.rope_pairs, args.cosines + angles, args.sines + angles)
    if gain != 0 and args.rope_first != 0:
        normalize(x, dim, gain, args.epsilon)
    if args.matrix != 0:
        scratch = args.scratch + 4 * args.padded_dim * thread
        rotate_head_int8(x, dim, args.padded_dim, args.matrix, args.matrix_scale, scratch)


def change_heads() -> Kernel:
    """The same of each head of every row, where no keys and values are written."""

    def kernel(record, part, parts, thread):
        args = ChangeHeadsArgs(record)
        heads = args.heads
        units = heads * get_i64(args.rows)
        for unit in range(units * part // parts, units * (part + 1) // parts):
            r = unit // heads
            x = args.x + r * args.x_stride + 4 * args.head_dim * (unit % heads)
            change_head(args, x, r, args.gain, thread)

    return kernel


def rope_kv_write(code: int, largest_code: int) -> Kernel:
    """Head norms and rotary positions in place; keys and values into the cache.  A unit is one head of one row.

    A part has neighbouring rows of a head, since their keys share cache lines, and of the heads that cost more, those with keys
    and values, no more than the next part: these lie between the queries that share them.

    largest_code   largest code of an int4 cache
    """

    def kernel(record, part, parts, thread):
        args = RopeKvWriteArgs(record)
        heads, kv_heads, dim, padded = args.heads, args.kv_heads, args.head_dim, args.padded_dim
        high, count = args.high, get_i64(args.rows)
        units, heads_together = (heads + kv_heads) * count, heads // kv_heads + 1
        for unit in range(units * part // parts, units * (part + 1) // parts):
            r, group, place = unit % count, unit // count // heads_together, unit // count % heads_together
            is_query = place < heads_together - 1
            head = group * (heads_together - 1) + place if is_query else group
            source = args.x + r * args.x_stride
            if is_query:
                x, gain = source + args.q_offset + 4 * dim * head, args.q_gain
            else:
                x, gain = source + args.k_offset + 4 * dim * head, args.k_gain
            change_head(args, x, r, gain, thread)
            if not is_query:
                slot, v = get_i32(args.slots + 4 * r), source + args.v_offset + 4 * dim * head
                keys, lane = keys_at(args, r, slot, head, code), slot % POSITIONS
                values = keys + half_bytes(dim, high, code)
                mark = mark_of(x, v, dim)
                if code == INT4_KV:
                    width = pair_bytes(dim, high) + high
                    put_mixed(x, (dim, high), largest_code, True, (keys + lane, POSITIONS), (keys, lane), mark)
                    put_mixed(v, (dim, high), largest_code, False, (values + width * lane, 1), (values, lane), 0.0)
                elif code == INT8_KV:
                    scales = POSITIONS * padded + 4 * lane
                    put_symmetric(x, dim, keys + lane, POSITIONS, keys + scales, mark)
                    put_symmetric(v, dim, values + padded * lane, 1, values + scales, 0.0)
                else:
                    put_halves(x, dim, keys + 2 * lane, 2 * POSITIONS)
                    put_halves(v, dim, values + 2 * padded * lane, 2)

    return kernel
