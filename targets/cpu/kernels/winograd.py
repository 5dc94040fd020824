"""The inner product by pairs of channels, with half the multiplications (S. Winograd, A New Algorithm for Inner Product, 1968).

For two channels e and o

    (x_e + w_o)(x_o + w_e) = x_e w_e + x_o w_o + x_e x_o + w_e w_o

so one product does the work of two; what is too much depends on the token alone or on the weights alone, and is taken off once
per activation block.  Where a processor has more units that add bytes than units that multiply them, as AMD's have, this goes
beyond what its dot products can do by themselves.  Two additions a product would leave those that multiply waiting, so some
tokens of a tile (`plain`) take two products instead.

Weights of 4 bits leave the room.  They are n = w + 8, in 0 ... 15, and with |x| <= 120 (`activation_limit`) a tile holds
x_e + 120 and x_o - 8 (`quantize.py`), so that x_e + 120 + n_o is an unsigned byte and x_o - 8 + n_e a signed one, as `dot8`
takes them:

    by pairs   sum (x_e + 120 + n_o)(x_o - 8 + n_e)      = sum x w + A + B,    A = sum (x_e + 128) x_o,  B = sum (w_o + 128) w_e
    plain      sum (x_e + 120) n_e  +  sum n_o (x_o - 8) = sum x w + C + D,    C = 8 sum x,              D = sum 120 n_e - 8 n_o

All of this is exact, so results are those of tile.py, bit by bit.  Channel i of an even quad is paired with channel i of the
odd quad behind it.  A comes with the activations, int32 [activation block][T] (quantize.py), -B and -D from `pair_constants`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from edgeq.codec import LINE, QUADS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.compile import COUNT, Kernel, word
from edgeq.targets.cpu.jit.simd import I8, I32, I64, constant, get_i64, load, prefetch, splat, store
from edgeq.targets.cpu.kernels.matmul import SCRATCH_BYTES, finish, share, tiles, written
from edgeq.targets.cpu.kernels.microkernel_int import (
    CHUNKS,
    CONSTANTS,
    GROUP,
    INTEGERS,
    PAIR,
    PER_BLOCK,
    ROWS,
    SCRATCH,
    STEP,
    W_BLOCK,
    X_BLOCKS,
    IntegerTile,
    W,
    at,
    chunks_of,
    plus,
    word_at,
)
from edgeq.targets.cpu.kernels.quantize import PAIR_SHIFTS
from edgeq.targets.cpu.kernels.swiglu_matmul import UNIT, WIDTH, behind, gate, gated_tiles, write_unit

BITS = 4
"""Of the weights: with fewer, what takes their planes apart leaves no registers."""
CENTER = 1 << (BITS - 1)
AHEAD = 8
"""Chunks of activations that are asked for before their turn: with those of the weights they exceed a first-level cache."""
CONSTANT_BYTES = 2 * LINE
"""-B and -D of an activation block of 16 rows."""


def plain(t: int) -> bool:
    """Whether token t of a tile is multiplied without pairs: five of twelve, spread evenly, keep all units busy."""
    return 5 * (t + 1) % 12 < 5


def operands(b: Any, chunk: Any, j: int) -> tuple[Any, Any]:
    """n_e and n_o, the quads 2j and 2j + 1 of the chunk of 4-bit weights at address `chunk`."""
    octets = ir.VectorType(I8, LINE)
    line = load(b, plus(b, chunk, j * LINE), octets, LINE)
    return b.and_(line, constant(octets, (1 << BITS) - 1)), b.lshr(line, constant(octets, BITS))


class PairTile(IntegerTile):
    """Emits the product of neighbouring blocks with T tokens of 8-bit activations, in activation blocks of whole chunks.

    `constants`: address of -B and -D, i32 [block of the tile][activation block][2][16].  `later`, not 0: bytes from the weights
    of these blocks to those that come next and are still in memory; the processor brings them while it multiplies.
    """

    def __init__(self, isa: Isa, zero: bool, tokens: int, blocks: int, constants: Any, later: Any) -> None:
        super().__init__(isa, BITS, False, zero, False, tokens, blocks)
        self.zero_center = CENTER
        self.constants, self.later = constants, later

    def emit(self, b: Any, row: Any, n: Any, r: Any, out: Any, own: Any) -> None:
        blocks = word_at(b, row, X_BLOCKS)
        places = [b.mul(blocks, ir.Constant(I64, i)) for i in range(self.blocks)]
        self.of_weights = [at(b, self.constants, place, CONSTANT_BYTES) for place in places]
        self.of_tokens = at(b, word_at(b, row, PAIR), b.mul(r, blocks), 4)
        super().emit(b, row, n, r, out, own)

    def _start(self, b: Any, xsum: Any, index: Any) -> list[list[list[Any]]]:
        sums = [[[cgutils.alloca_once(b, self.ints)] for _ in range(self.tokens)] for _ in self.of_weights]
        less = []
        for address in self.of_weights:
            constants = at(b, address, index, CONSTANT_BYTES)
            less.append([load(b, plus(b, constants, alone * LINE), self.ints, 4) for alone in range(2)])
        for t in range(self.tokens):
            of_token = load(b, plus(b, at(b, xsum if plain(t) else self.of_tokens, index, 4 * self.tokens), 4 * t), I32, 4)
            if plain(t):
                of_token = b.mul(of_token, ir.Constant(I32, CENTER))
            for block, of_weights in enumerate(less):
                b.store(b.sub(of_weights[plain(t)], splat(b, of_token, self.ints)), sums[block][t][0])
        return sums

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range) -> None:
        tokens, vector = at(b, x, chunk, QUADS * self.quad_bytes), ir.VectorType(I8, LINE)
        lines = [at(b, address, chunk, BITS * LINE) for address in w]
        with b.if_then(b.icmp_signed("!=", self.later, ir.Constant(I64, 0))):
            for line in lines:
                prefetch(b, b.add(line, self.later), BITS * LINE)
        prefetch(b, plus(b, tokens, AHEAD * QUADS * self.quad_bytes), QUADS * self.quad_bytes)
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


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def pair_tile(
    typing: Any, isa: Any, zero: Any, tokens: Any, blocks: Any,
    row: Any, n: Any, r: Any, out: Any, own: Any, constants: Any, later: Any,
) -> Any:  # fmt: skip
    """`product_tile` of 4-bit weights with 8-bit activations, by pairs of channels.  Literals: isa, zero, tokens, blocks."""
    numbers = [v.literal_value for v in (zero, tokens, blocks)]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        PairTile(all_isas()[isa.literal_value], *numbers, *args[9:]).emit(b, *args[4:9])
        return context.get_dummy_value()

    return types.void(isa, zero, tokens, blocks, *[types.intp] * 7), codegen


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def pair_constants(typing: Any, isa: Any, row: Any, n: Any, out: Any) -> Any:
    """out i32 [activation block][2][16] = -B and -D of block n of the weights.  Literal: isa."""
    chosen, ints, octets = all_isas()[isa.literal_value], ir.VectorType(I32, LINE // 4), ir.VectorType(I8, LINE)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, n, out = args[1:]
        w = b.add(word_at(b, row, W), b.mul(n, word_at(b, row, W_BLOCK)))
        chunks, per_block = word_at(b, row, CHUNKS), word_at(b, row, PER_BLOCK)
        even_shift, odd_shift = (constant(octets, shift) for shift in PAIR_SHIFTS)
        with cgutils.for_range(b, word_at(b, row, X_BLOCKS)) as loop:
            slots = [cgutils.alloca_once_value(b, constant(ints, 0)) for _ in range(2)]
            first, count = chunks_of(b, loop.index, chunks, per_block)
            with cgutils.for_range(b, count) as inner:
                line = at(b, w, b.add(first, inner.index), BITS * LINE)
                prefetch(b, plus(b, line, chosen.ahead), BITS * LINE)
                for even, odd in (operands(b, line, j) for j in range(QUADS // 2)):
                    by_pairs = [(b.add(odd, even_shift), b.add(even, odd_shift))]
                    for slot, factors in zip(slots, (by_pairs, [(even, even_shift), (odd, odd_shift)]), strict=True):
                        for unsigned, signed in factors:
                            b.store(chosen.dot8(b, b.load(slot), [unsigned], [b.bitcast(signed, ints)], BITS), slot)
            for i, slot in enumerate(slots):
                place = plus(b, at(b, out, loop.index, CONSTANT_BYTES), i * LINE)
                store(b, b.sub(constant(ints, 0), b.load(slot)), place, 4)
        return context.get_dummy_value()

    return types.void(isa, *[types.intp] * 3), codegen


@njit(inline="always")  # type: ignore[misc]
def pair_tiles(isa, zero, big, together, row, start, stop, scratch, constants, gates):  # type: ignore[no-untyped-def]
    """Blocks [start, stop), or those of a unit of results if `gates`, times as many rows as whole tiles take; returns the row
    behind them."""
    count, step, r = get_i64(word(row, COUNT)), word(row, STEP), 0
    stride, line = 1 if gates else together, CONSTANT_BYTES * word(row, X_BLOCKS)
    while r + big <= count:
        for n in range(start, stop, stride):
            here = together if gates else min(together, stop - n)
            of_tile = constants + (n - start) // stride * together * line
            if r == 0:
                for i in range(here):
                    pair_constants(isa, row, n + i * step, of_tile + i * line)
            own = not gates and written(row, together, n)
            later = stride * word(row, W_BLOCK) if r == 0 and n + stride < stop else 0
            pair_tile(isa, zero, big, together, row, n, r, scratch, int(own), of_tile, later)
            if gates:
                gate(scratch, big, n - start)
            elif not own:
                for i in range(here):
                    finish(row, scratch + 64 * big * i, big, n + i, r)
        if gates:
            write_unit(row, scratch, start, stop, r, big, big)
        r += big
    return r


def pair_matmul(isa: int, zero: int, big: int, together: int) -> Kernel:
    """`integer_matmul` of 4-bit weights and 8-bit activations, whose tiles of `big` tokens go by pairs of channels."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        group = (word(row, GROUP) + together - 1) // together * together
        first, last = share(word(row, ROWS), part, parts, together)
        scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
        constants = word(row, CONSTANTS) + thread * group * CONSTANT_BYTES * word(row, X_BLOCKS)
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = pair_tiles(isa, zero, big, together, row, start, stop, scratch, constants, False)
            r = tiles(INTEGERS, isa, BITS, 0, zero, 0, 4, 2, together, row, start, stop, r, scratch)
            tiles(INTEGERS, isa, BITS, 0, zero, 0, 1, 1, 1, row, start, stop, r, scratch)

    return kernel


def gated_pair_matmul(isa: int, zero: int, big: int, together: int) -> Kernel:
    """`gated_matmul` in the same way."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        scratch = word(row, SCRATCH) + thread * SCRATCH_BYTES
        first, last = share(word(behind(row), WIDTH), part, parts, UNIT)
        constants = word(row, CONSTANTS) + thread * together * UNIT * CONSTANT_BYTES * word(row, X_BLOCKS)
        for start in range(first, last, UNIT):
            stop = min(start + UNIT, last)
            r = pair_tiles(isa, zero, big, together, row, start, stop, scratch, constants, True)
            r = gated_tiles(isa, BITS, 0, zero, 0, 4, 2, together, row, start, stop, r, scratch, big)
            gated_tiles(isa, BITS, 0, zero, 0, 1, 1, 1, row, start, stop, r, scratch, big)

    return kernel
