"""Blocks of weights as products read them: the quads of a chunk, and what lies beside its integers.

Literal `beside` of a kernel says what that is, and what an integer q stands for:

    False       a scale                                   scale (q - 2^(bits - 1))
    True        and a zero point                          scale (q - zero)
    "half"      a scale                                   scale (q - (2^bits - 1) / 2)
    "s4"        four bits, a share of the row's scale     the same
    "table"     a scale, and a table of the block         scale table[q]
    "trellis"   four bits, and a table of the block       scale table[q | bit << bits], a bit of the rows above and below

    q, s, z, u   integers, scales or their four bits, zero points or tables, and scales of rows, as in the file

An entry of a table becomes entry + 128, an integer of 8 bits whose zero point is 128: bytes of a table are chosen by `prmt`,
four at once, by four indices that are the halves of two bytes.  So nothing after it knows of tables.  Of half grids the sum of
integers is doubled, so that it is exact, and the scale halved; in f16 halves are exact.
"""

from dataclasses import dataclass
from functools import cached_property

from tvm.script import tirx as T

from edgeq.format.codec import PLANES

ENTRY_ZERO = 128
"""What is added to the entries of a table."""
ONE, QUARTER = 0x3F800000, 21
"""1.0 in f32; a quarter of an exponent is its bit 21: 1.0 less k of them is (8 - k mod 4) / 8 * 2^-(k div 4)."""


def planes_of(bits):
    """(bits, first line, lowest bit of the integer) of the planes of a width, as edgeq/format/codec.py orders them."""
    planes, line, low = [], 0, 0
    for plane in PLANES[bits]:
        planes.append((plane, line, low))
        line, low = line + plane, low + plane
    return planes


def part_of(word, plane, low, index):
    """The bits of quad `index` in a word of its line, four bytes, where they belong in the integers."""
    mask = T.uint32(((1 << plane) - 1) * 0x01010101)
    return ((word >> T.Cast("uint32", index * plane % 8)) & mask) << T.uint32(low)


@dataclass(frozen=True)
class WeightForm:
    """How a block of weights is stored; `group`: channels of the quantized input, `integer`: whether that is bytes."""

    bits: int
    beside: bool | str
    integer: bool
    group: int

    @property
    def zero(self):
        """Whether there are zero points."""
        return self.beside is True

    @property
    def halves(self):
        return self.beside in ("half", "s4")

    @property
    def coded(self):
        """Whether scales are four bits, times one of the row."""
        return self.beside in ("s4", "trellis")

    @property
    def looked_up(self):
        return self.beside in ("table", "trellis")

    @property
    def ring(self):
        """Whether rows above and below give a bit of an index."""
        return self.beside == "trellis"

    @property
    def entries(self):
        """Entries of a table."""
        return 1 << (self.bits + self.ring) if self.looked_up else 0

    @property
    def table_words(self):
        """Registers of a table."""
        return max(1, self.entries // 4)

    @property
    def scales(self):
        """Numbers of a group in s."""
        return 4 if self.coded else 16

    @property
    def scale_type(self):
        return "uint16" if self.coded else "float16"

    @property
    def zero_type(self):
        return "uint8" if not self.looked_up else "uint32" if self.entries > 2 else "uint16"

    @property
    def number_type(self):
        """The type of a scale in a register."""
        return "float32" if self.coded or self.halves else "float16"

    @property
    def constant_zero(self):
        """The zero point where none is stored; of half grids twice it."""
        return ENTRY_ZERO if self.looked_up else (1 << self.bits) - 1 if self.halves else 1 << (self.bits - 1)

    @property
    def nibbles(self):
        """Whether f16 numbers are made of a word as it is read: it has both quads of a channel in its halves of bytes."""
        return self.bits == 4 and not self.integer and not self.looked_up and not self.apart(4)

    @property
    def words(self):
        """Registers of what a lane reads of a chunk: two for each line that has quads of it."""
        return sum(2 * (1 + self.apart(plane)) for plane in PLANES[self.bits])

    @property
    def planes(self):
        """How many there are."""
        return len(PLANES[self.bits])

    def places(self, g, t):
        """Where a lane reads in the lines of each plane, in units of two words."""
        return tuple((t if self.group == 16 else 2 * t) * plane // 8 * 8 + g for plane in PLANES[self.bits])

    def apart(self, plane):
        """Whether the two quads of a lane lie in lines of their own, and not in one."""
        return plane == 8 or (self.group == 16 and plane > 1)

    @cached_property
    def inlines(self):
        return *self._numbers(), self._loader(), self._table_decoder() if self.looked_up else self._decoder()

    def _numbers(self):
        """Inlines: what a block has, and what a group has, for the two channels of a lane.

        table, above   registers of the j-th block that a warp has;  sc, zp: the i-th scale and zero point, of a group of it
        number         of the group among all of the matrix
        """
        WORDS, HALF = self.table_words, 0.5 if self.halves and self.integer else 1.0

        @T.inline
        def begin(table, above, j, z, u, block, g):
            if self.looked_up:
                for i in T.unroll(WORDS):
                    table[j * WORDS + i] = T.Cast("uint32", z[block * WORDS + i]) ^ T.uint32(ENTRY_ZERO * 0x01010101)
            if self.coded:
                for v in T.unroll(2):
                    above[j * 2 + v] = T.Cast("float32", u[block * 16 + g * 2 + v]) * T.float32(HALF)

        @T.inline
        def numbers(sc, zp, i, above, j, s, z, number, g):
            if self.coded:
                # Those of rows 0 to 7 lie in low halves of bytes, the others in high.
                for v in T.unroll(2):
                    code: T.let = T.Cast("uint32", s[number * 4 + g % 4]) >> T.Cast("uint32", 8 * v + g // 4 * 4)
                    sc[i * 2 + v] = T.reinterpret(
                        "float32", T.uint32(ONE) - ((code & T.uint32(15)) << T.uint32(QUARTER))
                    ) * above[j * 2 + v]  # fmt: skip
            elif self.halves:
                for v in T.unroll(2):
                    sc[i * 2 + v] = T.Cast("float32", s[number * 16 + g * 2 + v]) * T.float32(HALF)
            else:
                for v in T.vectorized(2):
                    sc[i * 2 + v] = s[number * 16 + g * 2 + v]
            for v in T.unroll(2):
                if self.zero:
                    zp[i * 2 + v] = T.Cast("int32", z[number * 16 + g * 2 + v])
                else:
                    zp[i * 2 + v] = self.constant_zero

        return begin, numbers

    def _loader(self):
        """Inline: w[at : at + words] is what a lane reads of a chunk, line after line; `places`, and `base` in words."""
        planes, small, apart = planes_of(self.bits), self.group == 16, self.apart
        (p0, l0, _), (p1, l1, _), (p2, l2, _) = (planes + [planes[0]] * 2)[:3]
        count = len(planes)

        @T.inline
        def lines(q, w, at, place, base, p, line):
            for k in T.unroll(1 + apart(p)):
                for v in T.vectorized(2):
                    w[at + k * 2 + v] = q[base + (line + k * (p // 2 if small else 1)) * 16 + place * 2 + v]

        @T.inline
        def load(q, w, at, places, base):
            lines(q, w, at, places[0], base, p0, l0)
            if count > 1:
                lines(q, w, at + 2 * (1 + apart(p0)), places[1], base, p1, l1)
            if count > 2:
                lines(q, w, at + 2 * (2 + apart(p0) + apart(p1)), places[2], base, p2, l2)

        return load

    def _decoder(self):
        """Inline: the two quads of a chunk that a lane has, for its two channels, as bytes quad[k, v], of what was loaded; of
        nibbles the words."""
        planes, small, apart, nibbles = planes_of(self.bits), self.group == 16, self.apart, self.nibbles
        (p0, _, s0), (p1, _, s1), (p2, _, s2) = (planes + [planes[0]] * 2)[:3]
        count = len(planes)

        def which(t, k):
            return t + 4 * k if small else 2 * t + k

        @T.inline
        def plane(w, at, quad, t, p, low):
            for k in T.unroll(2):
                for v in T.unroll(2):
                    part: T.let = part_of(w[at + k * 2 * apart(p) + v], p, low, which(t, k))
                    if low == 0:
                        quad[k, v] = part
                    else:
                        quad[k, v] = quad[k, v] | part

        @T.inline
        def decode(w, at, quad, table, j, g, t):
            if nibbles:
                for v in T.unroll(2):
                    quad[0, v] = w[at + v]
            else:
                plane(w, at, quad, t, p0, s0)
            if count > 1:
                plane(w, at + 2 * (1 + apart(p0)), quad, t, p1, s1)
            if count > 2:
                plane(w, at + 2 * (2 + apart(p0) + apart(p1)), quad, t, p2, s2)

        return decode

    def _table_decoder(self):
        """As `_decoder`, of entries of a table.  Indices are put together in the halves of bytes, of quad 0 in the low one."""
        bits, small, planes, ring = self.bits, self.group == 16, planes_of(self.bits), self.ring
        (p0, _, s0), (p1, _, s1) = (planes + planes)[:2]
        count, apart = len(planes), self.apart
        lookup = self._lookup()

        def shifted(word, t, p):
            """The field of quad 0 lowest."""
            return word >> T.Cast("uint32", (t if small else 2 * t) * p % 8)

        def put(fields, mask, low, step, k):
            """What quad k has of them, `step` bits after what quad 0 has, as bit `low` of its index and those above."""
            return (fields << T.uint32(low + (4 - step) * k)) & (T.uint32(mask * 0x01010101) << T.uint32(low + 4 * k))

        @T.inline
        def plane(w, at, indices, g, t, p, low, coded):
            near = T.alloc_local((2,), "uint32")
            step = 0 if apart(p) else 4 if small else p
            for k in T.unroll(2):
                first: T.let = at + k * 2 * apart(p)
                if coded and (k == 0 or apart(p)):
                    # Of the row above the first of a lane, and the row below the second: 4 lanes away in the ring.
                    near[0] = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), w[first + 1], (g * 4 + t + 28) % 32, 32, 32)
                    near[1] = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), w[first], (g * 4 + t + 4) % 32, 32, 32)
                for v in T.unroll(2):
                    indices[v] = indices[v] | put(shifted(w[first + v], t, p), (1 << p) - 1, low, step, k)
                    if coded:
                        indices[v] = indices[v] | put(shifted(w[first + 1 - v] ^ near[v], t, p), 1, bits, step, k)

        @T.inline
        def decode(w, at, quad, table, j, g, t):
            indices = T.alloc_local((2,), "uint32")
            for v in T.unroll(2):
                indices[v] = T.uint32(0)
            plane(w, at, indices, g, t, p0, s0, ring and count == 1)
            if count > 1:
                plane(w, at + 2 * (1 + apart(p0)), indices, g, t, p1, s1, ring)
            for v in T.unroll(2):
                lookup(quad, v, table, j, indices[v])

        return decode

    def _lookup(self):
        """Inline: eight entries for quad[:, v]."""
        WORDS, MANY = self.table_words, self.entries == 16

        @T.inline
        def lookup(quad, v, table, j, halves):
            found = T.alloc_local((2,), "uint32")
            if MANY:
                # Which of the two halves of a table: bytes of the first are 0 to 3 for the last prmt, of the second 4 to 7.
                of = T.alloc_local((2,), "uint32")
                low: T.let = halves & T.uint32(0x77777777)
                half: T.let = ((halves >> T.uint32(1)) & T.uint32(0x44444444)) | T.uint32(0x32103210)
                for h in T.unroll(2):
                    for i in T.unroll(2):
                        T.ptx.prmt.b32(of[i], table[j * 4 + i * 2], table[j * 4 + i * 2 + 1], low >> T.uint32(16 * h))
                    T.ptx.prmt.b32(found[h], of[0], of[1], half >> T.uint32(16 * h))
            else:
                for h in T.unroll(2):
                    T.ptx.prmt.b32(found[h], table[j * WORDS], table[j * WORDS + WORDS - 1], halves >> T.uint32(16 * h))
            T.ptx.prmt.b32(quad[0, v], found[0], found[1], T.uint32(0x6420))
            T.ptx.prmt.b32(quad[1, v], found[0], found[1], T.uint32(0x7531))

        return lookup
