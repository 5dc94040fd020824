"""Packed integers times many tokens, weights unpacked first: where a dot product is several instructions, or one multiplies
two rows by two tokens; and where registers are few (AVX-VNNI).

A block of weights, some hundred channels of it, is unpacked into the first-level cache, once for a panel of tokens, which then
pass by in tiles.  So a tile has all registers for its sums:

    8-bit activations       a byte for every weight; products of a chunk are added up in 16 bits, `Isa.run` quads at a time, and
                            then in 32; on NEON int8; by `sdot` and `vpdpbusd` in 32 at once (quad_tile.py)
    of 16 bits, or weights  16 bits for every weight, even and odd channels of a quad apart; half as many multiplications and
    too large for that      more additions (panel_tile.py)
    octets                  a byte for every weight, eight channels of two rows side by side, and activations in the same order
                            (octet_tile.py)

Sums of integers are exact, and what becomes of them is what microkernel_int.py does, in its order: results are the same bits.
"""

from __future__ import annotations

from typing import Any

from edgeq.format.codec import CHUNK, LINE, ROWS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.isa.isa import by_chunks
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import always_inline, inline
from edgeq.targets.cpu.jit.simd import get_i64, vload, vsplat, vstore
from edgeq.targets.cpu.kernels.args import HALF_CHUNK, WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.panels.octet_tile import OctetTile, octets_of
from edgeq.targets.cpu.kernels.panels.panel_tile import (
    BYTES_OF_CHUNK,
    MAX_BLOCKS,
    STEP_CHUNKS,
    PanelTile,
    cross_sums,
    tile_product,
    unpacked,
)
from edgeq.targets.cpu.kernels.panels.quad_tile import QuadTile
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.matmul import (
    BLOCK_BYTES,
    SCRATCH_BYTES,
    finish,
    share,
    tile_loop,
)
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.swiglu_matmul import RESULT_STRIDE, UNIT, GatedProductArgs, gated_loop
from edgeq.targets.cpu.kernels.rows.elementwise import gated
from edgeq.targets.cpu.kernels.rows.quantize import place_of, write_quantized

PANEL = 128
"""Token rows that pass by while weights stay unpacked."""
GROUP_BLOCKS = 2 * UNIT
"""Blocks that pass by while some hundred channels of a panel's tokens stay in the second-level cache."""
PANEL_BYTES = PANEL * BLOCK_BYTES
RESULTS = GROUP_BLOCKS * PANEL_BYTES
"""In a thread's room after the floats of a group: those of a unit after the activation, f32 [PANEL][128]."""
ROW_SUMS_BYTES = 4 * MAX_BLOCKS
"""Cross sums of a token of the panel."""
TOKEN_SUMS = RESULTS + PANEL * RESULT_STRIDE
WEIGHT_SUMS = TOKEN_SUMS + PANEL * ROW_SUMS_BYTES
UNPACKED = WEIGHT_SUMS + MAX_BLOCKS * LINE
"""After that: cross sums of the panel's tokens and of a block's weights, octets of the tokens, and the weights themselves."""


def octet_bytes(weights: IntegerWeights) -> int:
    """Bytes of the octets of a token in a chunk; 0: there are none."""
    return CHUNK * (1 + weights.mode16) if weights.octets else 0


def tile_of_panel(weights: IntegerWeights, tokens: int) -> PanelTile:
    kind = OctetTile if weights.octets else PanelTile if by_chunks(all_isas()[weights.isa]) else QuadTile
    return kind(weights, tokens)


@inline
def nothing(args, chunks, source, out):
    return None


@inline
def step_of(args, first, extent):
    """The chunks that are unpacked together, from `first` on, as a tile takes them (panel_tile.py); all of the row where its
    integers are one sum."""
    if extent == WHOLE:
        return first, args.chunks, 0, 1
    count = min(STEP_CHUNKS, args.chunks - first)
    if extent == HALF_CHUNK:
        return first, count, 2 * first, 2 * count
    start = first // args.chunks_per_block
    return first, count, start, (first + count + args.chunks_per_block - 1) // args.chunks_per_block - start


def panel_product(weights: IntegerWeights, tokens: int) -> Any:
    """A function: (args, n, (r, here), chunks, out, scratch, room): out f32 [here, up to whole tiles][16] += block n, the
    chunks of a step, times `here` rows from row r on; from the first chunk on it is set.  `room`: of the thread, with what
    `panel_of_tokens` has made of these rows."""
    tile = tile_of_panel(weights, tokens)
    product, unpack_chunks = tile_product(tile), unpacked(tile)
    line, sum_weights = weights.bits * LINE, cross_sums(weights, 0) if weights.words else nothing
    of_token, place_of_tokens = octet_bytes(weights), places_of_tokens(weights)

    @always_inline
    def multiply(args, n, rows, chunks, out, scratch, room):
        (r, here), (first, count, _, _), panel = rows, chunks, room + UNPACKED + PANEL * of_token * chunks[1]
        unpack_chunks(args, n, args.weights + n * args.weights_block + first * line, count, panel)
        sum_weights(args, chunks, panel, room + WEIGHT_SUMS)
        if first == 0:
            for t in range((here + tokens - 1) // tokens * tokens):
                vstore(out + BLOCK_BYTES * t, vsplat(0.0))
        for t in range(0, here, tokens):
            rooms = panel, scratch, room + WEIGHT_SUMS, place_of_tokens(room, chunks, t)
            product(args, n, r + t, out + BLOCK_BYTES * t, chunks, rooms)

    return multiply


def places_of_tokens(weights: IntegerWeights) -> Any:
    """A function: (room, chunks, t): where octets or cross sums of a tile from token t of the panel on are."""
    of_token = octet_bytes(weights)

    @always_inline
    def place(room, chunks, t):
        return room + UNPACKED + of_token * chunks[1] * t if of_token else room + TOKEN_SUMS + ROW_SUMS_BYTES * t

    return place


def panel_of_tokens(weights: IntegerWeights, tokens: int) -> Any:
    """A function: (args, (r, here), chunks, room): octets or cross sums of `here` rows from row r on, in the chunks of a step,
    where `places_of_tokens` says."""
    tile, prepare_tile = tile_of_panel(weights, tokens), nothing
    if isinstance(tile, OctetTile):
        prepare_tile = octets_of(tile)
    elif weights.words:
        prepare_tile = cross_sums(weights, tokens)
    chunk_bytes, place_of_tokens = (1 + weights.mode16) * CHUNK * tokens, places_of_tokens(weights)

    @always_inline
    def prepare(args, rows, chunks, room):
        r, here = rows
        for t in range(0, here, tokens):
            x = args.x + (r + t) * args.x_stride + chunks[0] * chunk_bytes
            prepare_tile(args, chunks, x, place_of_tokens(room, chunks, t))

    return prepare


def room_bytes(weights: IntegerWeights, chunks: int) -> int:
    """Room of a thread: floats of a panel with a group of blocks, results of a unit, cross sums, octets of the panel, and
    unpacked weights, of the wider kind, so that modes share it.
    """
    step = chunks if weights.extent == WHOLE else min(chunks, STEP_CHUNKS)
    return UNPACKED + (2 * BYTES_OF_CHUNK + 2 * CHUNK * PANEL * weights.octets) * step


def panel_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """GEMM of prefill: packed integers times any number of tokens, a last one by itself."""
    weights, tokens = IntegerWeights(isa, bits, mode16, group_kind, extent), all_isas()[isa].tiles[0]
    multiply, prepare, whole = panel_product(weights, tokens), panel_of_tokens(weights, tokens), extent == WHOLE
    single = tile_loop(IntegerTile(weights, 1), 1)

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        first, last = share(args.output_channels, part, parts, 1)
        scratch, room = args.scratch + thread * SCRATCH_BYTES, args.room + thread * args.room_bytes
        count, chunks = get_i64(args.rows), args.chunks
        many = count - 1 if count % tokens == 1 else count
        for start in range(first, last, GROUP_BLOCKS):
            stop = min(start + GROUP_BLOCKS, last)
            for r in range(0, many, PANEL):
                here = min(PANEL, many - r)
                for first_chunk in range(0, chunks, chunks if whole else STEP_CHUNKS):
                    step = step_of(args, first_chunk, extent)
                    prepare(args, (r, here), step, room)
                    for n in range(start, stop):
                        multiply(args, n, (r, here), step, room + PANEL_BYTES * (n - start), scratch, room)
                for n in range(start, stop):
                    finish(args, room + PANEL_BYTES * (n - start), here, n, r)
            single(args, start, stop, many, scratch)

    return kernel


def gated_panel_matmul(isa: int, bits: int, mode16: int, group_kind: int, extent: int) -> Kernel:
    """`gated_matmul` in the same way: gate and up, silu(gate) * up and its quantization."""
    weights, tokens = IntegerWeights(isa, bits, mode16, group_kind, extent), all_isas()[isa].tiles[0]
    multiply, prepare, whole = panel_product(weights, tokens), panel_of_tokens(weights, tokens), extent == WHOLE
    single = gated_loop(weights, 1, 1, 1, tokens)

    @always_inline
    def unit(args, start, stop, many, scratch, room):
        """Blocks [start, stop) of results, at most UNIT."""
        chunks, up, results, quantized = args.chunks, args.block_step, room + RESULTS, args.swiglu.quantized
        count = get_i64(args.rows)
        for r in range(0, many, PANEL):
            here = min(PANEL, many - r)
            for first_chunk in range(0, chunks, chunks if whole else STEP_CHUNKS):
                step = step_of(args, first_chunk, extent)
                prepare(args, (r, here), step, room)
                for n in range(start, stop):
                    # Gate, then up, by the same machine code: the longest there is to compile.
                    for k in range(2):
                        out = room + PANEL_BYTES * (n - start + UNIT * k)
                        multiply(args, n + up * k, (r, here), step, out, scratch, room)
            for t in range(here):
                for i in range(stop - start):
                    of_gate = room + PANEL_BYTES * i + BLOCK_BYTES * t
                    result = gated(vload(of_gate), vload(of_gate + UNIT * PANEL_BYTES))
                    vstore(results + RESULT_STRIDE * t + BLOCK_BYTES * i, result)
                x = results + RESULT_STRIDE * t - BLOCK_BYTES * start
                write_quantized(quantized, x, place_of(quantized, r + t, count, tokens), ROWS * start, ROWS * stop)

    def kernel(record, part, parts, thread):
        args = GatedProductArgs(record)
        scratch, room = args.scratch + thread * SCRATCH_BYTES, args.room + thread * args.room_bytes
        first, last = share(args.swiglu.width, part, parts, UNIT)
        count = get_i64(args.rows)
        many = count - 1 if count % tokens == 1 else count
        for start in range(first, last, UNIT):
            stop = min(start + UNIT, last)
            unit(args, start, stop, many, scratch, room)
            single(args, start, stop, many, scratch)

    return kernel
