"""Kernels that pass over a row once: RMSNorm, SwiGLU, selection, rotary angles."""

from __future__ import annotations

import math

import numpy as np

from edgeq.targets.cpu.jit.args import Args, float32, nbytes, nested, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import (
    LANES,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    put_f32,
    vadd,
    vdiv,
    vexp,
    vfirst,
    vfma,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from edgeq.targets.cpu.kernels.args import NOT_QUANTIZED, QuantizedArgs
from edgeq.targets.cpu.kernels.rows.quantize import place_of, rows_of, share_of, write_quantized


@inline
def zero_if_finite(x, count):
    """0, or NaN where one of `count` numbers is NaN or infinite."""
    total, whole = vsplat(0.0), count // LANES * LANES
    for i in range(0, whole, LANES):
        total = vfma(vload(x + 4 * i), vsplat(0.0), total)
    mark = vsum(total)
    for i in range(whole, count):
        mark += get_f32(x + 4 * i) * np.float32(0)
    return mark


@inline
def inverse_root(mean, epsilon):
    """1 / sqrt(mean + epsilon), or NaN where the squares overflow: their inverse, 0, would make zeros of a row."""
    return 1.0 / math.sqrt(mean + epsilon) if mean < math.inf else math.nan


@inline
def clear_padding(out, width):
    """Zeros from channel `width` to a whole vector, where 0 times NaN left NaN: what reads the padding, now or in a later run,
    takes it for zeros."""
    if width % LANES != 0:
        last = out + 4 * (width // LANES * LANES)
        vstore(last, vfirst(vload(last), width % LANES))


@inline
def inverse_rms(x, width, epsilon):
    """1 / sqrt(mean x^2 + epsilon) of a row whose width is padded to 16 with zeros."""
    even, odd = vsplat(0.0), vsplat(0.0)
    for c in range(0, width, 32):
        even = vfma(vload(x + 4 * c), vload(x + 4 * c), even)
        if c + 16 < width:
            odd = vfma(vload(x + 4 * c + 64), vload(x + 4 * c + 64), odd)
    return inverse_root(vsum(vadd(even, odd)) / width, epsilon)


@inline
def normalize(x, dim, gain, epsilon):
    total = 0.0
    for i in range(dim):
        total += get_f32(x + 4 * i) * get_f32(x + 4 * i)
    factor = inverse_root(total / dim, epsilon)
    for i in range(dim):
        put_f32(x + 4 * i, get_f32(x + 4 * i) * factor * get_f32(gain + 4 * i))


class NormArgs(Args):
    """Widths are padded to 16 with zeros in x, gain and out.  `out_of_thread`: bytes from one thread's out to the next."""

    x = pointer()
    x_stride = nbytes()
    width = number()
    gain = pointer()
    epsilon = float32()
    out = pointer()
    out_stride = nbytes()
    quantized = nested(QuantizedArgs, NOT_QUANTIZED)
    out_of_thread = nbytes(0)


def norm(max_tile: int) -> Kernel:
    """RMSNorm, with the quantized activations of its result."""

    def kernel(record, part, parts, thread):
        args = NormArgs(record)
        count, width = get_i64(args.rows), args.width
        first, last = rows_of(part, parts, count, max_tile)
        for r in range(first, last):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride + thread * args.out_of_thread
            factor = vsplat(inverse_rms(x, width, args.epsilon))
            for c in range(0, width, 16):
                vstore(out + 4 * c, vmul(vmul(vload(x + 4 * c), factor), vload(args.gain + 4 * c)))
            clear_padding(out, width)
            write_quantized(args.quantized, out, place_of(args.quantized, r, count, max_tile), 0, width)

    return kernel


@inline
def gated(gate, up):
    """silu(gate) * up of sixteen channels."""
    sigmoid = vdiv(vsplat(1.0), vadd(vsplat(1.0), vexp(vsub(vsplat(0.0), gate))))
    return vmul(vmul(gate, sigmoid), up)


class ActivationArgs(Args):
    """`out_of_thread`: bytes from one thread's out to the next;  alpha, limit: of a clamped SwiGLU.

    Up begins where gate ends, so a last partial vector reads beyond gate, and beyond the row by less than a vector; the result
    is padded to a whole one with zeros.
    """

    x = pointer()
    x_stride = nbytes()
    width = number()
    out = pointer()
    out_stride = nbytes()
    quantized = nested(QuantizedArgs, NOT_QUANTIZED)
    out_of_thread = nbytes(0)
    alpha = float32(0.0)
    limit = float32(0.0)


def swiglu(max_tile: int, done: int) -> Kernel:
    """Literal `done`, 1: the product before it does it all (swiglu_matmul.py), or the transform after it (transform.py)."""

    def kernel(record, part, parts, thread):
        args = ActivationArgs(record)
        if done:
            return
        count, width = get_i64(args.rows), args.width
        begin, end, first, last = share_of(part, parts, count, max_tile, width)
        for r in range(begin, end):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride + thread * args.out_of_thread
            whole = first + (last - first) // LANES * LANES
            for c in range(first, whole, LANES):
                vstore(out + 4 * c, gated(vload(x + 4 * c), vload(x + 4 * (width + c))))
            if whole < last:
                value = gated(vload(x + 4 * whole), vload(x + 4 * (width + whole)))
                vstore(out + 4 * whole, vfirst(value, last - whole))
            write_quantized(args.quantized, out, place_of(args.quantized, r, count, max_tile), first, last)

    return kernel


class SelectArgs(Args):
    """`rows` are those of the result; indices i32 of the rows of x that stay, `together` of them side by side in one."""

    x = pointer()
    x_stride = nbytes()
    width = number()
    out = pointer()
    out_stride = nbytes()
    indices = pointer()
    together = number(1)


@inline
def copy_floats(source, out, width):
    """Nothing is written after `width` floats: another thread may write there."""
    whole = width // 16 * 16
    for c in range(0, whole, 16):
        vstore(out + 4 * c, vload(source + 4 * c))
    for c in range(whole, width):
        put_f32(out + 4 * c, get_f32(source + 4 * c))


def select() -> Kernel:
    """Only some rows stay."""

    def kernel(record, part, parts, thread):
        args = SelectArgs(record)
        width, together = args.width, args.together
        for r in range(part, get_i64(args.rows), parts):
            out = args.out + r * args.out_stride
            for i in range(together):
                x = args.x + get_i32(args.indices + 4 * (r * together + i)) * args.x_stride
                copy_floats(x, out + 4 * width * i, width)

    return kernel


class InjectArgs(Args):
    """vectors: int64 per row, the address of the vector that it brings, or 0; offset: bytes from there to what is taken; add: 1
    adds it to what is there."""

    out = pointer()
    out_stride = nbytes()
    width = number()
    vectors = pointer()
    offset = nbytes()
    add = number()


def inject() -> Kernel:
    """Rows that bring a vector take it."""

    def kernel(record, part, parts, thread):
        args = InjectArgs(record)
        width, add = args.width, args.add
        for r in range(part, get_i64(args.rows), parts):
            vector = get_i64(args.vectors + 8 * r)
            if vector != 0:
                source, out = vector + args.offset, args.out + r * args.out_stride
                if add == 0:
                    copy_floats(source, out, width)
                else:
                    for c in range(width):
                        put_f32(out + 4 * c, get_f32(out + 4 * c) + get_f32(source + 4 * c))

    return kernel


class AnglesArgs(Args):
    """positions i32 [axes, rows], axis_stride bytes from one axis to the next; axes i32 [pairs]: which of them turns a pair, 0:
    the first turns all; frequencies f64 [pairs]; factor: what cosines and sines are multiplied by."""

    positions = pointer()
    axis_stride = nbytes()
    axes = pointer()
    frequencies = pointer()
    pairs = number()
    cosines = pointer()
    sines = pointer()
    stride = nbytes()
    factor = float32()


def angles() -> Kernel:
    """Cosines and sines of every row's position, once per run."""

    def kernel(record, part, parts, thread):
        args = AnglesArgs(record)
        factor = args.factor
        for r in range(part, get_i64(args.rows), parts):
            for i in range(args.pairs):
                axis = get_i32(args.axes + 4 * i) if args.axes != 0 else 0
                position = get_i32(args.positions + axis * args.axis_stride + 4 * r)
                angle = position * get_f64(args.frequencies + 8 * i)
                put_f32(args.cosines + r * args.stride + 4 * i, math.cos(angle) * factor)
                put_f32(args.sines + r * args.stride + 4 * i, math.sin(angle) * factor)

    return kernel


class ScaleShiftArgs(Args):
    """Widths are padded to 16 in x, scale and shift, in these with zeros."""

    x = pointer()
    x_stride = nbytes()
    width = number()
    scale = pointer()
    shift = pointer()


def scale_shift() -> Kernel:
    """x = x * scale + shift, channel by channel."""

    def kernel(record, part, parts, thread):
        args = ScaleShiftArgs(record)
        for r in range(part, get_i64(args.rows), parts):
            x = args.x + r * args.x_stride
            for c in range(0, args.width, 16):
                vstore(x + 4 * c, vfma(vload(x + 4 * c), vload(args.scale + 4 * c), vload(args.shift + 4 * c)))

    return kernel
