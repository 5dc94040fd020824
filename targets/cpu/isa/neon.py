"""NEON: every 64-bit Arm processor, with and without the dot product of Armv8.2.

A line of 64 bytes is four vectors, each of four rows: four consecutive bytes of a vector are one row's channels.

With `sdot` (Cortex-A55, A76, A78AE and later) a quad is multiplied by a 32-bit lane of a register that one 16-byte load of
activations fills: 8 `sdot` and 8 instructions that unpack for 64 bytes of 4-bit weights, no shuffle, no horizontal sum.

Without it (Cortex-A53, A72) the products of a quad, `smull` and `smull2`, are added up in 16 bits as long as they cannot
overflow (a whole chunk at 4 bits and below), then `addp` and `sadalp` bring them to 32 bits, one lane a row.  Instructions
for 64 bytes of 4-bit weights: 16 smull/smlal + 8 unpack + 2 widen + 2 dup + 3.5 load and loop = 31.5, half an instruction a
byte.  The alternative, table lookup (T-MAC, Wei et al. 2024, arXiv 2407.00088), takes for 64 bytes of any width 8 tbl + 16
saddw of the 8-bit entries + 8 unpack + 2 loads = 34, without counting the tables, sixteen entries for every four channels,
which round the activations a second time.  It would win at 2 bits (34 against 69), where memory is already the bound of four
cores, and it needs bits of four channels side by side, another stored order.  So multiplication it is at every width.

With `smmla` (i8mm: Apple M2, Neoverse V1, Cortex-X2 and later) an instruction multiplies two tokens by two rows, eight
channels of each: twice the products of `sdot`.  It wants eight neighbouring channels of a row side by side, not four as the
file has them, so weights and activations are put in that order for a panel (kernels/panels/octet_tile.py).  A token alone would
leave half of it unused, and goes by `sdot`.

16-bit activations are multiplied as two bytes each, by the same instructions twice; without the dot product and with weights
of 8 bits, whose products of bytes leave no room in 16 bits, whole: `smull` and `addp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.simd import I8, I16, I32, call, constant

B16, H8, S4 = ir.VectorType(I8, 16), ir.VectorType(I16, 8), ir.VectorType(I32, 4)


def _half(b: Any, value: Any, high: bool) -> Any:
    """The low or high half of a vector; part of the instruction that uses it (smull2), or a register of a pair."""
    count = value.type.count // 2
    lanes = [count * high + i for i in range(count)]
    return b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), ir.Constant(ir.VectorType(I32, count), lanes))


class Neon(Isa):
    name = "neon"
    label = "NEON"
    lanes = 4
    tiles = (4, 1)
    machines = frozenset({"aarch64", "arm64"})
    needs = frozenset({"asimd"})
    shifts_bytes = True
    panels = True
    signs = True
    sums_16 = True

    def offset(self, bits: int) -> int:
        """All widths below 8 are int8 as they are; a byte q becomes the int8 q - 128 by flipping its highest bit."""
        return 128 if bits == 8 else 0

    def dot8(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        run = self.run(bits)
        for start in range(0, len(quads), run):
            signed = [self.signed(b, quad, bits) for quad in quads[start : start + run]]
            accumulator = self.dot_signed(b, accumulator, signed, tokens[start : start + run], bits)
        return accumulator

    def run(self, bits: int) -> int:
        # A lane of addp's result adds two bytes' products of every quad: as many quads as can never reach 2^15.  Weights of
        # 8 bits only meet 8-bit activations, of at least -127.
        return max(1, (1 << 15) // (2 * 128 * (128 if bits == 8 else (1 << bits) - 1)))

    def dot_signed(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        run = self.run(bits)
        for start in range(0, len(quads), run):
            sums: list[Any] = [None, None]
            for weights, token in zip(quads[start : start + run], tokens[start : start + run], strict=True):
                channels = b.bitcast(token, B16)
                for high in range(2):
                    pair = (_half(b, weights, bool(high)), _half(b, channels, bool(high)))
                    product = call(b, "llvm.aarch64.neon.smull.v8i16", H8, *pair)
                    sums[high] = product if sums[high] is None else b.add(sums[high], product)
            total = call(b, "llvm.aarch64.neon.addp.v8i16", H8, *sums)
            accumulator = b.add(accumulator, call(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", S4, total))
        return accumulator

    def signed(self, b: Any, quad: Any, bits: int) -> Any:
        return b.xor(quad, constant(B16, 128)) if bits == 8 else quad

    def looked_up(self, b: Any, table: Any, index: Any) -> Any:
        return call(b, "llvm.aarch64.neon.tbl1.v16i8", B16, table, index)

    def takes_pairs(self, bits: int) -> bool:
        return bits > 7

    def dot16(self, b: Any, accumulator: Any, pairs: Any, token: Any) -> Any:
        channels = b.bitcast(token, H8)
        halves = ((_half(b, pairs, high), _half(b, channels, high)) for high in (False, True))
        products = [call(b, "llvm.aarch64.neon.smull.v4i32", S4, *half) for half in halves]
        return b.add(accumulator, call(b, "llvm.aarch64.neon.addp.v4i32", S4, *products))


class NeonDot(Neon):
    name = "neon-dotprod"
    label = "NEON with dot product"
    needs = frozenset({"asimd", "dotprod"})
    sums_16 = False

    def dot_signed(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        for weights, token in zip(quads, tokens, strict=True):
            pair = (weights, b.bitcast(token, B16))
            accumulator = call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", S4, accumulator, *pair)
        return accumulator

    def takes_pairs(self, bits: int) -> bool:
        return False


class NeonI8mm(NeonDot):
    name = "neon-i8mm"
    label = "NEON with matrix products"
    needs = frozenset({"asimd", "dotprod", "i8mm"})
    octets = True

    def dot_octets(self, b: Any, accumulator: Any, tokens: Any, weights: Any) -> Any:
        return call(b, "llvm.aarch64.neon.smmla.v4i32.v16i8", S4, accumulator, tokens, weights)
