"""Kernels over whole rows that not every family has: LayerNorm, norms after a block, scaled and learned embeddings."""

from __future__ import annotations

import numpy as np

from edgeq.targets.cpu.jit.args import Args, float32, nbytes, nested, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.simd import (
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    vadd,
    vfirst,
    vfma,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from edgeq.targets.cpu.kernels.args import NOT_QUANTIZED, QuantizedArgs
from edgeq.targets.cpu.kernels.rows.activate import SILU, active, sigmoid_of_minus
from edgeq.targets.cpu.kernels.rows.elementwise import clear_padding, inverse_rms, inverse_root, normalize
from edgeq.targets.cpu.kernels.rows.embedding import get_float
from edgeq.targets.cpu.kernels.rows.quantize import place_of, rows_of, share_of, write_quantized
from edgeq.targets.cpu.kernels.rows.states import put_up_to


class LayerNormArgs(Args):
    """Widths are padded to 16 with zeros in x, gain, bias and out.

    out_of_thread   bytes from one thread's out to the next
    """

    x = pointer()
    x_stride = nbytes()
    width = number()
    gain = pointer()
    bias = pointer()
    epsilon = float32()
    out = pointer()
    out_stride = nbytes()
    quantized = nested(QuantizedArgs, NOT_QUANTIZED)
    out_of_thread = nbytes(0)


def layer_norm(max_tile: int) -> Kernel:
    """LayerNorm, with the quantized activations of its result."""

    def kernel(record, part, parts, thread):
        args = LayerNormArgs(record)
        count, width = get_i64(args.rows), args.width
        first, last = rows_of(part, parts, count, max_tile)
        for r in range(first, last):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride + thread * args.out_of_thread
            even, odd = vsplat(0.0), vsplat(0.0)
            for c in range(0, width, 32):
                even = vadd(vload(x + 4 * c), even)
                if c + 16 < width:
                    odd = vadd(vload(x + 4 * c + 64), odd)
            mean = vsum(vadd(even, odd)) / width
            center = vsplat(mean)
            even, odd = vsplat(0.0), vsplat(0.0)
            for c in range(0, width, 32):
                # The padding after the last channel is not at the mean.
                difference = vfirst(vsub(vload(x + 4 * c), center), width - c)
                even = vfma(difference, difference, even)
                if c + 16 < width:
                    difference = vfirst(vsub(vload(x + 4 * c + 64), center), width - c - 16)
                    odd = vfma(difference, difference, odd)
            variance = vsum(vadd(even, odd)) / width
            factor = vsplat(inverse_root(variance, args.epsilon))
            for c in range(0, width, 16):
                scaled = vmul(vsub(vload(x + 4 * c), center), factor)
                vstore(out + 4 * c, vfma(scaled, vload(args.gain + 4 * c), vload(args.bias + 4 * c)))
            clear_padding(out, width)
            write_quantized(args.quantized, out, place_of(args.quantized, r, count, max_tile), 0, width)

    return kernel


class HeadNormArgs(Args):
    """x   of the first head;  gain f32 [head_dim]"""

    x = pointer()
    x_stride = nbytes()
    heads = number()
    head_dim = number()
    gain = pointer()
    epsilon = float32()


def head_norm() -> Kernel:
    """RMSNorm over each head of a row, in place."""

    def kernel(record, part, parts, thread):
        args = HeadNormArgs(record)
        for r in range(part, get_i64(args.rows), parts):
            for head in range(args.heads):
                normalize(args.x + r * args.x_stride + 4 * args.head_dim * head, args.head_dim, args.gain, args.epsilon)

    return kernel


class ValueNormArgs(Args):
    """x   of the first head;  out: of its result in the same row, perhaps x"""

    x = pointer()
    x_stride = nbytes()
    heads = number()
    head_dim = number()
    out = pointer()
    epsilon = float32()


def value_norm() -> Kernel:
    """RMSNorm without a gain over each head of a row."""

    def kernel(record, part, parts, thread):
        args = ValueNormArgs(record)
        dim = args.head_dim
        for item in range(part, get_i64(args.rows) * args.heads, parts):
            begin = item // args.heads * args.x_stride + 4 * dim * (item % args.heads)
            x, out = args.x + begin, args.out + begin
            total = vsplat(0.0)
            for c in range(0, dim, 16):
                part_of_head = vfirst(vload(x + 4 * c), dim - c)
                total = vfma(part_of_head, part_of_head, total)
            factor = vsplat(inverse_root(vsum(total) / dim, args.epsilon))
            for c in range(0, dim, 16):
                put_up_to(out + 4 * c, vmul(vload(x + 4 * c), factor), dim - c)

    return kernel


class GatedNormArgs(Args):
    """gate   of the first channel of x;  gain f32 [head_dim], of every head gain_bytes after the one before"""

    x = pointer()
    x_stride = nbytes()
    gate = pointer()
    gate_stride = nbytes()
    heads = number()
    head_dim = number()
    gain = pointer()
    gain_bytes = nbytes()
    epsilon = float32()
    out = pointer()
    out_stride = nbytes()


def gated_norm(gate_first: int) -> Kernel:
    """RMSNorm over each head of a row, times silu(gate); `gate_first`: of the row times it."""

    def kernel(record, part, parts, thread):
        args = GatedNormArgs(record)
        dim = args.head_dim
        for item in range(part, get_i64(args.rows) * args.heads, parts):
            r, head = item // args.heads, item % args.heads
            begin, gain = 4 * dim * head, args.gain + args.gain_bytes * head
            x, gate, out = (
                args.x + r * args.x_stride + begin,
                args.gate + r * args.gate_stride + begin,
                args.out + r * args.out_stride + begin,
            )
            total = vsplat(0.0)
            for c in range(0, dim, 16):
                part_of_head = vload(x + 4 * c)
                if gate_first:
                    part_of_head = vmul(part_of_head, active(SILU, vload(gate + 4 * c)))
                part_of_head = vfirst(part_of_head, dim - c)
                total = vfma(part_of_head, part_of_head, total)
            factor = vsplat(inverse_root(vsum(total) / dim, args.epsilon))
            for c in range(0, dim, 16):
                gates, part_of_head = active(SILU, vload(gate + 4 * c)), vload(x + 4 * c)
                if gate_first:
                    normed = vmul(vmul(vmul(part_of_head, gates), factor), vload(gain + 4 * c))
                else:
                    normed = vmul(vmul(vmul(part_of_head, factor), vload(gain + 4 * c)), gates)
                put_up_to(out + 4 * c, normed, dim - c)

    return kernel


class GateArgs(Args):
    """gate   of the first channel of x"""

    x = pointer()
    x_stride = nbytes()
    gate = pointer()
    gate_stride = nbytes()
    width = number()


GATES = (None, "sigmoid", "silu")


def gate(function: int) -> Kernel:
    """x *= f(gate), in place; function: of GATES."""

    def kernel(record, part, parts, thread):
        args = GateArgs(record)
        for r in range(part, get_i64(args.rows), parts):
            x, gate = args.x + r * args.x_stride, args.gate + r * args.gate_stride
            for c in range(0, args.width, 16):
                by = vload(gate + 4 * c)
                if function == 1:
                    by = sigmoid_of_minus(vsub(vsplat(0.0), by))
                elif function == 2:
                    by = active(SILU, by)
                put_up_to(x + 4 * c, vmul(vload(x + 4 * c), by), args.width - c)

    return kernel


class NormAddArgs(Args):
    """Widths are padded to 16 with zeros in x, gain and out."""

    x = pointer()
    x_stride = nbytes()
    width = number()
    gain = pointer()
    epsilon = float32()
    out = pointer()
    out_stride = nbytes()


def norm_add() -> Kernel:
    """RMSNorm of x, added to out."""

    def kernel(record, part, parts, thread):
        args = NormAddArgs(record)
        width = args.width
        for r in range(part, get_i64(args.rows), parts):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            factor = vsplat(inverse_rms(x, width, args.epsilon))
            for c in range(0, width, 16):
                scaled = vmul(vmul(vload(x + 4 * c), factor), vload(args.gain + 4 * c))
                vstore(out + 4 * c, vadd(vload(out + 4 * c), scaled))
            clear_padding(out, width)

    return kernel


class ScaleArgs(Args):
    x = pointer()
    x_stride = nbytes()
    width = number()
    factor = float32()
    out = pointer()
    out_stride = nbytes()


def scale() -> Kernel:
    """out = x times a factor."""
    return scaled(False)


def scale_add() -> Kernel:
    """out += x times a factor."""
    return scaled(True)


def scaled(add: bool) -> Kernel:
    """The kernel of both."""

    def kernel(record, part, parts, thread):
        args = ScaleArgs(record)
        factor = vsplat(args.factor)
        for r in range(part, get_i64(args.rows), parts):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            for c in range(0, args.width, 16):
                if add:
                    vstore(out + 4 * c, vfma(vload(x + 4 * c), factor, vload(out + 4 * c)))
                else:
                    vstore(out + 4 * c, vmul(vload(x + 4 * c), factor))

    return kernel


class RowMeanArgs(Args):
    """count: parts of x, side by side; width: of each, and of out."""

    x = pointer()
    x_stride = nbytes()
    count = number()
    width = number()
    out = pointer()
    out_stride = nbytes()


def row_mean() -> Kernel:
    """The mean of parts of a row."""

    def kernel(record, part, parts, thread):
        args = RowMeanArgs(record)
        width, whole = args.width, args.width // 16 * 16
        share = np.float32(1) / np.float32(args.count)
        for r in range(part, get_i64(args.rows), parts):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            for c in range(0, whole, 16):
                total = vload(x + 4 * c)
                for i in range(1, args.count):
                    total = vadd(total, vload(x + 4 * (i * width + c)))
                vstore(out + 4 * c, vmul(total, vsplat(share)))
            # No whole vector: after the last part it would read what is not the row's.
            for c in range(whole, width):
                sum_ = get_f32(x + 4 * c)
                for i in range(1, args.count):
                    sum_ += get_f32(x + 4 * (i * width + c))
                put_f32(out + 4 * c, sum_ * share)
            clear_padding(out, width)

    return kernel


class PositionAddArgs(Args):
    """table [positions, width]; positions i32 of the rows."""

    x = pointer()
    x_stride = nbytes()
    width = number()
    table = pointer()
    positions = pointer()


def position_add(kind: int) -> Kernel:
    """x += the row of the table for its position."""

    def kernel(record, part, parts, thread):
        args = PositionAddArgs(record)
        width = args.width
        for r in range(part, get_i64(args.rows), parts):
            x, position = args.x + r * args.x_stride, get_i32(args.positions + 4 * r)
            for c in range(width):
                put_f32(x + 4 * c, get_f32(x + 4 * c) + get_float(kind, args.table, position * width + c))

    return kernel


class SoftCapArgs(Args):
    x = pointer()
    x_stride = nbytes()
    width = number()
    cap = float32()


def soft_cap(max_tile: int) -> Kernel:
    """x = cap tanh(x / cap), in place; tanh u is 2 / (1 + exp(-2 u)) - 1."""

    def kernel(record, part, parts, thread):
        args = SoftCapArgs(record)
        cap = args.cap
        inner, outer, less = vsplat(np.float32(-2.0) / cap), vsplat(np.float32(2.0) * cap), vsplat(-cap)
        begin, end, first, last = share_of(part, parts, get_i64(args.rows), max_tile, args.width)
        for r in range(begin, end):
            x = args.x + r * args.x_stride
            for c in range(first, last, 16):
                capped = vfma(sigmoid_of_minus(vmul(vload(x + 4 * c), inner)), outer, less)
                put_up_to(x + 4 * c, capped, last - c)

    return kernel


class LimitArgs(Args):
    x = pointer()
    x_stride = nbytes()
    width = number()
    least = float32()
    most = float32()
    out = pointer()
    out_stride = nbytes()


def limit(max_tile: int) -> Kernel:
    """out = x, but at least `least` and at most `most`; out may be x; NaN stays."""

    def kernel(record, part, parts, thread):
        args = LimitArgs(record)
        most, least = vsplat(args.most), vsplat(args.least)
        begin, end, first, last = share_of(part, parts, get_i64(args.rows), max_tile, args.width)
        for r in range(begin, end):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            for c in range(first, last, 16):
                # A comparison with NaN is false: then the second number is taken.
                put_up_to(out + 4 * c, vmin(most, vmax(least, vload(x + 4 * c))), last - c)

    return kernel
