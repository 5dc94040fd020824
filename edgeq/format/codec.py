"""How the numbers of a matrix are stored: pack, unpack and dequantize in numpy.  This file is the truth.

Every codec stores the matrix W[rows, columns], output by input channels, in one order, which CPU kernels read straight from the
mapped file:

    block   16 rows (the last one padded with zero rows)
    line    64 bytes = 16 lanes of 32 bits; lane r belongs to row r of the block and holds consecutive input channels
            (8 bits: 4 channels, 16 bits: 2, 32 bits: 1)
    chunk   16 rows x 32 channels; a b-bit integer codec stores it in exactly b lines

A *quad* is 16 rows x 4 channels, one byte each: byte 4r + c of quad j is row r, channel 4j + c of the chunk.  The eight quads
of a chunk are stored in planes of 4, 2 and 1 bits (8 bits: one plane of bytes), low bits first:

    plane of 4 bits, 4 lines    line t:  | quad 2t+1 | quad 2t |                                  high nibble | low nibble
    plane of 2 bits, 2 lines    line t:  | quad 4t+3 | quad 4t+2 | quad 4t+1 | quad 4t |          bits 7-6 | 5-4 | 3-2 | 1-0
    plane of 1 bit,  1 line     line 0:  | quad 7 | quad 6 | ... | quad 0 |                       bit 7 ... bit 0

    1 bit = [1]   2 bits = [2]   3 = [2][1]   4 = [4]   5 = [4][1]   6 = [4][2]   7 = [4][2][1]   8 = the eight quads themselves

so a 4-bit byte 4r + c of line t is  q[r, 8t + c] | q[r, 8t + 4 + c] << 4,  and no bit of a whole chunk is wasted.  Scales are
f16 [blocks][groups][16], zero points u8 and offsets f16 in the same order.  A group is `group_size` consecutive channels of one
row; the last group of a row has what is left of it, 1 to `group_size` channels.

In two levels scales are i8 and offsets u8, and f16 [blocks][ceil(columns / 256)][16] multiply those of 256 channels.

Scales of four bits (s4) are u8 [blocks][groups][8]: byte r has code k of row r of the block in its low and that of row r + 8 in
its high half.  A code stands for (8 - k mod 4) / 8 * 2^-(k div 4), and f16 [blocks][1][16] multiply those of a row.

Tables are i8 [blocks][2**bits]: entries by index, the same for the 16 rows of a block; of a trellis (trellis.py) twice as many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import UnsupportedError
from edgeq.format.trellis import TRELLIS_BITS, ring_indices

ROWS = 16
CHUNK = 32
QUADS = 8
LINE = 64
GROUP_SIZES = (16, 32, 64, 128)
SUPER_SIZE = 256
"""Channels whose scales of two levels share a factor: those of a block of llama.cpp's K-quants."""
BITS = range(2, 9)
TABLE_BITS = range(1, 5)
"""Bits of an index: one byte shuffle looks up in 16 entries."""
MAX_ENTRY = {False: 31, True: 127}
"""The largest entry of a table, by `Codec.wide`; the smallest is its negative."""

ArrayF32 = NDArray[np.float32]
ArrayU8 = NDArray[np.uint8]
AnyArray = NDArray[Any]

# Planes of each width, low bits first: (bits of the plane, lines of the plane in a chunk).
PLANES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}

Kind = Literal["f32", "f16", "bf16", "int", "half", "s4", "offset", "two-level", "table", "trellis"]
FLOAT_KINDS: tuple[Kind, ...] = ("f32", "f16", "bf16")
ZeroKind = Literal["symmetric", "integer", "offset", "half"]
_GROUP = r"(?:g(\d{1,4})|row)"
_NAME = re.compile(rf"(f32|f16|bf16)|i(\d) {_GROUP}( zero| half| half s4| offset| two-level| two-level offset)?")
_TABLE_NAME = re.compile(rf"n(\d) {_GROUP}( wide)?")
_TRELLIS_NAME = re.compile(r"t(\d) g(\d{1,4}) s4")


@dataclass(frozen=True)
class ArraySpec:
    """One stored array of a codec: its numpy dtype and shape, and its type in a file (f16 and bf16 are packed as uint16)."""

    dtype: str
    shape: tuple[int, ...]
    stored: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Codec:
    """The storage of one weight matrix.

    kind         "f32", "f16", "bf16"; "int"; "half": integers too, whose zero lies half way between the two in the middle,
                 w = scale * (q - (2**bits - 1) / 2); "s4": the same, whose scales are 4 bits a group times an
                 f16 per row; "offset": w = scale * q + offset with an f16 offset per group;
                 "two-level": integers whose scales, and offsets, are 8 bits a group times an f16 per 256 channels;
                 "table": w = scale * table[q], entries are signed bytes, and those of a block of 16 rows are the same;
                 "trellis": a table whose indices take one bit from the rows above and below, with scales as of "s4"
    bits         2 to 8 for integers, 1 to 4 for indices of a table, 1 to 3 of a trellis, else 0
    group_size   16, 32, 64 or 128 channels that share a scale; 0 means one group per row, not of "two-level", "s4", "trellis"
    symmetric    True: w = scale * (q - 2**(bits-1)).  False: of "int" w = scale * (q - zero) with a stored zero point per
                 group, of "two-level" w = scale * q + offset.  Always True for other kinds
    wide         of "table": entries are from -127 to 127.  False: from -31 to 31, which are faster where products of bytes are
                 added up in 16 bits.  Always False for other kinds
    """

    kind: Kind
    bits: int = 0
    group_size: int = 0
    symmetric: bool = True
    wide: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UnsupportedError(f"unknown codec {self.kind!r}; supported: f32, f16, bf16, i2 to i8, n1 to n4, t1 to t3")
        if self.wide and self.kind != "table":
            raise UnsupportedError(f"codec {self.kind!r} has no table whose entries could be wide")
        if not self.symmetric and self.kind not in ("int", "two-level"):
            raise UnsupportedError(f"codec {self.kind!r} has no zero points; only integers without an offset do")
        if (self.kind == "two-level" or self.coded) and not self.group_size:
            what = "two levels" if self.kind == "two-level" else "four bits"
            raise UnsupportedError(f"scales of {what} need groups; choose a group size of 16, 32, 64 or 128")
        if self.integer:
            if self.bits not in (widths := {"table": TABLE_BITS, "trellis": TRELLIS_BITS}.get(self.kind, BITS)):
                choice = f"{', '.join(map(str, widths[:-1]))} or {widths[-1]}"
                raise UnsupportedError(f"{self.bits} bits are not supported; choose {choice}")
            if self.group_size not in (0, *GROUP_SIZES):
                raise UnsupportedError(
                    f"group size {self.group_size} is not supported; choose 16, 32, 64, 128 or row (one group per row)"
                )

    @property
    def integer(self) -> bool:
        """Whether weights are integers, or entries of a table, with scales; inputs of others are never rounded."""
        return self.kind not in FLOAT_KINDS

    @property
    def zero_kind(self) -> ZeroKind:
        """What says which integer stands for zero: nothing ("half": none does; "symmetric" of a table too, whose entries say
        it), a stored integer or an offset per group."""
        if self.kind == "offset" or (self.kind == "two-level" and not self.symmetric):
            return "offset"
        if self.kind in ("half", "s4"):
            return "half"
        return "symmetric" if self.symmetric else "integer"

    @property
    def name(self) -> str:
        """A short name: `f16`, `i4 g128`, `i4 g128 zero`, `i2 g32 half`, `i2 g32 half s4`, `i4 g32 offset`, `i6 g16 two-level`,
        `i8 row`, `n4 g32`, `n4 g32 wide`, `t2 g32 s4`."""
        if not self.integer:
            return self.kind
        group = f"g{self.group_size}" if self.group_size else "row"
        if self.kind in ("table", "trellis"):
            return f"n{self.bits} {group}" + " wide" * self.wide if self.kind == "table" else f"t{self.bits} {group} s4"
        levels = " two-level" if self.kind == "two-level" else ""
        zero = {"symmetric": "", "integer": " zero", "offset": " offset", "half": " half"}[self.zero_kind]
        return f"i{self.bits} {group}{levels}{zero}" + " s4" * (self.kind == "s4")

    @classmethod
    def named(cls, name: str) -> Codec:
        """The codec of this `name`.  UnsupportedError: there is none."""
        if table := _TABLE_NAME.fullmatch(name):
            return cls("table", int(table[1]), int(table[2] or 0), wide=table[3] is not None)
        if trellis := _TRELLIS_NAME.fullmatch(name):
            return cls("trellis", int(trellis[1]), int(trellis[2]))
        found = _NAME.fullmatch(name)
        if not found:
            raise UnsupportedError(
                f"unknown codec {name!r}; codecs are called f32, f16, bf16, i4 g128, i4 row, i4 g128 zero, i2 g32 half, "
                "i4 g32 offset, n4 g32 or t2 g32 s4"
            )
        kind, bits, size, beside = found.groups("")
        if kind:
            return cls(cast(Kind, kind))
        form = {" half": "half", " half s4": "s4", " offset": "offset"}.get(
            beside, "two-level" if beside.startswith(" two-level") else "int"
        )
        return cls(cast(Kind, form), int(bits), int(size or 0), beside not in (" zero", " two-level offset"))

    def groups(self, columns: int) -> int:
        """Scales per row of `columns` channels; where the group size does not divide them, the last group is shorter."""
        if not self.integer:
            return 0
        return -(-columns // self.group_size) if self.group_size else 1

    def parts(self, rows: int, columns: int) -> dict[str, ArraySpec]:
        """The arrays that store a [rows, columns] matrix: "q", for integers "scale", and "zero" or "offset"; of
        two levels also "super_scale" and "super_offset", of scales of four bits "super_scale", of tables "table"."""
        blocks = -(-rows // ROWS)
        if self.kind == "f32":
            return {"q": ArraySpec("float32", (blocks, columns, ROWS), "f32")}
        if self.kind in ("f16", "bf16"):
            return {"q": ArraySpec("uint16", (blocks, -(-columns // 2), ROWS, 2), self.kind)}
        scales = (blocks, self.groups(columns), ROWS)
        codes = (blocks, -(-columns // CHUNK), self.bits, LINE)
        f16, u8 = ArraySpec("float16", scales, "f16"), ArraySpec("uint8", scales, "u8")
        parts = {"q": ArraySpec("uint8", codes, "u8"), "scale": f16}
        parts |= {"integer": {"zero": u8}, "offset": {"offset": f16}}.get(self.zero_kind, {})
        if self.coded:
            parts["scale"] = ArraySpec("uint8", (*scales[:2], ROWS // 2), "u8")
            parts["super_scale"] = ArraySpec("float16", (blocks, 1, ROWS), "f16")
        if self.kind in ("table", "trellis"):
            parts["table"] = ArraySpec("int8", (blocks, 1 << self.bits + self.coupled), "i8")
        if self.kind == "two-level":
            above = ArraySpec("float16", (blocks, -(-columns // SUPER_SIZE), ROWS), "f16")
            parts["scale"] = ArraySpec("int8", scales, "i8")
            if "offset" in parts:
                parts["offset"] = u8
            parts |= {f"super_{name}": above for name in ("scale", "offset") if name in parts}
        return parts

    @property
    def coded(self) -> bool:
        """Whether scales are codes of four bits, times an f16 per row."""
        return self.kind in ("s4", "trellis")

    @property
    def coupled(self) -> bool:
        """Whether the 16 rows of a block share bits: they are rounded and read together."""
        return self.kind == "trellis"

    def nbytes(self, rows: int, columns: int) -> int:
        return sum(part.nbytes for part in self.parts(rows, columns).values())

    @property
    def multiplied_bits(self) -> int:
        """Bits of the integers that scales multiply: those that are stored, or of a table's entries plus 32 or 128."""
        return (8 if self.wide else 6) if self.kind in ("table", "trellis") else self.bits

    @property
    def center(self) -> int:
        """The integer that stores the number zero in symmetric codecs."""
        return 1 << (self.bits - 1)

    @property
    def constant_zero(self) -> float:
        """What stands for the number zero where groups do not say it: `center`, or half way between it and the one before."""
        return self.center - (0.5 if self.zero_kind == "half" else 0.0)


def padded_rows(a: AnyArray) -> AnyArray:
    """`a` with zero rows appended up to a multiple of 16."""
    missing = -a.shape[0] % ROWS
    return np.concatenate([a, np.zeros((missing, *a.shape[1:]), a.dtype)]) if missing else a


def _padded_columns(a: AnyArray, multiple: int) -> AnyArray:
    missing = -a.shape[1] % multiple
    return np.concatenate([a, np.zeros((a.shape[0], missing), a.dtype)], axis=1) if missing else a


def pack_integers(q: ArrayU8, bits: int) -> ArrayU8:
    """q uint8 [rows, columns], values below 2**bits -> uint8 [blocks, chunks, bits, 64] in the order of this file."""
    if q.size and int(q.max()) >= 1 << bits:
        raise ValueError(f"value {int(q.max())} does not fit {bits} bits")
    q = _padded_columns(padded_rows(q), CHUNK)
    blocks, chunks = q.shape[0] // ROWS, q.shape[1] // CHUNK
    # block, row, chunk, quad, channel -> block, chunk, quad, row, channel: a quad is now 64 consecutive bytes
    quads = q.reshape(blocks, ROWS, chunks, QUADS, 4).transpose(0, 2, 3, 1, 4).reshape(blocks, chunks, QUADS, LINE)
    lines, low = [], 0
    for plane in PLANES[bits]:
        per_line = 8 // plane
        values = (quads >> low) & ((1 << plane) - 1) if plane < 8 else quads
        values = values.reshape(blocks, chunks, QUADS // per_line, per_line, LINE)
        shifts = (np.arange(per_line) * plane).astype(np.uint8)[:, None]
        lines.append(np.bitwise_or.reduce(values << shifts, axis=3))
        low += plane
    return np.ascontiguousarray(np.concatenate(lines, axis=2))


def unpack_integers(packed: ArrayU8, rows: int, columns: int) -> ArrayU8:
    """The inverse of `pack_integers`: uint8 [blocks, chunks, bits, 64] -> uint8 [rows, columns]."""
    blocks, chunks, bits, _ = packed.shape
    quads = np.zeros((blocks, chunks, QUADS, LINE), np.uint8)
    line, low = 0, 0
    for plane in PLANES[bits]:
        per_line, count = 8 // plane, plane
        lines = packed[:, :, line : line + count, None, :]
        shifts = (np.arange(per_line) * plane).astype(np.uint8)[:, None]
        values = (lines >> shifts) & np.uint8((1 << plane) - 1)
        quads |= (values.reshape(blocks, chunks, QUADS, LINE) << low).astype(np.uint8)
        line, low = line + count, low + plane
    q = quads.reshape(blocks, chunks, QUADS, ROWS, 4).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(q.reshape(blocks * ROWS, chunks * CHUNK)[:rows, :columns])


def pack_groups(a: AnyArray) -> AnyArray:
    """Per-group values [rows, groups] -> [blocks, groups, 16]."""
    a = padded_rows(a)
    return np.ascontiguousarray(a.reshape(-1, ROWS, a.shape[1]).transpose(0, 2, 1))


def unpack_groups(a: AnyArray, rows: int) -> AnyArray:
    """[blocks, groups, 16] -> [rows, groups]."""
    return np.ascontiguousarray(a.transpose(0, 2, 1).reshape(-1, a.shape[1])[:rows])


def pack_beside(codec: Codec, name: str, a: AnyArray) -> AnyArray:
    """What lies beside integers, [rows, values of a row], as array `name` of `codec.parts`: scales of four bits as codes, a
    table once for a block, whose rows have the same."""
    if name == "table":
        tables = np.ascontiguousarray(a[::ROWS])
        if not np.array_equal(np.repeat(tables, ROWS, axis=0)[: len(a)], a):
            raise ValueError("rows of a block with tables that differ")
        return tables
    packed = pack_groups(a)
    return packed[..., : ROWS // 2] | packed[..., ROWS // 2 :] << 4 if codec.coded and name == "scale" else packed


def unpack_beside(codec: Codec, name: str, a: AnyArray, rows: int) -> AnyArray:
    """The inverse of `pack_beside`."""
    if name == "table":
        return np.repeat(a, ROWS, axis=0)[:rows]
    return unpack_groups(np.concatenate([a & 15, a >> 4], axis=-1) if codec.coded and name == "scale" else a, rows)


SCALE_CODES: ArrayF32 = np.ldexp(8.0 - np.arange(16) % 4, -3 - np.arange(16) // 4).astype(np.float32)
"""What the codes of scales of four bits stand for, from 1 down to 5/64."""


def to_bf16(a: ArrayF32) -> NDArray[np.uint16]:
    """float32 -> bfloat16 bits, round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), np.uint32(0x7FC0), rounded).astype(np.uint16)


def as_float32(a: AnyArray, dtype: str) -> ArrayF32:
    """Numbers of type f32, f16 or bf16 as float32."""
    return from_bf16(a) if dtype == "bf16" else np.asarray(a, np.float32)


def from_bf16(a: NDArray[np.uint16]) -> ArrayF32:
    """bfloat16 bits -> float32, exact."""
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


def pack_floats(w: ArrayF32, kind: Kind) -> AnyArray:
    """w float32 [rows, columns] -> the "q" array of the float codec `kind`."""
    if kind == "f32":
        w = padded_rows(np.ascontiguousarray(w, np.float32))
        return np.ascontiguousarray(w.reshape(-1, ROWS, w.shape[1]).transpose(0, 2, 1))
    halves = to_bf16(w) if kind == "bf16" else w.astype(np.float16).view(np.uint16)
    halves = _padded_columns(padded_rows(halves), 2)
    return np.ascontiguousarray(halves.reshape(-1, ROWS, halves.shape[1] // 2, 2).transpose(0, 2, 1, 3))


def unpack_floats(packed: AnyArray, kind: Kind, rows: int, columns: int) -> ArrayF32:
    """The inverse of `pack_floats`, as float32 [rows, columns]."""
    if kind == "f32":
        return np.ascontiguousarray(packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[:rows])
    halves = packed.transpose(0, 2, 1, 3).reshape(packed.shape[0] * ROWS, -1)[:rows, :columns]
    halves = np.ascontiguousarray(halves)
    return from_bf16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def dequantize(codec: Codec, rows: int, columns: int, arrays: Mapping[str, AnyArray]) -> ArrayF32:
    """Stored arrays, as `codec.parts` names them -> W float32 [rows, columns].

    Exact: products of an f16 scale and what is below 2**9, of two levels up to 6 bits.  An offset is added and rounded once.
    """
    if not codec.integer:
        return unpack_floats(arrays["q"], codec.kind, rows, columns)
    whole = len(arrays["q"]) * ROWS  # Rows of a trellis depend on those beside them, in the last block on padded ones too.
    natural = {name: unpack_beside(codec, name, array, whole) for name, array in arrays.items() if name != "q"}
    return dequantized(codec, columns, {**natural, "q": unpack_integers(arrays["q"], whole, columns)})[:rows]


def dequantized(codec: Codec, columns: int, arrays: Mapping[str, AnyArray]) -> ArrayF32:
    """Dequantize integers that are not packed: "q" is [rows, columns], the other arrays are [rows, values of a row].
    Of a trellis the first row is that of a block, and rows that a last block lacks have integers of zero."""

    def of_groups(part: str) -> ArrayF32:
        if codec.coded:
            return per_channel(SCALE_CODES[arrays[part]] * arrays["super_scale"].astype(np.float32), codec, columns)
        values = per_channel(arrays[part].astype(np.float32), codec, columns)
        if codec.kind == "two-level":
            values *= np.repeat(arrays[f"super_{part}"].astype(np.float32), SUPER_SIZE, axis=1)[:, :columns]
        return values

    if "table" in arrays:
        q = ring_indices(arrays["q"], codec.bits) if codec.coupled else arrays["q"]
        return np.take_along_axis(arrays["table"], q, axis=1).astype(np.float32) * of_groups("scale")
    values = arrays["q"].astype(np.float32)
    if codec.zero_kind == "offset":
        return values * of_groups("scale") + of_groups("offset")
    values -= np.float32(codec.constant_zero) if codec.symmetric else of_groups("zero")
    return values * of_groups("scale")


def per_channel(a: ArrayF32, codec: Codec, columns: int) -> ArrayF32:
    """Per-group values [rows, groups] -> [rows, columns], each repeated over the channels of its group."""
    return np.repeat(a, codec.group_size or columns, axis=1)[:, :columns]
