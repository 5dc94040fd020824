"""AVX2: x86 since Haswell and Excavator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.isa.isa import X86_PREFETCH_DISTANCES, Isa
from edgeq.targets.cpu.jit.simd import I8, I16, I32, call, constant

B32, W16, D8 = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)


class Avx2(Isa):
    name = "avx2"
    label = "AVX2"
    lanes = 8
    tiles = (4, 1)
    prefetch_distances = X86_PREFETCH_DISTANCES
    folds_indices = True
    machines = frozenset({"x86_64", "AMD64"})
    needs = frozenset({"avx2", "fma", "f16c"})

    panels = True
    sums_16 = True

    def dot8(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        run = self.run(bits)
        for start in range(0, len(quads), run):
            total = None
            for quad, token in zip(quads[start : start + run], tokens[start : start + run], strict=True):
                total = self.pairs16(b, total, quad, token)
            accumulator = self.widened(b, accumulator, total)
        return accumulator

    def run(self, bits: int) -> int:
        # pmaddubsw adds two products in 16 bits, saturating: as many pairs are summed as can never reach 2^15.
        return max(1, (1 << 15) // (2 * 128 * ((1 << bits) - 1)))

    def pairs16(self, b: Any, total: Any, quad: Any, token: Any) -> Any:
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", W16, b.bitcast(quad, B32), b.bitcast(token, B32))
        return pairs if total is None else b.add(total, pairs)

    def widened(self, b: Any, accumulator: Any, total: Any) -> Any:
        return b.add(accumulator, call(b, "llvm.x86.avx2.pmadd.wd", D8, total, constant(W16, 1)))

    def looked_up(self, b: Any, table: Any, index: Any) -> Any:
        return call(b, "llvm.x86.avx2.pshuf.b", B32, table, index)

    def takes_pairs(self, bits: int) -> bool:
        # Both bytes of an activation by `dot8` would be more instructions than whole ones: 34 for 256 products, not 32.
        return True

    def widens(self, bits: int) -> bool:
        # The sum of two products of 8 by 8 bits does not fit 16 bits.
        return bits > 7

    def dot16(self, b: Any, accumulator: Any, pairs: Any, token: Any) -> Any:
        return b.add(accumulator, call(b, "llvm.x86.avx2.pmadd.wd", D8, pairs, b.bitcast(token, W16)))
