"""y = W x over the rows of a run: a part is some of the output blocks; within it a group of blocks stays in the cache while the
tokens pass by.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeq.targets.cpu.compiled import COUNT, inline, word
from edgeq.targets.cpu.tile import ADD, BIAS, GROUP, ROWS, SCRATCH, Y_ROW, Y, float_tile, integer_tile
from edgeq.targets.cpu.vector import get_f32, get_i64, put_f32, vadd, vload, vstore

SCRATCH_BYTES = 1 << 12
"""Per thread; a tile's result has at most 12 tokens x 64 bytes."""

Kernel = Callable[[int, int, int, int], None]


@inline
def finish(row, scratch, tokens, n, r):  # type: ignore[no-untyped-def]
    """Bias, residual and the rows that exist: from the tile's result to y."""
    rows, bias, add = word(row, ROWS), word(row, BIAS), word(row, ADD)
    for t in range(tokens):
        y, x = word(row, Y) + (r + t) * word(row, Y_ROW) + 64 * n, scratch + 64 * t
        if 16 * n + 16 <= rows:
            value = vload(x)
            if bias != 0:
                value = vadd(value, vload(bias + 64 * n))
            if add != 0:
                value = vadd(vload(y), value)
            vstore(y, value)
        else:
            for i in range(rows - 16 * n):
                last = get_f32(x + 4 * i)
                if bias != 0:
                    last += get_f32(bias + 64 * n + 4 * i)
                if add != 0:
                    last += get_f32(y + 4 * i)
                put_f32(y + 4 * i, last)


@inline
def share(row, part, parts):  # type: ignore[no-untyped-def]
    """The blocks [first, last) of a part."""
    blocks = (word(row, ROWS) + 15) // 16
    return blocks * part // parts, blocks * (part + 1) // parts


def integer_matvec(isa: int, bits: int, mode16: int, zero: int, half: int) -> Kernel:
    """Packed integers times one token."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        if get_i64(word(row, COUNT)) == 1:
            first, last = share(row, part, parts)
            scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
            for n in range(first, last):
                integer_tile(isa, bits, mode16, zero, half, 1, row, n, 0, scratch)
                finish(row, scratch, 1, n, 0)

    return kernel


def integer_matmul(isa: int, bits: int, mode16: int, zero: int, half: int, big: int) -> Kernel:
    """Packed integers times any number of tokens, in tiles of `big`, 4 and 1."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count, group = get_i64(word(row, COUNT)), word(row, GROUP)
        first, last = share(row, part, parts)
        scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = 0
            while count - r >= big:
                for n in range(start, stop):
                    integer_tile(isa, bits, mode16, zero, half, big, row, n, r, scratch)
                    finish(row, scratch, big, n, r)
                r += big
            while count - r >= 4:
                for n in range(start, stop):
                    integer_tile(isa, bits, mode16, zero, half, 4, row, n, r, scratch)
                    finish(row, scratch, 4, n, r)
                r += 4
            while count - r >= 1:
                for n in range(start, stop):
                    integer_tile(isa, bits, mode16, zero, half, 1, row, n, r, scratch)
                    finish(row, scratch, 1, n, r)
                r += 1

    return kernel


def float_matmul(kind: int, big: int) -> Kernel:
    """Floats times any number of tokens, in tiles of `big`, 4 and 1."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        count, group = get_i64(word(row, COUNT)), word(row, GROUP)
        first, last = share(row, part, parts)
        scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = 0
            while count - r >= big:
                for n in range(start, stop):
                    float_tile(kind, big, row, n, r, scratch)
                    finish(row, scratch, big, n, r)
                r += big
            while count - r >= 4:
                for n in range(start, stop):
                    float_tile(kind, 4, row, n, r, scratch)
                    finish(row, scratch, 4, n, r)
                r += 4
            while count - r >= 1:
                for n in range(start, stop):
                    float_tile(kind, 1, row, n, r, scratch)
                    finish(row, scratch, 1, n, r)
                r += 1

    return kernel
