"""Products on a matrix unit (matrix_unit.py) of weights with several scales in a row, applied while the unit multiplies.

The integer sums of an activation block leave the unit before they are scaled: 32 rows by 32 output channels, 64 vectors.  To
scale them takes about as long as to multiply, in other parts of the processor, which look no further ahead than some hundred
instructions.  So the instructions that multiply an activation block lie between those that scale the sums of the one before,
and there is room for the sums of both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from edgeq.format.codec import CHUNK, LINE, QUADS, ROWS
from edgeq.targets.cpu.jit.deferred import cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import F32, I32, I64, VF32, VI32, constant, load, splat, store
from edgeq.targets.cpu.kernels.args import ONE_CHUNK, ProductArgs
from edgeq.targets.cpu.kernels.products.groups import Groups
from edgeq.targets.cpu.kernels.products.matmul import BLOCK_BYTES
from edgeq.targets.cpu.kernels.products.matrix_unit import (
    ROW_BYTES,
    SIDE,
    SIGNED,
    TILE_BYTES,
    UNSIGNED,
    C,
    clear,
    keep,
    multiply,
)
from edgeq.targets.cpu.kernels.products.tiles import at, chunks_of, plus

PANEL = 2 * SIDE
"""Rows that are multiplied with two blocks at once."""
SUMS_BYTES = len(C) * TILE_BYTES
"""Integer sums of a panel with two blocks, or as many floats, [2][PANEL][16].  Activations of 16 bits have sums of low bytes,
then of high ones."""
CHUNK_BYTES = LINE * QUADS
"""A chunk of a block of weights, unpacked."""
PIECES = 4
"""In which the bytes of an activation block are multiplied; rows of another one are scaled between them."""


def step_bytes(extent: int) -> int:
    """Bytes of a row that the unit multiplies at once."""
    return CHUNK if extent == ONE_CHUNK else ROW_BYTES


class GroupProducts:
    """Emits the products of up to PANEL rows with two blocks of unpacked weights, less what lies in the middle of them."""

    def __init__(self, bits: int, mode16: int, group_kind: int, extent: int) -> None:
        self.bytes = 1 + mode16
        self.groups, self.extent = Groups(group_kind, bits, ROWS, one_chunk=extent == ONE_CHUNK), extent
        self.instruction = SIGNED if self.groups.taken else UNSIGNED

    def emit(self, b: Any, record: Any, blocks: Any, weights: Any, rows: Any, room: Any, results: Any) -> None:
        """room: of the sums of two activation blocks."""

        def of(field: Any) -> Any:
            return field.load(b, record)

        first, self.count = cgutils.unpack_tuple(b, rows, 2)
        self.weights, self.results = cgutils.unpack_tuple(b, weights, 2), results
        self.stride, self.blocks = of(ProductArgs.x_stride), of(ProductArgs.x_blocks)
        self.chunks, self.per_block = of(ProductArgs.chunks), of(ProductArgs.chunks_per_block)
        x = b.add(of(ProductArgs.x), b.mul(first, self.stride))
        self.planes = [x, b.add(x, b.lshr(self.stride, ir.Constant(I64, 1)))][: self.bytes]
        # Scale and sum of a row's activation block, 4 bytes each.
        self.row_numbers = b.shl(self.blocks, ir.Constant(I64, 2))
        numbers = b.mul(first, self.row_numbers)
        self.x_scales, self.x_sums = b.add(of(ProductArgs.x_scales), numbers), b.add(of(ProductArgs.x_sums), numbers)
        self.addresses = [self.groups.addresses(b, record, block) for block in cgutils.unpack_tuple(b, blocks, 2)]
        for start in range(0, SUMS_BYTES, BLOCK_BYTES):
            store(b, constant(VF32, 0.0), plus(b, results, start), 4)
        # Bytes from a row to the first and to the second A.
        none, side = ir.Constant(I64, 0), ir.Constant(I64, SIDE)
        second = b.mul(side, self.stride)
        with b.if_else(b.icmp_signed("<", self.count, ir.Constant(I64, PANEL))) as (few, whole):
            with few, b.if_else(b.icmp_signed("<=", self.count, side)) as (one, both):
                with one:
                    self._few(b, room, [none])
                with both:
                    self._few(b, room, [none, second])
            with whole:
                self._panel(b, room, [none, second])

    def _few(self, b: Any, room: Any, starts: list[Any]) -> None:
        """Fewer rows than a panel has, an activation block after the other."""
        with cgutils.for_range(b, self.blocks) as loop:
            for piece in self._pieces(b, loop.index, room, starts):
                piece()
            scale = self._scaled(b, loop.index, room)
            with cgutils.for_range(b, self.count) as rows:
                scale(rows.index)

    def _panel(self, b: Any, room: Any, starts: list[Any]) -> None:
        """A whole panel: an activation block is scaled while the next one is multiplied; the last is multiplied once more."""
        one = ir.Constant(I64, 1)
        for piece in self._pieces(b, ir.Constant(I64, 0), room, starts):
            piece()
        turns = PIECES * self.bytes
        last, rows = b.sub(self.blocks, one), PANEL // turns
        with cgutils.for_range(b, self.blocks) as loop:
            odd = b.and_(loop.index, one)
            here, there = (at(b, room, which, self.bytes * SUMS_BYTES) for which in (odd, b.xor(odd, one)))
            following = b.select(b.icmp_signed("<", loop.index, last), b.add(loop.index, one), last)
            *pieces, store_last = self._pieces(b, following, there, starts)
            scale = self._scaled(b, loop.index, here)
            for turn in range(turns):
                # A load waits for stores before it whose addresses end in the same bits: no row is scaled right after sums
                # of the same row are stored, beside which it lies.
                if turn < len(pieces):
                    pieces[turn]()
                for t in range(turn * rows, (turn + 1) * rows):
                    scale(ir.Constant(I64, t))
            store_last()

    def _pieces(self, b: Any, index: Any, sums: Any, starts: list[Any]) -> list[Callable[[], None]]:
        """What emits activation block `index`; of all its bytes the first step, the others, the sums of each A, which start so
        many bytes after the first row."""
        first, inside = (index, None) if self.extent == ONE_CHUNK else chunks_of(b, index, self.chunks, self.per_block)
        weights = [at(b, address, first, CHUNK_BYTES) for address in self.weights]

        def step(x: Any, number: Any) -> None:
            rows = [at(b, b.add(x, start), number, ROW_BYTES) for start in starts]
            multiply(b, self.instruction, rows, self.stride, [at(b, address, number, TILE_BYTES) for address in weights])

        def begin(x: Any) -> None:
            clear(b, C[: 2 * len(starts)])
            step(x, ir.Constant(I64, 0))

        def go_on(x: Any) -> None:
            if inside is not None:
                steps = b.lshr(plus(b, inside, 1), ir.Constant(I64, 1))
                with cgutils.for_range(b, b.sub(steps, ir.Constant(I64, 1))) as loop:
                    step(x, plus(b, loop.index, 1))

        pieces = list[Callable[[], None]]()
        for byte, plane in enumerate(self.planes):
            x, out = at(b, plane, first, CHUNK), plus(b, sums, byte * SUMS_BYTES)
            pieces += [partial(begin, x), partial(go_on, x)]
            pieces += [partial(keep, b, C[2 * i : 2 * i + 2], out) for i in range(len(starts))]
        return pieces

    def _scaled(self, b: Any, index: Any, sums: Any) -> Callable[[Any], None]:
        """What emits for a row that its sums of an activation block, times scales, are added to its results."""
        numbers = [self.groups.load(b, each, index, 0) for each in self.addresses]
        number = b.shl(index, ir.Constant(I64, 2))

        def scale(t: Any) -> None:
            here = b.add(number, b.mul(t, self.row_numbers))
            factor, added = load(b, b.add(self.x_scales, here), F32, 4), []

            def sum_x() -> Any:
                return splat(b, load(b, b.add(self.x_sums, here), I32, 4), VI32)

            for i in range(2):
                place, to = (at(b, plus(b, of, 2 * i * TILE_BYTES), t, BLOCK_BYTES) for of in (sums, self.results))
                total = load(b, place, VI32, 4)
                if self.bytes == 2:
                    total = b.add(b.shl(load(b, plus(b, place, SUMS_BYTES), VI32, 4), constant(VI32, 8)), total)
                added.append((self.groups.added(b, numbers[i], total, sum_x, factor, load(b, to, VF32, 4)), to))
            for result, to in added:
                store(b, result, to, 4)

        return scale


def group_products(bits: int, mode16: int, group_kind: int, extent: int) -> Any:
    """A function: (args, blocks, weights, rows, room, results): the products of `here` rows from row r on with blocks n and
    `other`, whose unpacked weights lie at two addresses, f32 [2][PANEL][16]."""

    @intrinsic
    def products(typing: Any, args: Any, blocks: Any, weights: Any, rows: Any, room: Any, results: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            GroupProducts(bits, mode16, group_kind, extent).emit(b, *values)
            return context.get_dummy_value()

        pair = types.UniTuple(types.intp, 2)
        return types.void(args, pair, pair, pair, types.intp, types.intp), codegen

    return products
