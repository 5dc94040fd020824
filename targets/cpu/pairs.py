"""The inner product by pairs of channels, with half the multiplications (S. Winograd, A New Algorithm for Inner Product, 1968).

For two channels e and o

    (x_e + w_o)(x_o + w_e) = x_e w_e + x_o w_o + x_e x_o + w_e w_o

so one product does the work of two; what is too much depends on the token alone or on the weights alone, and is taken off once
per activation block.  Where a processor has more units that add bytes than units that multiply them, as AMD's have, this goes
beyond what its dot products can do by themselves.

Weights of 4 bits leave the room.  Less their center they lie in -8 ... 7, and with |x| <= 120 (`Codec.activation_limit`)
x_o + w_e is a signed byte and x_e + w_o + 128 an unsigned one, as `dot8` takes them:

    sum (x_e + w_o + 128)(x_o + w_e) = sum x w + A + B,    A = sum (x_e + 128) x_o,    B = sum (w_o + 128) w_e

All of this is exact, so results are those of tile.py, bit by bit.  Channel i of an even quad is paired with channel i of the
odd quad behind it.  A comes with the activations, int32 [activation block][T] (quantize.py), -B from `pair_constants`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edgeq.codec import LINE, QUADS
from edgeq.targets.cpu.compiled import COUNT, Kernel, word
from edgeq.targets.cpu.isa import Isa, all_isas
from edgeq.targets.cpu.matmul import SCRATCH_BYTES, finish, share, tiles, written
from edgeq.targets.cpu.tile import (
    CHUNKS,
    CONSTANTS,
    GROUP,
    INTEGERS,
    PAIR,
    PER_BLOCK,
    SCRATCH,
    W_BLOCK,
    X_BLOCKS,
    IntegerTile,
    W,
    at,
    chunks_of,
    plus,
    word_at,
)
from edgeq.targets.cpu.vector import I8, I32, call, constant, get_i64, load, prefetch, splat, store

BITS = 4
"""Of the weights: with fewer, what takes their planes apart leaves no registers."""
EVEN, ODD = ((0, 1, 2, 3, 3, 3, 3, 3), 0xF8), ((4, 5, 6, 7, 7, 7, 7, 7), 0x78)
"""How the two quads of a line become w_e and w_o + 128: which bit of a byte goes where, and those that are flipped."""


def affine(b: Any, octets: Any, bits: tuple[int, ...], flipped: int) -> Any:
    """Every byte with bit bits[i] of it in the place of bit i, and the bits of `flipped` the other way round."""
    matrix = ir.Constant(octets.type, [1 << bits[7 - i % 8] for i in range(octets.type.count)])
    return call(b, "llvm.x86.vgf2p8affineqb.512", octets.type, octets, matrix, ir.Constant(I8, flipped))


def operands(b: Any, chunk: Any, j: int) -> tuple[Any, Any]:
    """(w_o + 128, w_e) of the quads 2j and 2j + 1 of the chunk of 4-bit weights at address `chunk`."""
    line = load(b, plus(b, chunk, j * LINE), ir.VectorType(I8, LINE), LINE)
    return affine(b, line, *ODD), affine(b, line, *EVEN)


class PairTile(IntegerTile):
    """Emits the product of neighbouring blocks with T tokens of 8-bit activations, in activation blocks of whole chunks.

    `constants`: address of -B, i32 [block][activation block][16].
    """

    def __init__(self, isa: Isa, zero: bool, tokens: int, blocks: int, constants: Any) -> None:
        super().__init__(isa, BITS, False, zero, False, tokens, blocks)
        self.zero_center = 1 << (BITS - 1)
        self.constants = constants

    def emit(self, b: Any, row: Any, n: Any, r: Any, out: Any) -> None:
        blocks = word_at(b, row, X_BLOCKS)
        places = [b.mul(b.sub(block, n), blocks) for block in self._block_numbers(b, row, n)]
        self.of_weights = [at(b, self.constants, place, LINE) for place in places]
        self.of_tokens = at(b, word_at(b, row, PAIR), b.mul(r, blocks), 4)
        super().emit(b, row, n, r, out)

    def _start(self, b: Any, xsum: Any, index: Any) -> list[list[list[Any]]]:
        sums = []
        for address in self.of_weights:
            less, slots = load(b, at(b, address, index, LINE), self.ints, 4), []
            for t in range(self.tokens):
                of_token = load(b, plus(b, at(b, self.of_tokens, index, 4 * self.tokens), 4 * t), I32, 4)
                slots.append([cgutils.alloca_once(b, self.ints)])
                b.store(b.sub(less, splat(b, of_token, self.ints)), slots[t][0])
            sums.append(slots)
        return sums

    def _chunk(self, b: Any, w: Any, x: Any, chunk: Any, sums: Any, quads: range) -> None:
        tokens, vector = at(b, x, chunk, QUADS * self.quad_bytes), ir.VectorType(I8, LINE)
        lines = [at(b, address, chunk, BITS * LINE) for address in w]
        for j in range(QUADS // 2):
            weights = [operands(b, line, j) for line in lines]
            for t in range(self.tokens):
                words = (self._broadcast(b, tokens, (2 * j + k) * self.tokens + t) for k in range(2))
                even, odd = (b.bitcast(word, vector) for word in words)
                for block, (unsigned, signed) in enumerate(weights):
                    slot, second = sums[block][t][0], b.bitcast(b.add(odd, signed), self.ints)
                    b.store(self.isa.dot8(b, b.load(slot), [b.add(even, unsigned)], [second], BITS), slot)


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def pair_tile(
    typing: Any, isa: Any, zero: Any, tokens: Any, blocks: Any, row: Any, n: Any, r: Any, out: Any, constants: Any
) -> Any:
    """`product_tile` of 4-bit weights with 8-bit activations, by pairs of channels.  Literals: isa, zero, tokens, blocks."""
    numbers = [v.literal_value for v in (zero, tokens, blocks)]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        PairTile(all_isas()[isa.literal_value], *numbers, args[8]).emit(b, *args[4:8])
        return context.get_dummy_value()

    return types.void(isa, zero, tokens, blocks, *[types.intp] * 5), codegen


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def pair_constants(typing: Any, isa: Any, row: Any, n: Any, out: Any) -> Any:
    """out i32 [activation block][16] = -B of block n of the weights.  Literal: isa."""
    chosen, ints = all_isas()[isa.literal_value], ir.VectorType(I32, LINE // 4)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, n, out = args[1:]
        w = b.add(word_at(b, row, W), b.mul(n, word_at(b, row, W_BLOCK)))
        chunks, per_block = word_at(b, row, CHUNKS), word_at(b, row, PER_BLOCK)
        with cgutils.for_range(b, word_at(b, row, X_BLOCKS)) as loop:
            slot = cgutils.alloca_once(b, ints)
            b.store(constant(ints, 0), slot)
            first, count = chunks_of(b, loop.index, chunks, per_block)
            with cgutils.for_range(b, count) as inner:
                line = at(b, w, b.add(first, inner.index), BITS * LINE)
                prefetch(b, plus(b, line, chosen.ahead), BITS * LINE)
                for unsigned, signed in (operands(b, line, j) for j in range(QUADS // 2)):
                    b.store(chosen.dot8(b, b.load(slot), [unsigned], [b.bitcast(signed, ints)], BITS), slot)
            store(b, b.sub(constant(ints, 0), b.load(slot)), at(b, out, loop.index, LINE), 4)
        return context.get_dummy_value()

    return types.void(isa, *[types.intp] * 3), codegen


def pair_matmul(isa: int, zero: int, big: int, together: int) -> Kernel:
    """`integer_matmul` of 4-bit weights and 8-bit activations, whose tiles of `big` tokens go by pairs of channels."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        group, count = (word(row, GROUP) + together - 1) // together * together, get_i64(word(row, COUNT))
        first, last = share(row, part, parts, together)
        scratch, line = word(row, SCRATCH) + thread * SCRATCH_BYTES, 64 * word(row, X_BLOCKS)
        constants = word(row, CONSTANTS) + thread * group * line
        for start in range(first, last, group):
            stop, r = min(start + group, last), 0
            while r + big <= count:
                for n in range(start, stop, together):
                    of_block, blocks = constants + (n - start) * line, min(together, stop - n)
                    if r == 0:
                        for i in range(blocks):
                            pair_constants(isa, row, n + i, of_block + i * line)
                    pair_tile(isa, zero, big, together, row, n, r, scratch, of_block)
                    if not written(row, together, n):
                        for i in range(blocks):
                            finish(row, scratch + 64 * big * i, big, n + i, r)
                r += big
            r = tiles(INTEGERS, isa, BITS, 0, zero, 0, 4, 2, together, row, start, stop, r, scratch)
            tiles(INTEGERS, isa, BITS, 0, zero, 0, 1, 1, 1, row, start, stop, r, scratch)

    return kernel
