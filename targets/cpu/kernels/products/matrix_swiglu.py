"""swiglu_matmul.py on a processor's matrix unit (matrix_matmul.py): gate and up, silu(gate) * up and its quantization."""

from __future__ import annotations

from edgeq.format.codec import ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline
from edgeq.targets.cpu.jit.simd import get_i64, vload, vstore
from edgeq.targets.cpu.kernels.args import A8, A16, WHOLE
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.matmul import BLOCK_BYTES, MIN_SMALL_TILE, SCRATCH_BYTES, SMALL_TILE, share
from edgeq.targets.cpu.kernels.products.matrix_groups import CHUNK_BYTES, PANEL, step_bytes
from edgeq.targets.cpu.kernels.products.matrix_matmul import (
    AT_NUMBERS,
    AT_RESULTS,
    MIN_ROWS,
    STEP_CHUNKS,
    panel_products,
    unpacked,
    write_numbers,
)
from edgeq.targets.cpu.kernels.products.matrix_unit import TILE_BYTES, configure, release
from edgeq.targets.cpu.kernels.products.swiglu_matmul import RESULT_STRIDE, UNIT, GatedProductArgs, gated_loop
from edgeq.targets.cpu.kernels.rows.elementwise import gated
from edgeq.targets.cpu.kernels.rows.quantize import place_of, write_quantized

GROUP_BLOCKS = 2 * UNIT
"""Blocks of gate and up that are unpacked at a time."""
UNIT_BYTES = PANEL * RESULT_STRIDE
"""Room for a unit of results of a panel."""


def gated_matrix_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """`gated_matmul` on a matrix unit.  Runs of fewer rows than MIN_ROWS go that way."""
    max_tile, blocks_per_tile = all_isas()[isa].tiles[0], all_isas()[isa].blocks_per_tile
    weights = IntegerWeights(isa, bits, mode16, group_kind, extent)
    large = gated_loop(weights, max_tile, blocks_per_tile, max_tile, max_tile)
    small = gated_loop(weights, SMALL_TILE, blocks_per_tile, MIN_SMALL_TILE, max_tile)
    single = gated_loop(weights, 1, 1, 1, max_tile)
    products, unpack_chunks = panel_products(bits, mode16, group_kind, extent), unpacked(weights)
    whole, step_of_a = extent == WHOLE, step_bytes(extent)
    packed, min_rows = bits < 8 or not whole, MIN_ROWS[A16 if mode16 else A8]

    @always_inline
    def unit(args, start, stop, room):
        """Blocks [start, stop) of results, at most UNIT."""
        count, chunks, up, quantized = get_i64(args.rows), args.chunks, args.block_step, args.swiglu.quantized
        results, floats = room + AT_NUMBERS + args.numbers_bytes, room + AT_RESULTS
        apart = packed or chunks % STEP_CHUNKS != 0
        step = CHUNK_BYTES * ((chunks + 1) // STEP_CHUNKS * STEP_CHUNKS)
        first, of_up = args.weights + start * args.weights_block, args.weights + (start + up) * args.weights_block
        if apart:
            first, of_up = results + UNIT_BYTES, results + UNIT_BYTES + UNIT * step
            for n in range(start, stop):
                stored, place = args.weights + n * args.weights_block, (n - start) * step
                unpack_chunks(args, n, stored, chunks, first + place)
                unpack_chunks(args, n + up, stored + up * args.weights_block, chunks, of_up + place)
        configure(room, PANEL, step_of_a)
        for r in range(0, count, PANEL):
            here = min(PANEL, count - r)
            if here < PANEL:
                configure(room, here, step_of_a)
            for n in range(start, stop):
                place = (n - start) * step
                products(args, (n, n + up), (first + place, of_up + place), (r, here), room)
                out = results + BLOCK_BYTES * (n - start)
                for t in range(here):
                    gate, other = vload(floats + BLOCK_BYTES * t), vload(floats + 2 * TILE_BYTES + BLOCK_BYTES * t)
                    vstore(out + RESULT_STRIDE * t, gated(gate, other))
            for t in range(here):
                x = results + RESULT_STRIDE * t - BLOCK_BYTES * start
                write_quantized(quantized, x, place_of(quantized, r + t, count, max_tile), ROWS * start, ROWS * stop)

    def kernel(record, part, parts, thread):
        args = GatedProductArgs(record)
        scratch = args.scratch + thread * SCRATCH_BYTES
        first, last = share(args.swiglu.width, part, parts, UNIT)
        many = get_i64(args.rows) >= min_rows
        room = args.room + thread * args.room_bytes
        if many and whole:
            write_numbers(args, get_i64(args.rows), room + AT_NUMBERS)
        for start in range(first, last, UNIT):
            stop = min(start + UNIT, last)
            if many:
                unit(args, start, stop, room)
            else:
                r = large(args, start, stop, 0, scratch)
                r = small(args, start, stop, r, scratch)
                single(args, start, stop, r, scratch)
        if many:
            release()

    return kernel
