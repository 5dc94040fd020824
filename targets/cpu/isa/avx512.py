"""AVX-512 with VNNI: Ice Lake, Sapphire Rapids, Zen 4 and later; with AMX: Sapphire Rapids and later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.isa.isa import X86_PREFETCH_DISTANCES, Isa
from edgeq.targets.cpu.jit.simd import I8, VI32, call

B64 = ir.VectorType(I8, 64)


class Avx512Vnni(Isa):
    name = "avx512-vnni"
    label = "AVX-512 VNNI"
    lanes = 16
    tiles = (12, 4, 1)
    chains = 4
    blocks_per_tile = 2
    prefetch_distances = X86_PREFETCH_DISTANCES
    folds_indices = True
    machines = frozenset({"x86_64", "AMD64"})
    needs = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"})

    def dot8(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        for quad, token in zip(quads, tokens, strict=True):
            accumulator = call(b, "llvm.x86.avx512.vpdpbusd.512", VI32, accumulator, b.bitcast(quad, VI32), token)
        return accumulator

    def looked_up(self, b: Any, table: Any, index: Any) -> Any:
        return call(b, "llvm.x86.avx512.pshuf.b.512", B64, table, index)


class Avx512Winograd(Avx512Vnni):
    """The same by pairs of channels: Zen 4 and later add bytes in four units and multiply them in two."""

    name = "avx512-pairs"
    winograd = True


class Avx512Amx(Avx512Vnni):
    """With a unit that multiplies tiles of 16 x 64 bytes: eight times the products of VNNI in the same time."""

    name = "avx512-amx"
    label = "AVX-512 with AMX"
    needs = Avx512Vnni.needs | {"amx_tile", "amx_int8", "amx_bf16"}
    matrix_unit = True
