"""The tile of panel_matmul.py: unpacked weights of a block times a few tokens; and what unpacks them.

Bytes, where sums of products fit 16 bits: those of a chunk are added up there, `Isa.run` quads at a time, and then in 32.

Else words: a processor that multiplies two pairs of them in an instruction needs another to add the result, and has fewer
units that multiply than that add.  So they go by Winograd's inner product (winograd.py).  For channels e and o that follow each
other, w the weights less `center_of`:

    (x_e + w_o)(x_o + w_e) = x_e w_e + x_o w_o + x_e x_o + w_e w_o

What is too much is a number of every token and one of every output channel for an activation block (`cross_sums`), which sums
begin without.  |x| <= 32,639 and -128 <= w <= 127, so the factors fit 16 bits and two products 32; all else is exact modulo
2^32, and so is the result.

Per 32 products, in instructions: two that multiply and two that add; by Winograd's one and three.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, QUADS
from edgeq.targets.cpu.isa.isa import by_chunks
from edgeq.targets.cpu.jit.deferred import cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import I8, I16, I32, I64, constant, load, prefetch, splat, store
from edgeq.targets.cpu.kernels.args import HALF_CHUNK, ONE_CHUNK, WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.tiles import at, chunks_of, loads_in_order, opaque, plus

STEP_CHUNKS = 16
"""Chunks that are unpacked at a time: with what a tile reads of the tokens they fit a first-level cache of 32 KiB."""
BYTES_OF_CHUNK = LINE * QUADS
"""Unpacked into bytes."""
MAX_BLOCKS = 2 * STEP_CHUNKS
"""Activation blocks of a step."""


class PanelTile(IntegerTile):
    """Emits floats [T][16] += the product of unpacked chunks of a block with T tokens."""

    def __init__(self, weights: IntegerWeights, tokens: int) -> None:
        super().__init__(weights, tokens)
        self.chains = 1
        self.chunk_bytes = BYTES_OF_CHUNK * (2 if self.pairs else 1)
        self.sums_at: Any = None
        # An activation block of which all products are added up in 16 bits needs no other sums: its totals of `_widen`.
        quads = {HALF_CHUNK: QUADS // 2, ONE_CHUNK: QUADS}.get(self.extent, 0)
        self.in_16_bits = not self.pairs and by_chunks(self.isa) and 0 < quads <= self.isa.run(self.bits)
        self.of_x.keeps = self.sums_in_order = self.in_16_bits
        self.totals: dict[tuple[int, int], Any] = {}
        # Cross sums of the block and of the tile, where words are multiplied.
        self.of_weights: Any = None
        self.of_tokens: Any = None
        if self.pairs:
            self.center = self.groups.taken - center_of(self.bits)

    def emit_chunks(
        self, b: Any, record: Any, n: Any, r: Any, out: Any, chunks: tuple[Any, ...], rooms: tuple[Any, ...]
    ) -> None:
        """`chunks`: the first one, how many, their first activation block, how many of those;  rooms: where unpacked weights
        lie; for the integer sums of a tile; cross sums of these activation blocks, of the block's weights and of the tile."""
        first, count, start, blocks = chunks
        x, numbers = self._operands(b, record, [n], r)
        x = self._take_rooms(b, x, chunks, rooms)
        w = [b.sub(rooms[0], b.mul(first, ir.Constant(I64, self.chunk_bytes)))]
        floats = [[self._float_at(b, out, part, t) for t in range(self.tokens)] for part in range(self.parts)]
        if self.extent == HALF_CHUNK:
            with cgutils.for_range(b, count) as loop:
                self._halves(b, record, w, x, b.add(first, loop.index), numbers, floats)
            return
        last, per_block = b.add(first, count), ProductArgs.chunks_per_block.load(b, record)
        if self.extent == WHOLE:
            self.of_x.add_up_rows(b, record, *numbers[-2:])
        with cgutils.for_range(b, blocks) as loop:
            index = b.add(start, loop.index)
            self._whole_chunks(b, w, x, index, self._chunks_of(b, index, last, per_block), numbers, floats)

    def _take_rooms(self, b: Any, x: Any, chunks: tuple[Any, ...], rooms: tuple[Any, ...]) -> Any:
        """The address of the first chunk of the tile's activations, which are at `x`."""
        start = chunks[2]
        _, self.sums_at, of_weights, of_tokens = rooms
        self.of_weights = b.sub(of_weights, b.mul(start, ir.Constant(I64, LINE)))
        self.of_tokens = b.sub(of_tokens, b.mul(start, ir.Constant(I64, 4 * self.tokens)))
        return x

    def _float_at(self, b: Any, out: Any, part: int, t: int) -> Any:
        return b.inttoptr(self._place(b, out, part, t), self.floats.as_pointer())

    def emit_unpacked(self, b: Any, record: Any, n: Any, stored: Any, chunks: Any, out: Any) -> None:
        """`chunks` chunks of block n at `stored`, unpacked to `out` as the tile takes them."""
        table = self.unpacker.table(b, record, n)
        with cgutils.for_range(b, chunks) as loop:
            line, to = at(b, stored, loop.index, self.line_bytes), at(b, out, loop.index, self.chunk_bytes)
            # Those of the next step.
            prefetch(b, plus(b, line, STEP_CHUNKS * self.line_bytes), self.line_bytes, level=2)
            for part in range(self.per_block):
                self.store_quads(b, to, part, self.unpacker.quads(b, line, part, table))

    def store_quads(self, b: Any, to: Any, part: int, quads: list[Any]) -> None:
        """The quads of an unpacked chunk, for the rows of a vector: a byte for every weight, or words less `center_of`."""
        words = ir.VectorType(I16, self.width // 2)
        for j, quad in enumerate(quads if self.pairs else self._as_stored(b, quads)):
            if not self.pairs:
                store(b, quad, plus(b, to, LINE * j + self.width * part), self.width)
                continue
            quad = b.bitcast(quad, words)
            for k, half in enumerate((b.and_(quad, constant(words, 255)), b.lshr(quad, constant(words, 8)))):
                half = b.sub(half, constant(words, center_of(self.bits)))
                store(b, half, plus(b, to, LINE * (2 * j + k) + self.width * part), self.width)

    def _as_stored(self, b: Any, quads: list[Any]) -> list[Any]:
        """Unpacked bytes as the tile takes them."""
        return quads

    def _slots(self, b: Any, chains: int) -> list[list[list[Any]]]:
        if self.pairs:
            return super()._slots(b, chains)
        # The registers are for sums of 16 bits.
        place, pointer = 4 * self.isa.lanes, self.ints.as_pointer()
        return [
            [[b.inttoptr(plus(b, self.sums_at, place * (part * self.tokens + t)), pointer)] for t in range(self.tokens)]
            for part in range(self.parts)
        ]

    def _start(self, b: Any, xsum: Any, index: Any) -> list[list[list[Any]]]:
        if self.in_16_bits:
            return []
        sums = super()._start(b, xsum, index)
        if self.pairs:
            address = at(b, self.of_weights, index, LINE)
            of_weights = [load(b, plus(b, address, self.width * part), self.ints, 32) for part in range(self.parts)]
            for t in range(self.tokens):
                of_token = splat(b, load(b, plus(b, at(b, self.of_tokens, index, 4 * self.tokens), 4 * t), I32, 4), self.ints)
                for part in range(self.parts):
                    slot = sums[part][t][0]
                    b.store(b.add(b.load(slot), b.add(of_weights[part], of_token)), slot)
        return sums

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        tokens = at(b, x, chunk, QUADS * self.quad_bytes)
        if self.pairs:
            self._words(b, at(b, w[0], chunk, 2 * BYTES_OF_CHUNK), tokens, sums, quads)
        else:
            self._bytes(b, at(b, w[0], chunk, BYTES_OF_CHUNK), tokens, sums, quads)

    def _bytes(self, b: Any, weights: Any, tokens: Any, sums: Any, quads: range) -> None:
        vector, vectors = ir.VectorType(I8, self.width), range(self.parts)
        lines = ((j, plus(b, weights, LINE * j)) for j in quads)
        of_quads = ((j, [load(b, plus(b, line, self.width * part), vector, 32) for part in vectors]) for j, line in lines)
        self._add_in_turn(b, of_quads, tokens, sums)

    def _widen(self, b: Any, totals: dict[tuple[int, int], Any], sums: Any) -> None:
        if self.in_16_bits:
            self.totals |= totals
        else:
            super()._widen(b, totals, sums)

    def _finish(self, b: Any, index: Any, addresses: Any, sums: Any, floats: Any) -> None:
        if not self.in_16_bits:
            super()._finish(b, index, addresses, sums, floats)
            return
        # Until here registers are for these sums.
        loads_in_order(b)
        of_groups, xscale, xsum = addresses
        numbers = [self.groups.load(b, of_groups[0], index, part, ahead=True) for part in range(self.parts)]
        for t in range(self.tokens):
            first, factor = self._first(b, xsum, index, t), self.of_x.scale(b, xscale, index, t)
            for part, slots in enumerate(floats):
                total = self.isa.widened(b, first, self.totals[part, t])
                sum_x = partial(self.of_x.lanes_of_sum, b, xsum, index, t)
                b.store(self.groups.added(b, numbers[part], total, sum_x, factor, b.load(slots[t])), slots[t])

    def _words(self, b: Any, weights: Any, tokens: Any, sums: Any, quads: range) -> None:
        words = ir.VectorType(I16, self.width // 2)
        for j in quads:
            even, odd = (words_of(b, weights, j, k, self.width, self.parts) for k in range(2))
            for t in range(self.tokens):
                # Sixteen registers are one too few: the last even channels are taken from memory where they are added.
                weights = opaque(b, weights)
                even[-1] = words_of(b, weights, j, 0, self.width, self.parts)[-1]
                of_even, of_odd = (
                    b.bitcast(self._broadcast(b, tokens, 2 * (j * self.tokens + t) + k), words) for k in range(2)
                )
                # In this order, which the compiler would change, a Zen 3 multiplies 4 % faster.
                factors = [
                    (opaque(b, b.add(of_even, odd[part]), True), opaque(b, b.add(of_odd, even[part]), True))
                    for part in range(self.parts)
                ]
                for part, (one, other) in enumerate(factors):
                    slot = sums[part][t][0]
                    b.store(opaque(b, self.isa.dot16(b, b.load(slot), one, b.bitcast(other, self.ints)), True), slot)


def center_of(bits: int) -> int:
    """What unpacked words are less than the integers of so many bits that are multiplied."""
    return 1 << (bits - 1)


def words_of(b: Any, weights: Any, j: int, k: int, width: int, parts: int) -> list[Any]:
    """The even channels of quad j of unpacked weights, or the odd ones: vectors of 16 bits."""
    places = [plus(b, weights, LINE * (2 * j + k) + width * part) for part in range(parts)]
    return [load(b, place, ir.VectorType(I16, width // 2), 32) for place in places]


def tile_product(tile: PanelTile) -> Any:
    """The tile as a function: (args, n, r, out, chunks, rooms), as of `PanelTile.emit_chunks`."""

    @intrinsic
    def product(typing: Any, args: Any, n: Any, r: Any, out: Any, chunks: Any, rooms: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            chunks, rooms = (tuple(cgutils.unpack_tuple(b, value, 4)) for value in values[4:])
            tile.emit_chunks(b, *values[:4], chunks, rooms)
            return context.get_dummy_value()

        return types.void(args, *[types.intp] * 3, *[types.UniTuple(types.intp, 4)] * 2), codegen

    return product


def cross_sums(weights: IntegerWeights, tokens: int) -> Any:
    """`emit_cross_sums` as a function: (args, chunks, from, out)."""
    many = tokens

    @intrinsic
    def write(typing: Any, args: Any, chunks: Any, source: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            record, chunks, source, out = values
            emit_cross_sums(b, weights, many, record, cgutils.unpack_tuple(b, chunks, 4), (source, out))
            return context.get_dummy_value()

        return types.void(args, types.UniTuple(types.intp, 4), types.intp, types.intp), codegen

    return write


def emit_cross_sums(b: Any, weights: IntegerWeights, many: int, record: Any, chunks: Any, places: tuple[Any, Any]) -> None:
    """Emits out i32 [activation block][numbers] = less the sums of the products of even channels with the odd ones after them.

    many    0: of a block's unpacked weights, a number for each of 16 output channels; else of the activations of a tile of so
            many tokens
    chunks  as of `PanelTile.emit_chunks`
    places  addresses: from, out
    """
    source, out = places
    first, count, start, blocks = chunks
    tile = IntegerTile(weights, many or 1)
    numbers, quad_bytes = (many, 8 * many) if many else (LINE // 4, 2 * LINE)
    with cgutils.for_range(b, blocks) as loop:
        if weights.extent == HALF_CHUNK:
            quad, quads = b.mul(loop.index, ir.Constant(I64, QUADS // 2)), ir.Constant(I64, QUADS // 2)
        else:
            per_block = ProductArgs.chunks_per_block.load(b, record)
            chunk, inside = chunks_of(b, b.add(start, loop.index), b.add(first, count), per_block)
            quad = b.mul(b.sub(chunk, first), ir.Constant(I64, QUADS))
            quads = b.mul(inside, ir.Constant(I64, QUADS))
        slots = [cgutils.alloca_once(b, tile.ints) for _ in range(1 if many else tile.parts)]
        for slot in slots:
            b.store(constant(tile.ints, 0), slot)
        with cgutils.for_range(b, quads) as inner:
            place = at(b, source, b.add(quad, inner.index), quad_bytes)
            pairs = _token_words(b, place, many, tile) if many else _weight_words(b, place, tile)
            for slot, (even, odd) in zip(slots, pairs, strict=True):
                b.store(tile.isa.dot16(b, b.load(slot), even, b.bitcast(odd, tile.ints)), slot)
        for part, slot in enumerate(slots):
            total, to = b.neg(b.load(slot)), plus(b, at(b, out, loop.index, 4 * numbers), tile.width * part)
            if many:
                total = b.shuffle_vector(total, total, _lanes(list(range(many))))
            store(b, total, to, 4)


def _lanes(which: list[int]) -> Any:
    return ir.Constant(ir.VectorType(I32, len(which)), which)


def _weight_words(b: Any, place: Any, tile: IntegerTile) -> list[tuple[Any, Any]]:
    even, odd = (words_of(b, place, 0, k, tile.width, tile.parts) for k in range(2))
    return list(zip(even, odd, strict=True))


def _token_words(b: Any, place: Any, tokens: int, tile: IntegerTile) -> list[tuple[Any, Any]]:
    """A quad of a tile, its tokens in the first lanes."""
    stored, words = load(b, place, ir.VectorType(I32, 2 * tokens), 4), ir.VectorType(I16, tile.width // 2)
    order = [2 * (lane % tokens) for lane in range(tile.isa.lanes)]
    even, odd = (b.shuffle_vector(stored, stored, _lanes([lane + k for lane in order])) for k in range(2))
    return [(b.bitcast(even, words), b.bitcast(odd, words))]


def unpacked(tile: PanelTile) -> Any:
    """A function: (args, n, address of chunks of block n, how many, out): their weights as the tile takes them."""

    @intrinsic
    def write(typing: Any, args: Any, n: Any, stored: Any, chunks: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            tile.emit_unpacked(b, *values)
            return context.get_dummy_value()

        return types.void(args, *[types.intp] * 4), codegen

    return write
