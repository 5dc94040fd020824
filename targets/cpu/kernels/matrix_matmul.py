"""Packed integers times many tokens on a processor's matrix unit (matrix_unit.py).

Sums of integers are exact, and what becomes of them is what microkernel_int.py does, in its order: results are the same bits.
Activations of such a run lie row by row.  Weights of 8 bits are multiplied as they lie in the file, of fewer they are unpacked
first, for all tokens once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edgeq.codec import CHUNK, LINE, QUADS, ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.pipeline import always_inline
from edgeq.targets.cpu.jit.simd import (
    F16,
    F32,
    I8,
    I32,
    I64,
    VF32,
    VI32,
    call,
    get_i64,
    load,
    splat,
    store,
    vsplat,
    vstore,
)
from edgeq.targets.cpu.kernels.args import A8, ProductArgs
from edgeq.targets.cpu.kernels.bitplanes import unpack
from edgeq.targets.cpu.kernels.matmul import LEAST_OF_SMALL, SCRATCH_BYTES, SMALL_TILE, finish, share, tile_loop
from edgeq.targets.cpu.kernels.matrix_unit import CONFIGURATION_BYTES, ROW_BYTES, SIDE, configure, products_int8, release
from edgeq.targets.cpu.kernels.microkernel_int import IntegerTile, IntegerWeights
from edgeq.targets.cpu.kernels.tiles import at, plus

LEAST_ROWS = SIDE
"""Rows of a run that are worth it."""
PANEL = 2 * SIDE
"""Rows that are multiplied with two blocks at once."""
INTEGERS_BYTES = 4 * PANEL * ROWS * 2
"""In scratch the integer sums of a panel with two blocks, then as many floats."""
BYTES_OF_CHUNK = LINE * QUADS
"""Unpacked."""


def takes(kind: int, columns: int, block: int) -> bool:
    """Whether such activations can be multiplied there: steps of 64 channels."""
    chunks = -(-columns // CHUNK)
    return kind == A8 and chunks % 2 == 0 and block % ROW_BYTES == 0


def room_bytes(bits: int, chunks: int, group_blocks: int) -> int:
    """Room of a thread."""
    return CONFIGURATION_BYTES + (BYTES_OF_CHUNK * chunks * group_blocks if bits < 8 else 0)


def unpacked(bits: int) -> Any:
    """A function: (weights, chunks, out): the quads of so many chunks, a byte for every weight."""

    @intrinsic  # type: ignore[misc]
    def write(typing: Any, weights: Any, chunks: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            weights, chunks, out = values
            with cgutils.for_range(b, chunks) as loop:
                quads = unpack(b, at(b, weights, loop.index, bits * LINE), bits, 0, LINE)
                for j, quad in enumerate(quads):
                    store(b, quad, plus(b, at(b, out, loop.index, BYTES_OF_CHUNK), LINE * j), LINE)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 3), codegen

    return write


def scaled_sums(bits: int, zero: int) -> Any:
    """A function: (args, sums, index, (n, other), r, rows): the floats after the integer sums of `rows` rows from row r on with
    blocks n and `other`, of activation block `index`, += scale * scale of the row * (sum - zero * sum of the row)."""
    octets = ir.VectorType(I8, ROWS)

    @intrinsic  # type: ignore[misc]
    def add(typing: Any, args: Any, sums: Any, index: Any, blocks: Any, r: Any, rows: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            record, sums, index, blocks, r, rows = values

            def of(field: Any) -> Any:
                return field.load(b, record)

            scales, zeros = [], []
            for block in cgutils.unpack_tuple(b, blocks, 2):
                place = b.add(b.mul(block, of(ProductArgs.scales_block)), b.mul(index, of(ProductArgs.scales_step)))
                half = load(b, b.add(of(ProductArgs.scales), place), ir.VectorType(F16, ROWS), 2)
                scales.append(b.fpext(half, VF32))
                if zero:
                    place = b.add(b.mul(block, of(ProductArgs.zeros_block)), b.mul(index, of(ProductArgs.zeros_step)))
                    stored = load(b, b.add(of(ProductArgs.zeros), place), octets)
                    zeros.append(b.fneg(b.uitofp(b.zext(stored, VI32), VF32)))
            step = of(ProductArgs.x_blocks)
            number = b.shl(b.add(b.mul(r, step), index), ir.Constant(I64, 2))
            xscale, xsum = b.add(of(ProductArgs.x_scales), number), b.add(of(ProductArgs.x_sums), number)
            step = b.shl(step, ir.Constant(I64, 2))
            with cgutils.for_range(b, rows) as loop:
                factor = splat(b, load(b, b.add(xscale, b.mul(loop.index, step)), F32, 4), VF32)
                whole = load(b, b.add(xsum, b.mul(loop.index, step)), I32, 4)
                for i in range(2):
                    place = plus(b, at(b, sums, loop.index, ROW_BYTES), i * INTEGERS_BYTES // 2)
                    total, to = load(b, place, VI32, 4), plus(b, place, INTEGERS_BYTES)
                    if zero:
                        value = b.sitofp(total, VF32)
                        value = _fma(b, zeros[i], splat(b, b.sitofp(whole, F32), VF32), value)
                    else:
                        center = splat(b, b.mul(whole, ir.Constant(I32, 1 << (bits - 1))), VI32)
                        value = b.sitofp(b.sub(total, center), VF32)
                    store(b, _fma(b, value, b.fmul(scales[i], factor), load(b, to, VF32, 4)), to, 4)
            return context.get_dummy_value()

        pair = types.UniTuple(types.intp, 2)
        return types.void(args, types.intp, types.intp, pair, types.intp, types.intp), codegen

    return add


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fmuladd.v16f32", VF32, x, y, z)


def panel_products(bits: int, zero: int) -> Any:
    """A function: the products of `here` rows from row r on with blocks n and `other`, f32 [2][PANEL][16] after the integers in
    scratch.  weights: address of these blocks, a byte for every weight."""
    add = scaled_sums(bits, zero)

    @always_inline
    def products(args, blocks, weights, rows, scratch):
        (r, here), stride = rows, args.x_stride
        # Of a few rows the second tile is the first once more, and not read.
        second = r + SIDE if here > SIDE else r
        left = here - SIDE if here > SIDE else 0
        a, a_second = args.x + r * stride, args.x + second * stride
        for i in range(INTEGERS_BYTES, 2 * INTEGERS_BYTES, ROW_BYTES):
            vstore(scratch + i, vsplat(0.0))
        chunks, per_block = args.chunks, args.chunks_per_block
        for index in range(args.x_blocks):
            first = index * per_block
            steps = min(per_block, chunks - first) // 2
            at_weights = BYTES_OF_CHUNK * first
            products_int8(
                a + CHUNK * first,
                a_second + CHUNK * first,
                stride,
                weights[0] + at_weights,
                weights[1] + at_weights,
                steps,
                scratch,
            )
            add(args, scratch, index, blocks, r, min(here, SIDE))
            add(args, scratch + SIDE * ROW_BYTES, index, blocks, second, left)

    return products


def matrix_matmul(isa: int, bits: int, zero: int) -> Kernel:
    """`integer_matmul` of 8-bit activations.  Runs of fewer rows than LEAST_ROWS go its way."""
    max_tile, blocks_per_tile = all_isas()[isa].tiles[0], all_isas()[isa].blocks_per_tile
    weights = IntegerWeights(isa, bits, 0, zero, 0)
    large = tile_loop(IntegerTile(weights, max_tile, blocks_per_tile), max_tile)
    small = tile_loop(IntegerTile(weights, SMALL_TILE, blocks_per_tile), LEAST_OF_SMALL)
    single = tile_loop(IntegerTile(weights, 1), 1)
    products, unpack_chunks, packed = panel_products(bits, zero), unpacked(bits), bits < 8

    @always_inline
    def panels(args, first, last, scratch, room):
        count, chunks = get_i64(args.rows), args.chunks
        step = BYTES_OF_CHUNK * chunks
        for start in range(first, last, args.group_blocks):
            stop = min(start + args.group_blocks, last)
            stored = args.weights + start * args.weights_block
            if packed:
                stored = room + CONFIGURATION_BYTES
                for n in range(start, stop):
                    unpack_chunks(args.weights + n * args.weights_block, chunks, stored + (n - start) * step)
            configure(room, SIDE, SIDE)
            for r in range(0, count, PANEL):
                here = min(PANEL, count - r)
                if here < PANEL:
                    configure(room, min(here, SIDE), here - SIDE if here > SIDE else here)
                for n in range(start, stop, 2):
                    other = min(n + 1, stop - 1)
                    pair = stored + (n - start) * step, stored + (other - start) * step
                    products(args, (n, other), pair, (r, here), scratch)
                    for i in range(other - n + 1):
                        finish(args, scratch + INTEGERS_BYTES + i * INTEGERS_BYTES // 2, here, n + i, r)
        release()

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        scratch = args.scratch + thread * SCRATCH_BYTES
        first, last = share(args.output_channels, part, parts, 2)
        if get_i64(args.rows) >= LEAST_ROWS:
            room = args.room + thread * (
                CONFIGURATION_BYTES + (BYTES_OF_CHUNK * args.chunks * args.group_blocks if packed else 0)
            )
            panels(args, first, last, scratch, room)
            return
        for start in range(first, last, args.group_blocks):
            stop = min(start + args.group_blocks, last)
            r = large(args, start, stop, 0, scratch)
            r = small(args, start, stop, r, scratch)
            single(args, start, stop, r, scratch)

    return kernel
