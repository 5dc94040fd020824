"""Packed integers of the file's order (edgeq/format/codec.py) as vectors of bytes: planes of bits put together, and indices of
tables looked up."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, PLANES, QUADS
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.simd import I8, I16, I32, I64, constant, load
from edgeq.targets.cpu.kernels.args import ProductArgs
from edgeq.targets.cpu.kernels.products.groups import TABLES, TRELLIS, entries
from edgeq.targets.cpu.kernels.products.trellis import ring_indices


def unpack(b: Any, address: Any, bits: int, part: int, width: int, shifts_bytes: bool = False) -> list[Any]:
    """The eight quads of the chunk at `address`, for rows [part * lanes, (part + 1) * lanes): vectors of `width` bytes.

    shifts_bytes   whether one instruction shifts every byte.  LLVM would put `gf2p8affineqb` in its place, for which an AVX-512
                   processor has no units but those of the dot products
    """
    vector = ir.VectorType(I8, width)
    moved = vector if shifts_bytes else ir.VectorType(I16, width // 2)
    quads: list[Any] = [None] * QUADS
    line, low = 0, 0
    for plane in PLANES[bits]:
        per_line = 8 // plane
        for i in range(plane):
            stored = load(b, b.add(address, ir.Constant(I64, (line + i) * LINE + part * width)), vector, width)
            for k in range(per_line):
                value, right = b.bitcast(stored, moved), k * plane - low
                value = b.lshr(value, constant(moved, right)) if right > 0 else value
                value = b.shl(value, constant(moved, -right)) if right < 0 else value
                value = b.bitcast(value, vector)
                if low or k < per_line - 1 or (k and not shifts_bytes):
                    value = b.and_(value, constant(vector, ((1 << plane) - 1) << low))
                j = i * per_line + k
                quads[j] = b.or_(quads[j], value) if low else value
        line, low = line + plane, low + plane
    return quads


class Unpacker:
    """Emits the integers that are multiplied: those that are stored, or what a table has for them.

    kind         of groups.py
    all_at_once  whether no quad of a chunk is done before most are begun
    """

    def __init__(self, isa: Isa, bits: int, kind: int) -> None:
        self.isa, self.bits, self.kind, self.width = isa, bits, kind, 4 * isa.lanes
        self.trellis = kind == TRELLIS
        self.all_at_once = len(PLANES[bits]) > 1 or self.trellis
        self.center = 1 << (TABLES[kind] - 1) if kind in TABLES else 0

    def table(self, b: Any, record: Any, block: Any) -> Any:
        """The table of a block of output channels: its entries plus half their range, 16 bytes over and over.  None: no kind
        with tables."""
        if not self.center:
            return None
        count = entries(self.bits, self.kind)
        vector = ir.VectorType(I8, count)
        address = b.add(ProductArgs.zeros.load(b, record), b.mul(block, ir.Constant(I64, count)))
        stored = b.add(load(b, address, vector), constant(vector, self.center))
        order = ir.Constant(ir.VectorType(I32, self.width), [i % count for i in range(self.width)])
        return b.shuffle_vector(stored, ir.Constant(vector, ir.Undefined), order)

    def quads(self, b: Any, address: Any, part: int, table: Any) -> list[Any]:
        """As `unpack`, looked up in `table`."""
        if self.trellis:
            stored = ring_indices(b, address, self.bits, part, self.isa)
        else:
            stored = unpack(b, address, self.bits, part, self.width, self.isa.shifts_bytes)
        return [self.isa.looked_up(b, table, index) for index in stored] if self.center else stored
