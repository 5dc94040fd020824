"""Packed integers times many tokens on a processor's matrix unit (matrix_unit.py).

Sums of integers are exact, and what becomes of them is what microkernel_int.py does, in its order: results are the same bits.
Activations of such a run lie row by row, with zeros up to a whole step of 64 channels.  Weights are unpacked first, for all
tokens once, less what lies in the middle of their integers; those of 8 bits are multiplied as they lie in the file where a row
has one scale and ends with a step.

Sums of groups leave the unit's registers after each activation block (matrix_groups.py); where a row has one scale
(args.WHOLE), they stay there for the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from edgeq.format.codec import CHUNK, LINE, ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import (
    F16,
    F32,
    I8,
    I32,
    I64,
    VF32,
    VI32,
    call,
    constant,
    get_i64,
    load,
    splat,
    store,
)
from edgeq.targets.cpu.kernels.args import A8, A16, WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.groups import Groups
from edgeq.targets.cpu.kernels.products.matmul import (
    BLOCK_BYTES,
    MIN_SMALL_TILE,
    SCRATCH_BYTES,
    SMALL_TILE,
    finish,
    share,
    tile_loop,
)
from edgeq.targets.cpu.kernels.products.matrix_groups import (
    CHUNK_BYTES,
    PANEL,
    SUMS_BYTES,
    group_products,
    step_bytes,
)
from edgeq.targets.cpu.kernels.products.matrix_unit import (
    CONFIGURATION_BYTES,
    ROW_BYTES,
    SIDE,
    TILE_BYTES,
    configure,
    products_int8,
    release,
)
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.tiles import at, plus

MIN_ROWS = {A8: 24, A16: SIDE}
"""Rows of a run that are worth it, as measured on a Granite Rapids; dot products multiply fewer sooner."""
STEP_CHUNKS = ROW_BYTES // CHUNK
NUMBERS_BYTES = 8
"""Bytes of a row's numbers: its scale, f32, and the sum of its integers, i32."""


def takes(kind: int, block: int) -> bool:
    """Whether such activations can be multiplied there: steps of 32 or 64 channels."""
    return kind in (A8, A16) and block % CHUNK == 0


AT_SUMS = CONFIGURATION_BYTES
AT_RESULTS = AT_SUMS + 4 * SUMS_BYTES
AT_NUMBERS = AT_RESULTS + SUMS_BYTES
"""Where in a thread's room, after the sizes, sums and results of a panel with two blocks lie, and numbers of rows that have one
scale; unpacked weights follow."""


def numbers_bytes(extent: int, rows: int) -> int:
    """Room for the numbers of so many rows."""
    return padded(NUMBERS_BYTES * rows, ROW_BYTES) if extent == WHOLE else 0


def weights_bytes(bits: int, extent: int, chunks: int) -> int:
    """Room for a block of weights, unpacked; 0: they are multiplied as they lie."""
    as_stored = extent == WHOLE and bits == 8 and chunks % STEP_CHUNKS == 0
    return 0 if as_stored else CHUNK_BYTES * padded(chunks, STEP_CHUNKS)


def unpacked(weights: IntegerWeights) -> Any:
    """A function: (args, n, chunks of block n, how many, out): their quads, a byte for every weight, of groups less what lies
    in the middle of them."""
    unpacker, octets = IntegerTile(weights, 1).unpacker, ir.VectorType(I8, LINE)
    middle = 0 if weights.extent == WHOLE else Groups(weights.group_kind, weights.bits, ROWS).taken

    @intrinsic
    def write(typing: Any, args: Any, n: Any, stored: Any, chunks: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            record, n, stored, chunks, out = values
            table = unpacker.table(b, record, n)
            with cgutils.for_range(b, chunks) as loop:
                quads = unpacker.quads(b, at(b, stored, loop.index, weights.bits * LINE), 0, table)
                for j, quad in enumerate(quads):
                    quad = b.sub(b.bitcast(quad, octets), constant(octets, middle)) if middle else quad
                    store(b, quad, plus(b, at(b, out, loop.index, CHUNK_BYTES), LINE * j), LINE)
            return context.get_dummy_value()

        return types.void(args, *[types.intp] * 4), codegen

    return write


def row_numbers(b: Any, record: Any, rows: Any, out: Any) -> None:
    """Scale f32 and sum i32 of the integers of rows 0 ... rows - 1, one pair after another, to `out`: the scale that all
    activation blocks have, NaN if one of theirs is."""
    blocks, four = ProductArgs.x_blocks.load(b, record), ir.Constant(I64, 4)
    line = b.mul(blocks, four)
    vectors = b.udiv(b.add(blocks, ir.Constant(I64, SIDE - 1)), ir.Constant(I64, SIDE))
    lanes = ir.Constant(VI32, list(range(SIDE)))
    with cgutils.for_range(b, rows) as loop:
        scales = b.add(ProductArgs.x_scales.load(b, record), b.mul(loop.index, line))
        sums = b.add(ProductArgs.x_sums.load(b, record), b.mul(loop.index, line))
        bad, total = cgutils.alloca_once(b, VF32), cgutils.alloca_once(b, VI32)
        b.store(constant(VF32, 0.0), bad)
        b.store(constant(VI32, 0), total)
        with cgutils.for_range(b, vectors) as inner:
            left = b.trunc(b.sub(blocks, b.mul(inner.index, ir.Constant(I64, SIDE))), I32)
            some = b.icmp_signed("<", lanes, splat(b, left, VI32))
            of_scales = _some(b, at(b, scales, inner.index, ROW_BYTES), some, VF32, 0.0)
            of_sums = _some(b, at(b, sums, inner.index, ROW_BYTES), some, VI32, 0)
            b.store(b.fadd(b.load(bad), b.fmul(of_scales, constant(VF32, 0.0))), bad)
            b.store(b.add(b.load(total), of_sums), total)
        worst = call(b, "llvm.vector.reduce.fadd.v16f32", F32, ir.Constant(F32, 0.0), b.load(bad))
        place = at(b, out, loop.index, NUMBERS_BYTES)
        store(b, b.fadd(load(b, scales, F32, 4), worst), place, 4)
        store(b, call(b, "llvm.vector.reduce.add.v16i32", I32, b.load(total)), plus(b, place, 4), 4)


def _some(b: Any, address: Any, some: Any, kind: Any, other: Any) -> Any:
    """The vector at an address where `some`, else `other`, without reading there."""
    name = f"llvm.masked.load.v16{'f' if kind is VF32 else 'i'}32.p0"
    return call(b, name, kind, b.inttoptr(address, kind.as_pointer()), ir.Constant(I32, 4), some, constant(kind, other))


@intrinsic
def write_numbers(typing: Any, args: Any, rows: Any, out: Any) -> Any:
    """A function: (args, rows, out): see `row_numbers`."""

    def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
        row_numbers(b, *values)
        return context.get_dummy_value()

    return types.void(args, *[types.intp] * 2), codegen


def scaled_rows(bits: int, stores_result: bool) -> Any:
    """A function: (args, sums, (n, other), (r, rows), numbers): scale * scale of the row * (sum - center * sum of the row) of
    `rows` rows from row r on with blocks n and `other`, to the results after the integer sums; or, of two whole blocks, what
    `finish` makes of it, to y.  numbers: of row 0."""

    @intrinsic
    def scaled(typing: Any, args: Any, sums: Any, blocks: Any, rows: Any, numbers: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            record, sums, blocks, rows, numbers = values
            first, rows = cgutils.unpack_tuple(b, rows, 2)
            numbers = at(b, numbers, first, NUMBERS_BYTES)
            scales, places = [], []
            for block in cgutils.unpack_tuple(b, blocks, 2):
                places.append(b.shl(block, ir.Constant(I64, 6)))
                place = b.add(ProductArgs.scales.load(b, record), b.mul(block, ProductArgs.scales_block.load(b, record)))
                scales.append(b.fpext(load(b, place, ir.VectorType(F16, ROWS), 2), VF32))

            def for_each_block(put: Callable[[Any, int, Any, Any], None]) -> None:
                with cgutils.for_range(b, rows) as loop:
                    number = at(b, numbers, loop.index, NUMBERS_BYTES)
                    factor = splat(b, load(b, number, F32, 4), VF32)
                    center = b.mul(load(b, plus(b, number, 4), I32, 4), ir.Constant(I32, 1 << (bits - 1)))
                    for i, scale in enumerate(scales):
                        place = at(b, plus(b, sums, 2 * i * TILE_BYTES), loop.index, BLOCK_BYTES)
                        value = b.sitofp(b.sub(load(b, place, VI32, 4), splat(b, center, VI32)), VF32)
                        put(loop.index, i, place, _fma(b, value, b.fmul(scale, factor), constant(VF32, 0.0)))

            if stores_result:
                _to_y(b, record, first, places, for_each_block)
            else:
                for_each_block(lambda t, i, place, result: store(b, result, plus(b, place, AT_RESULTS - AT_SUMS), 4))
            return context.get_dummy_value()

        pair = types.UniTuple(types.intp, 2)
        return types.void(args, types.intp, pair, pair, types.intp), codegen

    return scaled


def _to_y(b: Any, record: Any, first: Any, places: list[Any], for_each_block: Callable[[Callable[..., None]], None]) -> None:
    """Bias and residual, as `finish` adds them, from row `first` of y on; `places`: bytes from a row to its blocks."""
    bias, step, none = ProductArgs.bias.load(b, record), ProductArgs.y_stride.load(b, record), ir.Constant(I64, 0)
    y, biases = b.add(ProductArgs.y.load(b, record), b.mul(first, step)), []
    for place in places:
        slot = cgutils.alloca_once(b, VF32)
        # A result of zero has no sign: a bias of zero changes none.
        b.store(constant(VF32, 0.0), slot)
        with b.if_then(b.icmp_unsigned("!=", bias, none)):
            b.store(load(b, b.add(bias, place), VF32, 4), slot)
        biases.append(b.load(slot))

    def put(adds: bool, t: Any, i: int, result: Any) -> None:
        to, result = b.add(b.add(y, b.mul(t, step)), places[i]), b.fadd(result, biases[i])
        store(b, b.fadd(load(b, to, VF32, 4), result) if adds else result, to, 4)

    with b.if_else(b.icmp_unsigned("!=", ProductArgs.add.load(b, record), none)) as (residual, alone):
        for branch, adds in ((residual, True), (alone, False)):
            with branch:
                for_each_block(lambda t, i, place, result, adds=adds: put(adds, t, i, result))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fmuladd.v16f32", VF32, x, y, z)


def panel_products(bits: int, mode16: int, group_kind: int, extent: int) -> Any:
    """A function: (args, blocks, weights, rows, room): the products of `here` rows from row r on with blocks n and `other`, to
    the results in room, f32 [2][PANEL][16].  weights: address of these blocks, a byte for every weight."""
    return _whole_products(bits) if extent == WHOLE else _group_products(bits, mode16, group_kind, extent)


def _group_products(bits: int, mode16: int, group_kind: int, extent: int) -> Any:
    products_of = group_products(bits, mode16, group_kind, extent)

    @always_inline
    def products(args, blocks, weights, rows, room):
        products_of(args, blocks, weights, rows, room + AT_SUMS, room + AT_RESULTS)

    return products


def _whole_products(bits: int, stores_result: bool = False) -> Any:
    scaled = scaled_rows(bits, stores_result)

    @always_inline
    def products(args, blocks, weights, rows, room):
        (r, here), stride = rows, args.x_stride
        # Of a few rows the second A is the first once more, and not read.
        second = r + SIDE if here > SIDE else r
        a, steps, sums = args.x, (args.chunks + 1) // STEP_CHUNKS, room + AT_SUMS
        products_int8(a + r * stride, a + second * stride, stride, weights[0], weights[1], steps, sums)
        scaled(args, sums, blocks, rows, room + AT_NUMBERS)

    return products


def matrix_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """`integer_matmul` on a matrix unit.  Runs of fewer rows than MIN_ROWS go that way."""
    max_tile, blocks_per_tile = all_isas()[isa].tiles[0], all_isas()[isa].blocks_per_tile
    weights = IntegerWeights(isa, bits, mode16, group_kind, extent)
    large = tile_loop(IntegerTile(weights, max_tile, blocks_per_tile), max_tile)
    small = tile_loop(IntegerTile(weights, SMALL_TILE, blocks_per_tile), MIN_SMALL_TILE)
    single = tile_loop(IntegerTile(weights, 1), 1)
    products, unpack_chunks = panel_products(bits, mode16, group_kind, extent), unpacked(weights)
    whole, step_of_a = extent == WHOLE, step_bytes(extent)
    packed, min_rows = bits < 8 or not whole, MIN_ROWS[A16 if mode16 else A8]

    to_y = _whole_products(bits, stores_result=True) if whole else products

    @always_inline
    def panels(args, first, last, room):
        count, chunks = get_i64(args.rows), args.chunks
        apart = packed or chunks % STEP_CHUNKS != 0
        step = CHUNK_BYTES * ((chunks + 1) // STEP_CHUNKS * STEP_CHUNKS)
        if whole:
            write_numbers(args, count, room + AT_NUMBERS)
        of_weights = room + AT_NUMBERS + args.numbers_bytes
        for start in range(first, last, args.group_blocks):
            stop = min(start + args.group_blocks, last)
            stored = args.weights + start * args.weights_block
            if apart:
                stored = of_weights
                for n in range(start, stop):
                    unpack_chunks(args, n, args.weights + n * args.weights_block, chunks, stored + (n - start) * step)
            configure(room, PANEL, step_of_a)
            for r in range(0, count, PANEL):
                here = min(PANEL, count - r)
                if here < PANEL:
                    configure(room, here, step_of_a)
                for n in range(start, stop, 2):
                    other = min(n + 1, stop - 1)
                    pair = stored + (n - start) * step, stored + (other - start) * step
                    if whole and other > n and ROWS * (other + 1) <= args.output_channels:
                        to_y(args, (n, other), pair, (r, here), room)
                        continue
                    products(args, (n, other), pair, (r, here), room)
                    for i in range(other - n + 1):
                        finish(args, room + AT_RESULTS + 2 * i * TILE_BYTES, here, n + i, r)
        release()

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        scratch = args.scratch + thread * SCRATCH_BYTES
        first, last = share(args.output_channels, part, parts, 2)
        if get_i64(args.rows) >= min_rows:
            panels(args, first, last, args.room + thread * args.room_bytes)
            return
        for start in range(first, last, args.group_blocks):
            stop = min(start + args.group_blocks, last)
            r = large(args, start, stop, 0, scratch)
            r = small(args, start, stop, r, scratch)
            single(args, start, stop, r, scratch)

    return kernel
