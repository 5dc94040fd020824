"""Packed integers times many tokens where a processor's dot products are several instructions: weights are unpacked first.

A block of weights, some hundred channels of it, is unpacked into the first-level cache, once for a panel of tokens, which then
pass by in tiles.  So a tile has all registers for its sums:

    8-bit activations       a byte for every weight; products of a chunk are added up in 16 bits, `Isa.run` quads at a time, and
                            then in 32
    of 16 bits, or weights  16 bits for every weight, even and odd channels of a quad apart, as `Isa.dot16` takes them
    too large for that

Sums of integers are exact, and what becomes of them is what microkernel_int.py does, in its order: results are the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, QUADS, ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import I8, I16, I64, constant, get_i64, load, prefetch, store, vload, vsplat, vstore
from edgeq.targets.cpu.kernels.args import HALF_CHUNK, WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.products.matmul import (
    BLOCK_BYTES,
    SCRATCH_BYTES,
    finish,
    share,
    tile_loop,
)
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile, IntegerWeights
from edgeq.targets.cpu.kernels.products.swiglu_matmul import RESULT_STRIDE, UNIT, GatedProductArgs, gated_loop
from edgeq.targets.cpu.kernels.products.tiles import at, chunks_of, opaque, plus
from edgeq.targets.cpu.kernels.rows.elementwise import gated
from edgeq.targets.cpu.kernels.rows.quantize import place_of, write_quantized

PANEL = 128
"""Token rows that pass by while weights stay unpacked."""
STEP_CHUNKS = 16
"""Chunks that are unpacked at a time: with what a tile reads of the tokens they fit a first-level cache of 32 KiB."""
GROUP_BLOCKS = 2 * UNIT
"""Blocks that pass by while some hundred channels of a panel's tokens stay in the second-level cache."""
PANEL_BYTES = PANEL * BLOCK_BYTES
RESULTS = GROUP_BLOCKS * PANEL_BYTES
"""In a thread's room after the floats of a group: those of a unit after the activation, f32 [PANEL][128]."""
BYTES_OF_CHUNK = LINE * QUADS
"""Unpacked into bytes."""


class PanelTile(IntegerTile):
    """Emits floats [T][16] += the product of unpacked chunks of a block with T tokens."""

    def __init__(self, weights: IntegerWeights, tokens: int) -> None:
        super().__init__(weights, tokens)
        self.chains = 1
        self.sums_at: Any = None

    def emit_chunks(self, b: Any, record: Any, n: Any, r: Any, out: Any, chunks: tuple[Any, ...], sums_at: Any) -> None:
        """`chunks`: the first one, how many, and where their weights lie;  sums_at: room for the integer sums of a tile."""
        first, count, panel = chunks
        x, numbers = self._operands(b, record, [n], r)
        of_chunk = BYTES_OF_CHUNK * (2 if self.pairs else 1)
        w = [b.sub(panel, b.mul(first, ir.Constant(I64, of_chunk)))]
        per_block = ProductArgs.chunks_per_block.load(b, record)
        floats = [[self._float_at(b, out, part, t) for t in range(self.tokens)] for part in range(self.parts)]
        self.sums_at = sums_at
        last = b.add(first, count)
        if self.extent == HALF_CHUNK:
            with cgutils.for_range(b, count) as loop:
                self._halves(b, record, w, x, b.add(first, loop.index), numbers, floats)
            return
        start = b.udiv(first, per_block)
        blocks = b.sub(b.udiv(b.add(last, b.sub(per_block, ir.Constant(I64, 1))), per_block), start)
        if self.extent == WHOLE:
            self.row_factors, self.row_sums = self._of_rows(b, record, numbers[-2], numbers[-1])
        with cgutils.for_range(b, blocks) as loop:
            index = b.add(start, loop.index)
            self._whole_chunks(b, w, x, index, chunks_of(b, index, last, per_block), numbers, floats)

    def _float_at(self, b: Any, out: Any, part: int, t: int) -> Any:
        return b.inttoptr(self._place(b, out, part, t), self.floats.as_pointer())

    def _slots(self, b: Any, chains: int) -> list[list[list[Any]]]:
        if self.pairs:
            return super()._slots(b, chains)
        # The registers are for sums of 16 bits.
        place, pointer = 4 * self.isa.lanes, self.ints.as_pointer()
        return [
            [[b.inttoptr(plus(b, self.sums_at, place * (part * self.tokens + t)), pointer)] for t in range(self.tokens)]
            for part in range(self.parts)
        ]

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        tokens = at(b, x, chunk, QUADS * self.quad_bytes)
        if self.pairs:
            self._words(b, at(b, w[0], chunk, 2 * BYTES_OF_CHUNK), tokens, sums, quads)
        else:
            self._bytes(b, at(b, w[0], chunk, BYTES_OF_CHUNK), tokens, sums, quads)

    def _bytes(self, b: Any, weights: Any, tokens: Any, sums: Any, quads: range) -> None:
        vector, run = ir.VectorType(I8, self.width), self.isa.run(self.bits)
        for start in range(quads.start, quads.stop, run):
            totals: list[list[Any]] = [[None] * self.tokens for _ in range(self.parts)]
            for j in range(start, min(start + run, quads.stop)):
                stored = [load(b, plus(b, weights, LINE * j + self.width * part), vector, 32) for part in range(self.parts)]
                for t in range(self.tokens):
                    value = self._broadcast(b, tokens, j * self.tokens + t)
                    for part in range(self.parts):
                        totals[part][t] = opaque(b, self.isa.pairs16(b, totals[part][t], stored[part], value))
            for part in range(self.parts):
                for t in range(self.tokens):
                    slot = sums[part][t][0]
                    b.store(self.isa.widened(b, b.load(slot), totals[part][t]), slot)

    def _words(self, b: Any, weights: Any, tokens: Any, sums: Any, quads: range) -> None:
        vector = ir.VectorType(I16, self.width // 2)
        for j in quads:
            for k in range(2):
                places = [plus(b, weights, LINE * (2 * j + k) + self.width * part) for part in range(self.parts)]
                stored = [load(b, place, vector, 32) for place in places]
                for t in range(self.tokens):
                    value = self._broadcast(b, tokens, 2 * (j * self.tokens + t) + k)
                    for part in range(self.parts):
                        slot = sums[part][t][0]
                        b.store(opaque(b, self.isa.dot16(b, b.load(slot), stored[part], value)), slot)


def panel_tile(weights: IntegerWeights, tokens: int) -> Any:
    """The tile as a function: (args, n, r, out, (first chunk, chunks, their weights, room for sums))."""

    @intrinsic
    def product(typing: Any, args: Any, n: Any, r: Any, out: Any, chunks: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            *chunks, sums_at = cgutils.unpack_tuple(b, values[4], 4)
            PanelTile(weights, tokens).emit_chunks(b, *values[:4], tuple(chunks), sums_at)
            return context.get_dummy_value()

        return types.void(args, *[types.intp] * 3, types.UniTuple(types.intp, 4)), codegen

    return product


def unpacked(weights: IntegerWeights) -> Any:
    """A function: (args, n, address of chunks of block n, how many, out): their quads in order, a byte for every weight or 16
    bits."""
    bits, tile = weights.bits, IntegerTile(weights, 1)

    @intrinsic
    def write(typing: Any, args: Any, n: Any, stored: Any, chunks: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            record, n, stored, chunks, out = values
            width, words = tile.width, ir.VectorType(I16, tile.width // 2)
            table = tile.unpacker.table(b, record, n)
            with cgutils.for_range(b, chunks) as loop:
                line = at(b, stored, loop.index, bits * LINE)
                to = at(b, out, loop.index, BYTES_OF_CHUNK * (2 if tile.pairs else 1))
                # Those of the next step.
                prefetch(b, plus(b, line, STEP_CHUNKS * bits * LINE), bits * LINE, level=2)
                for part in range(tile.per_block):
                    for j, quad in enumerate(tile.unpacker.quads(b, line, part, table)):
                        if not tile.pairs:
                            store(b, quad, plus(b, to, LINE * j + width * part), width)
                            continue
                        quad = b.bitcast(quad, words)
                        for k, half in enumerate((b.and_(quad, constant(words, 255)), b.lshr(quad, constant(words, 8)))):
                            store(b, half, plus(b, to, LINE * (2 * j + k) + width * part), width)
            return context.get_dummy_value()

        return types.void(args, *[types.intp] * 4), codegen

    return write


def panel_product(weights: IntegerWeights, tokens: int) -> Any:
    """A function: (args, n, (r, here), first, out, scratch, panel): out f32 [here, up to whole tiles][16] += block n, chunks
    [first, first + STEP_CHUNKS), times `here` rows from row r on; from the first chunk on it is set.  `panel`: room for those
    chunks."""
    product, unpack_chunks, whole = panel_tile(weights, tokens), unpacked(weights), weights.extent == WHOLE
    line = weights.bits * LINE

    @always_inline
    def multiply(args, n, rows, first, out, scratch, panel):
        (r, here), chunks = rows, args.chunks
        count = chunks if whole else min(STEP_CHUNKS, chunks - first)
        unpack_chunks(args, n, args.weights + n * args.weights_block + first * line, count, panel)
        if first == 0:
            for t in range((here + tokens - 1) // tokens * tokens):
                vstore(out + BLOCK_BYTES * t, vsplat(0.0))
        for t in range(0, here, tokens):
            product(args, n, r + t, out + BLOCK_BYTES * t, (first, count, panel, scratch))

    return multiply


def room_bytes(weights: IntegerWeights, chunks: int) -> int:
    """Room of a thread: floats of a panel with a group of blocks, results of a unit, and unpacked weights of the wider kind, so
    that modes share it.
    """
    step = chunks if weights.extent == WHOLE else min(chunks, STEP_CHUNKS)
    return RESULTS + PANEL * RESULT_STRIDE + 2 * BYTES_OF_CHUNK * step


def panel_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """GEMM of prefill: packed integers times any number of tokens, a last one by itself."""
    weights, tokens = IntegerWeights(isa, bits, mode16, group_kind, extent), all_isas()[isa].tiles[0]
    multiply, single, whole = panel_product(weights, tokens), tile_loop(IntegerTile(weights, 1), 1), extent == WHOLE

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        first, last = share(args.output_channels, part, parts, 1)
        scratch, out = args.scratch + thread * SCRATCH_BYTES, args.room + thread * args.room_bytes
        count, chunks, panel = get_i64(args.rows), args.chunks, out + RESULTS + PANEL * RESULT_STRIDE
        many = count - 1 if count % tokens == 1 else count
        for start in range(first, last, GROUP_BLOCKS):
            stop = min(start + GROUP_BLOCKS, last)
            for r in range(0, many, PANEL):
                here = min(PANEL, many - r)
                for chunk in range(0, chunks, chunks if whole else STEP_CHUNKS):
                    for n in range(start, stop):
                        multiply(args, n, (r, here), chunk, out + PANEL_BYTES * (n - start), scratch, panel)
                for n in range(start, stop):
                    finish(args, out + PANEL_BYTES * (n - start), here, n, r)
            single(args, start, stop, many, scratch)

    return kernel


def gated_panel_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """`gated_matmul` in the same way: gate and up, silu(gate) * up and its quantization."""
    weights, tokens = IntegerWeights(isa, bits, mode16, group_kind, extent), all_isas()[isa].tiles[0]
    multiply, whole = panel_product(weights, tokens), extent == WHOLE
    single = gated_loop(weights, 1, 1, 1, tokens)

    @always_inline
    def unit(args, start, stop, many, scratch, out):
        """Blocks [start, stop) of results, at most UNIT."""
        chunks, up, results, quantized = args.chunks, args.block_step, out + RESULTS, args.swiglu.quantized
        count, panel = get_i64(args.rows), results + PANEL * RESULT_STRIDE
        for r in range(0, many, PANEL):
            here = min(PANEL, many - r)
            for chunk in range(0, chunks, chunks if whole else STEP_CHUNKS):
                for n in range(start, stop):
                    of_gate = out + PANEL_BYTES * (n - start)
                    multiply(args, n, (r, here), chunk, of_gate, scratch, panel)
                    multiply(args, n + up, (r, here), chunk, of_gate + UNIT * PANEL_BYTES, scratch, panel)
            for t in range(here):
                for i in range(stop - start):
                    of_gate = out + PANEL_BYTES * i + BLOCK_BYTES * t
                    result = gated(vload(of_gate), vload(of_gate + UNIT * PANEL_BYTES))
                    vstore(results + RESULT_STRIDE * t + BLOCK_BYTES * i, result)
                x = results + RESULT_STRIDE * t - BLOCK_BYTES * start
                write_quantized(quantized, x, place_of(quantized, r + t, count, tokens), ROWS * start, ROWS * stop)

    def kernel(record, part, parts, thread):
        args = GatedProductArgs(record)
        scratch, out = args.scratch + thread * SCRATCH_BYTES, args.room + thread * args.room_bytes
        first, last = share(args.swiglu.width, part, parts, UNIT)
        count = get_i64(args.rows)
        many = count - 1 if count % tokens == 1 else count
        for start in range(first, last, UNIT):
            stop = min(start + UNIT, last)
            unit(args, start, stop, many, scratch, out)
            single(args, start, stop, many, scratch)

    return kernel
