"""Indices of a trellis (edgeq/format/trellis.py) as vectors of bytes.

The bits that neighbouring rows give are computed while they lie packed: a row is a lane of 32 bits, so a line turned by a lane
up, xor the line turned down, has c1 of each row where its c0 is.  Of 2 bits a field

    p = up ^ down                             c1 in the low bit of each field
    even = fields 0, 2 and odd = fields 1, 3, each below its field of p            an index in every half of a byte

and of 1 bit (c0, c1) is the field.  Of 3 bits such fields are put above those of the plane of 2 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, QUADS, ROWS
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.simd import I8, I16, I32, I64, constant, load

SECTIONS = {1: 1, 2: 2, 3: 1}
"""By bits: parts of a chunk that have no lines in common."""


def ring_indices(b: Any, address: Any, bits: int, part: int, isa: Isa) -> list[Any]:
    """The eight quads of the chunk at `address`, for rows [part * lanes, (part + 1) * lanes): what `isa.looked_up` takes.

    Bits above an index, where it has fewer than four, are any: the table is there over and over."""
    lines, found = _Lines(b, address, part, isa), dict[int, Any]()
    for section in range(SECTIONS[bits]):
        found |= lines.indices(_FIELDS[bits](lines, section), bits)
    return [found[j] for j in range(QUADS)]


def ring_pieces(b: Any, address: Any, bits: int, part: int, isa: Isa) -> Iterator[dict[int, Any]]:
    """The same, some quads at a time, by their numbers.  By measurement on Zen 4: of 2 bits a section at a time."""
    lines = _Lines(b, address, part, isa)
    for section in range(SECTIONS[bits]):
        fields = _FIELDS[bits](lines, section)
        for together in [fields] if bits == 2 else ([each] for each in fields):
            yield lines.indices(together, bits)


class _Lines:
    """Lines of a chunk, as vectors of bytes for one part of the rows."""

    def __init__(self, b: Any, address: Any, part: int, isa: Isa) -> None:
        self.b, self.address, self.part, self.lanes, self.isa = b, address, part, isa.lanes, isa
        self.width = 4 * isa.lanes
        self.bytes = ir.VectorType(I8, self.width)
        self.moved = self.bytes if isa.shifts_bytes else ir.VectorType(I16, self.width // 2)

    def stored(self, line: int, part: int | None = None) -> Any:
        part = self.part if part is None else part
        return self._rows_from(line, part % (ROWS // self.lanes) * self.lanes)

    def _rows_from(self, line: int, row: int) -> Any:
        place = ir.Constant(I64, line * LINE + 4 * row)
        return load(self.b, self.b.add(self.address, place), self.bytes, self.width if row % self.lanes == 0 else 4)

    def beside(self, line: int) -> Any:
        """Bits of the next row xor those of the one before, in the ring."""
        b, rows = self.b, ir.VectorType(I32, self.lanes)
        before, here, after = (b.bitcast(self.stored(line, self.part + step), rows) for step in (-1, 0, 1))
        order = range(self.lanes)
        following = b.shuffle_vector(here, after, ir.Constant(rows, [i + 1 for i in order]))
        preceding = b.shuffle_vector(before, here, ir.Constant(rows, [i + self.lanes - 1 for i in order]))
        if 2 * self.lanes == ROWS:
            # One of them is read where it lies, by the instruction that takes it, which saves two that would move halves.
            first = self.part % 2 == 0
            beside = b.bitcast(self._rows_from(line, 1 if first else self.lanes - 1), rows)
            following, preceding = (beside, preceding) if first else (following, beside)
        return b.bitcast(b.xor(following, preceding), self.bytes)

    def right(self, value: Any, count: int) -> Any:
        """Each byte shifted right; where bytes have no shift of their own, bits of the next one come in."""
        return self.b.bitcast(self.b.lshr(self.b.bitcast(value, self.moved), constant(self.moved, count)), self.bytes)

    def left(self, value: Any, count: int) -> Any:
        return self.b.bitcast(self.b.shl(self.b.bitcast(value, self.moved), constant(self.moved, count)), self.bytes)

    def mixed(self, mask: int, ones: Any, others: Any, taken: int = 255) -> Any:
        """Bits of `ones` where `mask` has them in every byte, else of `others`, of which those of `taken`."""
        b = self.b
        return b.or_(b.and_(ones, constant(self.bytes, mask)), b.and_(others, constant(self.bytes, taken & ~mask)))

    def indices(self, fields: Iterable[tuple[Any, dict[int, int]]], bits: int) -> dict[int, Any]:
        """Quads by their numbers."""
        places = {j: (field, at) for field, quads in list(fields) for j, at in quads.items()}
        return {j: self.index(*places[j], bits) for j in sorted(places)}

    def index(self, fields: Any, at: int, bits: int) -> Any:
        """Four bits of every byte, from bit `at` on; of 2 bits the highest of a byte is 0."""
        moved, below_128 = self.right(fields, at) if at else fields, bits == 2
        alone = at >= 4 and self.isa.shifts_bytes or not at and below_128 and self.isa.folds_indices
        return moved if alone else self.b.and_(moved, constant(self.bytes, 15))

    def coded_fields(self, line: int) -> tuple[Any, Any]:
        """Fields (c0, c1) of a plane of 1 bit: of quads 0, 2, 4, 6, and of quads 1, 3, 5, 7."""
        stored, beside = self.stored(line), self.beside(line)
        return self.mixed(0x55, stored, self.left(beside, 1)), self.mixed(0x55, self.right(stored, 1), beside)


Fields = Iterator[tuple[Any, dict[int, int]]]
"""Bytes with indices, and for each quad whose indices they have, from which bit on."""


def _of_1_bit(lines: _Lines, line: int) -> Fields:
    for odd, fields in enumerate(lines.coded_fields(line)):
        yield fields, {2 * i + odd: 2 * i for i in range(4)}


def _of_2_bits(lines: _Lines, line: int) -> Fields:
    stored, beside, first = lines.stored(line), lines.beside(line), 4 * line
    yield lines.mixed(0x33, stored, lines.left(beside, 2), 0x77), {first: 0, first + 2: 4}
    yield lines.mixed(0x33, lines.right(stored, 2), beside, 0x77), {first + 1: 0, first + 3: 4}


def _of_3_bits(lines: _Lines, line: int) -> Fields:
    even, odd = lines.coded_fields(line + 2)
    # Fields of quads 0, 1, 4, 5 and of 2, 3, 6, 7: each as far from the next as in `even` and `odd`.
    outer = lines.mixed(0x0F, lines.stored(line), lines.left(lines.stored(line + 1), 4))
    yield lines.mixed(0x33, outer, lines.left(even, 2)), {0: 0, 4: 4}
    yield lines.mixed(0x33, lines.right(outer, 2), lines.left(odd, 2)), {1: 0, 5: 4}
    inner = lines.mixed(0x0F, lines.right(lines.stored(line), 4), lines.stored(line + 1))
    yield lines.mixed(0x33, inner, even), {2: 0, 6: 4}
    yield lines.mixed(0x33, lines.right(inner, 2), odd), {3: 0, 7: 4}


_FIELDS = {1: _of_1_bit, 2: _of_2_bits, 3: _of_3_bits}
