"""The products of a panel of attention in bf16 (attention_bf16.py): by a matrix unit, or by instructions for pairs.

Both read the same operands: queries and weights row by row, keys and values as tiles of 16 pairs by 16 columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite

from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.deferred import always_inline
from edgeq.targets.cpu.kernels.attention.bf16_vectors import TILE_ROWS, dots
from edgeq.targets.cpu.kernels.products.matrix_unit import (
    CONFIGURATION_BYTES,
    ROW_BYTES,
    SIDE,
    TILE_BYTES,
    added_bf16,
    configure,
    products_bf16,
    release,
)

ROWS, PANEL, BLOCK = 256, 2 * SIDE, 256
"""Rows of a unit, rows that are multiplied at once, and slots of a block."""
STEP = 2 * SIDE
"""Channels, or slots, that one instruction sums."""
WEIGHTS_STRIDE = 2 * BLOCK
MAX_VECTORS = 5
"""Vectors of columns of a tile: with TILE_ROWS rows what the registers of AVX-512 hold."""
MATRIX_UNIT, VECTORS = 0, 1
"""What multiplies."""
COMPILES = tuple(map(int, llvmlite.__version__.split(".")[:2])) >= (0, 45)
"""LLVM 15 (llvmlite 0.44) names other types for a product of pairs, and the function it calls to round to a bf16 ends the
process."""


class PanelScratch:
    """Bytes of a thread's scratch and where its parts begin, for heads of `dim` channels.

    steps, columns   registers of a row of channels, and vectors of 16 channels of a result
    column_bytes     of the scores of a panel for 16 slots, or its results for 16 channels: float32 [32][16]
    """

    def __init__(self, dim: int, unit: int) -> None:
        self.steps = padded(dim, STEP) // STEP
        self.columns = padded(dim, STEP if unit == MATRIX_UNIT else SIDE) // SIDE
        # The matrix unit stores two at once.  Else no power of two: parts of a row would compete for a few lines of a cache.
        self.column_bytes = 2 * TILE_BYTES + (0 if unit == MATRIX_UNIT else ROW_BYTES)
        sizes = {
            "configuration": CONFIGURATION_BYTES,
            "queries": ROWS * self.steps * ROW_BYTES,
            "keys": BLOCK // SIDE * self.steps * TILE_BYTES,
            "values": self.columns * BLOCK // STEP * TILE_BYTES,
            "scores": BLOCK // SIDE * self.column_bytes,
            "weights": PANEL * WEIGHTS_STRIDE,
            "results": ROWS // PANEL * self.columns * self.column_bytes,
            "totals": ROWS * ROW_BYTES,
            "largest": ROWS * 4,
        }
        self.at, self.nbytes = dict[str, int](), 0
        for name, size in sizes.items():
            self.at[name] = self.nbytes
            self.nbytes += padded(size, ROW_BYTES)


class Products(NamedTuple):
    """What one kind of unit multiplies for a panel of up to 32 rows.

    begin     (states): before the first product of a work item
    score     (queries, keys, vectors, rows, scores): of so many rows with so many times 16 slots, an even number
    gather    (weights, values, steps, rows, results): weights times values of so many times 32 slots, added to the results
    end       (): after the last
    """

    begin: Any
    score: Any
    gather: Any
    end: Any


def matrix_products(dim: int) -> Products:
    room = PanelScratch(dim, MATRIX_UNIT)
    steps, columns, row_of_values = room.steps, room.columns, BLOCK // STEP * TILE_BYTES
    stride, tile, out_bytes = steps * ROW_BYTES, steps * TILE_BYTES, room.column_bytes

    @always_inline
    def begin(states):
        configure(states, PANEL, ROW_BYTES)

    @always_inline
    def score(queries, keys, vectors, rows, scores):
        for c in range(0, vectors, 2):
            line = keys + c * tile
            products_bf16(queries, queries + SIDE * stride, stride, line, line + tile, steps, scores + c * out_bytes)

    @always_inline
    def gather(weights, values, many, rows, results):
        for c in range(0, columns, 2):
            line, out = values + c * row_of_values, results + c * out_bytes
            added_bf16(weights, weights + SIDE * WEIGHTS_STRIDE, WEIGHTS_STRIDE, line, line + row_of_values, many, out)

    return Products(begin, score, gather, release)


def vector_products(dim: int) -> Products:
    room = PanelScratch(dim, VECTORS)
    columns, row_of_values, pairs = room.columns, BLOCK // STEP * TILE_BYTES, (dim + 1) // 2
    stride, tile, out_bytes = room.steps * ROW_BYTES, room.steps * TILE_BYTES, room.column_bytes
    # At most five vectors of columns at once, as many each time as can be.
    passes = -(-columns // MAX_VECTORS)
    wide = -(-columns // passes)
    score_four, score_two = dots(4, False), dots(2, False)
    gather_wide, gather_last = dots(wide, True), dots(columns - (passes - 1) * wide, True)

    @always_inline
    def begin(states):
        return None

    @always_inline
    def score(queries, keys, vectors, rows, scores):
        c = 0
        while vectors - c >= 4:
            for row in range(0, rows, TILE_ROWS):
                out = scores + c * out_bytes + row * ROW_BYTES
                score_four(queries + row * stride, stride, keys + c * tile, tile, pairs, out, out_bytes)
            c += 4
        if c < vectors:
            for row in range(0, rows, TILE_ROWS):
                out = scores + c * out_bytes + row * ROW_BYTES
                score_two(queries + row * stride, stride, keys + c * tile, tile, pairs, out, out_bytes)

    @always_inline
    def gather(weights, values, many, rows, results):
        for c in range(passes):
            line = values + c * wide * row_of_values
            for row in range(0, rows, TILE_ROWS):
                source, out = weights + row * WEIGHTS_STRIDE, results + c * wide * out_bytes + row * ROW_BYTES
                if c + 1 < passes:
                    gather_wide(source, WEIGHTS_STRIDE, line, row_of_values, many * SIDE, out, out_bytes)
                else:
                    gather_last(source, WEIGHTS_STRIDE, line, row_of_values, many * SIDE, out, out_bytes)

    @always_inline
    def end():
        return None

    return Products(begin, score, gather, end)
