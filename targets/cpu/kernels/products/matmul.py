"""y = W x over the rows of a run: the GEMV of decode and the GEMM of prefill, over the tiles of the microkernels.

A work item is some of the output blocks; within it a group of blocks stays in the cache while the tokens pass by.
"""

from __future__ import annotations

from typing import Any

from edgeq.format.codec import ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, inline
from edgeq.targets.cpu.jit.simd import get_f32, get_i64, put_f32, vadd, vload, vstore
from edgeq.targets.cpu.kernels.args import ProductArgs
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.microkernel_float import FloatTile
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.tiles import Tile, tile_function

SCRATCH_BYTES = 1 << 13
"""Scratch of a thread: a tile's result has at most 2 blocks x 12 tokens x 64 bytes, and swiglu_matmul.py needs four times as
much after it."""
SMALL_TILE, MIN_SMALL_TILE = 4, 2
"""Tokens of the tile that follows the largest ones, and how many are worth it."""
BLOCK_BYTES = 4 * ROWS
"""One token's result for a block of output channels, float32."""


@inline
def stores_whole_tiles(args, blocks_per_tile, n):
    """Whether a tile of whole tokens stores its results itself: whole blocks, more than one, without a bias."""
    return blocks_per_tile > 1 and args.bias == 0 and ROWS * (n + blocks_per_tile) <= args.output_channels


@inline
def finish(args, scratch, tokens, n, r):
    """Bias, residual and the output channels that exist: from the tile's result to y."""
    rows, bias, add = args.output_channels, args.bias, args.add
    for t in range(tokens):
        y, x = args.y + (r + t) * args.y_stride + BLOCK_BYTES * n, scratch + BLOCK_BYTES * t
        if ROWS * n + ROWS <= rows:
            value = vload(x)
            if bias != 0:
                value = vadd(value, vload(bias + BLOCK_BYTES * n))
            if add != 0:
                value = vadd(vload(y), value)
            vstore(y, value)
        else:
            for i in range(rows - ROWS * n):
                last = get_f32(x + 4 * i)
                if bias != 0:
                    last += get_f32(bias + BLOCK_BYTES * n + 4 * i)
                if add != 0:
                    last += get_f32(y + 4 * i)
                put_f32(y + 4 * i, last)


@inline
def share(output_channels, part, parts, blocks_per_tile):
    """The blocks [first, last) of work item `part`; `blocks_per_tile` of them are not divided."""
    blocks = (output_channels + ROWS - 1) // ROWS
    units = (blocks + blocks_per_tile - 1) // blocks_per_tile
    return units * part // parts * blocks_per_tile, min(units * (part + 1) // parts * blocks_per_tile, blocks)


def tile_loop(tile: Tile, least: int) -> Any:
    """A function: blocks [start, stop) times rows from r on, as many as the tile takes, the last time with `least` rows or
    more; returns the row after them."""
    tokens, blocks = tile.tokens, tile.blocks
    product = tile_function(tile)

    @always_inline
    def loop(args, start, stop, r, scratch):
        count = get_i64(args.rows)
        while count - r >= least:
            here = min(tokens, count - r)
            for n in range(start, stop, blocks):
                stores_result = here == tokens and stores_whole_tiles(args, blocks, n)
                product(args, n, r, scratch, int(stores_result))
                if not stores_result:
                    for i in range(min(blocks, stop - n)):
                        finish(args, scratch + BLOCK_BYTES * tokens * i, here, n + i, r)
            r += here
        return r

    return loop


def integer_matvec(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """GEMV of decode: packed integers times one token."""
    single = tile_loop(IntegerTile(IntegerWeights(isa, bits, mode16, group_kind, extent), 1), 1)

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        if get_i64(args.rows) == 1:
            first, last = share(args.output_channels, part, parts, 1)
            scratch = args.scratch + thread * SCRATCH_BYTES
            single(args, first, last, 0, scratch)

    return kernel


def integer_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """GEMM of prefill: packed integers times any number of tokens.

    In tiles of the instruction set's size, of 4 and of 1, two or three tokens in one of 4; of the larger tiles several blocks
    at once.
    """
    max_tile, blocks_per_tile = all_isas()[isa].tiles[0], all_isas()[isa].blocks_per_tile
    weights = IntegerWeights(isa, bits, mode16, group_kind, extent)
    large = tile_loop(IntegerTile(weights, max_tile, blocks_per_tile), max_tile)
    small = tile_loop(IntegerTile(weights, SMALL_TILE, blocks_per_tile), MIN_SMALL_TILE)
    single = tile_loop(IntegerTile(weights, 1), 1)

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        group = (args.group_blocks + blocks_per_tile - 1) // blocks_per_tile * blocks_per_tile
        first, last = share(args.output_channels, part, parts, blocks_per_tile)
        scratch = args.scratch + thread * SCRATCH_BYTES
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = large(args, start, stop, 0, scratch)
            r = small(args, start, stop, r, scratch)
            single(args, start, stop, r, scratch)

    return kernel


def float_matmul(kind: int, max_tile: int) -> Kernel:
    """Floats times any number of tokens, in tiles of `max_tile`, 4 and 1, two or three in one of 4."""
    large = tile_loop(FloatTile(kind, max_tile), max_tile)
    small = tile_loop(FloatTile(kind, SMALL_TILE), MIN_SMALL_TILE)
    single = tile_loop(FloatTile(kind, 1), 1)

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        group = args.group_blocks
        first, last = share(args.output_channels, part, parts, 1)
        scratch = args.scratch + thread * SCRATCH_BYTES
        for start in range(first, last, group):
            stop = min(start + group, last)
            r = large(args, start, stop, 0, scratch)
            r = small(args, start, stop, r, scratch)
            single(args, start, stop, r, scratch)

    return kernel
