"""Gate and up of an MLP in one pass: both products, silu(gate) * up and the form of the result; no floats leave the cache.

Rows of gate and of up stand one half of the matrix apart, and a tile takes a block of each.  What becomes of them is said by
the table row behind, that of `elementwise.swiglu`, which has nothing left to do.
"""

from __future__ import annotations

from numba import njit

from edgeq.targets.cpu.jit.compile import COUNT, Kernel, inline, word
from edgeq.targets.cpu.jit.optable import ROW_WORDS
from edgeq.targets.cpu.jit.simd import get_i64, vload, vstore
from edgeq.targets.cpu.kernels.elementwise import gated
from edgeq.targets.cpu.kernels.matmul import SCRATCH_BYTES, share
from edgeq.targets.cpu.kernels.microkernel_int import INTEGERS, SCRATCH, STEP, product_tile
from edgeq.targets.cpu.kernels.quantize import write_form

UNIT = 8
"""Blocks of results that a thread makes at once: 128 channels, the longest activation block."""
WIDTH, FORM = 4, 7
"""Words of the row behind."""
RESULTS, RESULT_ROW = 2 * 12 * 64, 64 * UNIT
"""In scratch, behind the products of the largest tile: f32 [12][128]."""


@inline
def behind(row):  # type: ignore[no-untyped-def]
    return row + 8 * ROW_WORDS


@inline
def gate(scratch, tokens, block):  # type: ignore[no-untyped-def]
    """Block `block` of a unit, from the products that a tile has left in scratch."""
    for t in range(tokens):
        result = gated(vload(scratch + 64 * t), vload(scratch + 64 * (tokens + t)))
        vstore(scratch + RESULTS + RESULT_ROW * t + 64 * block, result)


@inline
def write_unit(row, scratch, start, stop, r, here, big):  # type: ignore[no-untyped-def]
    """The form of blocks [start, stop) of `here` rows from row r on."""
    count = get_i64(word(row, COUNT))
    for t in range(here):
        x = scratch + RESULTS + RESULT_ROW * t - 64 * start
        write_form(behind(row), FORM, x, r + t, count, big, 16 * start, 16 * stop)


@njit(inline="always")  # type: ignore[misc]
def gated_tiles(isa, bits, mode16, zero, half, tokens, least, together, row, start, stop, r, scratch, big):  # type: ignore[no-untyped-def]
    """As `matmul.tiles`, for a unit of results."""
    count, step = get_i64(word(row, COUNT)), word(row, STEP)
    while count - r >= least:
        here = min(tokens, count - r)
        for n in range(start, stop):
            product_tile(INTEGERS, isa, bits, mode16, zero, half, tokens, together, row, n, r, scratch, 0)
            if together == 1:
                product_tile(INTEGERS, isa, bits, mode16, zero, half, tokens, 1, row, n + step, r, scratch + 64 * tokens, 0)
            gate(scratch, tokens, n - start)
        write_unit(row, scratch, start, stop, r, here, big)
        r += here
    return r


def gated_matmul(isa: int, bits: int, mode16: int, zero: int, half: int, big: int, together: int) -> Kernel:
    """Row words: those of a product."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
        first, last = share(word(behind(row), WIDTH), part, parts, UNIT)
        for start in range(first, last, UNIT):
            stop = min(start + UNIT, last)
            r = gated_tiles(isa, bits, mode16, zero, half, big, big, together, row, start, stop, 0, scratch, big)
            r = gated_tiles(isa, bits, mode16, zero, half, 4, 2, together, row, start, stop, r, scratch, big)
            gated_tiles(isa, bits, mode16, zero, half, 1, 1, 1, row, start, stop, r, scratch, big)

    return kernel
