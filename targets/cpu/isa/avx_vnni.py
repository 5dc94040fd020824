"""AVX2 with VNNI in the encoding of AVX (VEX): Intel's laptops and desktops since Alder Lake, which have no AVX-512.

`vpdpbusd` multiplies the 32 bytes of a vector, unsigned weights by signed activations, and adds four products at a time to 32
bits, exactly.  So nothing is added up in 16 bits first, 8 bits are multiplied as they are, and 16-bit activations in two bytes.

AVX-VNNI-INT8 (Lunar Lake, Arrow Lake) is not used: its `vpdpbssd` takes signed weights, but those in a file are unsigned, and
the instructions that made them signed would cost more than what begins a sum without their center.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeq.targets.cpu.isa.avx2 import D8, Avx2
from edgeq.targets.cpu.jit.simd import call

VEX, EVEX = "avx_vnni", frozenset({"avx512_vnni", "avx512vl"})
"""Either lets a processor run `vpdpbusd` on 256 bits; LLVM encodes it as the processor takes it."""


class AvxVnni(Avx2):
    name = "avx-vnni"
    label = "AVX-VNNI"
    needs = Avx2.needs | {VEX}
    chains = 2
    sums_16 = False

    def missing(self, features: frozenset[str]) -> list[str]:
        return super().missing(features | {VEX} if features >= EVEX else features)

    def dot8(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        for quad, token in zip(quads, tokens, strict=True):
            accumulator = call(b, "llvm.x86.avx512.vpdpbusd.256", D8, accumulator, b.bitcast(quad, D8), token)
        return accumulator

    def takes_pairs(self, bits: int) -> bool:
        return False

    def widens(self, bits: int) -> bool:
        return False
