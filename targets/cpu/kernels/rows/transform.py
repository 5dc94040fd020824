"""Activation, transform and quantized activations of a row in one pass, so that what lies between stays in the thread's cache.

y = (H_K (x) H_2^m) v / sqrt(K 2^m), butterflies first (hadamard.py).  A base of signs takes no multiplications: of every four
pieces all sixteen sums with signs are made once, and each of the K results adds one of them for every four pieces (Arlazarov
et al. 1970, "On economical construction of the transitive closure of an oriented graph", Soviet Math. Dokl. 11).  That is
22 K / 4 + K K / 4 additions for K channels instead of K K.
"""

from __future__ import annotations

from edgeq.targets.cpu.jit.args import Args, float32, nbytes, nested, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_f32, get_i32, get_i64, put_f32, vadd, vload, vmul, vsplat, vstore, vsub
from edgeq.targets.cpu.kernels.args import QuantizedArgs
from edgeq.targets.cpu.kernels.rows.activate import activated
from edgeq.targets.cpu.kernels.rows.elementwise import gated
from edgeq.targets.cpu.kernels.rows.hadamard import butterflies, scalar_butterflies
from edgeq.targets.cpu.kernels.rows.quantize import place_of, rows_of, write_quantized, write_quantized_tokens

SUM_BYTES = 64
"""A sum of four pieces: sixteen channels."""
SUMS_BYTES = 16 * SUM_BYTES
"""Those of four pieces with all signs."""
NOTHING, SWIGLU = -2, -1
"""What is done to a row before it is transformed, beside the functions of activate.py."""


class TransformArgs(Args):
    """x: a row is runs of `order` pieces of power * stride channels.

    inner             rows of which x would be the activation, for kernels that do that themselves
    order             K; 1: no base
    sums              int32 [K / 4, K / 4, 4]: for four results and four pieces, where in the table the sum of each result lies
    row_bytes, table_bytes  of the room of every thread: two rows, between them the table of sums
    kept              f32 per row: channel `kept_channel` of the result
    """

    x = pointer()
    x_stride = nbytes()
    inner = pointer(0)
    inner_stride = nbytes(0)
    power = number()
    stride = number()
    factor = float32()
    order = number()
    sums = pointer()
    room = pointer()
    row_bytes = nbytes()
    table_bytes = nbytes()
    kept = pointer()
    kept_stride = nbytes()
    kept_channel = number()
    quantized = nested(QuantizedArgs)


@inline
def powers_of_two(x, out, channels, power, stride, factor):
    """H_power, times a factor, over channels `stride` apart of every piece of power * stride channels."""
    piece = power * stride
    for first in range(0, channels, piece):
        at = 4 * first
        if stride % 16 == 0:
            for c in range(0, 4 * stride, 64):
                butterflies(x + at + c, out + at + c, power, 4 * stride, 0, factor)
        elif stride == 1 and power % 16 == 0:
            butterflies(x + at, out + at, power // 16, 64, 1, factor)
        else:
            scalar_butterflies(x + at, out + at, power, stride, factor)


@inline
def signed_sums(x, step, table):
    """Sixteen channels of four pieces, `step` bytes apart: sum number i takes piece k with minus where bit k of i is set."""
    a, b, c, d = vload(x), vload(x + step), vload(x + 2 * step), vload(x + 3 * step)
    p, q, s, t = vadd(a, b), vsub(a, b), vadd(c, d), vsub(c, d)
    none = vsplat(0.0)
    minus_p, minus_q = vsub(none, p), vsub(none, q)
    vstore(table, vadd(p, s))
    vstore(table + 64, vsub(s, q))
    vstore(table + 2 * 64, vadd(q, s))
    vstore(table + 3 * 64, vsub(s, p))
    vstore(table + 4 * 64, vsub(p, t))
    vstore(table + 5 * 64, vsub(minus_q, t))
    vstore(table + 6 * 64, vsub(q, t))
    vstore(table + 7 * 64, vsub(minus_p, t))
    vstore(table + 8 * 64, vadd(p, t))
    vstore(table + 9 * 64, vsub(t, q))
    vstore(table + 10 * 64, vadd(q, t))
    vstore(table + 11 * 64, vsub(t, p))
    vstore(table + 12 * 64, vsub(p, s))
    vstore(table + 13 * 64, vsub(minus_q, s))
    vstore(table + 14 * 64, vsub(q, s))
    vstore(table + 15 * 64, vsub(minus_p, s))


@inline
def signs(x, out, order, width, factor, sums, table):
    """Piece i, of `width` channels, becomes the sum of all pieces with the signs of row i of the base, times a factor."""
    fours, step, scale = order // 4, 4 * width, vsplat(factor)
    for c in range(0, step, 64):
        for g in range(fours):
            signed_sums(x + c + 4 * g * step, step, table + g * SUMS_BYTES)
        at = sums
        for i in range(fours):
            p, q = vload(table + get_i32(at)), vload(table + get_i32(at + 4))
            s, t = vload(table + get_i32(at + 8)), vload(table + get_i32(at + 12))
            for _ in range(1, fours):
                at += 16
                p, q = vadd(p, vload(table + get_i32(at))), vadd(q, vload(table + get_i32(at + 4)))
                s, t = vadd(s, vload(table + get_i32(at + 8))), vadd(t, vload(table + get_i32(at + 12)))
            at += 16
            to = out + c + 4 * i * step
            vstore(to, vmul(p, scale))
            vstore(to + step, vmul(q, scale))
            vstore(to + 2 * step, vmul(s, scale))
            vstore(to + 3 * step, vmul(t, scale))


@inline
def activate_row(function, with_gate, x, out, channels):
    """The activation of a row of whole vectors."""
    for c in range(0, 4 * channels, 64):
        if function == SWIGLU:
            vstore(out + c, gated(vload(x + c), vload(x + 4 * channels + c)))
        else:
            vstore(out + c, activated(function, with_gate, x + c, 4 * channels))


@inline
def transformed(args, r, thread, function, with_gate):
    """The address of row r, transformed."""
    power, stride, order, columns = args.power, args.stride, args.order, args.quantized.columns
    x = args.x + r * args.x_stride
    made = args.room + thread * (2 * args.row_bytes + args.table_bytes)
    if function != NOTHING:
        activate_row(function, with_gate, args.inner + r * args.inner_stride, made, columns)
        x = made
    if order == 1:
        powers_of_two(x, made, columns, power, stride, args.factor)
    else:
        table, width = made + args.row_bytes, power * stride
        out = table + args.table_bytes
        powers_of_two(x, made, columns, power, stride, 1.0)
        for run in range(0, 4 * columns, 4 * order * width):
            signs(made + run, out + run, order, width, args.factor, args.sums, table)
        made = out
    put_f32(args.kept + r * args.kept_stride, get_f32(made + 4 * args.kept_channel))
    return made


def transform(max_tile: int, function: int, with_gate: int) -> Kernel:
    """The quantized activations of the transformed rows.  Literal `function`: NOTHING, SWIGLU or one of activate.py, with
    `with_gate` times what lies after its argument."""

    def kernel(record, part, parts, thread):
        args = TransformArgs(record)
        count, columns = get_i64(args.rows), args.quantized.columns
        begin, end = rows_of(part, parts, count, max_tile)
        for r in range(begin, end):
            row, place = transformed(args, r, thread, function, with_gate), place_of(args.quantized, r, count, max_tile)
            write_quantized(args.quantized, row, place, 0, columns)

    return kernel


def transform_tokens(max_tile: int, function: int, with_gate: int, asymmetric: int) -> Kernel:
    """The same with one scale for a row."""

    def kernel(record, part, parts, thread):
        args = TransformArgs(record)
        count, columns = get_i64(args.rows), args.quantized.columns
        begin, end = rows_of(part, parts, count, max_tile)
        for r in range(begin, end):
            row, place = transformed(args, r, thread, function, with_gate), place_of(args.quantized, r, count, max_tile)
            write_quantized_tokens(args.quantized, asymmetric, row, place, 0, columns)

    return kernel
