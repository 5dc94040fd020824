"""Kernels that pass over a row once: embedding, RMSNorm, SwiGLU, selection, rotary angles."""

from __future__ import annotations

import math

from edgeq.targets.cpu.jit.compile import COUNT, Kernel, inline, word
from edgeq.targets.cpu.jit.simd import (
    get_bf16,
    get_f16,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    get_u8,
    put_f32,
    vadd,
    vdiv,
    vexp,
    vfma,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from edgeq.targets.cpu.kernels.microkernel_int import F16_KIND, F32_KIND
from edgeq.targets.cpu.kernels.quantize import rows_of, share_of, write_form


@inline
def get_float(kind, address, index):  # type: ignore[no-untyped-def]
    """Element `index` of an array of f32, f16 or bf16."""
    if kind == F32_KIND:
        return get_f32(address + 4 * index)
    if kind == F16_KIND:
        return get_f16(address + 2 * index)
    return get_bf16(address + 2 * index)


def embed_plain(kind: int) -> Kernel:
    """Row words: 2 tokens i32, 3 table [vocab, width], 4 width, 5 out, 6 bytes of its rows."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        width = word(row, 4)
        for r in range(part, get_i64(word(row, COUNT)), parts):
            token = get_i32(word(row, 2) + 4 * r)
            out = word(row, 5) + r * word(row, 6)
            for c in range(width):
                put_f32(out + 4 * c, get_float(kind, word(row, 3), token * width + c))

    return kernel


def embed_float_tile(kind: int) -> Kernel:
    """As `embed_plain`, from a tied head of floats in the file's order; word 3 is its first block, 7 bytes of a block."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        per_lane = 1 if kind == F32_KIND else 2
        for r in range(part, get_i64(word(row, COUNT)), parts):
            token = get_i32(word(row, 2) + 4 * r)
            out, block = word(row, 5) + r * word(row, 6), word(row, 3) + token // 16 * word(row, 7)
            for c in range(word(row, 4)):
                put_f32(out + 4 * c, get_float(kind, block, (c // per_lane * 16 + token % 16) * per_lane + c % per_lane))

    return kernel


def embed_integer_tile(bits: int, zero: int) -> Kernel:
    """As `embed_float_tile`, of packed integers: 8 scales, 9 bytes of a block of them, 10 zeros, 11 their block, 12 group."""
    wide, middle, low = (bits & 8) // 8, (bits & 4) // 4, bits % 4
    two, one = low // 2, low % 2

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        group = word(row, 12)
        for r in range(part, get_i64(word(row, COUNT)), parts):
            token = get_i32(word(row, 2) + 4 * r)
            lane = token % 16
            out, block = word(row, 5) + r * word(row, 6), word(row, 3) + token // 16 * word(row, 7)
            scales, zeros = word(row, 8) + token // 16 * word(row, 9), word(row, 10) + token // 16 * word(row, 11)
            for c in range(word(row, 4)):
                line = block + c // 32 * bits * 64 + 4 * lane + c % 4
                quad = c % 32 // 4
                if wide:
                    q = get_u8(line + 64 * quad)
                else:
                    q, shift = 0, 0
                    if middle:
                        q = (get_u8(line + quad // 2 * 64) >> (quad % 2 * 4)) & 15
                        line, shift = line + 256, 4
                    if two:
                        q |= ((get_u8(line + quad // 4 * 64) >> (quad % 4 * 2)) & 3) << shift
                        line, shift = line + 128, shift + 2
                    if one:
                        q |= ((get_u8(line) >> quad) & 1) << shift
                center = get_u8(zeros + c // group * 16 + lane) if zero else 1 << (bits - 1)
                put_f32(out + 4 * c, get_f16(scales + (c // group * 16 + lane) * 2) * (q - center))

    return kernel


@inline
def inverse_rms(x, width, epsilon):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean x^2 + epsilon) of a row whose width is padded to 16 with zeros."""
    even, odd = vsplat(0.0), vsplat(0.0)
    for c in range(0, width, 32):
        even = vfma(vload(x + 4 * c), vload(x + 4 * c), even)
        if c + 16 < width:
            odd = vfma(vload(x + 4 * c + 64), vload(x + 4 * c + 64), odd)
    return 1.0 / math.sqrt(vsum(vadd(even, odd)) / width + epsilon)


def norm(big: int) -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 gain f32, 6 epsilon (bits of an f32), 7 out, 8 bytes of its rows, 9...
    form, 19 bytes from one thread's out to the next.

    Widths are padded to 16 with zeros in x, gain and out.
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count, width = get_i64(word(row, COUNT)), word(row, 4)
        first, last = rows_of(part, parts, count, big)
        for r in range(first, last):
            x, out = word(row, 2) + r * word(row, 3), word(row, 7) + r * word(row, 8) + thread * word(row, 19)
            factor = vsplat(inverse_rms(x, width, get_f32(row + 8 * 6)))
            for c in range(0, width, 16):
                vstore(out + 4 * c, vmul(vmul(vload(x + 4 * c), factor), vload(word(row, 5) + 4 * c)))
            write_form(row, 9, out, r, count, big, 0, width)

    return kernel


@inline
def gated(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up of sixteen channels."""
    sigmoid = vdiv(vsplat(1.0), vadd(vsplat(1.0), vexp(vsub(vsplat(0.0), gate))))
    return vmul(vmul(gate, sigmoid), up)


def swiglu(big: int, done: int) -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 width, 5 out, 6 bytes of its rows, 7... form, 17 bytes from one thread's out to
    the next.

    Literal `done`, 1: the product in front has done it all (gated.py).
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        if done:
            return
        count, width = get_i64(word(row, COUNT)), word(row, 4)
        begin, end, first, last = share_of(part, parts, count, big, width)
        for r in range(begin, end):
            x, out = word(row, 2) + r * word(row, 3), word(row, 5) + r * word(row, 6) + thread * word(row, 17)
            for c in range(first, last, 16):
                vstore(out + 4 * c, gated(vload(x + 4 * c), vload(x + 4 * (width + c))))
            write_form(row, 7, out, r, count, big, first, last)

    return kernel


def select() -> Kernel:
    """Row words: COUNT of the selected rows, 2 x, 3 bytes of its rows, 4 width, 5 out, 6 bytes of its rows, 7 indices i32."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        for r in range(part, get_i64(word(row, COUNT)), parts):
            x = word(row, 2) + get_i32(word(row, 7) + 4 * r) * word(row, 3)
            for c in range(0, word(row, 4), 16):
                vstore(word(row, 5) + r * word(row, 6) + 4 * c, vload(x + 4 * c))

    return kernel


def angles() -> Kernel:
    """Cosines and sines of every row's position, once per run.

    Row words: 2 positions i32, 3 frequencies f64, 4 how many, 5 cosines, 6 sines, 7 bytes of their rows, 8 what both are
    multiplied by (bits of an f32).
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        factor = get_f32(row + 8 * 8)
        for r in range(part, get_i64(word(row, COUNT)), parts):
            position = get_i32(word(row, 2) + 4 * r)
            for i in range(word(row, 4)):
                angle = position * get_f64(word(row, 3) + 8 * i)
                put_f32(word(row, 5) + r * word(row, 7) + 4 * i, math.cos(angle) * factor)
                put_f32(word(row, 6) + r * word(row, 7) + 4 * i, math.sin(angle) * factor)

    return kernel
