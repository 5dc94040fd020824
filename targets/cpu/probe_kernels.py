"""The kernels that measure a machine: one reads memory, two multiply integers (probes.py)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.format.codec import QUADS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.isa.isa import Isa, by_chunks
from edgeq.targets.cpu.jit.args import Args, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import cgutils, literal_intrinsic, types
from edgeq.targets.cpu.jit.simd import I8, I32, constant, get_i64, put_f32, store, vadd, vload, vsplat, vsum
from edgeq.targets.cpu.kernels.products.matrix_unit import (
    CONFIGURATION_BYTES,
    ROW_BYTES,
    SIDE,
    TILE_BYTES,
    configure,
    products_int8,
    release,
)
from edgeq.targets.cpu.kernels.products.tiles import opaque
from edgeq.targets.cpu.kernels.products.winograd import plain


class ReadArgs(Args):
    """`rows`: runs of 256 bytes; results: a line of each part."""

    x = pointer()
    results = pointer()


def read_lines() -> Kernel:
    """Reads memory in runs of 256 bytes.  Sums, so that nothing can be left out."""

    def kernel(record, part, parts, thread):
        args = ReadArgs(record)
        count = get_i64(args.rows)
        a, b, c, d = vsplat(0.0), vsplat(0.0), vsplat(0.0), vsplat(0.0)
        for i in range(count * part // parts, count * (part + 1) // parts):
            x = args.x + 256 * i
            a, b = vadd(a, vload(x)), vadd(b, vload(x + 64))
            c, d = vadd(c, vload(x + 128)), vadd(d, vload(x + 192))
        put_f32(args.results + 64 * part, vsum(vadd(vadd(a, b), vadd(c, d))))

    return kernel


CHAINS = 12
"""Independent sums: more than latency times units of any processor here, few enough for sixteen registers."""
CHUNK_CHAINS = 6
"""The same where each has a sum of 16 bits beside that of 32."""
ROUNDS = 64
PROBED_BITS = 4
"""Bits of the weights that are multiplied."""


def chains(isa: Isa) -> int:
    """Independent sums of a measurement."""
    return CHUNK_CHAINS if by_chunks(isa) else CHAINS


@literal_intrinsic
def multiply_integers(typing: Any, isa: Any, pairs: Any, repeat: Any, out: Any) -> Any:
    """repeat x ROUNDS x `chains` dot products of all lanes x 4 channels in registers; the sums go to `out`.  Where an
    instruction set takes panels, of 32 channels.

    Literals: isa, an index; pairs, 1: twice the work, as winograd.py does it, by two dot products or one with two additions.
    """
    chosen, twice = all_isas()[isa.literal_value], bool(pairs.literal_value)
    sums = ir.VectorType(I32, chosen.lanes)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        slots = [cgutils.alloca_once(b, sums) for _ in range(chains(chosen))]
        for i, slot in enumerate(slots):
            b.store(constant(sums, i), slot)
        with cgutils.for_range(b, b.mul(args[2], ir.Constant(ir.IntType(64), ROUNDS))) as loop:
            # An operand that changes, or the whole loop would be computed by the compiler.
            token = b.insert_element(constant(sums, 0x01020304), b.trunc(loop.index, I32), ir.Constant(I32, 0))
            multiply_all = _multiply_chunk if by_chunks(chosen) else _multiply_quad
            multiply_all(b, chosen, token, slots, twice)
        # Every chain must reach the result, or the compiler would leave it out.
        total = b.load(slots[0])
        for slot in slots[1:]:
            total = b.xor(total, b.load(slot))
        store(b, total, args[3], 4)
        return context.get_dummy_value()

    return types.void(isa, pairs, types.intp, types.intp), codegen


def _multiply_quad(b: Any, isa: Isa, token: Any, slots: list[Any], twice: bool) -> None:
    """A quad in each chain, or `twice` one; four octets, where the instruction set has those."""
    quad, sums = ir.VectorType(I8, 4 * isa.lanes), ir.VectorType(I32, isa.lanes)
    for i, slot in enumerate(slots):
        factors = [(constant(quad, 3), token)]
        if twice and plain(i):
            factors *= 2
        elif twice:
            first, second = (b.add(b.bitcast(token, quad), constant(quad, i + c)) for c in (8, 32))
            factors = [(first, b.bitcast(second, sums))]
        for weights, operand in factors:
            if isa.octets:
                total = isa.dot_octets(b, b.load(slot), b.bitcast(operand, quad), weights)
            else:
                total = isa.dot8(b, b.load(slot), [weights], [operand], PROBED_BITS)
            b.store(total, slot)


def _multiply_chunk(b: Any, isa: Isa, token: Any, slots: list[Any], twice: bool) -> None:
    """A chunk in each chain, as panel_matmul.py multiplies it: two vectors of weights, by tokens that the compiler takes for
    different ones."""
    assert not twice
    weights = [opaque(b, constant(ir.VectorType(I8, 4 * isa.lanes), 3 + i)) for i in range(2)]
    for start in range(0, QUADS, isa.run(PROBED_BITS)):
        totals: list[Any] = [None] * len(slots)
        for _ in range(start, min(start + isa.run(PROBED_BITS), QUADS)):
            for i in range(0, len(slots), 2):
                value = opaque(b, token)
                for k in range(2):
                    totals[i + k] = opaque(b, isa.pairs16(b, totals[i + k], weights[k], value))
        for slot, total in zip(slots, totals, strict=True):
            b.store(isa.widened(b, b.load(slot), total), slot)


class MultiplyArgs(Args):
    """`rows`: repetitions; results: a line of each part."""

    results = pointer()


def multiply(isa: int, pairs: int) -> Kernel:
    """Multiplies integers in registers."""

    def kernel(record, part, parts, thread):
        args = MultiplyArgs(record)
        multiply_integers(isa, pairs, get_i64(args.rows), args.results + 64 * part)

    return kernel


STEPS = 16
"""Steps of a product on a matrix unit, 64 channels each: its operands stay in the first-level cache."""


class MultiplyTilesArgs(Args):
    """`rows`: repetitions; x, weights: operands of all parts; room: of each part, for sizes and then results."""

    x = pointer()
    weights = pointer()
    room = pointer()


def multiply_tiles() -> Kernel:
    """Multiplies integers on a matrix unit: 32 rows that overlap, by two blocks of 16 channels."""

    def kernel(record, part, parts, thread):
        args = MultiplyTilesArgs(record)
        room = args.room + TILES_ROOM_BYTES * part
        configure(room, 2 * SIDE, ROW_BYTES)
        for _ in range(get_i64(args.rows)):
            products_int8(args.x, args.x, ROW_BYTES, args.weights, args.weights, STEPS, room + CONFIGURATION_BYTES)
        release()

    return kernel


TILES_ROOM_BYTES = CONFIGURATION_BYTES + 4 * TILE_BYTES
