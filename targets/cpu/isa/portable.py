"""Plain LLVM vector arithmetic: any processor that Numba compiles for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.simd import I32, VI32, constant


class Portable(Isa):
    name = "portable"
    label = "any processor"
    lanes = 16
    tiles = (4, 1)
    chains = 4
    folds_indices = True
    machines: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()

    def dot8(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        for quad, token in zip(quads, tokens, strict=True):
            words = b.bitcast(quad, VI32)
            for channel in range(4):
                weight = b.and_(b.lshr(words, constant(VI32, 8 * channel)), constant(VI32, 255))
                value = b.ashr(b.shl(token, constant(VI32, 24 - 8 * channel)), constant(VI32, 24))
                accumulator = b.add(accumulator, b.mul(weight, value))
        return accumulator

    def looked_up(self, b: Any, table: Any, index: Any) -> Any:
        # No vector operation of LLVM looks up by lanes that vary: of pairs of entries one is taken by a bit of the index.
        undefined = ir.Constant(table.type, ir.Undefined)
        entries = [b.shuffle_vector(table, undefined, constant(ir.VectorType(I32, table.type.count), i)) for i in range(16)]
        for bit in range(4):
            odd = b.icmp_unsigned("!=", b.and_(index, constant(index.type, 1 << bit)), constant(index.type, 0))
            entries = [b.select(odd, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
        return entries[0]

    def takes_pairs(self, bits: int) -> bool:
        return True

    def dot16(self, b: Any, accumulator: Any, pairs: Any, token: Any) -> Any:
        words, sixteen = b.bitcast(pairs, VI32), constant(VI32, 16)
        low = b.mul(b.and_(words, constant(VI32, 65535)), b.ashr(b.shl(token, sixteen), sixteen))
        return b.add(b.add(accumulator, low), b.mul(b.lshr(words, sixteen), b.ashr(token, sixteen)))
