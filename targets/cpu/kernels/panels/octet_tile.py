"""The tile of panel_matmul.py where an instruction multiplies two tokens by two rows, eight channels of each (`smmla`).

Weights are unpacked, and activations put, into octets: eight neighbouring channels of two rows of weights, of two tokens, or of
the low and then the high bytes of one token whose activations have 16 bits.

    weights       [chunk][octet][pair of rows][2][8]
    activations   [chunk][octet][pair of tokens, or token][2][8]

An instruction leaves the sums of four products: of the first token by both rows, of the second by both.  Two such vectors, of
four rows, are halves of the vectors that other tiles have, one for each token; they are put together once per activation block,
and what follows is what microkernel_int.py does.

Of the 32 registers 16 hold sums, for all rows of a block by four tokens; of 16 bits, half of the rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from edgeq.format.codec import CHUNK, LINE, QUADS
from edgeq.targets.cpu.jit.deferred import cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import I8, I32, I64, constant, load, store
from edgeq.targets.cpu.kernels.panels.panel_tile import BYTES_OF_CHUNK, PanelTile
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.tiles import at, plus

ACCUMULATORS = 16
VECTOR = 16
"""Bytes of two octets."""
_OCTETS, _LANES = ir.VectorType(I8, VECTOR), ir.VectorType(I32, 4)


def _chosen(b: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(first, second, ir.Constant(_LANES, lanes))


def _zipped(b: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Two neighbouring quads of four rows, or tokens, as octets of the first two and of the last two of them."""
    return _chosen(b, first, second, [0, 4, 1, 5]), _chosen(b, first, second, [2, 6, 3, 7])


def _halves(b: Any, first: Any, second: Any) -> tuple[Any, Any]:
    return _chosen(b, first, second, [0, 1, 4, 5]), _chosen(b, first, second, [2, 3, 6, 7])


class OctetTile(PanelTile):
    """Emits floats [T][16] += the product of chunks of octets of a block with T tokens."""

    def __init__(self, weights: IntegerWeights, tokens: int) -> None:
        super().__init__(weights, tokens)
        self.vectors = tokens * self.bytes // 2
        self.parts_at_once = min(self.parts, ACCUMULATORS // (2 * self.vectors))
        # What a chunk of the activations of a tile takes.
        self.token_bytes = self.bytes * CHUNK * tokens

    def _take_rooms(self, b: Any, x: Any, chunks: tuple[Any, ...], rooms: tuple[Any, ...]) -> Any:
        return b.sub(rooms[3], b.mul(chunks[0], ir.Constant(I64, self.token_bytes)))

    def store_quads(self, b: Any, to: Any, part: int, quads: list[Any]) -> None:
        signed = [b.bitcast(self.isa.signed(b, quad, self.bits), _LANES) for quad in quads]
        for octet in range(QUADS // 2):
            for i, rows in enumerate(_zipped(b, *signed[2 * octet : 2 * octet + 2])):
                store(b, rows, plus(b, to, 2 * LINE * octet + VECTOR * (2 * part + i)), VECTOR)

    def _block(self, b: Any, index: Any, numbers: Any, floats: Any, walk: Callable[[Any, tuple[int, ...]], None]) -> None:
        for first in range(0, self.parts, self.parts_at_once):
            sums = self._first_sums(b, numbers[-1], index)
            walk(sums, (first,))
            for i in range(self.parts_at_once):
                of_part = self._of_tokens(b, sums[2 * i], sums[2 * i + 1])
                self._finish_part(b, first + i, index, numbers, of_part, floats[first + i])

    def _first_sums(self, b: Any, xsum: Any, index: Any) -> list[list[Any]]:
        """Accumulators [pair of rows][vector of activations]."""
        firsts = [self._first(b, xsum, index, t) for t in range(self.tokens)]
        # High bytes begin with nothing.
        low, high = (firsts, [constant(_LANES, 0)] * self.tokens) if self.bytes == 2 else (firsts[::2], firsts[1::2])
        begin = [_halves(b, *pair)[0] for pair in zip(low, high, strict=True)]
        return [[cgutils.alloca_once_value(b, value) for value in begin] for _ in range(2 * self.parts_at_once)]

    def _of_tokens(self, b: Any, low_rows: list[Any], high_rows: list[Any]) -> list[list[Any]]:
        """Sums of four rows by each token: accumulators [token][byte]."""
        found = [
            cgutils.alloca_once_value(b, half)
            for low, high in zip(low_rows, high_rows, strict=True)
            for half in _halves(b, b.load(low), b.load(high))
        ]
        return [found[self.bytes * t : self.bytes * (t + 1)] for t in range(self.tokens)]

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        (first_part,) = which
        weights, tokens = at(b, w[0], chunk, BYTES_OF_CHUNK), at(b, x, chunk, self.token_bytes)
        for octet in range(quads.start // 2, quads.stop // 2):
            places = [plus(b, tokens, VECTOR * (octet * self.vectors + v)) for v in range(self.vectors)]
            of_tokens = [load(b, place, _OCTETS, VECTOR) for place in places]
            for pair, slots in enumerate(sums):
                place = plus(b, weights, 2 * LINE * octet + VECTOR * (2 * first_part + pair))
                rows = load(b, place, _OCTETS, VECTOR)
                for slot, pair_of_tokens in zip(slots, of_tokens, strict=True):
                    b.store(self.isa.dot_octets(b, b.load(slot), pair_of_tokens, rows), slot)

    def emit_octets(self, b: Any, source: Any, chunks: Any, out: Any) -> None:
        """The activations of a tile, so many chunks at `source`, in the order of octets to `out`."""
        with cgutils.for_range(b, chunks) as loop:
            quads, to = at(b, source, loop.index, QUADS * self.quad_bytes), at(b, out, loop.index, self.token_bytes)
            for octet in range(QUADS // 2):
                for v in range(0, self.vectors, 2):
                    place = plus(b, quads, 2 * self.quad_bytes * octet + VECTOR * v // 2)
                    pair = (load(b, plus(b, place, self.quad_bytes * k), _LANES, VECTOR) for k in range(2))
                    for i, octets in enumerate(_zipped(b, *pair)):
                        store(b, octets, plus(b, to, VECTOR * (octet * self.vectors + v + i)), VECTOR)


def octets_of(tile: OctetTile) -> Any:
    """`OctetTile.emit_octets` as a function: (args, chunks as of `PanelTile.emit_chunks`, from, out)."""

    @intrinsic
    def write(typing: Any, args: Any, chunks: Any, source: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            _, chunks, source, out = values
            tile.emit_octets(b, source, cgutils.unpack_tuple(b, chunks, 4)[1], out)
            return context.get_dummy_value()

        return types.void(args, types.UniTuple(types.intp, 4), types.intp, types.intp), codegen

    return write
