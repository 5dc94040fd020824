"""Activations in the form that the tiles read: int8 or int16 blocks with a scale and a sum, or floats (tile.py has the layout).

The form of a row is written by whoever makes the row, while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeq.targets.cpu.compiled import COUNT, inline, word
from edgeq.targets.cpu.vector import (
    get_i64,
    put_f32,
    put_i32,
    put_lanes,
    put_quads_i8,
    put_quads_i16,
    vabs,
    vadd,
    vload,
    vmax,
    vmaximum,
    vmul,
    vrint,
    vsplat,
    vsum,
)

NONE, FLOAT, A8, A16 = 0, 1, 2, 3
WORDS = 7
"""Table words of a form, in the order of `Form.words`."""


@dataclass(frozen=True)
class Form:
    """Where and how the quantized copy of a buffer lies.

    kind       NONE, FLOAT, A8 or A16
    columns    channels
    block      channels that share a scale, a multiple of 16
    data       address of the tiles, row_bytes for each row;  scale, total: addresses, one number per row and block
    """

    kind: int
    columns: int
    block: int
    row_bytes: int
    data: int
    scale: int
    total: int

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block)

    def words(self) -> list[int]:
        return [self.kind, self.columns, self.block, self.row_bytes, self.data, self.scale, self.total]


ABSENT = Form(NONE, 0, 16, 0, 0, 0, 0)


@inline
def tile_of(r, count, big):  # type: ignore[no-untyped-def]
    """Row r of `count` lies in a tile of how many tokens, and which row is its first: tiles of `big`, then of 4, then of 1."""
    many = count // big * big
    if r < many:
        return r // big * big, big
    some = many + (count - many) // 4 * 4
    if r < some:
        return many + (r - many) // 4 * 4, 4
    return r, 1


@inline
def write_form(row, at, x, r, count, big, first, last):  # type: ignore[no-untyped-def]
    """Channels [first, last) of row r, at address x (of channel 0), into the form described by the table words from `at`.

    `first` is a multiple of the block.
    """
    kind = word(row, at)
    if kind == 0:
        return
    block, row_bytes = word(row, at + 2), word(row, at + 3)
    base, tokens = tile_of(r, count, big)
    t = r - base
    data = word(row, at + 4) + base * row_bytes
    if kind == 1:
        for c in range(first, last, 16):
            put_lanes(vload(x + 4 * c), data + (c * tokens + t) * 4, 4 * tokens)
        return
    blocks = (word(row, at + 1) + block - 1) // block
    scales = word(row, at + 5) + base * blocks * 4
    totals = word(row, at + 6) + base * blocks * 4
    limit = 127.0 if kind == 2 else 32767.0
    for start in range(first, last, block):
        stop = min(start + block, last)
        peak = vsplat(0.0)
        for c in range(start, stop, 16):
            peak = vmax(vabs(vload(x + 4 * c)), peak)
        largest = vmaximum(peak)
        inverse = limit / largest if largest > 1e-30 else 0.0
        factor, total = vsplat(inverse), vsplat(0.0)
        for c in range(start, stop, 16):
            whole = vrint(vmul(vload(x + 4 * c), factor))
            total = vadd(total, whole)
            quad = (c // 4 * tokens + t) * 4
            if kind == 2:
                put_quads_i8(whole, data + quad, 4 * tokens)
            else:
                put_quads_i16(whole, data + 2 * quad, 8 * tokens)
        place = (start // block * tokens + t) * 4
        put_f32(scales + place, largest / limit if largest > 1e-30 else 0.0)
        put_i32(totals + place, int(vsum(total)))


def quantize(big: int) -> Callable[[int, int, int, int], None]:
    """Row words: COUNT, 2 address of x, 3 bytes between rows, 4... the form."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count = get_i64(word(row, COUNT))
        columns = word(row, 5)
        if count >= parts:
            for r in range(part, count, parts):
                write_form(row, 4, word(row, 2) + r * word(row, 3), r, count, big, 0, columns)
        else:
            pieces = (columns + 127) // 128
            first, last = pieces * part // parts * 128, pieces * (part + 1) // parts * 128
            for r in range(count):
                write_form(row, 4, word(row, 2) + r * word(row, 3), r, count, big, first, min(last, columns))

    return kernel
