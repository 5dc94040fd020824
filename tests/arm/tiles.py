"""Inner tiles of an instruction set as object files for Arm, and one product to check it with.

Compiled on the machine that runs the tests, where that takes a second; run in the emulator, where Numba would take minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from edgeq.format.codec import BITS, CHUNK, MAX_ENTRY, SCALE_CODES, Codec, Kind, pack_beside, pack_groups, pack_integers
from edgeq.format.trellis import ring_indices
from edgeq.targets.cpu.isa import all_isas, isa_index
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.simd import I64
from edgeq.targets.cpu.kernels.args import CHUNKS, HALF_CHUNK, ONE_CHUNK, ProductArgs
from edgeq.targets.cpu.kernels.panels.octet_tile import OctetTile
from edgeq.targets.cpu.kernels.panels.panel_matmul import tile_of_panel
from edgeq.targets.cpu.kernels.panels.panel_tile import emit_cross_sums
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.groups import group_kind
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.kernels.products.tiles import plus

ROWS = 48
ROOM = 1 << 14
"""Bytes in quarters: what is made of the activations of a tile, and of weights, beside integers; sums; unpacked weights."""
HALF_GRIDS: tuple[Kind, ...] = ("half", "s4")


class TileCase(NamedTuple):
    codec: Codec
    mode16: int
    tokens: int

    @property
    def symbol(self) -> str:
        return f"tile_{self.codec.name.replace(' ', '_')}_{self.mode16}_{self.tokens}"


CODECS = [
    *(Codec("int", bits, size, symmetric) for bits in BITS for symmetric in (True, False) for size in (0, 16)),
    *(Codec("table", bits, size, wide=wide) for bits in (1, 4) for size in (16, 32) for wide in (False, True)),
    *(Codec("trellis", bits, size) for bits in (1, 2, 3) for size in (16, 32)),
    *(Codec(kind, bits, size) for bits in (2, 4) for kind in HALF_GRIDS for size in (16, 32)),
]


def in_turn(codec: Codec, mode16: int, tokens: int) -> bool:
    """Whether this one of two modes is tried with one token, and the other with several; or the other way round."""
    return (mode16 + (tokens > 1) + (codec.group_size == 16) + codec.symmetric + codec.wide) % 2 == 0


CASES = [TileCase(*each) for each in itertools.product(CODECS, (0, 1), (1, 4)) if in_turn(*each)]
"""Every codec in both modes, every width of a kind in both with one token and with several."""


def isa_of(name: str) -> Isa:
    return next(each for each in all_isas() if each.name == name)


class Panel:
    """What panel_matmul.py does with a tile, from beginning to end, called as `IntegerTile` is."""

    def __init__(self, weights: IntegerWeights, tokens: int) -> None:
        self.weights, self.tile = weights, tile_of_panel(weights, tokens)

    def emit(self, b: Any, record: Any, n: Any, r: Any, out: Any, stores_result: Any) -> None:
        def of(field: Any) -> Any:
            return field.load(b, record)

        zero, x, of_tokens = ir.Constant(I64, 0), of(ProductArgs.x), of(ProductArgs.room)
        of_weights, scratch, panel = (plus(b, of_tokens, ROOM // 4 * i) for i in range(1, 4))
        stored = b.add(of(ProductArgs.weights), b.mul(n, of(ProductArgs.weights_block)))
        chunks = zero, of(ProductArgs.chunks), zero, of(ProductArgs.x_blocks)
        self.tile.emit_unpacked(b, record, n, stored, chunks[1], panel)
        if isinstance(self.tile, OctetTile):
            self.tile.emit_octets(b, x, chunks[1], of_tokens)
        elif self.weights.words:
            # The last chunk may be a half: of what lies after it no sum is asked for.
            emit_cross_sums(b, self.weights, self.tile.tokens, record, chunks, (x, of_tokens))
            emit_cross_sums(b, self.weights, 0, record, chunks, (panel, of_weights))
        self.tile.emit_chunks(b, record, n, r, out, chunks, (panel, scratch, of_weights, of_tokens))


def emitter(isa: str, case: TileCase) -> IntegerTile | Panel:
    """The tile that products of that many rows have."""
    codec, mode16, tokens = case
    extent = {16: HALF_CHUNK, 32: ONE_CHUNK}.get(codec.group_size, CHUNKS)
    weights = IntegerWeights(isa_index(isa_of(isa)), codec.bits, mode16, group_kind(codec), extent)
    return Panel(weights, tokens) if tokens > 1 else IntegerTile(weights, tokens)


def write_objects(folder: Path, board: str, isa: str, cases: Sequence[TileCase] = CASES) -> None:
    from edgeq.tools.lab import arm_roofline

    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        target, module = arm_roofline.compiled(arm_roofline.CORES[board], emitter(isa, case).emit, case.symbol)
        (folder / f"{case.symbol}.o").write_bytes(target.emit_object(module))


def emitted(isa: str, case: TileCase) -> str:
    """The tile in LLVM's representation, before it is compiled."""
    from edgeq.tools.lab.arm_roofline import TRIPLE

    module = ir.Module("tile")
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), case.symbol)
    builder = ir.IRBuilder(function.append_basic_block())
    emitter(isa, case).emit(builder, *function.args, ir.Constant(I64, 0))
    builder.ret_void()
    return str(module)


def in_store(quads: np.ndarray, isa: str, case: TileCase) -> np.ndarray:
    """Integers [quad, token, 4] as a tile of that case reads them."""
    if not case.mode16:
        return quads.astype(np.int8)
    if isa_of(isa).takes_pairs(case.codec.multiplied_bits):
        return quads[:, :, [0, 2, 1, 3]].astype(np.int16)
    return np.stack([quads, quads + 128 >> 8], axis=2).astype(np.int8)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 64 bytes, where all arrays of a file and of the threads lie."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def product(function: Any, isa: str, case: TileCase, extreme: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the tile gives for the last of three blocks and what it should, f32 and f64 [tokens, 16].

    extreme: all integers at their limits, activations of one sign, so that sums in 16 and 32 bits are as large as they can be.
    """
    codec, mode16, tokens = case
    bits, size = codec.bits, codec.group_size
    rng = np.random.default_rng(bits)
    # One scale a row over two activation blocks, the second short; or groups, of 16 with half a chunk at the end.
    columns, block = (80 if size == 16 else 160), size or 128
    limit = 256 * 127 + 127 if mode16 else 127
    q = rng.integers(0, 1 << bits, (ROWS, columns), dtype=np.uint8)
    x = rng.integers(-limit, limit + 1, (tokens, columns))
    if extreme:
        q[::2], q[1::2], x[:] = (1 << bits) - 1, 0, limit
        x[1:2] = -limit
    groups = codec.groups(columns)
    scale = rng.uniform(0.5, 2, (ROWS, groups)).astype(np.float16)
    stored, row_scale = scale, scale[:, :1]
    if codec.coded:
        stored = rng.integers(0, 16, scale.shape).astype(np.uint8)
        scale = row_scale.astype(np.float64) * SCALE_CODES[stored]
    zeros = rng.integers(0, 1 << bits, scale.shape, dtype=np.uint8)
    most = MAX_ENTRY[codec.wide]
    table = rng.integers(-most, most + 1, (ROWS // 16, 1 << bits + (codec.kind == "trellis"))).astype(np.int8)
    table[:, 0], table[:, -1] = -most, most
    blocks = -(-columns // block)
    xscale = rng.uniform(0.5, 2, (blocks, tokens)).astype(np.float32)
    xsum = np.stack([x[:, i * block : (i + 1) * block].sum(1) for i in range(blocks)]).astype(np.int32)
    chunks = -(-columns // CHUNK)
    whole = np.zeros((tokens, chunks * CHUNK), np.int64)
    whole[:, :columns] = x
    quads = whole.reshape(tokens, chunks * 8, 4).transpose(1, 0, 2)
    arrays = {
        "x": in_store(quads, isa, case), "x_scales": xscale, "x_sums": xsum,
        "weights": pack_integers(q, bits), "scales": pack_beside(codec, "scale", stored),
        "zeros": table if "table" in codec.parts(16, 32) else pack_groups(zeros),
        "super_scales": pack_groups(row_scale),
        "room": np.zeros(ROOM + 1024 * chunks, np.uint8),
    }  # fmt: skip
    kept = {name: aligned(array) for name, array in arrays.items()}
    places = {name: array.ctypes.data for name, array in kept.items()}
    of_group = arrays["scales"].nbytes // (arrays["scales"].shape[0] * groups)
    args = ProductArgs(
        **places, x_stride=0, x_blocks=blocks, chunks=chunks, chunks_per_block=max(1, block // CHUNK),
        weights_block=64 * bits * chunks, scales_block=of_group * groups, scales_step=of_group if size else 0, super_block=32,
        output_channels=ROWS, group_blocks=1, y=0, y_stride=0, scratch=0,
    )  # fmt: skip
    record, out = np.array(args.record(), np.int64), aligned(np.zeros((tokens, 16), np.float32))
    function(record.ctypes.data, 2, 0, out.ctypes.data)
    step = columns // groups
    center = np.repeat(
        zeros.astype(np.float64) if codec.zero_kind == "integer" else np.full(scale.shape, codec.constant_zero), step, axis=1
    )
    index = ring_indices(q, bits) if codec.kind == "trellis" else q
    looked_up = "table" in codec.parts(16, 32)
    levels = np.take_along_axis(np.repeat(table, 16, axis=0), index, axis=1) if looked_up else q - center
    w = (levels * np.repeat(scale.astype(np.float64), step, axis=1))[32:]
    return out, (x * np.repeat(xscale.T.astype(np.float64), block, axis=1)[:, :columns]) @ w.T
