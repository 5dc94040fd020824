"""What an inner product is to the kernels around it: a tile of a few tokens and neighbouring blocks, emitted as LLVM IR."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import intrinsic, types
from edgeq.targets.cpu.jit.simd import I64


class Tile(Protocol):
    """Emits out f32 [blocks][tokens][16] = the weights of `blocks` blocks from block n on times `tokens` rows from row r.

    The rest is in the op record, `ProductArgs`.  `stores_result`, not 0: a tile of several blocks stores to y, or adds, itself.
    """

    tokens: int
    blocks: int

    def emit(self, b: Any, record: Any, n: Any, r: Any, out: Any, stores_result: Any) -> None: ...


def tile_function(tile: Tile) -> Any:
    """The tile as a function for kernels: (args, n, r, out, stores_result)."""

    @intrinsic
    def product(typing: Any, args: Any, n: Any, r: Any, out: Any, stores_result: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            tile.emit(b, *values)
            return context.get_dummy_value()

        return types.void(args, *[types.intp] * 4), codegen

    return product


def at(b: Any, base: Any, index: Any, step: int) -> Any:
    return b.add(base, b.mul(index, ir.Constant(I64, step)))


def plus(b: Any, address: Any, offset: int) -> Any:
    return b.add(address, ir.Constant(I64, offset))


def chunks_of(b: Any, index: Any, chunks: Any, per_block: Any) -> tuple[Any, Any]:
    """The first chunk of an activation block and how many it has: `per_block`, or those left of a row's `chunks`."""
    first = b.mul(index, per_block)
    left = b.sub(chunks, first)
    return first, b.select(b.icmp_unsigned("<", left, per_block), left, per_block)


def opaque(b: Any, value: Any, in_order: bool = False) -> Any:
    """`value`, of which the compiler sees no origin: a chain of additions stays one, where it would make a tree of them that
    needs more registers than there are.  `in_order`: it is computed after all such values before it."""
    register = "x" if b.module.triple.startswith(("x86", "i386")) else "w"
    register = register if isinstance(value.type, ir.VectorType) else "r"
    return b.asm(ir.FunctionType(value.type, [value.type]), "", f"={register},0", [value], in_order)


def loads_in_order(b: Any) -> None:
    """What is loaded after it stays after it, and after all values before that are `opaque` and in order."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


@contextmanager
def scaled_range(b: Any, count: Any, scale: int) -> Iterator[Any]:
    """A loop: numbers below `count`, which is kept times `scale`, a power of 2.

    An address of x86 adds a number times 1, 2, 4 or 8 to another for nothing; LLVM, where it sees the loop's number, keeps an
    address for every array and adds to each.
    """
    start, body, end = b.block, b.append_basic_block(), b.append_basic_block()
    last, zero = b.mul(count, ir.Constant(I64, scale)), ir.Constant(I64, 0)
    b.cbranch(b.icmp_signed("<", zero, last), body, end)
    b.position_at_end(body)
    number = b.phi(I64)
    number.add_incoming(zero, start)
    scaled = opaque(b, number)
    yield b.lshr(scaled, ir.Constant(I64, scale.bit_length() - 1), flags=["exact"])
    following = plus(b, scaled, scale)
    number.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, last), body, end)
    b.position_at_end(end)
