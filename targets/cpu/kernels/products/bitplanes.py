"""Packed integers of the file's order (edgeq/format/codec.py) as vectors of bytes: planes of bits put together, and indices of
tables looked up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, PLANES, QUADS
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.simd import I8, I16, I32, I64, constant, load
from edgeq.targets.cpu.kernels.args import ProductArgs
from edgeq.targets.cpu.kernels.products.groups import TABLES, TRELLIS, entries, multiplied_bits
from edgeq.targets.cpu.kernels.products.tiles import loads_in_order
from edgeq.targets.cpu.kernels.products.trellis import ring_indices, ring_pieces


def unpack(b: Any, address: Any, bits: int, part: int, width: int, shifts_bytes: bool = False) -> list[Any]:
    """The eight quads of the chunk at `address`, for rows [part * lanes, (part + 1) * lanes): vectors of `width` bytes.

    shifts_bytes   whether one instruction shifts every byte.  LLVM would put `gf2p8affineqb` in its place, for which an AVX-512
                   processor has no units but those of the dot products
    """
    found = unpacked(b, address, bits, part, width, shifts_bytes)
    quads = {j: quad for piece in found for j, quad in piece.items()}
    return [quads[j] for j in range(QUADS)]


def unpacked(b: Any, address: Any, bits: int, part: int, width: int, shifts_bytes: bool) -> Iterator[dict[int, Any]]:
    """The same as they are made, quads by their numbers."""
    vector = ir.VectorType(I8, width)
    moved = vector if shifts_bytes else ir.VectorType(I16, width // 2)
    quads: dict[int, Any] = {}
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
            if len(PLANES[bits]) == 1:
                yield {j: quads[j] for j in range(i * per_line, (i + 1) * per_line)}
        line, low = line + plane, low + plane
    if len(PLANES[bits]) > 1:
        yield quads


@dataclass(frozen=True)
class IntegerWeights:
    """What the code for packed integers depends on.

    isa          index into all_isas()
    bits         of the stored integers
    mode16       1: activations stored in 16 bits; 0: in 8
    group_kind   what groups have beside their integers: a literal of groups.py
    extent       CHUNKS, HALF_CHUNK, WHOLE or ONE_CHUNK: what is added up before it is scaled
    """

    isa: int
    bits: int
    mode16: int
    group_kind: int
    extent: int

    @property
    def octets(self) -> bool:
        """Whether tiles of panels multiply two tokens by two rows at once."""
        return all_isas()[self.isa].octets

    @property
    def words(self) -> bool:
        """Whether weights are multiplied in 16 bits."""
        return bool(self.mode16) and all_isas()[self.isa].takes_pairs(multiplied_bits(self.bits, self.group_kind))


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
        return [self._looked_up(b, table, index) for index in stored]

    def pieces(self, b: Any, address: Any, part: int, table: Any) -> Iterator[dict[int, Any]]:
        """The same, some quads at a time, by their numbers: those that have as little as may be in common with others."""
        if self.trellis:
            pieces = ring_pieces(b, address, self.bits, part, self.isa)
        else:
            pieces = unpacked(b, address, self.bits, part, self.width, self.isa.shifts_bytes)
        for piece in pieces:
            yield {j: self._looked_up(b, table, index) for j, index in piece.items()}

    def in_turn(self, b: Any, address: Any, parts: int, quads: range, table: Any) -> Iterator[tuple[int, list[Any]]]:
        """Those in `quads`, unpacked when their turn comes: the number of each, and its vectors of all `parts` of the rows."""
        vectors = (self.pieces(b, address, part, table) for part in range(parts))
        for pieces in zip(*vectors, strict=True):
            yield from ((j, [piece[j] for piece in pieces]) for j in pieces[0] if j in quads)
            # Lest the compiler unpacks all first, for which it has no registers.
            loads_in_order(b)

    def _looked_up(self, b: Any, table: Any, index: Any) -> Any:
        return self.isa.looked_up(b, table, index) if self.center else index
