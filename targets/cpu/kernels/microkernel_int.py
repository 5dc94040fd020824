"""The inner product of one block of 16 output rows with a few tokens: the code that time is spent in.

One intrinsic, for packed integers and for floats.  It reads the weights of a block in file order, once, and keeps one vector of
16 rows per token; it adds in an order that depends neither on the number of tokens nor on the instruction set's
vector width, so a token's result is the same bits alone and among others.

Activations of a tile of T tokens, as `quantize.py` writes them:

    a8      int8  [chunk][quad][T][4]                    one 32-bit broadcast per quad and token
    a16     int16 [chunk][quad][T][4], channels 0 2 1 3  two broadcasts; even and odd bytes of a quad of weights are the pairs
    float   f32   [column][T]
    scale   f32   [activation block][T],  sum  int32 [activation block][T]: the sum of the block's stored integers

An activation block is a weight group or, if that is longer or the row, 128 channels; integers of one block are summed exactly:
8 bits x 15 bits x 128 channels stay below 2^31.
"""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edgeq.codec import LINE, QUADS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.simd import F16, F32, I8, I16, I32, I64, call, constant, load, prefetch, splat, store
from edgeq.targets.cpu.kernels.bitplanes import unpack

# Words of a product's table row (compiled.py has words 0 and 1).  Bytes where nothing else is said.
X, X_ROW, X_SCALE, X_SUM, X_BLOCKS = 2, 3, 4, 5, 6
"""Activations: data, bytes of a row, scales, sums, activation blocks of a row."""
W, W_BLOCK, SCALE, SCALE_BLOCK, SCALE_STEP, ZERO, ZERO_BLOCK, ZERO_STEP = 7, 8, 9, 10, 11, 12, 13, 14
"""Weights, scales, zero points: address, from one block of 16 rows to the next, from one activation block to the next."""
CHUNKS, PER_BLOCK = 15, 16
"""Integers: chunks of 32 channels in a row and in an activation block.  Floats: CHUNKS is the number of columns."""
ROWS, GROUP, Y, Y_ROW, BIAS, ADD, SCRATCH = 17, 18, 19, 20, 21, 22, 23
"""Output rows, blocks that stay in the cache while tokens pass, result, bytes of its rows, f32 bias or 0, 1: add to y,
scratch."""
PAIR, CONSTANTS = 24, 25
"""Of products by pairs of channels (pairs.py): sums of the activations, room for those of the weights."""
STEP = 26
"""Of tiles of several blocks: from one block to the next."""
WORDS = 27


def at(b: Any, base: Any, index: Any, step: int) -> Any:
    return b.add(base, b.mul(index, ir.Constant(I64, step)))


def word_at(b: Any, row: Any, index: int) -> Any:
    return load(b, plus(b, row, 8 * index), I64, 8)


def plus(b: Any, address: Any, offset: int) -> Any:
    return b.add(address, ir.Constant(I64, offset))


def chunks_of(b: Any, index: Any, chunks: Any, per_block: Any) -> tuple[Any, Any]:
    """The first chunk of an activation block and how many it has: `per_block`, or those left of a row's `chunks`."""
    first = b.mul(index, per_block)
    left = b.sub(chunks, first)
    return first, b.select(b.icmp_unsigned("<", left, per_block), left, per_block)


class IntegerTile:
    """Emits the product of one or more neighbouring blocks with T tokens; see `product_tile` for the arguments."""

    def __init__(self, isa: Isa, bits: int, mode16: bool, zero: bool, half: bool, tokens: int, blocks: int = 1) -> None:
        self.isa, self.bits, self.mode16, self.zero, self.half, self.tokens = isa, bits, mode16, zero, half, tokens
        self.blocks, self.per_block = blocks, 16 // isa.lanes
        self.parts = blocks * self.per_block
        self.width = 4 * isa.lanes
        self.ints, self.floats = ir.VectorType(I32, isa.lanes), ir.VectorType(F32, isa.lanes)
        self.partials = isa.partials16 if mode16 else 1
        self.sums = ir.VectorType(I32, self.partials * isa.lanes)
        # What the stored integers still exceed the multiplied ones by: the center of the symmetric form, less the set's offset.
        self.center = (0 if zero else 1 << (bits - 1)) - (0 if mode16 else isa.offset(bits))
        # What was taken off the weights, and is to be off their zero points.
        self.zero_center = 0
        # One token alone has no other to hide the latency of a dot product behind, unless a block takes four vectors; integer
        # sums may be split freely.
        self.chains = 4 if tokens == 1 and self.parts < 4 else 1
        self.quad_bytes = tokens * (8 if mode16 else 4)

    def emit(self, b: Any, row: Any, n: Any, r: Any, out: Any, own: Any) -> None:
        def of(word: int) -> Any:
            return word_at(b, row, word)

        blocks = self._block_numbers(b, row, n)
        w, scale, zero = ([b.add(of(word), b.mul(block, of(word + 1))) for block in blocks] for word in (W, SCALE, ZERO))
        scale_step, zero_step = of(SCALE_STEP), of(ZERO_STEP)
        x = b.add(of(X), b.mul(r, of(X_ROW)))
        numbers = b.mul(b.mul(r, of(X_BLOCKS)), ir.Constant(I64, 4))
        xscale, xsum = b.add(of(X_SCALE), numbers), b.add(of(X_SUM), numbers)
        chunks, per_block = of(CHUNKS), of(PER_BLOCK)
        if self.blocks > 1:
            results, owned = self._results(b, row, n, r), b.icmp_signed("!=", own, ir.Constant(I64, 0))
            with b.if_then(owned):
                # Stores that wait for their lines hold up all behind them.
                for place in results:
                    prefetch(b, place, 64 * self.blocks, write=True)
        floats = [[self._float(b, out, part, t) for t in range(self.tokens)] for part in range(self.parts)]
        whole = b.udiv(b.add(chunks, b.sub(per_block, ir.Constant(I64, 1))), per_block)
        count = chunks if self.half else whole
        numbers = (scale, scale_step, zero, zero_step, xscale, xsum)
        with cgutils.for_range(b, count) as loop:
            if self.half:
                index = b.shl(loop.index, ir.Constant(I64, 1))
                self._half(b, w, x, loop.index, 0, index, numbers, floats)
                odd = b.or_(index, ir.Constant(I64, 1))
                with b.if_then(b.icmp_unsigned("<", odd, of(X_BLOCKS))):
                    self._half(b, w, x, loop.index, 4, odd, numbers, floats)
            else:
                sums = self._start(b, xsum, loop.index)
                first, inside = chunks_of(b, loop.index, chunks, per_block)
                with cgutils.for_range(b, inside) as inner:
                    self._chunk(b, w, x, b.add(first, inner.index), sums, range(QUADS))
                self._finish(b, loop.index, numbers, sums, floats)
        if self.blocks == 1:
            for part, slots in enumerate(floats):
                for t, slot in enumerate(slots):
                    store(b, b.load(slot), self._place(b, out, part, t), 4)
        else:
            residual = b.icmp_signed("!=", of(ADD), ir.Constant(I64, 0))
            with b.if_then(owned), b.if_else(residual) as (added, alone):
                with added:
                    self._write(b, results, out, True)
                with alone:
                    self._write(b, results, out, False)

    def _results(self, b: Any, row: Any, n: Any, r: Any) -> list[Any]:
        """Where the results of each token go."""
        step = word_at(b, row, Y_ROW)
        first = at(b, b.add(word_at(b, row, Y), b.mul(r, step)), n, 64)
        return [b.add(first, b.mul(step, ir.Constant(I64, t))) for t in range(self.tokens)]

    def _write(self, b: Any, rows: list[Any], out: Any, add: bool) -> None:
        for part, t in itertools.product(range(self.parts), range(self.tokens)):
            block, place = divmod(part, self.per_block)
            value = load(b, self._place(b, out, part, t), self.floats, 4)
            to = plus(b, rows[t], 64 * block + 4 * self.isa.lanes * place)
            store(b, b.fadd(load(b, to, self.floats, 4), value) if add else value, to, 4)

    def _place(self, b: Any, out: Any, part: int, t: int) -> Any:
        block, place = divmod(part, self.per_block)
        return plus(b, out, 64 * (block * self.tokens + t) + 4 * self.isa.lanes * place)

    def _float(self, b: Any, out: Any, part: int, t: int) -> Any:
        """Where a result is added up, at first 0.  Blocks together need the registers for their integer sums."""
        zero = constant(self.floats, 0.0)
        if self.blocks == 1:
            return cgutils.alloca_once_value(b, zero)
        place = self._place(b, out, part, t)
        store(b, zero, place, 4)
        return b.inttoptr(place, self.floats.as_pointer())

    def _block_numbers(self, b: Any, row: Any, n: Any) -> list[Any]:
        """Block n and those that follow in steps; what would lie behind the last is the last once more."""
        if self.blocks == 1:
            return [n]
        last = b.lshr(plus(b, word_at(b, row, ROWS), -1), ir.Constant(I64, 4))
        numbers = [b.add(n, b.mul(word_at(b, row, STEP), ir.Constant(I64, i))) for i in range(self.blocks)]
        return [b.select(b.icmp_signed("<", number, last), number, last) for number in numbers]

    def _half(self, b: Any, w: Any, x: Any, chunk: Any, first: int, index: Any, numbers: Any, floats: Any) -> None:
        """An activation block of 16 channels: quads first ... first + 3 of a chunk."""
        sums = self._start(b, numbers[-1], index)
        self._chunk(b, w, x, chunk, sums, range(first, first + 4))
        self._finish(b, index, numbers, sums, floats)

    def _start(self, b: Any, xsum: Any, index: Any) -> list[list[list[Any]]]:
        """Accumulators [part][token][chain]; the symmetric form subtracts its center here, exactly and for nothing."""
        zero, xsum = constant(self.sums, 0), at(b, xsum, index, 4 * self.tokens)
        sums = [
            [[cgutils.alloca_once(b, self.sums) for _ in range(self.chains)] for _ in range(self.tokens)]
            for _ in range(self.parts)
        ]
        for t in range(self.tokens):
            first = zero
            if self.center:
                center = ir.Constant(I32, -self.center)
                first = splat(b, b.mul(load(b, plus(b, xsum, 4 * t), I32, 4), center), self.ints)
                first = self.isa.start16(b, first, self.bits) if self.mode16 else first
            for part in range(self.parts):
                for chain, slot in enumerate(sums[part][t]):
                    b.store(zero if chain else first, slot)
        return sums

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range) -> None:
        lines = [at(b, address, chunk, self.bits * LINE) for address in w]
        tokens = at(b, x, chunk, QUADS * self.quad_bytes)
        if self.isa.ahead:
            # Blocks follow each other in the file, whose small pages end what the processor foresees itself.
            for line in lines:
                prefetch(b, plus(b, line, self.isa.ahead), self.bits * LINE)
        if self.blocks > 1:
            places = [(line, place) for line in lines for place in range(self.per_block)]
            self._dots(b, [unpack(b, line, self.bits, place, self.width) for line, place in places], tokens, sums, quads)
            return
        for part in range(self.parts):
            stored = unpack(b, lines[0], self.bits, part, self.width)
            if self.mode16:
                self._dot16(b, stored, tokens, sums[part], quads)
            else:
                self._dot8(b, stored, tokens, sums[part], quads)

    def _dots(self, b: Any, stored: list[list[Any]], tokens: Any, sums: Any, quads: range) -> None:
        """Every broadcast token meets all blocks."""
        words = ir.VectorType(I16, self.width // 2)
        for j in quads:
            for t in range(self.tokens):
                for k in range(2 if self.mode16 else 1):
                    value = self._broadcast(b, tokens, (1 + self.mode16) * (j * self.tokens + t) + k)
                    for part in range(self.parts):
                        slot, quad = sums[part][t][0], stored[part][j]
                        if self.mode16:
                            pair = b.bitcast(quad, words)
                            pair = b.lshr(pair, constant(words, 8)) if k else b.and_(pair, constant(words, 255))
                            total = self.isa.dot16(b, b.load(slot), pair, value)
                        else:
                            total = self.isa.dot8(b, b.load(slot), [quad], [value], self.bits)
                        b.store(total, slot)

    def _dot8(self, b: Any, stored: list[Any], tokens: Any, sums: Any, quads: range) -> None:
        for t in range(self.tokens):
            values = {j: self._broadcast(b, tokens, j * self.tokens + t) for j in quads}
            for chain in range(self.chains):
                mine = [j for j in quads if (j - quads.start) * self.chains // len(quads) == chain]
                slot = sums[t][chain]
                picked = [stored[j] for j in mine]
                b.store(self.isa.dot8(b, b.load(slot), picked, [values[j] for j in mine], self.bits), slot)

    def _dot16(self, b: Any, stored: list[Any], tokens: Any, sums: Any, quads: range) -> None:
        words = ir.VectorType(I16, self.width // 2)
        if self.isa.takes_bytes(self.bits):
            self._dot_bytes(b, stored, tokens, sums, quads)
            return
        for j in quads:
            quad = b.bitcast(stored[j], words)
            pairs = (b.and_(quad, constant(words, 255)), b.lshr(quad, constant(words, 8)))
            for t in range(self.tokens):
                slot = sums[t][j % self.chains]
                total = b.load(slot)
                for k in range(2):
                    value = self._broadcast(b, tokens, 2 * (j * self.tokens + t) + k)
                    total = self.isa.dot16(b, total, pairs[k], value)
                b.store(total, slot)

    def _dot_bytes(self, b: Any, stored: list[Any], tokens: Any, sums: Any, quads: range) -> None:
        """Four neighbours (token, then quad) of 8 bytes, channels 0 2 1 3, become one vector of low and one of high bytes."""
        vector = ir.VectorType(I8, 16)
        for j in quads:
            for t in range(self.tokens):
                unit = j * self.tokens + t
                pair = [load(b, plus(b, tokens, unit // 4 * 32 + 16 * k), vector, 16) for k in range(2)]
                parts = []
                for high in range(2):
                    order = [8 * i + channel + high for i in range(4) for channel in (0, 4, 2, 6)]
                    parts.append(b.bitcast(b.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, 16), order)), self.ints))
                low, high = (self._lane(b, part, unit % 4) for part in parts)
                slot = sums[t][j % self.chains]
                b.store(self.isa.dot_bytes(b, b.load(slot), stored[j], low, high), slot)

    def _lane(self, b: Any, vector: Any, lane: int) -> Any:
        return b.shuffle_vector(vector, ir.Constant(self.ints, ir.Undefined), constant(self.ints, lane))

    def _broadcast(self, b: Any, tokens: Any, word: int) -> Any:
        """Word `word` of the chunk's activations in all lanes.  A vector of four lanes is loaded whole, for `sdot` by lane."""
        if self.isa.lanes != 4:
            return splat(b, load(b, plus(b, tokens, 4 * word), I32, 4), self.ints)
        return self._lane(b, load(b, plus(b, tokens, word // 4 * 16), self.ints, 16), word % 4)

    def _finish(self, b: Any, index: Any, addresses: Any, sums: Any, floats: Any) -> None:
        """floats += scale * xscale * (sum - zero * xsum) for one activation block."""
        scale, scale_step, zero, zero_step, xscale, xsum = addresses
        lanes = self.isa.lanes
        for part in range(self.parts):
            block, place = divmod(part, self.per_block)
            address = b.add(b.add(scale[block], b.mul(index, scale_step)), ir.Constant(I64, 2 * lanes * place))
            scales = b.fpext(load(b, address, ir.VectorType(F16, lanes), 2), self.floats)
            if self.zero:
                address = b.add(b.add(zero[block], b.mul(index, zero_step)), ir.Constant(I64, lanes * place))
                zeros = b.uitofp(b.zext(load(b, address, ir.VectorType(I8, lanes)), self.ints), self.floats)
                center = constant(self.floats, float(self.zero_center))
                zeros = b.fsub(center, zeros) if self.zero_center else b.fneg(zeros)
            for t in range(self.tokens):
                chains = [b.load(slot) for slot in sums[part][t]]
                total = chains[0]
                for chain in chains[1:]:
                    total = b.add(total, chain)
                value = b.sitofp(self.isa.joined16(b, total, self.bits) if self.mode16 else total, self.floats)
                if self.zero:
                    block_sum = b.sitofp(load(b, plus(b, at(b, xsum, index, 4 * self.tokens), 4 * t), I32, 4), F32)
                    value = self._fma(b, zeros, splat(b, block_sum, self.floats), value)
                factor = load(b, plus(b, at(b, xscale, index, 4 * self.tokens), 4 * t), F32, 4)
                factors = b.fmul(scales, splat(b, factor, self.floats))
                b.store(self._fma(b, value, factors, b.load(floats[part][t])), floats[part][t])

    def _fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        return call(b, f"llvm.fmuladd.v{self.isa.lanes}f32", self.floats, x, y, z)


class FloatTile:
    """Emits the product of one block of floats with T tokens, in two sums per token, of even and of odd columns."""

    def __init__(self, kind: int, tokens: int) -> None:
        self.kind, self.tokens = kind, tokens
        self.floats, self.lanes32 = ir.VectorType(F32, 16), ir.VectorType(I32, 16)

    def emit(self, b: Any, row: Any, n: Any, r: Any, out: Any, own: Any) -> None:
        w = b.add(word_at(b, row, W), b.mul(n, word_at(b, row, W_BLOCK)))
        x = b.add(word_at(b, row, X), b.mul(r, word_at(b, row, X_ROW)))
        columns, one = word_at(b, row, CHUNKS), ir.Constant(I64, 1)
        sums = [[cgutils.alloca_once(b, self.floats) for _ in range(2)] for _ in range(self.tokens)]
        for slot in (slot for pair in sums for slot in pair):
            b.store(constant(self.floats, 0.0), slot)
        pairs = b.lshr(columns, one)
        with cgutils.for_range(b, pairs) as loop:
            column = b.shl(loop.index, one)
            for odd, line in enumerate(self._pair(b, w, loop.index)):
                offset = b.mul(b.add(column, ir.Constant(I64, odd)), ir.Constant(I64, 4 * self.tokens))
                self._add(b, line, b.add(x, offset), sums, odd)
        with b.if_then(b.trunc(columns, ir.IntType(1))):
            # The stored order has no second line, or only padding, behind an odd last column.
            line = self._last(b, w, pairs)
            self._add(b, line, b.add(x, b.mul(b.shl(pairs, one), ir.Constant(I64, 4 * self.tokens))), sums, 0)
        for t in range(self.tokens):
            store(b, b.fadd(b.load(sums[t][0]), b.load(sums[t][1])), plus(b, out, 64 * t), 4)

    def _pair(self, b: Any, w: Any, index: Any) -> list[Any]:
        """Columns 2 index and 2 index + 1 of the block as floats."""
        if self.kind == F32_KIND:
            return [load(b, plus(b, at(b, w, index, 128), 64 * odd), self.floats, 64) for odd in range(2)]
        stored = load(b, at(b, w, index, 64), self.lanes32, 64)
        return [self._widen(b, stored, odd) for odd in range(2)]

    def _last(self, b: Any, w: Any, index: Any) -> Any:
        if self.kind == F32_KIND:
            return load(b, at(b, w, index, 128), self.floats, 64)
        return self._widen(b, load(b, at(b, w, index, 64), self.lanes32, 64), 0)

    def _widen(self, b: Any, stored: Any, odd: int) -> Any:
        if self.kind == BF16_KIND:
            high = b.and_(stored, constant(self.lanes32, 0xFFFF0000)) if odd else b.shl(stored, constant(self.lanes32, 16))
            return b.bitcast(high, self.floats)
        low = b.lshr(stored, constant(self.lanes32, 16)) if odd else stored
        return b.fpext(b.bitcast(b.trunc(low, ir.VectorType(I16, 16)), ir.VectorType(F16, 16)), self.floats)

    def _add(self, b: Any, line: Any, x: Any, sums: Any, odd: int) -> None:
        for t in range(self.tokens):
            value = splat(b, load(b, plus(b, x, 4 * t), F32, 4), self.floats)
            b.store(call(b, "llvm.fmuladd.v16f32", self.floats, line, value, b.load(sums[t][odd])), sums[t][odd])


INTEGERS, F16_KIND, BF16_KIND, F32_KIND = 0, 2, 3, 4


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def product_tile(
    typing: Any, kind: Any, isa: Any, bits: Any, mode16: Any, zero: Any, half: Any, tokens: Any, blocks: Any,
    row: Any, n: Any, r: Any, out: Any, own: Any,
) -> Any:  # fmt: skip
    """out f32 [blocks][tokens][16] = the weights of `blocks` blocks from block n on times the tile of `tokens` rows from row
    r; the rest is in the table row.  `own`, not 0: a tile of several blocks writes to y, or adds, itself.

    Literals: kind, INTEGERS or the kind of the floats; isa (index into all_isas()), bits, mode16 (1: a16, 0: a8), zero (1:
    stored zero points) and half (1: activation blocks of 16 channels) of integers; tokens, blocks (1 of floats).
    """
    numbers = [v.literal_value for v in (bits, mode16, zero, half, tokens, blocks)]
    if kind.literal_value == INTEGERS:
        emit = IntegerTile(all_isas()[isa.literal_value], *numbers).emit
    else:
        emit = FloatTile(kind.literal_value, tokens.literal_value).emit

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        emit(b, *args[8:])
        return context.get_dummy_value()

    return types.void(kind, isa, bits, mode16, zero, half, tokens, blocks, *([types.intp] * 5)), codegen
