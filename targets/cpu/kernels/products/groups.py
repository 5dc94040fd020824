"""What the groups of weights have beside their integers, and how a sum of integers becomes a product with it.

For a group of a row, with sum = sum of (q - taken) x over its channels, exact, and sum_x = the sum of x, both of integers:

    SYMMETRIC   y += scale * xscale * sum                             taken = 2^(bits - 1)
    ZERO        y += scale * xscale * (sum - zero * sum_x)            taken = 0
    OFFSET      y += xscale * (scale * sum + shift * sum_x)           taken = 2^(bits - 1), shift = offset + taken * scale

`taken` lies in the middle of the integers, so that an offset near -taken * scale, as nearly all are, cancels before anything is
multiplied with activations.  taken * scale is exact.

A kernel loads the numbers of a group once for all tokens (`Groups.load`) and applies them to each (`Groups.added`); only here
does it matter how they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, Codec, ZeroKind
from edgeq.targets.cpu.jit.simd import F16, F32, I8, I32, I64, call, constant, load, prefetch, splat
from edgeq.targets.cpu.kernels.args import ProductArgs
from edgeq.targets.cpu.kernels.products.tiles import plus

SYMMETRIC, ZERO, OFFSET = 0, 1, 2
"""Literals of kernels."""
GROUP_KINDS: Mapping[ZeroKind, int] = {"symmetric": SYMMETRIC, "integer": ZERO, "offset": OFFSET}
SCALES_AHEAD = 512
"""Bytes of scales: those of 2048 channels with groups of 128.  So thin a stream no processor foresees in time."""


def group_kind(codec: Codec) -> int:
    """The literal of an integer codec."""
    return GROUP_KINDS[codec.zero_kind]


def group_args(codec: Codec, rows: int, columns: int, address: Callable[[str], int]) -> dict[str, int]:
    """The arguments that say where the numbers of groups are: addresses, which `address` knows by the names of the codec's
    arrays, and bytes from one block of output channels, and from one group, to the next."""
    parts, args = codec.parts(rows, columns), dict[str, int]()
    for name, stored in (("scales", "scale"), ("zeros", "zero"), ("zeros", "offset")):
        if stored in parts:
            nbytes, (blocks, groups, _) = parts[stored].nbytes, parts[stored].shape
            step = nbytes // (blocks * groups) if codec.group_size else 0
            args |= {name: address(stored), f"{name}_block": nbytes // blocks, f"{name}_step": step}
    return args


@dataclass(frozen=True)
class GroupAddresses:
    """Where the numbers of the groups of a block of weights are: of the first, and bytes from one group to the next."""

    scales: Any
    scales_step: Any
    zeros: Any
    zeros_step: Any


@dataclass(frozen=True)
class GroupNumbers:
    """Vectors of f32, one lane for an output channel: the scale, and what sum_x is multiplied by, None where nothing is."""

    scale: Any
    shift: Any


class Groups:
    """Emits the code for groups of one kind, in vectors of `lanes`.

    zero_center   what is taken off the integers all the same where there are zero points
    """

    def __init__(self, kind: int, bits: int, lanes: int, zero_center: int = 0) -> None:
        self.kind, self.lanes, self.zero_center = kind, lanes, zero_center
        self.ints, self.floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        self.taken = 0 if kind == ZERO else 1 << (bits - 1)

    def addresses(self, b: Any, record: Any, block: Any) -> GroupAddresses:
        """Those of block `block`."""

        def of(field: Any) -> Any:
            return field.load(b, record)

        scales = b.add(of(ProductArgs.scales), b.mul(block, of(ProductArgs.scales_block)))
        zeros = b.add(of(ProductArgs.zeros), b.mul(block, of(ProductArgs.zeros_block)))
        return GroupAddresses(scales, of(ProductArgs.scales_step), zeros, of(ProductArgs.zeros_step))

    def load(self, b: Any, addresses: GroupAddresses, index: Any, part: int, ahead: bool = False) -> GroupNumbers:
        """The numbers of activation block `index` for rows [part * lanes, (part + 1) * lanes); `ahead`: also asks for later
        ones."""
        scale = b.fpext(self._numbers(b, addresses.scales, addresses.scales_step, index, part, F16, ahead), self.floats)
        if self.kind == SYMMETRIC:
            return GroupNumbers(scale, None)
        kind = I8 if self.kind == ZERO else F16
        stored = self._numbers(b, addresses.zeros, addresses.zeros_step, index, part, kind, ahead)
        if self.kind == OFFSET:
            taken = constant(self.floats, float(self.taken))
            return GroupNumbers(scale, b.fadd(b.fmul(scale, taken), b.fpext(stored, self.floats)))
        zeros = b.uitofp(b.zext(stored, self.ints), self.floats)
        center = constant(self.floats, float(self.zero_center))
        return GroupNumbers(scale, b.fsub(center, zeros) if self.zero_center else b.fneg(zeros))

    def _numbers(self, b: Any, base: Any, step: Any, index: Any, part: int, kind: Any, ahead: bool) -> Any:
        size = 2 if kind is F16 else 1
        address = b.add(b.add(base, b.mul(index, step)), ir.Constant(I64, size * self.lanes * part))
        if ahead and not part:
            prefetch(b, plus(b, address, SCALES_AHEAD * size // 2), LINE, level=2)
        return load(b, address, ir.VectorType(kind, self.lanes), size)

    def added(self, b: Any, numbers: GroupNumbers, total: Any, sum_x: Callable[[], Any], factor: Any, to: Any) -> Any:
        """`to` plus the product of a group.

        total    its sum, i32
        sum_x    emits the sum of the token's integers, i32, where it is wanted
        factor   the token's scale, f32
        """
        value, factor = b.sitofp(total, self.floats), splat(b, factor, self.floats)
        if self.kind == SYMMETRIC:
            return self._fma(b, value, b.fmul(numbers.scale, factor), to)
        sums = splat(b, b.sitofp(sum_x(), F32), self.floats)
        if self.kind == OFFSET:
            return self._fma(b, self._fma(b, value, numbers.scale, b.fmul(numbers.shift, sums)), factor, to)
        return self._fma(b, self._fma(b, numbers.shift, sums, value), b.fmul(numbers.scale, factor), to)

    def _fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        return call(b, f"llvm.fmuladd.v{self.lanes}f32", self.floats, x, y, z)
