"""Products of bf16 with sums in float32 in vectors of AVX-512 (AVX512-BF16: Zen 4, Cooper Lake, Sapphire Rapids and later).

One instruction adds to sixteen sums the products of sixteen pairs with one pair (Intel, Intrinsics Guide, _mm512_dpbf16_ps).
Operands lie as the matrix unit wants them (matrix_unit.py), so that what prepares them serves both.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import BF16, I32, I64, VF32, VI32, call, constant, load, splat, store
from edgeq.targets.cpu.kernels.products.tiles import at, plus

FEATURE = "avx512_bf16"
"""What a processor must have; as /proc/cpuinfo spells it."""
TILE_ROWS = 4
"""Rows that are multiplied at once: with 4 or 5 vectors of columns there are sums enough to hide how long each takes."""
VECTOR_BYTES, PAIR_BYTES = 64, 4
PAIRS = ir.VectorType(BF16, 32)


def dots(vectors: int, adds: bool) -> Any:
    """A function (rows, row_stride, columns, column_stride, pairs, out, out_stride): out float32 [vectors][row][16] = TILE_ROWS
    rows by `vectors` x 16 columns, over so many pairs; or with `adds` it is added to what is there.

    rows      pairs of a row side by side, rows `row_stride` bytes apart
    columns   of each vector of columns the pairs [pairs][16], vectors `column_stride` bytes apart
    out       rows 64 bytes apart, vectors `out_stride`
    """
    width, added = vectors, adds

    @intrinsic
    def products(
        typing: Any, rows: Any, row_stride: Any, columns: Any, column_stride: Any, pairs: Any, out: Any, out_stride: Any
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            rows, row_stride, columns, column_stride, pairs, out, out_stride = values
            row_offsets = [b.mul(row_stride, ir.Constant(I64, r)) for r in range(TILE_ROWS)]
            column_offsets = [b.mul(column_stride, ir.Constant(I64, v)) for v in range(width)]
            places = [
                [plus(b, b.add(out, b.mul(out_stride, ir.Constant(I64, v))), VECTOR_BYTES * r) for v in range(width)]
                for r in range(TILE_ROWS)
            ]
            sums = [[cgutils.alloca_once(b, VF32) for _ in range(width)] for _ in range(TILE_ROWS)]
            for r in range(TILE_ROWS):
                for v in range(width):
                    b.store(load(b, places[r][v], VF32, 4) if added else constant(VF32, 0.0), sums[r][v])
            with cgutils.for_range(b, pairs) as loop:
                line = at(b, columns, loop.index, VECTOR_BYTES)
                pair = at(b, rows, loop.index, PAIR_BYTES)
                column = [load(b, b.add(line, offset), PAIRS, 2) for offset in column_offsets]
                for r in range(TILE_ROWS):
                    row = b.bitcast(splat(b, load(b, b.add(pair, row_offsets[r]), I32, 4), VI32), PAIRS)
                    for v in range(width):
                        total = call(b, "llvm.x86.avx512bf16.dpbf16ps.512", VF32, b.load(sums[r][v]), column[v], row)
                        b.store(total, sums[r][v])
            for r in range(TILE_ROWS):
                for v in range(width):
                    store(b, b.load(sums[r][v]), places[r][v], 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return products
