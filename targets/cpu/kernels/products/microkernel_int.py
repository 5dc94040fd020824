"""The inner product of packed integers: the code that time is spent in.

For one output channel and one token, in numpy; w are the stored integers of the channel, x those of the token:

    y = 0.0
    for block in range(activation_blocks):                       # as long as a group of weights, at most 128 channels
        acc = 0
        for quad in range(first_quad[block], first_quad[block + 1]):
            acc += w[4 * quad : 4 * quad + 4] @ x[4 * quad : 4 * quad + 4]          # isa.dot8, int32, exact
        sum_x = x[4 * first_quad[block] : 4 * first_quad[block + 1]].sum()          # written by quantize.py
        y += scale_w[block] * scale_x[block] * (acc - zero[block] * sum_x)          # one fused multiply-add, float32; groups.py

The tile does so for the 16 channels of a block in the lanes of one vector (of several narrower ones), for one or more
neighbouring blocks and T tokens at once.  It reads the weights in file order, once, and adds in an order that depends neither
on the number of tokens nor on the instruction set's vector width, so a token's result is the same bits alone and among others.

Activations of a tile of T tokens, as `quantize.py` writes them:

    a8      int8  [chunk][quad][T][4]                    one 32-bit broadcast per quad and token
    a16     int8  [chunk][quad][T][2][4]                 x = 256 * high + low: the four low, then the four high bytes
            int16 [chunk][quad][T][4], channels 0 2 1 3  where the set `takes_pairs`: even and odd bytes of a quad of weights;
                                                         also those of 8 bits that it `widens`
    scale   f32   [activation block][T],  sum  int32 [activation block][T]: the sum of the block's stored integers

A token alone adds up low and high bytes side by side.  Several would need more registers than there are: their tile passes over
an activation block twice, first with the high bytes, then, the sums times 256, with the low ones.

Indices of a table (args.zeros) are looked up as they are unpacked, and w above are its entries.

Integers of one activation block are summed exactly: 8 bits x 15 bits x 128 channels stay below 2^31.  Where a row ends within a
chunk of 32 channels, activations are zeros up to its end.

Where neither weights nor activations have a scale inside a row (args.WHOLE), acc runs over all of it, as exactly while it has
at most MAX_INT32_CHANNELS channels, and is scaled once, by the one scale of its blocks; sum_x is the sum of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, QUADS, ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.deferred import cgutils
from edgeq.targets.cpu.jit.simd import F32, I16, I32, I64, constant, load, prefetch, splat, store
from edgeq.targets.cpu.kernels.args import HALF_CHUNK, ONE_CHUNK, WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights, Unpacker
from edgeq.targets.cpu.kernels.products.groups import Groups, multiplied_bits
from edgeq.targets.cpu.kernels.products.tiles import at, chunks_of, opaque, plus, scaled_range
from edgeq.targets.cpu.kernels.products.token_numbers import TokenNumbers

MAX_INT32_CHANNELS = 1 << 16
"""Channels of which an int32 holds the sum of products of 8 by 8 bits."""


class IntegerTile:
    """Emits the product of one or more neighbouring blocks with T tokens; see `Tile`."""

    def __init__(self, weights: IntegerWeights, tokens: int, blocks: int = 1, zero_center: int = 0) -> None:
        isa, bits, mode16 = all_isas()[weights.isa], multiplied_bits(weights.bits, weights.group_kind), weights.mode16
        self.isa, self.bits, self.mode16, self.extent = isa, bits, mode16, weights.extent
        self.unpacker = Unpacker(isa, weights.bits, weights.group_kind)
        self.line_bytes = weights.bits * LINE
        # Tiles of several tokens gain nothing by it, and LLVM then keeps addresses that need more registers than there are.
        fixed = self.extent == ONE_CHUNK and tokens == 1 and isa.lanes > 4
        self.groups = Groups(weights.group_kind, weights.bits, isa.lanes, self.extent == HALF_CHUNK, zero_center, fixed)
        self.tokens, self.blocks, self.per_block = tokens, blocks, ROWS // isa.lanes
        self.parts = blocks * self.per_block
        self.width = 4 * isa.lanes
        self.ints, self.floats = ir.VectorType(I32, isa.lanes), ir.VectorType(F32, isa.lanes)
        self.pairs = weights.words
        # Bytes of an activation that are multiplied apart, low ones first, and those of each pass over an activation block.
        self.bytes = 2 if mode16 and not self.pairs else 1
        self.passes = (tuple(range(self.bytes)),) if tokens == 1 else tuple((byte,) for byte in reversed(range(self.bytes)))
        # What the stored integers still exceed the multiplied ones by: what their groups take off, less the set's offset.
        self.center = self.groups.taken - (0 if self.pairs else isa.offset(bits))
        # How far ahead weights are asked for.
        self.ahead: Any = None
        # The table of each block.
        self.tables: list[Any] = []
        self.of_x = TokenNumbers(tokens, self.extent, isa.lanes, tokens == 1 and self.extent in (HALF_CHUNK, ONE_CHUNK))
        # Sixteen registers do not hold the activations of a chunk until the second vector of a block meets them, and what the
        # compiler puts aside is written first.  By measurement on Zen 3: planes of bits beside pairs gain nothing by it.
        busy = self.unpacker.trellis or not self.unpacker.all_at_once if self.pairs else self.unpacker.all_at_once
        self.reads_again = isa.lanes == 8 and busy
        # Sixteen registers, and products added up in all vectors of a block at once.
        self.few_registers = isa.lanes == 8 and not isa.sums_16
        # Products added up in 16 bits, all vectors of a block in turn.  Planes of bits leave no registers for that.
        one_by_one = not self.unpacker.all_at_once or self.unpacker.trellis
        self.in_turn = isa.sums_16 and not isa.signs and not self.pairs and one_by_one
        # Whether the compiler leaves them in the order in which they are emitted.
        self.sums_in_order = tokens == 1
        # Registers that a trellis of planes needs more: what is put aside once for a group costs least.
        self.floats_in_memory = self.in_turn and self.unpacker.trellis and weights.bits != 2
        # Integer sums may be split freely: those of each byte.  Where registers are few not those of a chunk alone, for which
        # the next one does not wait.
        split = tokens == 1 and not (self.few_registers and self.extent in (HALF_CHUNK, ONE_CHUNK))
        self.chains = max(1, isa.chains // len(self.passes[0])) if split else 1
        self.quad_bytes = tokens * (8 if mode16 else 4)

    def emit(self, b: Any, record: Any, n: Any, r: Any, out: Any, stores_result: Any) -> None:
        blocks = self._block_numbers(b, record, n)

        def of(field: Any) -> Any:
            return field.load(b, record)

        w = [b.add(of(ProductArgs.weights), b.mul(block, of(ProductArgs.weights_block))) for block in blocks]
        self.tables = [self.unpacker.table(b, record, block) for block in blocks]
        x, numbers = self._operands(b, record, blocks, r)
        chunks, per_block = of(ProductArgs.chunks), of(ProductArgs.chunks_per_block)
        self.ahead = of(ProductArgs.prefetch_bytes)
        if self.blocks > 1:
            results, owned = self._results(b, record, n, r), b.icmp_signed("!=", stores_result, ir.Constant(I64, 0))
            with b.if_then(owned):
                # Stores that wait for their lines hold up all after them.
                for place in results:
                    prefetch(b, place, 64 * self.blocks, write=True)
        floats = [[self._float(b, out, part, t) for t in range(self.tokens)] for part in range(self.parts)]
        whole = b.udiv(b.add(chunks, b.sub(per_block, ir.Constant(I64, 1))), per_block)
        count = chunks if self.extent == HALF_CHUNK else whole
        if self.extent == WHOLE:
            self.of_x.add_up_rows(b, record, *numbers[-2:])
        if self.extent == ONE_CHUNK and self.tokens == 1 and self.isa.lanes == 8:
            self._single_chunks(b, w, x, count, numbers, floats)
        else:
            with cgutils.for_range(b, count) as loop:
                if self.extent == HALF_CHUNK:
                    self._halves(b, record, w, x, loop.index, numbers, floats)
                else:
                    self._whole_chunks(b, w, x, loop.index, self._chunks_of(b, loop.index, chunks, per_block), numbers, floats)
        if self.blocks == 1:
            for part, slots in enumerate([] if self.floats_in_memory else floats):
                for t, slot in enumerate(slots):
                    store(b, b.load(slot), self._place(b, out, part, t), 4)
        else:
            residual = b.icmp_signed("!=", of(ProductArgs.add), ir.Constant(I64, 0))
            with b.if_then(owned), b.if_else(residual) as (added, alone):
                with added:
                    self._write(b, results, out, True)
                with alone:
                    self._write(b, results, out, False)

    def _operands(self, b: Any, record: Any, blocks: list[Any], r: Any) -> tuple[Any, tuple[Any, ...]]:
        """Addresses of the activations of a tile, and of the numbers by which the sums of its blocks are scaled."""

        def of(field: Any) -> Any:
            return field.load(b, record)

        x = b.add(of(ProductArgs.x), b.mul(r, of(ProductArgs.x_stride)))
        numbers = b.mul(b.mul(r, of(ProductArgs.x_blocks)), ir.Constant(I64, 4))
        xscale, xsum = b.add(of(ProductArgs.x_scales), numbers), b.add(of(ProductArgs.x_sums), numbers)
        return x, ([self.groups.addresses(b, record, block) for block in blocks], xscale, xsum)

    def _results(self, b: Any, record: Any, n: Any, r: Any) -> list[Any]:
        """Where the results of each token go."""
        step = ProductArgs.y_stride.load(b, record)
        first = at(b, b.add(ProductArgs.y.load(b, record), b.mul(r, step)), n, 64)
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
        if self.blocks == 1 and not self.floats_in_memory:
            return cgutils.alloca_once_value(b, zero)
        place = self._place(b, out, part, t)
        store(b, zero, place, 4)
        return b.inttoptr(place, self.floats.as_pointer())

    def _block_numbers(self, b: Any, record: Any, n: Any) -> list[Any]:
        """Block n and those that follow in steps; what would lie after the last is the last once more."""
        if self.blocks == 1:
            return [n]
        last = b.lshr(plus(b, ProductArgs.output_channels.load(b, record), -1), ir.Constant(I64, 4))
        numbers = [b.add(n, b.mul(ProductArgs.block_step.load(b, record), ir.Constant(I64, i))) for i in range(self.blocks)]
        return [b.select(b.icmp_signed("<", number, last), number, last) for number in numbers]

    def _chunks_of(self, b: Any, index: Any, chunks: Any, per_block: Any) -> tuple[Any, Any]:
        """As `chunks_of`."""
        return (index, None) if self.extent == ONE_CHUNK else chunks_of(b, index, chunks, per_block)

    def _whole_chunks(self, b: Any, w: Any, x: Any, index: Any, chunks: tuple[Any, Any], numbers: Any, floats: Any) -> None:
        """Activation block `index`: its first chunk and how many."""
        first, inside = chunks

        def walk(sums: Any, which: tuple[int, ...]) -> None:
            if self.extent == ONE_CHUNK:
                self._chunk(b, w, x, first, sums, range(QUADS), which)
                return
            with cgutils.for_range(b, inside) as inner:
                self._chunk(b, w, x, b.add(first, inner.index), sums, range(QUADS), which)

        self._block(b, index, numbers, floats, walk)

    def _single_chunks(self, b: Any, w: Any, x: Any, count: Any, numbers: Any, floats: Any) -> None:
        """All activation blocks, where they are one chunk: one address moves on, that of the weights."""
        places = [cgutils.alloca_once_value(b, address) for address in w]
        with scaled_range(b, count, 4) as index:
            lines, tokens = [b.load(place) for place in places], at(b, x, index, QUADS * self.quad_bytes)

            def walk(sums: Any, which: tuple[int, ...]) -> None:
                self._chunk(b, lines, tokens, ir.Constant(I64, 0), sums, range(QUADS), which)

            self._block(b, index, numbers, floats, walk)
            for place, line in zip(places, lines, strict=True):
                b.store(plus(b, line, self.line_bytes), place)

    def _halves(self, b: Any, record: Any, w: Any, x: Any, chunk: Any, numbers: Any, floats: Any) -> None:
        """The activation blocks of 16 channels of a chunk; the last chunk of a row may have one."""
        index = b.shl(chunk, ir.Constant(I64, 1))
        self._half_chunk(b, w, x, chunk, 0, index, numbers, floats)
        odd = b.or_(index, ir.Constant(I64, 1))
        with b.if_then(b.icmp_unsigned("<", odd, ProductArgs.x_blocks.load(b, record))):
            self._half_chunk(b, w, x, chunk, 4, odd, numbers, floats)

    def _half_chunk(self, b: Any, w: Any, x: Any, chunk: Any, first: int, index: Any, numbers: Any, floats: Any) -> None:
        """An activation block of 16 channels: quads first ... first + 3 of a chunk."""

        def walk(sums: Any, which: tuple[int, ...]) -> None:
            self._chunk(b, w, x, chunk, sums, range(first, first + 4), which)

        self._block(b, index, numbers, floats, walk)

    def _block(self, b: Any, index: Any, numbers: Any, floats: Any, walk: Callable[[Any, tuple[int, ...]], None]) -> None:
        """An activation block: `walk` adds the products with some of the bytes of all its chunks to the sums."""
        xsum = numbers[-1]
        sums = self._start(b, xsum, index)
        for which in self.passes:
            if which != self.passes[0]:
                self._raise(b, xsum, index, sums)
            walk(sums, which)
        self._finish(b, index, numbers, sums, floats)

    def _start(self, b: Any, xsum: Any, index: Any) -> list[list[list[Any]]]:
        """Accumulators [part][token][chain], of a token alone those of low bytes and then of high ones."""
        zero, sums = constant(self.ints, 0), self._slots(b, self.chains * len(self.passes[0]))
        for t in range(self.tokens):
            first = self._first(b, xsum, index, t) if len(self.passes) == 1 else zero
            for part in range(self.parts):
                for chain, slot in enumerate(sums[part][t]):
                    b.store(zero if chain else first, slot)
        return sums

    def _slots(self, b: Any, chains: int) -> list[list[list[Any]]]:
        return [
            [[cgutils.alloca_once(b, self.ints) for _ in range(chains)] for _ in range(self.tokens)] for _ in range(self.parts)
        ]

    def _first(self, b: Any, xsum: Any, index: Any, t: int) -> Any:
        """What the sums of token t begin with: the symmetric form subtracts its center here, exactly and for nothing."""
        if not self.center:
            return constant(self.ints, 0)
        return b.mul(self.of_x.lanes_of_sum(b, xsum, index, t), constant(self.ints, -self.center))

    def _raise(self, b: Any, xsum: Any, index: Any, sums: Any) -> None:
        """From sums of high bytes to those that low bytes are added to."""
        for t in range(self.tokens):
            first = self._first(b, xsum, index, t)
            for part in range(self.parts):
                slot = sums[part][t][0]
                b.store(self._joined(b, b.load(slot), first), slot)

    def _joined(self, b: Any, high: Any, low: Any) -> Any:
        return b.add(b.shl(high, constant(self.ints, 8)), low)

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        lines = [at(b, address, chunk, self.line_bytes) for address in w]
        tokens = at(b, x, chunk, QUADS * self.quad_bytes)
        if self.in_turn:
            vectors = self.unpacker.in_turn(b, lines[0], self.per_block, quads, self.tables[0])
            self._add_in_turn(b, self._asking_ahead(b, lines[0], vectors), tokens, sums)
            return
        if self.isa.prefetch_distances and which == self.passes[0]:
            # Blocks follow each other in the file.
            for line in lines:
                prefetch(b, b.add(line, self.ahead), self.line_bytes, level=2)
        if self.blocks > 1:
            places = [(line, i, place) for i, line in enumerate(lines) for place in range(self.per_block)]
            self._dots(b, [self._unpacked(b, *each) for each in places], tokens, sums, quads, which)
            return
        for part in range(self.parts):
            if part and self.reads_again:
                tokens = opaque(b, tokens)
            stored = self._unpacked(b, lines[0], 0, part)
            if self.pairs:
                self._dot16(b, stored, tokens, sums[part], quads)
            else:
                self._dot8(b, stored, tokens, sums[part], quads, which)

    def _asking_ahead(self, b: Any, line: Any, quads: Iterable[tuple[int, list[Any]]]) -> Iterator[tuple[int, list[Any]]]:
        """The same quads.  Between them lines are asked for, one at a time: at once they would hold up the loads after them."""
        count = self.line_bytes // LINE
        asked = {i * QUADS // count: i for i in range(count)}
        for j, vectors in quads:
            if j in asked:
                prefetch(b, b.add(plus(b, line, LINE * asked[j]), self.ahead), LINE, level=2)
            yield j, vectors

    def _add_in_turn(self, b: Any, quads: Iterable[tuple[int, list[Any]]], tokens: Any, sums: Any) -> None:
        """Products added up in 16 bits: quads of activations meet all vectors of the block, one after the other.

        quads   the number of a quad, and its weights in each vector of rows
        """
        run, totals = self.isa.run(self.bits), dict[tuple[int, int], Any]()
        for count, (j, stored) in enumerate(quads, 1):
            for t in range(self.tokens):
                value = self._broadcast(b, tokens, j * self.tokens + t)
                for part in range(self.parts):
                    total = self.isa.pairs16(b, totals.get((part, t)), stored[part], value)
                    totals[part, t] = opaque(b, total, self.sums_in_order)
            if count % run == 0:
                self._widen(b, totals, sums)
                totals = {}
        self._widen(b, totals, sums)

    def _widen(self, b: Any, totals: dict[tuple[int, int], Any], sums: Any) -> None:
        """Adds sums in 16 bits, by vector and token, to those in 32."""
        for part, t in sorted(totals):
            slot = sums[part][t][0]
            value = self.isa.widened(b, b.load(slot), totals[part, t])
            b.store(opaque(b, value, True) if self.sums_in_order else value, slot)

    def _unpacked(self, b: Any, line: Any, block: int, place: int) -> list[Any]:
        return self.unpacker.quads(b, line, place, self.tables[block])

    def _dots(self, b: Any, stored: list[list[Any]], tokens: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        """Every broadcast token meets all blocks: several tokens, so one of their bytes."""
        (byte,) = which
        for j, t in itertools.product(quads, range(self.tokens)):
            value = self._broadcast(b, tokens, self.bytes * (j * self.tokens + t) + byte)
            for part in range(self.parts):
                slot = sums[part][t][0]
                b.store(self.isa.dot8(b, b.load(slot), [stored[part][j]], [value], self.bits), slot)

    def _dot8(self, b: Any, stored: list[Any], tokens: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        for t, (place, byte) in itertools.product(range(self.tokens), enumerate(which)):
            values = {j: self._broadcast(b, tokens, self.bytes * (j * self.tokens + t) + byte) for j in quads}
            for chain in range(self.chains):
                mine = [j for j in quads if (j - quads.start) * self.chains // len(quads) == chain]
                slot = sums[t][place * self.chains + chain]
                picked = [stored[j] for j in mine]
                b.store(self.isa.dot8(b, b.load(slot), picked, [values[j] for j in mine], self.bits), slot)

    def _dot16(self, b: Any, stored: list[Any], tokens: Any, sums: Any, quads: range) -> None:
        words = ir.VectorType(I16, self.width // 2)
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

    def _lane(self, b: Any, vector: Any, lane: int) -> Any:
        return b.shuffle_vector(vector, ir.Constant(self.ints, ir.Undefined), constant(self.ints, lane))

    def _broadcast(self, b: Any, tokens: Any, word: int) -> Any:
        """Word `word` of the chunk's activations in all lanes.  A vector of four lanes is loaded whole, for `sdot` by lane."""
        if self.isa.lanes != 4:
            return splat(b, load(b, plus(b, tokens, 4 * word), I32, 4), self.ints)
        return self._lane(b, load(b, plus(b, tokens, word // 4 * 16), self.ints, 16), word % 4)

    def _finish(self, b: Any, index: Any, addresses: Any, sums: Any, floats: Any) -> None:
        """Adds one activation block to the floats."""
        for part in range(self.parts):
            self._finish_part(b, part, index, addresses, sums[part], floats[part])

    def _finish_part(self, b: Any, part: int, index: Any, addresses: Any, sums: Any, floats: Any) -> None:
        """The same for the rows of one vector: accumulators [token][chain], floats [token]."""
        of_groups, xscale, xsum = addresses
        block, place = divmod(part, self.per_block)
        numbers = self.groups.load(b, of_groups[block], index, place, ahead=bool(self.isa.prefetch_distances))
        for t in range(self.tokens):
            factor, total = self.of_x.scale(b, xscale, index, t), self._total(b, sums[t])
            sum_x = partial(self.of_x.lanes_of_sum, b, xsum, index, t)
            b.store(self.groups.added(b, numbers, total, sum_x, factor, b.load(floats[t])), floats[t])

    def _total(self, b: Any, slots: list[Any]) -> Any:
        sums = [b.load(slot) for slot in slots]
        low, *high = (reduce(b.add, sums[i : i + self.chains]) for i in range(0, len(sums), self.chains))
        return self._joined(b, high[0], low) if high else low
