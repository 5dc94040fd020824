"""Scales, f32, and sums, int32, of the quantized activations of a tile's T tokens: [activation block][T], by quantize.py."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import cgutils
from edgeq.targets.cpu.jit.simd import F32, I32, constant, load, splat
from edgeq.targets.cpu.kernels.args import WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.products.tiles import at, opaque, plus


class TokenNumbers:
    """Emits what loads them.

    extent   as of `IntegerWeights`: of WHOLE there is one of each for a row
    lanes    of a vector
    keeps    whether `lanes_of_sum` may give again what it gave last: no loop lies between two calls for a block and token
    """

    def __init__(self, tokens: int, extent: int, lanes: int, keeps: bool) -> None:
        self.tokens, self.whole, self.lanes, self.keeps = tokens, extent == WHOLE, lanes, keeps
        # Vectors of the tokens, of whole rows.
        self.row_scales: Any = None
        self.row_sums: Any = None
        self.kept: tuple[Any, int, Any] = (None, 0, None)

    def add_up_rows(self, b: Any, record: Any, scales: Any, sums: Any) -> None:
        """Numbers of whole rows, before any is asked for: the scale that all blocks of a token have, NaN if one is, and the sum
        of their sums."""
        floats = ir.VectorType(F32, self.tokens)
        bad, first = cgutils.alloca_once_value(b, constant(floats, 0.0)), load(b, scales, floats, 4)
        with cgutils.for_range(b, ProductArgs.x_blocks.load(b, record)) as loop:
            here = load(b, at(b, scales, loop.index, 4 * self.tokens), floats, 4)
            b.store(b.fadd(b.load(bad), b.fmul(here, constant(floats, 0.0))), bad)
        self.row_scales = b.fadd(first, b.load(bad))
        self.row_sums = self.sums_of_rows(b, record, sums)

    def sums_of_rows(self, b: Any, record: Any, address: Any) -> Any:
        """Sums of numbers int32 [activation block][T] over the blocks: a vector of T."""
        ints = ir.VectorType(I32, self.tokens)
        total = cgutils.alloca_once_value(b, constant(ints, 0))
        with cgutils.for_range(b, ProductArgs.x_blocks.load(b, record)) as loop:
            b.store(b.add(b.load(total), load(b, at(b, address, loop.index, 4 * self.tokens), ints, 4)), total)
        return b.load(total)

    def number(self, b: Any, of_rows: Any, address: Any, index: Any, t: int, kind: Any) -> Any:
        """A number of an activation block of token t: that of its row, where blocks are added up, else the one stored."""
        if self.whole:
            return b.extract_element(of_rows, ir.Constant(I32, t))
        return load(b, plus(b, at(b, address, index, 4 * self.tokens), 4 * t), kind, 4)

    def scale(self, b: Any, address: Any, index: Any, t: int) -> Any:
        return self.number(b, self.row_scales, address, index, t, F32)

    def sum(self, b: Any, address: Any, index: Any, t: int) -> Any:
        return self.number(b, self.row_sums, address, index, t, I32)

    def lanes_of_sum(self, b: Any, address: Any, index: Any, t: int) -> Any:
        """The sum in all lanes of a vector."""
        of_index, of_token, kept = self.kept
        if of_index is index and of_token == t:
            return kept
        lanes = splat(b, self.sum(b, address, index, t), ir.VectorType(I32, self.lanes))
        if self.lanes == 8:
            # Else what is made of it would be made of one number, in more instructions, and then brought to all lanes.
            lanes = opaque(b, lanes)
        if self.keeps:
            self.kept = index, t, lanes
        return lanes
