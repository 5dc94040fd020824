"""Kernels over whole rows that not every family has: LayerNorm, norms behind a block, scaled and learned embeddings, and the
activations of an MLP other than SwiGLU."""

from __future__ import annotations

import math

from edgeq.targets.cpu.jit.compile import COUNT, Kernel, word
from edgeq.targets.cpu.jit.simd import (
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    vadd,
    vdiv,
    vexp,
    vfirst,
    vfma,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from edgeq.targets.cpu.kernels.elementwise import get_float, inverse_rms
from edgeq.targets.cpu.kernels.quantize import rows_of, share_of, write_form


def layer_norm(big: int) -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 gain f32, 6 bias f32, 7 epsilon (bits of an f32), 8 out, 9 bytes of its
    rows, 10... form.

    Widths are padded to 16 with zeros in x, gain, bias and out.
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count, width = get_i64(word(row, COUNT)), word(row, 4)
        first, last = rows_of(part, parts, count, big)
        for r in range(first, last):
            x, out = word(row, 2) + r * word(row, 3), word(row, 8) + r * word(row, 9)
            even, odd = vsplat(0.0), vsplat(0.0)
            for c in range(0, width, 32):
                even = vadd(vload(x + 4 * c), even)
                if c + 16 < width:
                    odd = vadd(vload(x + 4 * c + 64), odd)
            mean = vsum(vadd(even, odd)) / width
            center = vsplat(mean)
            even, odd = vsplat(0.0), vsplat(0.0)
            for c in range(0, width, 32):
                # The padding behind the last channel is not at the mean.
                difference = vfirst(vsub(vload(x + 4 * c), center), width - c)
                even = vfma(difference, difference, even)
                if c + 16 < width:
                    difference = vfirst(vsub(vload(x + 4 * c + 64), center), width - c - 16)
                    odd = vfma(difference, difference, odd)
            variance = vsum(vadd(even, odd)) / width
            factor = vsplat(1.0 / math.sqrt(variance + get_f32(row + 8 * 7)))
            for c in range(0, width, 16):
                scaled = vmul(vsub(vload(x + 4 * c), center), factor)
                vstore(out + 4 * c, vfma(scaled, vload(word(row, 5) + 4 * c), vload(word(row, 6) + 4 * c)))
            write_form(row, 10, out, r, count, big, 0, width)

    return kernel


def norm_add() -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 gain f32, 6 epsilon (bits of an f32), 7 out, 8 bytes of its rows.

    Widths are padded to 16 with zeros in x, gain and out.
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        width = word(row, 4)
        for r in range(part, get_i64(word(row, COUNT)), parts):
            x, out = word(row, 2) + r * word(row, 3), word(row, 7) + r * word(row, 8)
            factor = vsplat(inverse_rms(x, width, get_f32(row + 8 * 6)))
            for c in range(0, width, 16):
                scaled = vmul(vmul(vload(x + 4 * c), factor), vload(word(row, 5) + 4 * c))
                vstore(out + 4 * c, vadd(vload(out + 4 * c), scaled))

    return kernel


def scale() -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 factor (bits of an f32)."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        factor = vsplat(get_f32(row + 8 * 5))
        for r in range(part, get_i64(word(row, COUNT)), parts):
            x = word(row, 2) + r * word(row, 3)
            for c in range(0, word(row, 4), 16):
                vstore(x + 4 * c, vmul(vload(x + 4 * c), factor))

    return kernel


def position_add(kind: int) -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 table [positions, width], 6 positions i32 of the rows."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        width = word(row, 4)
        for r in range(part, get_i64(word(row, COUNT)), parts):
            x, position = word(row, 2) + r * word(row, 3), get_i32(word(row, 6) + 4 * r)
            for c in range(width):
                put_f32(x + 4 * c, get_f32(x + 4 * c) + get_float(kind, word(row, 5), position * width + c))

    return kernel


def geglu(big: int) -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 out, 6 bytes of its rows, 7... form."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count, width = get_i64(word(row, COUNT)), word(row, 4)
        begin, end, first, last = share_of(part, parts, count, big, width)
        for r in range(begin, end):
            x, out = word(row, 2) + r * word(row, 3), word(row, 5) + r * word(row, 6)
            for c in range(first, last, 16):
                gate = vload(x + 4 * c)
                # 1/2 (1 + tanh u) is the sigmoid of 2 u.
                cubic = vfma(
                    vmul(gate, vsplat(-0.07135481627260025)), vmul(gate, gate), vmul(gate, vsplat(-1.5957691216057308))
                )
                sigmoid = vdiv(vsplat(1.0), vadd(vsplat(1.0), vexp(cubic)))
                vstore(out + 4 * c, vmul(vmul(gate, sigmoid), vload(x + 4 * (width + c))))
            write_form(row, 7, out, r, count, big, first, last)

    return kernel


def relu(big: int) -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 out, 6 bytes of its rows, 7... form."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count, width = get_i64(word(row, COUNT)), word(row, 4)
        begin, end, first, last = share_of(part, parts, count, big, width)
        for r in range(begin, end):
            x, out = word(row, 2) + r * word(row, 3), word(row, 5) + r * word(row, 6)
            for c in range(first, last, 16):
                vstore(out + 4 * c, vmax(vload(x + 4 * c), vsplat(0.0)))
            write_form(row, 7, out, r, count, big, first, last)

    return kernel
