"""Winograd's inner product, with half the multiplications (S. Winograd, A New Algorithm for Inner Product, 1968).

For two channels e and o

    (x_e + w_o)(x_o + w_e) = x_e w_e + x_o w_o + x_e x_o + w_e w_o

so one product does the work of two; what is too much depends on the token alone or on the weights alone, and is taken off once
per activation block.  Where a processor has more units that add bytes than units that multiply them, as AMD's have, this goes
beyond what its dot products can do by themselves.  Two additions a product would leave those that multiply waiting, so some
tokens of a tile (`plain`) take two products instead.

Weights of 4 bits leave the room.  They are n = w + 8, in 0 ... 15, and with |x| <= 120 (`activation_limit`) a tile holds
x_e + 120 and x_o - 8 (`quantize.py`), so that x_e + 120 + n_o is an unsigned byte and x_o - 8 + n_e a signed one, as `dot8`
takes them:

    winograd   sum (x_e + 120 + n_o)(x_o - 8 + n_e)      = sum x w + A + B,    A = sum (x_e + 128) x_o,  B = sum (w_o + 128) w_e
    plain      sum (x_e + 120) n_e  +  sum n_o (x_o - 8) = sum x w + C + D,    C = 8 sum x,              D = sum 120 n_e - 8 n_o

All of this is exact, so results are those of microkernel_int.py, bit by bit.  Channel i of an even quad is paired with channel
i of the odd quad after it.  A comes with the activations, int32 [activation block][T] (quantize.py), -B and -D from
`weight_constants`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, QUADS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import I8, I32, I64, constant, get_i64, load, prefetch, splat, store
from edgeq.targets.cpu.kernels.args import WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.matmul import (
    BLOCK_BYTES,
    MIN_SMALL_TILE,
    SCRATCH_BYTES,
    SMALL_TILE,
    finish,
    share,
    stores_whole_tiles,
    tile_loop,
)
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.swiglu_matmul import UNIT, GatedProductArgs, gate, gated_loop, write_unit
from edgeq.targets.cpu.kernels.products.tiles import at, chunks_of, plus
from edgeq.targets.cpu.kernels.rows.quantize import WINOGRAD_SHIFTS

BITS = 4
"""Bits of the weights: with fewer, what takes their planes apart leaves no registers."""
CENTER = 1 << (BITS - 1)
PREFETCH_CHUNKS = 8
"""Chunks of activations that are asked for before their turn: with those of the weights they exceed a first-level cache."""
CONSTANT_BYTES = 2 * LINE
"""-B and -D of an activation block of 16 rows."""


def plain(t: int) -> bool:
    """Whether token t of a tile takes plain products: five of twelve, spread evenly, keep all units busy."""
    return 5 * (t + 1) % 12 < 5


def operands(b: Any, chunk: Any, j: int) -> tuple[Any, Any]:
    """n_e and n_o, the quads 2j and 2j + 1 of the chunk of 4-bit weights at address `chunk`."""
    octets = ir.VectorType(I8, LINE)
    line = load(b, plus(b, chunk, j * LINE), octets, LINE)
    return b.and_(line, constant(octets, (1 << BITS) - 1)), b.lshr(line, constant(octets, BITS))


class WinogradTile(IntegerTile):
    """Emits the product of neighbouring blocks with T tokens of 8-bit activations, in activation blocks of whole chunks.

    `constants`: address of -B and -D, i32 [block of the tile][activation block][2][16].  `later`, not 0: bytes from the weights
    of these blocks to those that come next and are still in memory; the processor brings them while it multiplies.
    """

    def __init__(self, weights: IntegerWeights, tokens: int, blocks: int, constants: Any, later: Any) -> None:
        super().__init__(weights, tokens, blocks, zero_center=CENTER)
        self.constants, self.later = constants, later
        self.of_rows: Any = None

    def emit(self, b: Any, record: Any, n: Any, r: Any, out: Any, stores_result: Any) -> None:
        blocks = ProductArgs.x_blocks.load(b, record)
        places = [b.mul(blocks, ir.Constant(I64, i)) for i in range(self.blocks)]
        self.of_weights = [at(b, self.constants, place, CONSTANT_BYTES) for place in places]
        self.of_tokens = at(b, ProductArgs.winograd_sums.load(b, record), b.mul(r, blocks), 4)
        if self.extent == WHOLE:
            self.of_rows = self.of_x.sums_of_rows(b, record, self.of_tokens)
        super().emit(b, record, n, r, out, stores_result)

    def _start(self, b: Any, xsum: Any, index: Any) -> list[list[list[Any]]]:
        sums = [[[cgutils.alloca_once(b, self.ints)] for _ in range(self.tokens)] for _ in self.of_weights]
        less = []
        for address in self.of_weights:
            constants = at(b, address, index, CONSTANT_BYTES)
            less.append([load(b, plus(b, constants, alone * LINE), self.ints, 4) for alone in range(2)])
        for t in range(self.tokens):
            if plain(t):
                of_token = self.of_x.sum(b, xsum, index, t)
                of_token = b.mul(of_token, ir.Constant(I32, CENTER))
            else:
                of_token = self.of_x.number(b, self.of_rows, self.of_tokens, index, t, I32)
            for block, of_weights in enumerate(less):
                b.store(b.sub(of_weights[plain(t)], splat(b, of_token, self.ints)), sums[block][t][0])
        return sums

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range, which: tuple[int, ...]) -> None:
        tokens, vector = at(b, x, chunk, QUADS * self.quad_bytes), ir.VectorType(I8, LINE)
        lines = [at(b, address, chunk, BITS * LINE) for address in w]
        with b.if_then(b.icmp_signed("!=", self.later, ir.Constant(I64, 0))):
            for line in lines:
                prefetch(b, b.add(line, self.later), BITS * LINE)
        prefetch(b, plus(b, tokens, PREFETCH_CHUNKS * QUADS * self.quad_bytes), QUADS * self.quad_bytes)
        for j in range(QUADS // 2):
            weights = [operands(b, line, j) for line in lines]
            for t in range(self.tokens):
                words = (self._broadcast(b, tokens, (2 * j + k) * self.tokens + t) for k in range(2))
                even, odd = (b.bitcast(word, vector) for word in words)
                for block, (of_even, of_odd) in enumerate(weights):
                    slot = sums[block][t][0]
                    alone = [(of_odd, odd), (even, of_even)]
                    for unsigned, signed in alone if plain(t) else [(b.add(even, of_odd), b.add(odd, of_even))]:
                        b.store(self.isa.dot8(b, b.load(slot), [unsigned], [b.bitcast(signed, self.ints)], BITS), slot)


def winograd_tile(weights: IntegerWeights, tokens: int, blocks: int) -> Any:
    """The tile as a function: (args, n, r, out, stores_result, (constants, later))."""

    @intrinsic
    def product(typing: Any, args: Any, n: Any, r: Any, out: Any, stores_result: Any, of_weights: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            constants, later = cgutils.unpack_tuple(b, values[5], 2)
            WinogradTile(weights, tokens, blocks, constants, later).emit(b, *values[:5])
            return context.get_dummy_value()

        return types.void(args, *[types.intp] * 4, types.UniTuple(types.intp, 2)), codegen

    return product


def weight_constants(isa: int) -> Any:
    """A function: (args, n, out): out i32 [activation block][2][16] = -B and -D of block n of the weights."""
    chosen, ints, octets = all_isas()[isa], ir.VectorType(I32, LINE // 4), ir.VectorType(I8, LINE)

    @intrinsic
    def write(typing: Any, args: Any, n: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            record, n, out = values
            w = b.add(ProductArgs.weights.load(b, record), b.mul(n, ProductArgs.weights_block.load(b, record)))
            chunks, per_block = ProductArgs.chunks.load(b, record), ProductArgs.chunks_per_block.load(b, record)
            ahead = ProductArgs.prefetch_bytes.load(b, record)
            even_shift, odd_shift = (constant(octets, shift) for shift in WINOGRAD_SHIFTS)
            whole = b.udiv(b.add(chunks, b.sub(per_block, ir.Constant(I64, 1))), per_block)
            with cgutils.for_range(b, whole) as loop:
                slots = [cgutils.alloca_once_value(b, constant(ints, 0)) for _ in range(2)]
                first, count = chunks_of(b, loop.index, chunks, per_block)
                with cgutils.for_range(b, count) as inner:
                    line = at(b, w, b.add(first, inner.index), BITS * LINE)
                    prefetch(b, b.add(line, ahead), BITS * LINE)
                    for even, odd in (operands(b, line, j) for j in range(QUADS // 2)):
                        joint = [(b.add(odd, even_shift), b.add(even, odd_shift))]
                        for slot, factors in zip(slots, (joint, [(even, even_shift), (odd, odd_shift)]), strict=True):
                            for unsigned, signed in factors:
                                b.store(chosen.dot8(b, b.load(slot), [unsigned], [b.bitcast(signed, ints)], BITS), slot)
                for i, slot in enumerate(slots):
                    place = plus(b, at(b, out, loop.index, CONSTANT_BYTES), i * LINE)
                    store(b, b.sub(constant(ints, 0), b.load(slot)), place, 4)
            return context.get_dummy_value()

        return types.void(args, types.intp, types.intp), codegen

    return write


def large_tiles(weights: IntegerWeights, tokens: int, blocks: int, gates: bool) -> Any:
    """A function: blocks [start, stop), or those of a unit of results if `gates`, times as many rows as whole tiles take;
    returns the row after them.  `constants`: room for those of the weights."""
    product, write_constants = winograd_tile(weights, tokens, blocks), weight_constants(weights.isa)
    stride = 1 if gates else blocks

    @always_inline
    def loop(args, start, stop, scratch, constants):
        count, step, r = get_i64(args.rows), args.block_step, 0
        line = CONSTANT_BYTES * args.x_blocks
        while r + tokens <= count:
            for n in range(start, stop, stride):
                here = blocks if gates else min(blocks, stop - n)
                of_tile = constants + (n - start) // stride * blocks * line
                if r == 0:
                    for i in range(here):
                        write_constants(args, n + i * step, of_tile + i * line)
                stores_result = not gates and stores_whole_tiles(args, blocks, n)
                later = stride * args.weights_block if r == 0 and n + stride < stop else 0
                product(args, n, r, scratch, int(stores_result), (of_tile, later))
                if gates:
                    gate(scratch, tokens, n - start)
                elif not stores_result:
                    for i in range(here):
                        finish(args, scratch + BLOCK_BYTES * tokens * i, tokens, n + i, r)
            if gates:
                write_unit(args, scratch, (start, stop), (r, tokens), tokens)
            r += tokens
        return r

    return loop


def winograd_matmul(isa: int, group_kind: int, extent: int) -> Kernel:
    """`integer_matmul` of 4-bit weights and 8-bit activations, whose largest tiles go by Winograd's method."""
    max_tile, blocks_per_tile = all_isas()[isa].tiles[0], all_isas()[isa].blocks_per_tile
    weights = IntegerWeights(isa, BITS, 0, group_kind, extent)
    large = large_tiles(weights, max_tile, blocks_per_tile, False)
    small = tile_loop(IntegerTile(weights, SMALL_TILE, blocks_per_tile), MIN_SMALL_TILE)
    single = tile_loop(IntegerTile(weights, 1), 1)

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        group = (args.group_blocks + blocks_per_tile - 1) // blocks_per_tile * blocks_per_tile
        first, last = share(args.output_channels, part, parts, blocks_per_tile)
        scratch = args.scratch + thread * SCRATCH_BYTES
        constants = args.room + thread * group * CONSTANT_BYTES * args.x_blocks
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = large(args, start, stop, scratch, constants)
            r = small(args, start, stop, r, scratch)
            single(args, start, stop, r, scratch)

    return kernel


def gated_winograd_matmul(isa: int, group_kind: int, extent: int) -> Kernel:
    """`gated_matmul` in the same way."""
    max_tile, blocks_per_tile = all_isas()[isa].tiles[0], all_isas()[isa].blocks_per_tile
    weights = IntegerWeights(isa, BITS, 0, group_kind, extent)
    large = large_tiles(weights, max_tile, blocks_per_tile, True)
    small = gated_loop(weights, SMALL_TILE, blocks_per_tile, MIN_SMALL_TILE, max_tile)
    single = gated_loop(weights, 1, 1, 1, max_tile)

    def kernel(record, part, parts, thread):
        args = GatedProductArgs(record)
        scratch = args.scratch + thread * SCRATCH_BYTES
        first, last = share(args.swiglu.width, part, parts, UNIT)
        constants = args.room + thread * blocks_per_tile * UNIT * CONSTANT_BYTES * args.x_blocks
        for start in range(first, last, UNIT):
            stop = min(start + UNIT, last)
            r = large(args, start, stop, scratch, constants)
            r = small(args, start, stop, r, scratch)
            single(args, start, stop, r, scratch)

    return kernel
