"""The tile of panel_matmul.py on NEON and AVX-VNNI: unpacked quads of bytes, as many rows as a vector has, times a few tokens.

With dot products (`sdot`, `vpdpbusd`) every quad of the block meets every token while it is in a register: 16 vectors of sums
and a load for four of them, or 8 and a load for four.  Without, on NEON, sums of 16 bits need two registers for a vector of
rows, so tokens come one after the other: 8 registers hold what a chunk of theirs has in all lanes, two the sums, and weights
are read again, which costs nothing beside a multiplication a cycle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, QUADS
from edgeq.targets.cpu.jit.simd import I8, load
from edgeq.targets.cpu.kernels.panels.panel_tile import BYTES_OF_CHUNK, PanelTile
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.tiles import at, opaque, plus


class QuadTile(PanelTile):
    """Emits floats [T][16] += the product of unpacked quads of a block with T tokens."""

    def _slots(self, b: Any, chains: int) -> list[list[list[Any]]]:
        return super()._slots(b, chains) if self.isa.sums_16 else IntegerTile._slots(self, b, chains)

    def _as_stored(self, b: Any, quads: list[Any]) -> list[Any]:
        return [self.isa.signed(b, quad, self.bits) for quad in quads] if self.isa.signs else quads

    def _finish(self, b: Any, index: Any, addresses: Any, sums: Any, floats: Any) -> None:
        if not self.isa.signs:
            # Of one token after the other the compiler would finish the products late, with their factors put aside.
            for slots in itertools.chain.from_iterable(sums):
                b.store(opaque(b, b.load(slots[0]), True), slots[0])
        super()._finish(b, index, addresses, sums, floats)

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        if self.pairs:
            super()._chunk(b, w, x, chunk, sums, quads, which)
            return
        (byte,) = which
        weights, tokens = at(b, w[0], chunk, BYTES_OF_CHUNK), at(b, x, chunk, QUADS * self.quad_bytes)
        if which != self.passes[0] and not self.isa.signs:
            # Sixteen registers do not keep them from pass to pass: read again, where the compiler would put them aside.
            weights = opaque(b, weights)

        def values(t: int, of_quads: Iterable[int]) -> list[Any]:
            return [self._broadcast(b, tokens, self.bytes * (j * self.tokens + t) + byte) for j in of_quads]

        def rows(part: int, of_quads: Iterable[int]) -> list[Any]:
            vector = ir.VectorType(I8, self.width)
            return [load(b, plus(b, weights, LINE * j + self.width * part), vector, self.width) for j in of_quads]

        def add(part: int, t: int, quads_of_part: list[Any], quads_of_token: list[Any]) -> None:
            slot, dot = sums[part][t][0], self.isa.dot_signed if self.isa.signs else self.isa.dot8
            b.store(dot(b, b.load(slot), quads_of_part, quads_of_token, self.bits), slot)

        if self.isa.sums_16:
            for t in range(self.tokens):
                # Read again, where the compiler would keep 32 vectors; in all lanes, where it would halve what all have.
                weights, of_token = opaque(b, weights), [opaque(b, value) for value in values(t, quads)]
                for part in range(self.parts):
                    add(part, t, rows(part, quads), of_token)
            return
        for j in quads:
            of_tokens = [values(t, [j]) for t in range(self.tokens)]
            for part in range(self.parts):
                of_part = rows(part, [j])
                for t in range(self.tokens):
                    add(part, t, of_part, of_tokens[t])
