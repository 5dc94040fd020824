"""Kernels that change a row before a product reads it: the order of its channels, and orthogonal transforms.

y = (H_K (x) H_2^m) v / sqrt(K 2^m) over runs v is two passes: butterflies over every piece of 2^m, then, where K > 1, sums
over the K pieces.  Both take their channels in an order of their own, so a row's result does not depend on how many threads
there are or which rows run with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.args import Args, float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import (
    LANES,
    VF32,
    VI32,
    call,
    f32x16,
    get_f32,
    get_i32,
    get_i64,
    primitive,
    put_f32,
    vadd,
    vfma,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
)
from edgeq.targets.cpu.kernels.rows.quantize import share_of


@primitive(f32x16, f32x16)
def vwalsh(b: Any, x: Any) -> Any:
    """H_16 of the lanes: butterflies of lanes 1, 2, 4 and 8 apart."""
    for distance in (1, 2, 4, 8):
        order = ir.Constant(VI32, [i ^ distance for i in range(LANES)])
        other = b.shuffle_vector(x, ir.Constant(VF32, ir.Undefined), order)
        signs = ir.Constant(VF32, [-1.0 if i & distance else 1.0 for i in range(LANES)])
        x = call(b, "llvm.fmuladd.v16f32", VF32, x, signs, other)
    return x


class GatherArgs(Args):
    """indices i32 [columns]."""

    x = pointer()
    x_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    columns = number()
    indices = pointer()


def gather() -> Kernel:
    """out[c] = x[indices[c]] for every channel c."""

    def kernel(record, part, parts, thread):
        args = GatherArgs(record)
        count, columns, indices = get_i64(args.rows), args.columns, args.indices
        begin, end, first, last = share_of(part, parts, count, 1, columns)
        for r in range(begin, end):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            for c in range(first, last):
                put_f32(out + 4 * c, get_f32(x + 4 * get_i32(indices + 4 * c)))

    return kernel


@inline
def pairs(source, target, count, distance, lanes, factor):
    """Butterflies of neighbours among `count` vectors `distance` bytes apart, then times the factor."""
    scale = vsplat(factor)
    for i in range(0, count, 2):
        at = i * distance
        a, b = vload(source + at), vload(source + at + distance)
        if lanes:
            a, b = vwalsh(a), vwalsh(b)
        vstore(target + at, vmul(vadd(a, b), scale))
        vstore(target + at + distance, vmul(vsub(a, b), scale))


@inline
def fours(source, target, vectors, half, lanes, factor):
    """Butterflies of vectors that lie `half` and then 2 `half` places apart, then times the factor.

    vectors   how many, and bytes from one to the next
    """
    count, distance = vectors
    scale, step = vsplat(factor), half * distance
    for first in range(0, count, 4 * half):
        for i in range(first, first + half):
            at = i * distance
            a, b = vload(source + at), vload(source + at + step)
            c, d = vload(source + at + 2 * step), vload(source + at + 3 * step)
            if lanes:
                a, b, c, d = vwalsh(a), vwalsh(b), vwalsh(c), vwalsh(d)
            p, q, s, t = vadd(a, b), vsub(a, b), vadd(c, d), vsub(c, d)
            vstore(target + at, vmul(vadd(p, s), scale))
            vstore(target + at + step, vmul(vadd(q, t), scale))
            vstore(target + at + 2 * step, vmul(vsub(p, s), scale))
            vstore(target + at + 3 * step, vmul(vsub(q, t), scale))


@inline
def butterflies(source, target, count, distance, lanes, factor):
    """H_count over vectors `distance` bytes apart, and if `lanes` also H_16 across the lanes of each; times the factor."""
    odd, rest = 0, count
    while rest > 1:
        rest >>= 1
        odd = 1 - odd
    half, reading = 1, source
    if count == 1:
        value = vload(source)
        if lanes:
            value = vwalsh(value)
        vstore(target, vmul(value, vsplat(factor)))
    elif odd == 1:
        pairs(source, target, count, distance, lanes, factor if count == 2 else 1.0)
        half, reading, lanes = 2, target, 0
    while half < count:
        fours(reading, target, (count, distance), half, lanes, factor if 4 * half == count else 1.0)
        half, reading, lanes = 4 * half, target, 0


@inline
def scalar_butterflies(source, target, power, stride, factor):
    """The same for strides and sizes that vectors do not fit."""
    for c in range(power * stride):
        put_f32(target + 4 * c, get_f32(source + 4 * c))
    half = 1
    while half < power:
        for first in range(0, power, 2 * half):
            for c in range(first * stride, (first + half) * stride):
                at, other = target + 4 * c, target + 4 * (c + half * stride)
                a, b = get_f32(at), get_f32(other)
                put_f32(at, a + b)
                put_f32(other, a - b)
        half *= 2
    for c in range(power * stride):
        put_f32(target + 4 * c, get_f32(target + 4 * c) * factor)


class HadamardArgs(Args):
    x = pointer()
    x_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    columns = number()
    power = number()
    stride = number()
    factor = float32()


def hadamard() -> Kernel:
    """H_power, times a factor, over channels `stride` apart of every piece of power * stride channels."""

    def kernel(record, part, parts, thread):
        args = HadamardArgs(record)
        power, stride, factor = args.power, args.stride, args.factor
        pieces = args.columns // (power * stride)
        across = stride // 16 if stride % 16 == 0 else 1
        a_row = pieces * across
        for unit in range(part, get_i64(args.rows) * a_row, parts):
            r, place = unit // a_row, unit % a_row
            at = 4 * (place // across * power * stride + place % across * 16)
            x, out = args.x + r * args.x_stride + at, args.out + r * args.out_stride + at
            if stride % 16 == 0:
                butterflies(x, out, power, 4 * stride, 0, factor)
            elif stride == 1 and power % 16 == 0:
                butterflies(x, out, power // 16, 64, 1, factor)
            else:
                scalar_butterflies(x, out, power, stride, factor)

    return kernel


@inline
def mixed_scalar(x, base, order, width, c):
    """Channel c of the pieces times a row of the base."""
    total = get_f32(base) * get_f32(x + 4 * c)
    for k in range(1, order):
        total += get_f32(base + 4 * k) * get_f32(x + 4 * (k * width + c))
    return total


class MixArgs(Args):
    """out is not x; order: K; width: channels of a piece; base f32 [K, K]."""

    x = pointer()
    x_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    columns = number()
    order = number()
    width = number()
    factor = float32()
    base = pointer()


def mix() -> Kernel:
    """Piece i of a run becomes the sum over k of base[i, k] * piece k, times a factor."""

    def kernel(record, part, parts, thread):
        args = MixArgs(record)
        order, width, factor = args.order, args.width, args.factor
        runs, fours = args.columns // (order * width), (order + 3) // 4
        whole, scale, line = width // 16 * 16, vsplat(factor), 4 * order
        a_row = runs * fours
        for unit in range(part, get_i64(args.rows) * a_row, parts):
            r, place = unit // a_row, unit % a_row
            run, first = 4 * (place // fours * order * width), place % fours * 4
            x, out = args.x + r * args.x_stride + run, args.out + r * args.out_stride + run
            last = min(first + 4, order)
            base = args.base + first * line
            for c in range(0, whole, 16):
                if last - first == 4:
                    p, q, s, t = vsplat(0.0), vsplat(0.0), vsplat(0.0), vsplat(0.0)
                    for k in range(order):
                        value, at = vload(x + 4 * (k * width + c)), base + 4 * k
                        p = vfma(vsplat(get_f32(at)), value, p)
                        q = vfma(vsplat(get_f32(at + line)), value, q)
                        s = vfma(vsplat(get_f32(at + 2 * line)), value, s)
                        t = vfma(vsplat(get_f32(at + 3 * line)), value, t)
                    to = out + 4 * (first * width + c)
                    vstore(to, vmul(p, scale))
                    vstore(to + 4 * width, vmul(q, scale))
                    vstore(to + 8 * width, vmul(s, scale))
                    vstore(to + 12 * width, vmul(t, scale))
                else:
                    for i in range(last - first):
                        total = vsplat(0.0)
                        for k in range(order):
                            total = vfma(vsplat(get_f32(base + i * line + 4 * k)), vload(x + 4 * (k * width + c)), total)
                        vstore(out + 4 * ((first + i) * width + c), vmul(total, scale))
            for c in range(whole, width):
                for i in range(last - first):
                    put_f32(out + 4 * ((first + i) * width + c), mixed_scalar(x, base + i * line, order, width, c) * factor)

    return kernel
