"""Activations in the form that the tiles read: int8 or int16 blocks with a scale and a sum, or floats (tile.py has the layout).

The form of a row is written by whoever makes the row, while it is in the cache; but integers with one scale for all of a row
need the whole row first, and an operation of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.compile import COUNT, Kernel, inline, word
from edgeq.targets.cpu.jit.simd import (
    LANES,
    VF32,
    VI32,
    call,
    constant,
    f32x16,
    get_i64,
    primitive,
    put_f32,
    put_i32,
    put_lanes,
    put_quads_i8,
    put_quads_i16,
    vabs,
    vadd,
    vfirst,
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

NONE, FLOAT, A8, A16 = 0, 1, 2, 3
WORDS = 10
"""Table words of a form, in the order of `Form.words`."""
BLOCK, TOKEN, TOKEN_ZERO = 0, 1, 2
"""What a scale is for: a block of channels, symmetric; a whole row, symmetric or with a zero point."""
LEAST = 1e-30
"""Of a block's largest value, or a row's range: a smaller one counts as zero, for its inverse may not be a number."""


@dataclass(frozen=True)
class Reading:
    """What a product reads: columns [first, first + columns) of a buffer's rows, quantized.

    kind       NONE, FLOAT, A8 or A16: how the integers are stored
    block      channels that have a scale of their own in store, a multiple of 16
    limit      the largest integer; with TOKEN_ZERO the difference of the largest and the smallest
    scaling    BLOCK, TOKEN or TOKEN_ZERO
    factors    address of one f32 per channel that x is multiplied by first, or 0
    pairs      8-bit integers go to products by pairs of channels, which need a number more of every block (pairs.py)
    """

    kind: int
    columns: int
    block: int
    limit: int = 0
    scaling: int = BLOCK
    factors: int = 0
    first: int = 0
    pairs: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block)


@dataclass(frozen=True)
class Form:
    """Where a quantized copy lies: address of the tiles, row_bytes for each row; of scales, sums and, for products by pairs,
    the sums A, one per row and block."""

    reading: Reading
    row_bytes: int
    data: int
    scale: int
    total: int
    pair: int = 0

    def words(self) -> list[int]:
        r = self.reading
        return [r.kind, r.columns, r.block, self.row_bytes, self.data, self.scale, self.total, r.limit, r.factors, self.pair]


ABSENT = Form(Reading(NONE, 0, 16), 0, 0, 0, 0)


PAIR_SHIFTS = (120, -8)
"""What tiles of tokens for products by pairs hold more than x: in even quads, in odd ones (pairs.py)."""


@primitive(f32x16, f32x16)
def vpair(b: Any, x: Any) -> Any:
    """Of whole numbers in four quads, what adds up over the lanes to the sum of (x_e + 128) x_o over the channels e of the even
    and o of the odd quads: exact while the sum of the magnitudes stays below 2^23."""
    order = ir.Constant(VI32, [i ^ 4 for i in range(LANES)])
    other = b.shuffle_vector(x, ir.Constant(VF32, ir.Undefined), order)
    odd = ir.Constant(VF32, [128.0 if i & 4 else 0.0 for i in range(LANES)])
    return b.fmul(x, call(b, "llvm.fmuladd.v16f32", VF32, other, constant(VF32, 0.5), odd))


@primitive(f32x16)
def pair_shifts(b: Any) -> Any:
    return ir.Constant(VF32, [float(PAIR_SHIFTS[i // 4 % 2]) for i in range(LANES)])


@inline
def shifts_of(pairs, tokens, big):  # type: ignore[no-untyped-def]
    """What a tile adds to the integers of four quads: only the largest tiles are multiplied by pairs."""
    return pair_shifts() if pairs != 0 and tokens == big else vsplat(0.0)


@inline
def tile_of(r, count, big):  # type: ignore[no-untyped-def]
    """Row r of `count` lies in a tile of how many tokens, and which row is its first: tiles of `big`, then of 4, one of 4 for
    two or three that are left, or of 1."""
    many = count // big * big
    if r < many:
        return r // big * big, big
    base = many + (r - many) // 4 * 4
    return (base, 4) if count - base >= 2 else (r, 1)


@inline
def rows_of(part, parts, count, big):  # type: ignore[no-untyped-def]
    """The rows [first, last) of a part: neighbours, and whole tiles where there are enough, because the tokens of a tile share
    cache lines, and two cores that write to one line wait for each other."""
    tiles = count // big
    if 2 * tiles < parts:
        return count * part // parts, count * (part + 1) // parts
    return tiles * part // parts * big, count if part + 1 == parts else tiles * (part + 1) // parts * big


@inline
def share_of(part, parts, count, big, width):  # type: ignore[no-untyped-def]
    """The rows [first, last) of a part and its channels [first, last), whole activation blocks; few rows are shared out by
    channels."""
    if count < parts:
        pieces = (width + 127) // 128
        begin, end = pieces * part // parts * 128, min(pieces * (part + 1) // parts * 128, width)
        return 0, count if begin < end else 0, begin, end
    first, last = rows_of(part, parts, count, big)
    return first, last, 0, width


@inline
def channels(x, factors, c, columns):  # type: ignore[no-untyped-def]
    """Sixteen channels from c on, times their factors; behind the last of `columns` there are zeros."""
    value = vload(x + 4 * c)
    if factors != 0:
        value = vmul(value, vload(factors + 4 * c))
    if c + 16 > columns:
        value = vfirst(value, columns - c)
    return value


@inline
def put_integers(kind, whole, data, c, tokens, t):  # type: ignore[no-untyped-def]
    """Channels c ... c + 15 of token t of a tile."""
    quad = (c // 4 * tokens + t) * 4
    if kind == 2:
        put_quads_i8(whole, data + quad, 4 * tokens)
    else:
        put_quads_i16(whole, data + 2 * quad, 8 * tokens)


@inline
def put_padding(kind, data, columns, tokens, t, shifts):  # type: ignore[no-untyped-def]
    """Zeros, shifted, up to a whole chunk: another run may have left numbers there, which not every instruction set ignores."""
    c = (columns + 15) // 16 * 16
    if c % 32 != 0:
        put_integers(kind, shifts, data, c, tokens, t)


@inline
def put_numbers(row, at, place, scale, total, pair):  # type: ignore[no-untyped-def]
    """Scale and sums of a block, number `place` of all."""
    put_f32(word(row, at + 5) + 4 * place, scale)
    put_i32(word(row, at + 6) + 4 * place, int(vsum(total)))
    if word(row, at + 9) != 0:
        put_i32(word(row, at + 9) + 4 * place, int(vsum(pair)))


@inline
def write_form(row, at, x, r, count, big, first, last):  # type: ignore[no-untyped-def]
    """Channels [first, last) of row r, at address x (of channel 0), into the form described by the table words from `at`.

    `first` is a multiple of the block.
    """
    kind = word(row, at)
    if kind == 0:
        return
    columns, block, row_bytes, factors = word(row, at + 1), word(row, at + 2), word(row, at + 3), word(row, at + 8)
    base, tokens = tile_of(r, count, big)
    t = r - base
    data = word(row, at + 4) + base * row_bytes
    if kind == 1:
        for c in range(first, last, 16):
            put_lanes(channels(x, factors, c, columns), data + (c * tokens + t) * 4, 4 * tokens)
        return
    blocks, pairs = (columns + block - 1) // block, word(row, at + 9)
    limit, shifts = float(word(row, at + 7)), shifts_of(pairs, tokens, big)
    for start in range(first, last, block):
        stop = min(start + block, last)
        peak = vsplat(0.0)
        for c in range(start, stop, 16):
            peak = vmax(vabs(channels(x, factors, c, columns)), peak)
        largest = vmaximum(peak)
        inverse = limit / largest if largest > LEAST else 0.0
        factor, total, pair = vsplat(inverse), vsplat(0.0), vsplat(0.0)
        for c in range(start, stop, 16):
            whole = vrint(vmul(channels(x, factors, c, columns), factor))
            total = vadd(total, whole)
            if pairs != 0:
                pair = vadd(pair, vpair(whole))
            put_integers(kind, vadd(whole, shifts), data, c, tokens, t)
        scale = largest / limit if largest > LEAST else 0.0
        put_numbers(row, at, base * blocks + start // block * tokens + t, scale, total, pair)
    if last == columns:
        put_padding(kind, data, columns, tokens, t, shifts)


@inline
def write_token_form(row, at, asymmetric, x, r, count, big, first, last):  # type: ignore[no-untyped-def]
    """The same with one scale, and perhaps a zero point z, for all of the row: what is stored is q - z, 0 for x = 0.

    Every block gets the scale, so products need not know.
    """
    kind, columns, block, row_bytes = word(row, at), word(row, at + 1), word(row, at + 2), word(row, at + 3)
    factors, limit = word(row, at + 8), float(word(row, at + 7))
    base, tokens = tile_of(r, count, big)
    t = r - base
    data = word(row, at + 4) + base * row_bytes
    blocks, none = (columns + block - 1) // block, vsplat(0.0)
    pairs = word(row, at + 9)
    shifts = shifts_of(pairs, tokens, big)
    high, low = none, none
    for c in range(0, columns, 16):
        value = channels(x, factors, c, columns)
        high, low = vmax(value, high), vmax(vsub(none, value), low)
    span = vmaximum(high) + vmaximum(low) if asymmetric else vmaximum(vmax(high, low))
    inverse = limit / span if span > LEAST else 0.0
    scale = span / limit if span > LEAST else 0.0
    factor, most = vsplat(inverse), vsplat(limit)
    least = vsub(none, most)
    if asymmetric:
        least = vsub(none, vrint(vmul(vsplat(vmaximum(low)), factor)))
        most = vadd(most, least)
    for start in range(first, last, block):
        total, pair = none, none
        for c in range(start, min(start + block, last), 16):
            whole = vmin(vmax(vrint(vmul(channels(x, factors, c, columns), factor)), least), most)
            total = vadd(total, whole)
            if pairs != 0:
                pair = vadd(pair, vpair(whole))
            put_integers(kind, vadd(whole, shifts), data, c, tokens, t)
        put_numbers(row, at, base * blocks + start // block * tokens + t, scale, total, pair)
    if last == columns:
        put_padding(kind, data, columns, tokens, t, shifts)


def quantize(big: int) -> Kernel:
    """Row words: COUNT, 2 address of x's first channel, 3 bytes between rows, 4... the form."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count = get_i64(word(row, COUNT))
        begin, end, first, last = share_of(part, parts, count, big, word(row, 5))
        for r in range(begin, end):
            write_form(row, 4, word(row, 2) + r * word(row, 3), r, count, big, first, last)

    return kernel


def quantize_tokens(big: int, asymmetric: int) -> Kernel:
    """Row words as those of `quantize`.  Each part finds the range for itself: that costs less than to meet the others."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count = get_i64(word(row, COUNT))
        begin, end, first, last = share_of(part, parts, count, big, word(row, 5))
        for r in range(begin, end):
            write_token_form(row, 4, asymmetric, word(row, 2) + r * word(row, 3), r, count, big, first, last)

    return kernel
