"""What the groups of weights have beside their integers, and how a sum of integers becomes a product with it.

For a group of a row, with sum = sum of (q - taken) x over its channels, exact, and sum_x = the sum of x, both of integers:

    SYMMETRIC   y += scale * xscale * sum                             taken = 2^(bits - 1)
    ZERO        y += scale * xscale * (sum - zero * sum_x)            taken = 0
    OFFSET      y += xscale * (scale * sum + shift * sum_x)           taken = 2^(bits - 1), shift = offset + taken * scale
    HALF        y += scale / 2 * xscale * (2 sum + sum_x)             taken = 2^(bits - 1), half a step too much; exact
    TABLE       as SYMMETRIC, of entries of a table plus `taken`      taken = 32
    TABLE_WIDE  the same                                              taken = 128
    TRELLIS     the same as TABLE, of the table of a trellis          taken = 32

HALF_S4 is HALF whose scale is that of the row times what a code k of four bits stands for, (8 - k mod 4) / 8 * 2^-(k div 4): as
a float that is 1.0 less k quarters of an exponent.  So is that of TRELLIS.

In two levels scale = super_scale * 8 bits of the group and offset = super_offset * 8 bits of it, exact; the rest is as there.

`taken` lies in the middle of the integers, so that an offset near -taken * scale, as nearly all are, cancels before anything is
multiplied with activations.  taken * scale is exact.

A kernel loads the numbers of a group once for all tokens (`Groups.load`) and applies them to each (`Groups.added`); only here
does it matter how they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from edgeq.format.codec import CHUNK, LINE, ROWS, SUPER_SIZE, Codec
from edgeq.targets.cpu.jit.simd import F16, F32, I8, I32, I64, call, constant, load, prefetch, splat
from edgeq.targets.cpu.kernels.args import ProductArgs
from edgeq.targets.cpu.kernels.products.tiles import plus

SYMMETRIC, ZERO, OFFSET, TWO_LEVELS, TWO_LEVELS_OFFSET, HALF, HALF_S4, TABLE, TABLE_WIDE, TRELLIS = range(10)
"""Literals of kernels."""
TABLES = {TABLE: 6, TABLE_WIDE: 8, TRELLIS: 6}
"""Kinds whose stored integers are indices of a table -> bits of its entries plus half their range, which are multiplied."""
CODED = {HALF_S4: 0.5, TRELLIS: 1.0}
"""Kinds with scales of four bits -> what those of rows are multiplied by."""
ARRAYS = {
    "scale": "scales", "zero": "zeros", "offset": "zeros", "super_scale": "super_scales", "super_offset": "super_offsets",
    "table": "zeros",
}  # fmt: skip
"""Arrays of a codec, and the arguments that say where they are."""
SCALES_AHEAD = 512
"""Bytes of scales: those of 2048 channels with groups of 128.  So thin a stream no processor foresees in time."""


def group_kind(codec: Codec) -> int:
    """The literal of an integer codec."""
    if codec.kind == "s4":
        return HALF_S4
    if codec.kind == "trellis":
        return TRELLIS
    if codec.kind == "table":
        return TABLE_WIDE if codec.wide else TABLE
    if codec.kind == "two-level":
        return TWO_LEVELS if codec.symmetric else TWO_LEVELS_OFFSET
    return {"symmetric": SYMMETRIC, "integer": ZERO, "offset": OFFSET, "half": HALF}[codec.zero_kind]


def multiplied_bits(bits: int, kind: int) -> int:
    """Bits of the integers that are multiplied, of weights with `bits` stored ones: `Codec.multiplied_bits` from literals."""
    return TABLES.get(kind, bits)


def entries(bits: int, kind: int) -> int:
    """Entries of the table of a block, of a kind in TABLES."""
    return 1 << bits + (kind == TRELLIS)


def group_args(codec: Codec, rows: int, columns: int, address: Callable[[str], int]) -> dict[str, int]:
    """The arguments that say where the numbers of groups are: addresses, which `address` knows by the names of the codec's
    arrays, and bytes from one block of output channels, and from one group, to the next."""
    parts = codec.parts(rows, columns)
    nbytes, (blocks, groups, _) = parts["scale"].nbytes, parts["scale"].shape
    args = {"scales_block": nbytes // blocks, "scales_step": nbytes // (blocks * groups) if codec.group_size else 0}
    if "super_scale" in parts:
        args["super_block"] = parts["super_scale"].nbytes // blocks
    return args | {ARRAYS[name]: address(name) for name in parts if name in ARRAYS}


@dataclass(frozen=True)
class GroupAddresses:
    """Where the numbers of the groups of a block of weights are: of the first, and bytes from one group to the next; where what
    they are multiplied by is, and the chunks of a group.

    rows   of scales of four bits: vectors of what is multiplied by a code's share, for each row
    """

    scales: Any
    scales_step: Any
    zeros: Any
    zeros_step: Any
    super_scales: Any
    super_offsets: Any
    chunks: Any
    rows: tuple[Any, ...]


@dataclass(frozen=True)
class GroupNumbers:
    """Vectors of f32, one lane for an output channel: the scale, and what sum_x is multiplied by, None where nothing is."""

    scale: Any
    shift: Any


class Groups:
    """Emits the code for groups of one kind, in vectors of `lanes`.

    half_chunks   whether groups are half a chunk, not whole ones
    zero_center   what is taken off the integers all the same where there are zero points
    one_chunk     whether groups are known to be one chunk, so that a constant says how far apart their numbers are
    """

    def __init__(
        self, kind: int, bits: int, lanes: int, half_chunks: bool = False, zero_center: int = 0, one_chunk: bool = False
    ) -> None:
        self.kind, self.lanes, self.half_chunks, self.zero_center = kind, lanes, half_chunks, zero_center
        self.one_chunk = one_chunk
        self.two_levels, self.offsets = kind in (TWO_LEVELS, TWO_LEVELS_OFFSET), kind in (OFFSET, TWO_LEVELS_OFFSET)
        self.ints, self.floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        self.taken = 0 if kind == ZERO else 1 << (multiplied_bits(bits, kind) - 1)

    def addresses(self, b: Any, record: Any, block: Any) -> GroupAddresses:
        """Those of block `block`."""

        def of(field: Any) -> Any:
            return field.load(b, record)

        def at_block(field: Any, step: Any) -> Any:
            return b.add(of(field), b.mul(block, step))

        # A zero point is one byte beside an f16 scale; what else there is has the size of a scale.
        half = ir.Constant(I64, int(self.kind == ZERO))
        block_step, step, super_step = of(ProductArgs.scales_block), of(ProductArgs.scales_step), of(ProductArgs.super_block)
        if self.one_chunk:
            step = ir.Constant(I64, ROWS // 2 if self.kind in CODED else ROWS if self.two_levels else 2 * ROWS)
        return GroupAddresses(
            at_block(ProductArgs.scales, block_step), step,
            at_block(ProductArgs.zeros, b.lshr(block_step, half)), b.lshr(step, half),
            at_block(ProductArgs.super_scales, super_step), at_block(ProductArgs.super_offsets, super_step),
            of(ProductArgs.chunks_per_block), self._row_scales(b, at_block(ProductArgs.super_scales, super_step)),
        )  # fmt: skip

    def _row_scales(self, b: Any, base: Any) -> tuple[Any, ...]:
        if self.kind not in CODED:
            return ()
        places = (plus(b, base, 2 * self.lanes * part) for part in range(ROWS // self.lanes))
        scales = (b.fpext(load(b, place, ir.VectorType(F16, self.lanes), 2), self.floats) for place in places)
        return tuple(b.fmul(scale, constant(self.floats, CODED[self.kind])) for scale in scales)

    def load(self, b: Any, addresses: GroupAddresses, index: Any, part: int, ahead: bool = False) -> GroupNumbers:
        """The numbers of activation block `index` for rows [part * lanes, (part + 1) * lanes); `ahead`: also asks for later
        ones."""

        def of_groups(base: Any, step: Any, kind: Any) -> Any:
            return self._numbers(b, base, step, index, part, kind, ahead)

        if self.kind in CODED:
            return GroupNumbers(b.fmul(self._coded(b, addresses, index, part, ahead), addresses.rows[part]), None)
        if self.two_levels:
            chunk = b.mul(index, ir.Constant(I64, 1) if self.one_chunk else addresses.chunks)
            chunk = b.lshr(index, ir.Constant(I64, 1)) if self.half_chunks else chunk
            which, step = b.udiv(chunk, ir.Constant(I64, SUPER_SIZE // CHUNK)), ir.Constant(I64, 2 * ROWS)
            scale = b.sitofp(b.sext(of_groups(addresses.scales, addresses.scales_step, I8), self.ints), self.floats)
            scale = b.fmul(scale, b.fpext(self._numbers(b, addresses.super_scales, step, which, part, F16), self.floats))
        else:
            scale = b.fpext(of_groups(addresses.scales, addresses.scales_step, F16), self.floats)
        if self.kind == HALF:
            return GroupNumbers(b.fmul(scale, constant(self.floats, 0.5)), None)
        if self.kind in (SYMMETRIC, TWO_LEVELS, *TABLES):
            return GroupNumbers(scale, None)
        stored = of_groups(addresses.zeros, addresses.zeros_step, F16 if self.kind == OFFSET else I8)
        taken = constant(self.floats, float(self.taken))
        if self.kind == OFFSET:
            return GroupNumbers(scale, self._fma(b, scale, taken, b.fpext(stored, self.floats)))
        zeros = b.uitofp(b.zext(stored, self.ints), self.floats)
        if self.kind == TWO_LEVELS_OFFSET:
            above = b.fpext(self._numbers(b, addresses.super_offsets, step, which, part, F16), self.floats)
            return GroupNumbers(scale, self._fma(b, scale, taken, b.fmul(zeros, above)))
        center = constant(self.floats, float(self.zero_center))
        return GroupNumbers(scale, b.fsub(center, zeros) if self.zero_center else b.fneg(zeros))

    def _coded(self, b: Any, addresses: GroupAddresses, index: Any, part: int, ahead: bool) -> Any:
        """What the codes of a group's scales stand for: those of rows 0 to 7 lie in low halves of bytes, the others in high."""
        address = b.add(addresses.scales, b.mul(index, addresses.scales_step))
        if ahead and not part:
            prefetch(b, plus(b, address, SCALES_AHEAD // 4), LINE, level=2)
        count, first = min(self.lanes, ROWS // 2), part * self.lanes
        octets = ir.VectorType(I8, count)
        if self.lanes == 8:
            stored = b.zext(load(b, address, octets, 1), self.ints)
            moved = b.shl(stored, constant(self.ints, 17 if part else 21))
            quarters = b.and_(moved, constant(self.ints, 15 << 21))
            return b.bitcast(b.sub(constant(self.ints, 0x3F800000), quarters), self.floats)
        stored = load(b, plus(b, address, first % (ROWS // 2)), octets, 1)
        low, high = b.and_(stored, constant(octets, 15)), b.lshr(stored, constant(octets, 4))
        if self.lanes == ROWS:
            codes = b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, ROWS), list(range(ROWS))))
        else:
            codes = high if first >= ROWS // 2 else low
        quarters = b.shl(b.zext(codes, self.ints), constant(self.ints, 21))
        return b.bitcast(b.sub(constant(self.ints, 0x3F800000), quarters), self.floats)

    def _numbers(self, b: Any, base: Any, step: Any, index: Any, part: int, kind: Any, ahead: bool = False) -> Any:
        size = 2 if kind is F16 else 1
        address = b.add(b.add(base, b.mul(index, step)), ir.Constant(I64, size * self.lanes * part))
        if ahead and not part:
            prefetch(b, plus(b, address, SCALES_AHEAD * size // 2), LINE, level=2)
        return load(b, address, ir.VectorType(kind, self.lanes), size)

    def added(self, b: Any, numbers: GroupNumbers, total: Any, sum_x: Callable[[], Any], factor: Any, to: Any) -> Any:
        """`to` plus the product of a group.

        total    its sum, i32
        sum_x    emits the sum of the token's integers, i32 in all lanes, where it is wanted
        factor   the token's scale, f32
        """
        if self.kind in (HALF, HALF_S4):
            # 255 times 15 bits times 128 channels stay below 2^31.
            total = b.add(b.shl(total, constant(self.ints, 1)), sum_x())
        value, factor = b.sitofp(total, self.floats), splat(b, factor, self.floats)
        if numbers.shift is None:
            return self._fma(b, value, b.fmul(numbers.scale, factor), to)
        sums = b.sitofp(sum_x(), self.floats)
        if self.offsets:
            return self._fma(b, self._fma(b, value, numbers.scale, b.fmul(numbers.shift, sums)), factor, to)
        return self._fma(b, self._fma(b, numbers.shift, sums, value), b.fmul(numbers.scale, factor), to)

    def _fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        return call(b, f"llvm.fmuladd.v{self.lanes}f32", self.floats, x, y, z)
