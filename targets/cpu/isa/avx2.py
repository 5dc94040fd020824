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
    machines = frozenset({"x86_64", "AMD64"})
    needs = frozenset({"avx2", "fma", "f16c"})

    def dot8(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        if bits > 7:
            return self._wide(b, accumulator, quads, tokens)
        # pmaddubsw adds two products in 16 bits, saturating: as many pairs are summed as can never reach 2^15.
        run = max(1, (1 << 15) // (2 * 128 * ((1 << bits) - 1)))
        for start in range(0, len(quads), run):
            total = None
            for quad, token in zip(quads[start : start + run], tokens[start : start + run], strict=True):
                pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", W16, b.bitcast(quad, B32), b.bitcast(token, B32))
                total = pairs if total is None else b.add(total, pairs)
            accumulator = b.add(accumulator, call(b, "llvm.x86.avx2.pmadd.wd", D8, total, constant(W16, 1)))
        return accumulator

    def _wide(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any]) -> Any:
        """Eight bits: one product pair already exceeds 16 bits, so even and odd channels are widened first."""
        eight, low = constant(W16, 8), constant(W16, 255)
        for quad, token in zip(quads, tokens, strict=True):
            words, channels = b.bitcast(quad, W16), b.bitcast(token, W16)
            even = b.ashr(b.shl(channels, eight), eight)
            for weight, channel in ((b.and_(words, low), even), (b.lshr(words, eight), b.ashr(channels, eight))):
                accumulator = b.add(accumulator, call(b, "llvm.x86.avx2.pmadd.wd", D8, weight, channel))
        return accumulator

    def takes_pairs(self, bits: int) -> bool:
        # `_wide` takes as many products for a byte of an activation as `dot16` for both.
        return bits > 7

    def dot16(self, b: Any, accumulator: Any, pairs: Any, token: Any) -> Any:
        return b.add(accumulator, call(b, "llvm.x86.avx2.pmadd.wd", D8, pairs, b.bitcast(token, W16)))
