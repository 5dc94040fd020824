"""y = W x over the rows of a run: a part is some of the output blocks; within it a group of blocks stays in the cache while the
tokens pass by.
"""

from __future__ import annotations

from numba import njit

from edgeq.targets.cpu.jit.compile import COUNT, Kernel, inline, word
from edgeq.targets.cpu.jit.simd import get_f32, get_i64, put_f32, vadd, vload, vstore
from edgeq.targets.cpu.kernels.microkernel_int import ADD, BIAS, GROUP, INTEGERS, ROWS, SCRATCH, Y_ROW, Y, product_tile

SCRATCH_BYTES = 1 << 13
"""Per thread; a tile's result has at most 2 blocks x 12 tokens x 64 bytes, and gated.py needs four times as much behind it."""


@inline
def written(row, together, n):  # type: ignore[no-untyped-def]
    """Whether a tile of whole tokens writes its results itself: `together` whole blocks, more than one, without a bias."""
    return together > 1 and word(row, BIAS) == 0 and 16 * (n + together) <= word(row, ROWS)


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
def share(rows, part, parts, together):  # type: ignore[no-untyped-def]
    """The blocks [first, last) of a part of so many rows, `together` of which are not parted."""
    blocks = (rows + 15) // 16
    units = (blocks + together - 1) // together
    return units * part // parts * together, min(units * (part + 1) // parts * together, blocks)


# Into the kernel before it is typed: a function of its own would be compiled twice.
@njit(inline="always")  # type: ignore[misc]
def tiles(kind, isa, bits, mode16, zero, half, tokens, least, together, row, start, stop, r, scratch):  # type: ignore[no-untyped-def]
    """Blocks [start, stop) times rows from r on, as many as tiles of `tokens` take, the last of them with `least` rows or more;
    returns the row behind them."""
    count = get_i64(word(row, COUNT))
    while count - r >= least:
        here = min(tokens, count - r)
        for n in range(start, stop, together):
            own = here == tokens and written(row, together, n)
            product_tile(kind, isa, bits, mode16, zero, half, tokens, together, row, n, r, scratch, int(own))
            if not own:
                for i in range(min(together, stop - n)):
                    finish(row, scratch + 64 * tokens * i, here, n + i, r)
        r += here
    return r


def integer_matvec(isa: int, bits: int, mode16: int, zero: int, half: int) -> Kernel:
    """Packed integers times one token."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        if get_i64(word(row, COUNT)) == 1:
            first, last = share(word(row, ROWS), part, parts, 1)
            scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
            tiles(INTEGERS, isa, bits, mode16, zero, half, 1, 1, 1, row, first, last, 0, scratch)

    return kernel


def integer_matmul(isa: int, bits: int, mode16: int, zero: int, half: int, big: int, together: int) -> Kernel:
    """Packed integers times any number of tokens, in tiles of `big`, 4 and 1, two or three in one of 4; of the larger tiles
    `together` blocks at once."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        group = (word(row, GROUP) + together - 1) // together * together
        first, last = share(word(row, ROWS), part, parts, together)
        scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = tiles(INTEGERS, isa, bits, mode16, zero, half, big, big, together, row, start, stop, 0, scratch)
            r = tiles(INTEGERS, isa, bits, mode16, zero, half, 4, 2, together, row, start, stop, r, scratch)
            tiles(INTEGERS, isa, bits, mode16, zero, half, 1, 1, 1, row, start, stop, r, scratch)

    return kernel


def float_matmul(kind: int, big: int) -> Kernel:
    """Floats times any number of tokens, in tiles of `big`, 4 and 1, two or three in one of 4."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        group = word(row, GROUP)
        first, last = share(word(row, ROWS), part, parts, 1)
        scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = tiles(kind, 0, 0, 0, 0, 0, big, big, 1, row, start, stop, 0, scratch)
            r = tiles(kind, 0, 0, 0, 0, 0, 4, 2, 1, row, start, stop, r, scratch)
            tiles(kind, 0, 0, 0, 0, 0, 1, 1, 1, row, start, stop, r, scratch)

    return kernel
