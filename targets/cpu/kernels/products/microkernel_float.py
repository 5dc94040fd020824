"""The inner product of float weights: columns in the order of the file, float32 sums.

Activations of a tile of T tokens are f32 [column][T].
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import cgutils
from edgeq.targets.cpu.jit.simd import F16, F32, I16, I32, I64, call, constant, load, splat, store
from edgeq.targets.cpu.kernels.args import BF16_KIND, F32_KIND, ProductArgs
from edgeq.targets.cpu.kernels.products.tiles import at, plus


class FloatTile:
    """Emits the product of one block of floats with T tokens, in two sums per token, of even and of odd columns."""

    def __init__(self, kind: int, tokens: int) -> None:
        self.kind, self.tokens, self.blocks = kind, tokens, 1
        self.floats, self.lanes32 = ir.VectorType(F32, 16), ir.VectorType(I32, 16)

    def emit(self, b: Any, record: Any, n: Any, r: Any, out: Any, stores_result: Any) -> None:
        w = b.add(ProductArgs.weights.load(b, record), b.mul(n, ProductArgs.weights_block.load(b, record)))
        x = b.add(ProductArgs.x.load(b, record), b.mul(r, ProductArgs.x_stride.load(b, record)))
        columns, one = ProductArgs.chunks.load(b, record), ir.Constant(I64, 1)
        sums = [[cgutils.alloca_once(b, self.floats) for _ in range(2)] for _ in range(self.tokens)]
        for slot in (slot for pair in sums for slot in pair):
            b.store(constant(self.floats, 0.0), slot)
        pairs = b.lshr(columns, one)
        with cgutils.for_range(b, pairs) as loop:
            column = b.shl(loop.index, one)
            for odd, line in enumerate(self._pair(b, w, loop.index)):
                offset = b.mul(b.add(column, ir.Constant(I64, odd)), ir.Constant(I64, 4 * self.tokens))
                self._add(b, line, b.add(x, offset), sums, odd)
        with b.if_then(b.trunc(columns, ir.IntType(1))):
            # The stored order has no second line, or only padding, after an odd last column.
            line = self._last(b, w, pairs)
            self._add(b, line, b.add(x, b.mul(b.shl(pairs, one), ir.Constant(I64, 4 * self.tokens))), sums, 0)
        for t in range(self.tokens):
            store(b, b.fadd(b.load(sums[t][0]), b.load(sums[t][1])), plus(b, out, 64 * t), 4)

    def _pair(self, b: Any, w: Any, index: Any) -> list[Any]:
        """Columns 2 index and 2 index + 1 of the block as floats."""
        if self.kind == F32_KIND:
            return [load(b, plus(b, at(b, w, index, 128), 64 * odd), self.floats, 64) for odd in range(2)]
        stored = load(b, at(b, w, index, 64), self.lanes32, 64)
        return [self._widen(b, stored, odd) for odd in range(2)]

    def _last(self, b: Any, w: Any, index: Any) -> Any:
        if self.kind == F32_KIND:
            return load(b, at(b, w, index, 128), self.floats, 64)
        return self._widen(b, load(b, at(b, w, index, 64), self.lanes32, 64), 0)

    def _widen(self, b: Any, stored: Any, odd: int) -> Any:
        if self.kind == BF16_KIND:
            high = b.and_(stored, constant(self.lanes32, 0xFFFF0000)) if odd else b.shl(stored, constant(self.lanes32, 16))
            return b.bitcast(high, self.floats)
        low = b.lshr(stored, constant(self.lanes32, 16)) if odd else stored
        return b.fpext(b.bitcast(b.trunc(low, ir.VectorType(I16, 16)), ir.VectorType(F16, 16)), self.floats)

    def _add(self, b: Any, line: Any, x: Any, sums: Any, odd: int) -> None:
        for t in range(self.tokens):
            value = splat(b, load(b, plus(b, x, 4 * t), F32, 4), self.floats)
            b.store(call(b, "llvm.fmuladd.v16f32", self.floats, line, value, b.load(sums[t][odd])), sums[t][odd])
