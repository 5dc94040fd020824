"""The matrix unit of Intel's processors, AMX: eight registers of 16 rows of 64 bytes, of which one instruction multiplies two.

A product C += A B takes of A [16][64] int8 (32 bf16) a row for each row of C, of B four (two) neighbouring channels for each
of 16 columns side by side: a quad of the file's order (edgeq/format/codec.py) is a row of B as it lies.  Registers 0 to 3 are
the four C of two A, 4 and 5, and two B, 6 and 7 (Intel, Architecture Instruction Set Extensions, chapter 3).

A row of A may be half as long, a group of 32 channels; B then has 8 rows.

Registers have the size that the last `configure` gave them; a kernel ends with `release`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import cgutils
from edgeq.targets.cpu.jit.simd import ADDRESS, I8, I16, I64, VI32, VOID, call, constant, primitive, store
from edgeq.targets.cpu.kernels.products.tiles import at, plus

SIDE, ROW_BYTES = 16, 64
"""Rows of a register, and its bytes in a row: also the columns of C, and the bytes of its row."""
TILE_BYTES = SIDE * ROW_BYTES
CONFIGURATION_BYTES = 64
C, A, B = (0, 1, 2, 3), (4, 5), (6, 7)


def _register(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I8.as_pointer())


def _load_register(b: Any, number: int, address: Any, stride: Any) -> None:
    call(b, "llvm.x86.tileloadd64", ir.VoidType(), _register(number), _pointer(b, address), stride)


def clear(b: Any, numbers: Iterable[int]) -> None:
    """Those C are 0."""
    for number in numbers:
        call(b, "llvm.x86.tilezero", ir.VoidType(), _register(number))


def multiply(b: Any, instruction: str, rows: Sequence[Any], stride: Any, columns: Sequence[Any]) -> None:
    """C += the A at `rows`, one or both, times the two B at `columns`."""
    for number, address in zip(A, rows, strict=False):
        _load_register(b, number, address, stride)
    for number, address in zip(B, columns, strict=True):
        _load_register(b, number, address, ir.Constant(I64, ROW_BYTES))
    for i, number in enumerate(C[: 2 * len(rows)]):
        call(b, instruction, ir.VoidType(), *(_register(n) for n in (number, A[i // 2], B[i % 2])))


def keep(b: Any, numbers: Iterable[int], out: Any) -> None:
    """Those C to their places in out [2][32][16]."""
    for number in numbers:
        call(
            b, "llvm.x86.tilestored64", ir.VoidType(), _register(number), _pointer(b, _place(b, number, out)),
            ir.Constant(I64, ROW_BYTES),
        )  # fmt: skip


def _place(b: Any, number: int, out: Any) -> Any:
    return plus(b, out, TILE_BYTES * (number % 2 * 2 + number // 2))


@primitive(VOID, ADDRESS, ADDRESS, ADDRESS)
def configure(b: Any, room: Any, rows: Any, step: Any) -> None:
    """Sizes: of both A together `rows` rows, at most 2 SIDE, of `step` bytes, ROW_BYTES or half of that; of B as many rows as
    that takes; of all else what there is.  If the first A has all rows the second has as many.  room: CONFIGURATION_BYTES."""
    side = ir.Constant(I64, SIDE)
    both = b.icmp_signed(">", rows, side)
    first, second = b.select(both, side, rows), b.select(both, b.sub(rows, side), rows)
    store(b, constant(VI32, 0), room)
    store(b, ir.Constant(I8, 1), room)
    of_b = b.lshr(step, ir.Constant(I64, 2))
    counts = [first, first, second, second, first, second, of_b, of_b]
    for number, count in enumerate(counts):
        width = b.trunc(step, I16) if number in A else ir.Constant(I16, ROW_BYTES)
        store(b, width, plus(b, room, 16 + 2 * number))
        store(b, b.trunc(count, I8), plus(b, room, 48 + number))
    call(b, "llvm.x86.ldtilecfg", ir.VoidType(), _pointer(b, room))


@primitive(VOID)
def release(b: Any) -> None:
    call(b, "llvm.x86.tilerelease", ir.VoidType())


def _products(instruction: str, adds: bool = False) -> Any:
    def products(b: Any, first: Any, second: Any, stride: Any, weights: Any, other: Any, steps: Any, out: Any) -> None:
        if adds:
            for number in C:
                _load_register(b, number, _place(b, number, out), ir.Constant(I64, ROW_BYTES))
        else:
            clear(b, C)
        with cgutils.for_range(b, steps) as loop:
            rows = [at(b, address, loop.index, ROW_BYTES) for address in (first, second)]
            multiply(b, instruction, rows, stride, [at(b, address, loop.index, TILE_BYTES) for address in (weights, other)])
        keep(b, C, out)

    return products


SIGNED, UNSIGNED = "llvm.x86.tdpbssd", "llvm.x86.tdpbsud"
"""Instructions of products of 8 bits: rows are signed, columns are or are not."""
products_int8 = primitive(VOID, *[ADDRESS] * 7)(_products(UNSIGNED))
"""(first, second, stride, weights, other, steps, out): out int32 [2][32][16] = the rows of the two A, signed, by the columns of
the two B, unsigned, over `steps` times 64 channels.  A lie row by row, `stride` bytes apart, B tile by tile."""
products_bf16 = primitive(VOID, *[ADDRESS] * 7)(_products("llvm.x86.tdpbf16ps"))
"""The same for bf16 and float32, over `steps` times 32 channels."""
added_bf16 = primitive(VOID, *[ADDRESS] * 7)(_products("llvm.x86.tdpbf16ps", adds=True))
"""The same, added to what is there."""
