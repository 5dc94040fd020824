"""Quantized activations as the tiles read them: int8 or int16 blocks with a scale and a sum, or floats (microkernel_int.py has
the layout).

Those of a row are written by whoever makes the row, while it is in the cache; but integers with one scale for all of a row need
the whole row first, and an operation of their own.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.args import Args, nbytes, nested, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import (
    ADDRESS,
    I8,
    LANES,
    VF32,
    VI32,
    VOID,
    call,
    constant,
    f32x16,
    get_f32,
    get_i64,
    get_u8,
    primitive,
    put_bytes_i16,
    put_f32,
    put_i32,
    put_lanes,
    put_octets,
    put_pairs_i16,
    put_quads_i8,
    store,
    vabs,
    vadd,
    vfirst,
    vfma,
    vload,
    vmax,
    vmaximum,
    vmin,
    vmul,
    vrint,
    vsplat,
    vsub,
    vsum,
)
from edgeq.targets.cpu.kernels.args import A8, A16, FLOAT, NONE, QuantizedArgs

MIN_SPAN = 1e-30
"""A block's largest value, or a row's range, below this counts as zero, for its inverse may not be a number."""


WINOGRAD_SHIFTS = (120, -8)
"""What tiles of tokens for products by Winograd's method hold more than x: in even quads, in odd ones (winograd.py)."""


@primitive(f32x16, f32x16)
def vwinograd(b: Any, x: Any) -> Any:
    """What adds up over the lanes, for whole numbers in four quads, to the sum of (x_e + 128) x_o over the channels e of the
    even and o of the odd quads: exact while the sum of the magnitudes stays below 2^23."""
    order = ir.Constant(VI32, [i ^ 4 for i in range(LANES)])
    other = b.shuffle_vector(x, ir.Constant(VF32, ir.Undefined), order)
    odd = ir.Constant(VF32, [128.0 if i & 4 else 0.0 for i in range(LANES)])
    return b.fmul(x, call(b, "llvm.fmuladd.v16f32", VF32, other, constant(VF32, 0.5), odd))


@primitive(f32x16)
def winograd_shifts(b: Any) -> Any:
    return ir.Constant(VF32, [float(WINOGRAD_SHIFTS[i // 4 % 2]) for i in range(LANES)])


@primitive(VOID, f32x16, ADDRESS, ADDRESS)
def put_planes_i16(b: Any, x: Any, address: Any, apart: Any) -> None:
    """Sixteen whole numbers 256 * high + low, both int8: sixteen of low, and `apart` bytes further sixteen of high."""
    whole, octets = b.fptosi(x, VI32), ir.VectorType(I8, LANES)
    store(b, b.trunc(whole, octets), address)
    store(b, b.trunc(b.ashr(b.add(whole, constant(VI32, 128)), constant(VI32, 8)), octets), b.add(address, apart))


@inline
def shifts_of(winograd, largest_tile):
    """What a tile adds to the integers of four quads: only the largest tiles are multiplied by Winograd's method."""
    return winograd_shifts() if winograd != 0 and largest_tile else vsplat(0.0)


@inline
def tile_of(r, count, max_tile):
    """Row r of `count` lies in a tile of how many tokens, and which row is its first: tiles of `max_tile`, then of 4, one of 4
    for two or three that are left, or of 1."""
    many = count // max_tile * max_tile
    if r < many:
        return r // max_tile * max_tile, max_tile
    base = many + (r - many) // 4 * 4
    return (base, 4) if count - base >= 2 else (r, 1)


@inline
def place_of(quantized, r, count, max_tile):
    """Where row r of `count` lies: the first row of its tile, the tile's tokens, its place in it, whether the tile is of the
    largest, and whether the row lies by itself."""
    if 0 < quantized.flat_from <= count:
        return r, 1, 0, False, True
    base, tokens = tile_of(r, count, max_tile)
    return base, tokens, r - base, tokens == max_tile, False


@inline
def rows_of(part, parts, count, max_tile):
    """The rows [first, last) of a part: neighbours, and whole tiles where there are enough, because the tokens of a tile share
    cache lines, and two cores that write to one line wait for each other."""
    tiles = count // max_tile
    if 2 * tiles < parts:
        return count * part // parts, count * (part + 1) // parts
    return tiles * part // parts * max_tile, count if part + 1 == parts else tiles * (part + 1) // parts * max_tile


@inline
def share_of(part, parts, count, max_tile, width):
    """The rows [first, last) of a part and its channels [first, last), whole activation blocks; few rows are shared out by
    channels."""
    if count < parts:
        pieces = (width + 127) // 128
        begin, end = pieces * part // parts * 128, min(pieces * (part + 1) // parts * 128, width)
        return 0, count if begin < end else 0, begin, end
    first, last = rows_of(part, parts, count, max_tile)
    return first, last, 0, width


@inline
def channels(x, factors, c, columns):
    """Sixteen channels from c on, times their factors; after the last of `columns` there are zeros."""
    value = vload(x + 4 * c)
    if factors != 0:
        value = vmul(value, vload(factors + 4 * c))
    if c + 16 > columns:
        value = vfirst(value, columns - c)
    return value


@inline
def apart_of(quantized, flat):
    """Bytes from the low bytes of a row by itself to its high ones; 0: they lie side by side, or there are none."""
    return quantized.stride // 2 if flat and quantized.kind == A16 else 0


@inline
def put_integers(kind, whole, data, c, tokens, t, apart):
    """Channels c ... c + 15 of token t of a tile."""
    quad = (c // 4 * tokens + t) * 4
    if kind == A8:
        if tokens == 1:
            put_octets(data + quad, whole)
        else:
            put_quads_i8(whole, data + quad, 4 * tokens)
    elif apart != 0:
        put_planes_i16(whole, data + c, apart)
    elif kind == A16:
        put_bytes_i16(whole, data + 2 * quad, 8 * tokens)
    else:
        put_pairs_i16(whole, data + 2 * quad, 8 * tokens)


@inline
def put_padding(quantized, data, tokens, t, shifts, apart):
    """Zeros, shifted, up to a whole chunk, of a row by itself to the end of its room: another run may have left numbers there,
    which not every instruction set ignores."""
    kind, c = quantized.kind, (quantized.columns + 15) // 16 * 16
    end = quantized.stride if kind == A8 and tokens == 1 else (c + 31) // 32 * 32
    end = apart if apart != 0 else end
    while c < end:
        put_integers(kind, shifts, data, c, tokens, t, apart)
        c += 16


@inline
def put_numbers(quantized, place, scale, total, products):
    """Scale and sums of a block, number `place` of all.

    Integers cannot hold NaN or an infinity: of such a value comes a sum of NaN, and with it the scale, which reaches every
    output channel.
    """
    added = vsum(total)
    put_f32(quantized.scales + 4 * place, scale if added == added else math.nan)
    put_i32(quantized.sums + 4 * place, int(added))
    if quantized.winograd_sums != 0:
        put_i32(quantized.winograd_sums + 4 * place, int(vsum(products)))


@inline
def write_quantized(quantized, x, place, first, last):
    """Channels [first, last) of a row, at address x (of channel 0), as `quantized` describes them, to its place (`place_of`).

    `first` is a multiple of the block.
    """
    kind = quantized.kind
    if kind == NONE:
        return
    columns, block, row_bytes, factors = quantized.columns, quantized.block, quantized.stride, quantized.factors
    base, tokens, t, largest_tile, flat = place
    data = quantized.data + base * row_bytes
    if kind == FLOAT:
        for c in range(first, last, 16):
            put_lanes(channels(x, factors, c, columns), data + (c * tokens + t) * 4, 4 * tokens)
        return
    blocks, winograd = (columns + block - 1) // block, quantized.winograd_sums
    limit, shifts, apart = float(quantized.limit), shifts_of(winograd, largest_tile), apart_of(quantized, flat)
    if quantized.constants != 0:
        write_quantized_constant(quantized, x, place, first, last)
        return
    for start in range(first, last, block):
        stop = min(start + block, last)
        peak = vsplat(0.0)
        for c in range(start, stop, 16):
            peak = vmax(vabs(channels(x, factors, c, columns)), peak)
        largest = vmaximum(peak)
        inverse = limit / largest if largest > MIN_SPAN else 0.0
        factor, total, products = vsplat(inverse), vsplat(0.0), vsplat(0.0)
        for c in range(start, stop, 16):
            whole = vrint(vmul(channels(x, factors, c, columns), factor))
            total = vadd(total, whole)
            if winograd != 0:
                products = vadd(products, vwinograd(whole))
            put_integers(kind, vadd(whole, shifts), data, c, tokens, t, apart)
        scale = largest / limit if largest > MIN_SPAN else 0.0
        put_numbers(quantized, base * blocks + start // block * tokens + t, scale, total, products)
    if last == columns:
        put_padding(quantized, data, tokens, t, shifts, apart)


@inline
def write_quantized_constant(quantized, x, place, first, last):
    """The same with the constant scale of the row's modality, which every block gets, so products need not know."""
    kind, columns, block, row_bytes = quantized.kind, quantized.columns, quantized.block, quantized.stride
    factors, blocks = quantized.factors, (columns + block - 1) // block
    base, tokens, t, largest_tile, flat = place
    data, winograd = quantized.data + base * row_bytes, quantized.winograd_sums
    shifts, apart = shifts_of(winograd, largest_tile), apart_of(quantized, flat)
    constants = quantized.constants + 8 * get_u8(quantized.modality + base + t)
    factor, scale = vsplat(get_f32(constants)), get_f32(constants + 4)
    none, most = vsplat(0.0), vsplat(float(quantized.limit))
    least = vsub(none, most)
    for start in range(first, last, block):
        total, products = none, none
        for c in range(start, min(start + block, last), 16):
            value = channels(x, factors, c, columns)
            whole = vmin(most, vmax(least, vrint(vmul(value, factor))))
            # Limited, an infinity would go unnoticed.
            total = vadd(vfma(value, none, whole), total)
            if winograd != 0:
                products = vadd(products, vwinograd(whole))
            put_integers(kind, vadd(whole, shifts), data, c, tokens, t, apart)
        put_numbers(quantized, base * blocks + start // block * tokens + t, scale, total, products)
    if last == columns:
        put_padding(quantized, data, tokens, t, shifts, apart)


@inline
def write_quantized_tokens(quantized, asymmetric, x, place, first, last):
    """The same with one scale, and perhaps a zero point z, for all of the row: what is stored is q - z, 0 for x = 0.

    Every block gets the scale, so products need not know.
    """
    kind, columns, block, row_bytes = quantized.kind, quantized.columns, quantized.block, quantized.stride
    factors, limit = quantized.factors, float(quantized.limit)
    base, tokens, t, largest_tile, flat = place
    data = quantized.data + base * row_bytes
    blocks, none = (columns + block - 1) // block, vsplat(0.0)
    winograd = quantized.winograd_sums
    shifts, apart = shifts_of(winograd, largest_tile), apart_of(quantized, flat)
    high, low = none, none
    for c in range(0, columns, 16):
        value = channels(x, factors, c, columns)
        high, low = vmax(value, high), vmax(vsub(none, value), low)
    span = vmaximum(high) + vmaximum(low) if asymmetric else vmaximum(vmax(high, low))
    inverse = limit / span if span > MIN_SPAN else 0.0
    scale = span / limit if span > MIN_SPAN else 0.0
    factor, most = vsplat(inverse), vsplat(limit)
    least = vsub(none, most)
    if asymmetric:
        least = vsub(none, vrint(vmul(vsplat(vmaximum(low)), factor)))
        most = vadd(most, least)
    for start in range(first, last, block):
        total, products = none, none
        for c in range(start, min(start + block, last), 16):
            # In this order both keep NaN, for `total`.
            whole = vmin(most, vmax(least, vrint(vmul(channels(x, factors, c, columns), factor))))
            total = vadd(total, whole)
            if winograd != 0:
                products = vadd(products, vwinograd(whole))
            put_integers(kind, vadd(whole, shifts), data, c, tokens, t, apart)
        put_numbers(quantized, base * blocks + start // block * tokens + t, scale, total, products)
    if last == columns:
        put_padding(quantized, data, tokens, t, shifts, apart)


class QuantizeArgs(Args):
    """x: the first channel of the first row."""

    x = pointer()
    x_stride = nbytes()
    quantized = nested(QuantizedArgs)


def quantize(max_tile: int) -> Kernel:
    """The quantized activations of x, in a pass of its own."""

    def kernel(record, part, parts, thread):
        args = QuantizeArgs(record)
        count = get_i64(args.rows)
        begin, end, first, last = share_of(part, parts, count, max_tile, args.quantized.columns)
        for r in range(begin, end):
            write_quantized(
                args.quantized, args.x + r * args.x_stride, place_of(args.quantized, r, count, max_tile), first, last
            )

    return kernel


def quantize_tokens(max_tile: int, asymmetric: int) -> Kernel:
    """With one scale for a row.  Each part finds the range for itself: that costs less than to meet the others."""

    def kernel(record, part, parts, thread):
        args = QuantizeArgs(record)
        count = get_i64(args.rows)
        begin, end, first, last = share_of(part, parts, count, max_tile, args.quantized.columns)
        for r in range(begin, end):
            x = args.x + r * args.x_stride
            write_quantized_tokens(args.quantized, asymmetric, x, place_of(args.quantized, r, count, max_tile), first, last)

    return kernel
