"""Gate and up of an MLP in one pass: both products, silu(gate) * up and its quantization; no float32 leaves the cache.

Output channels of gate and of up lie one half of the matrix apart, and a tile takes a block of each.  What becomes of them is
said by the op record after this one, that of `elementwise.swiglu`, which has nothing left to do.
"""

from __future__ import annotations

from typing import Any

from edgeq.format.codec import ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.args import following
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, inline
from edgeq.targets.cpu.jit.simd import get_i64, vload, vstore
from edgeq.targets.cpu.kernels.args import ProductArgs
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.matmul import BLOCK_BYTES, MIN_SMALL_TILE, SCRATCH_BYTES, SMALL_TILE, share
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.tiles import tile_function
from edgeq.targets.cpu.kernels.rows.elementwise import ActivationArgs, gated
from edgeq.targets.cpu.kernels.rows.quantize import place_of, write_quantized

UNIT = 8
"""Blocks of results that a thread makes at once: 128 channels, the longest activation block."""
RESULTS, RESULT_STRIDE = 2 * 12 * BLOCK_BYTES, UNIT * BLOCK_BYTES
"""In scratch, after the products of the largest tile: f32 [12][128]."""


class GatedProductArgs(ProductArgs):
    """A product and, in the op record after it, the SwiGLU that it does as well."""

    swiglu = following(ActivationArgs)


@inline
def gate(scratch, tokens, block):
    """Block `block` of a unit, from the products that a tile has left in scratch."""
    for t in range(tokens):
        result = gated(vload(scratch + BLOCK_BYTES * t), vload(scratch + BLOCK_BYTES * (tokens + t)))
        vstore(scratch + RESULTS + RESULT_STRIDE * t + BLOCK_BYTES * block, result)


@inline
def write_unit(args, scratch, blocks, rows, max_tile):
    """The quantized activations of blocks [start, stop) of `here` rows from row r on."""
    count, (start, stop), (r, here) = get_i64(args.rows), blocks, rows
    for t in range(here):
        x = scratch + RESULTS + RESULT_STRIDE * t - BLOCK_BYTES * start
        write_quantized(
            args.swiglu.quantized, x, place_of(args.swiglu.quantized, r + t, count, max_tile), ROWS * start, ROWS * stop
        )


def gated_loop(weights: IntegerWeights, tokens: int, blocks: int, least: int, max_tile: int) -> Any:
    """As `matmul.tile_loop`, for a unit of results: gate and up in one tile of two blocks, or in one after the other."""
    product, passes = tile_function(IntegerTile(weights, tokens, blocks)), 2 // blocks

    @always_inline
    def loop(args, start, stop, r, scratch):
        count, step = get_i64(args.rows), args.block_step
        while count - r >= least:
            here = min(tokens, count - r)
            for n in range(start, stop):
                for k in range(passes):
                    product(args, n + step * k, r, scratch + BLOCK_BYTES * tokens * k, 0)
                gate(scratch, tokens, n - start)
            write_unit(args, scratch, (start, stop), (r, here), max_tile)
            r += here
        return r

    return loop


def gated_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """Packed integers times any number of tokens, then SwiGLU and quantization; see `GatedProductArgs`."""
    max_tile, blocks_per_tile = all_isas()[isa].tiles[0], all_isas()[isa].blocks_per_tile
    weights = IntegerWeights(isa, bits, mode16, group_kind, extent)
    large = gated_loop(weights, max_tile, blocks_per_tile, max_tile, max_tile)
    small = gated_loop(weights, SMALL_TILE, blocks_per_tile, MIN_SMALL_TILE, max_tile)
    single = gated_loop(weights, 1, 1, 1, max_tile)

    def kernel(record, part, parts, thread):
        args = GatedProductArgs(record)
        scratch = args.scratch + thread * SCRATCH_BYTES
        first, last = share(args.swiglu.width, part, parts, UNIT)
        for start in range(first, last, UNIT):
            stop = min(start + UNIT, last)
            r = large(args, start, stop, 0, scratch)
            r = small(args, start, stop, r, scratch)
            single(args, start, stop, r, scratch)

    return kernel
