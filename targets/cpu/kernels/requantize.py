"""Weights rounded anew from their master, for other scales of the input channels: the rule of edgeq/rounding.py, bit for bit,
in the order of the file.

A vector holds one channel of the sixteen rows of a block, so a group's range, scale and zero point need nothing across lanes.
A span of channels, at least a chunk and at least a group, waits in the scratch of a thread between the pass that finds its
range and the one that rounds it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from edgeq.codec import CHUNK, LINE, PLANES, QUADS, ROWS, Codec
from edgeq.errors import UnsupportedError
from edgeq.quantization import LARGEST_SCALE, SMALLEST_RANGE
from edgeq.records import Weight
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.compile import COUNT, Kernel, inline, word
from edgeq.targets.cpu.jit.optable import FLOAT_KINDS
from edgeq.targets.cpu.jit.simd import (
    I32,
    I64,
    VF32,
    VI32,
    call,
    constant,
    get_f16s,
    get_f32,
    get_i32,
    get_i64,
    get_u8s,
    lane_bf16,
    lane_bytes,
    lane_f16,
    load,
    put_f16s,
    put_u8s,
    store,
    vabs,
    vadd,
    vdiv,
    vfirst,
    vload,
    vmax,
    vmin,
    vmul,
    vrint,
    vround_f16,
    vsplat,
    vstore,
    vsub,
)
from edgeq.targets.cpu.kernels.microkernel_int import F16_KIND, F32_KIND

BYTES_KIND = 1

# Words of a table row of `requantize`.  Of every array: address, bytes from one block of 16 rows to the next.
MASTER, MASTER_SCALE, MASTER_ZERO, MASTER_GROUP = 2, 4, 6, 8
FACTORS, SIZE, GROUP, SCRATCH, SCRATCH_BYTES = 9, 10, 12, 13, 14
"""Factors f32 [columns]; rows and columns; channels of a group; scratch, bytes of a thread."""
Q, SCALE, ZERO = 15, 17, 19
"""The result."""


def literals(master: Weight, codec: Codec) -> tuple[int, int, int, int]:
    """Literals of the kernel that rounds `master` to `codec`.  UnsupportedError: it does not read such a master."""
    kind = master.codec.kind
    if kind == "int" and master.codec.bits != 8:
        raise UnsupportedError(
            f"the cpu target reads masters of i8, f16, bf16 and f32, not {master.codec.name}; run with --target reference"
        )
    return BYTES_KIND if kind == "int" else FLOAT_KINDS[kind], int(master.codec.symmetric), codec.bits, int(codec.symmetric)


def span_of(columns: int, group: int) -> int:
    """Channels that are rounded together: whole groups and whole chunks."""
    return max(group, CHUNK) if group else padded(columns, CHUNK)


def scratch_bytes(columns: int, group: int) -> int:
    return 4 * ROWS * padded(span_of(columns, group), CHUNK)


@intrinsic(prefer_literal=True)  # type: ignore[misc]
def pack_chunk(typing: Any, bits: Any, values: Any, out: Any) -> Any:
    """Sixteen rows of 32 channels, f32 [channel][row] of whole numbers below 2^bits, as the lines of a chunk.

    Literal: bits.
    """
    planes = PLANES[bits.literal_value]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, out = args[1:]

        def quad(j: int) -> Any:
            word: Any = None
            for c in range(4):
                at = b.add(values, ir.Constant(I64, LINE * (4 * j + c)))
                channel = b.fptosi(load(b, at, VF32, 4), VI32)
                word = channel if word is None else b.or_(word, b.shl(channel, constant(VI32, 8 * c)))
            return word

        quads = [quad(j) for j in range(QUADS)]
        line, low = 0, 0
        for plane in planes:
            per_line, every = 8 // plane, ((1 << plane) - 1) * 0x01010101
            for i in range(plane):
                packed: Any = None
                for k in range(per_line):
                    piece = quads[i * per_line + k]
                    # The bytes of a quad do not run into each other: each is masked before it is moved up.
                    piece = b.and_(b.lshr(piece, constant(VI32, low)), constant(VI32, every))
                    piece = b.shl(piece, constant(VI32, plane * k))
                    packed = piece if packed is None else b.or_(packed, piece)
                store(b, packed, b.add(out, ir.Constant(I64, LINE * (line + i))), 4)
            line, low = line + plane, low + plane
        return context.get_dummy_value()

    return types.void(bits, types.intp, types.intp), codegen


@inline
def at_block(row, index, n):  # type: ignore[no-untyped-def]
    """Where block n of the array begins whose address is word `index`."""
    return word(row, index) + n * word(row, index + 1)


@inline
def master_channel(kind, q, c):  # type: ignore[no-untyped-def]
    """Channel c of the block at q: stored bytes, or values."""
    if kind == BYTES_KIND:
        return lane_bytes(q + c // 4 * 64, c % 4)
    if kind == F32_KIND:
        return vload(q + c * 64)
    if kind == F16_KIND:
        return lane_f16(q + c // 2 * 64, c % 2)
    return lane_bf16(q + c // 2 * 64, c % 2)


def requantize(kind: int, master_symmetric: int, bits: int, symmetric: int) -> Kernel:
    """A master times its factors, rounded to integers of `bits` bits."""
    top = float((1 << bits) - 1)
    center = float(1 << (bits - 1))
    least, most = SMALLEST_RANGE, LARGEST_SCALE

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        rows, columns, group = word(row, SIZE), word(row, SIZE + 1), word(row, GROUP)
        factors, values = word(row, FACTORS), word(row, SCRATCH) + thread * word(row, SCRATCH_BYTES)
        master_group = word(row, MASTER_GROUP)
        blocks, span = (rows + 15) // 16, (max(group, 32) + 31) // 32 * 32
        none, full = vsplat(0.0), vsplat(top)
        for n in range(blocks * part // parts, blocks * (part + 1) // parts):
            master, lanes = at_block(row, MASTER, n), rows - 16 * n
            offset, factor = vsplat(128.0), vsplat(1.0)
            for start in range(0, columns, span):
                stop = min(start + span, columns)
                for first in range(start, stop, group):
                    last = min(first + group, stop)
                    low, high = vsplat(3e38), vsplat(-3e38)
                    for some in range(first, last, 16):
                        if kind == 1:
                            g = some // master_group
                            factor = get_f16s(at_block(row, MASTER_SCALE, n) + 32 * g)
                            if not master_symmetric:
                                offset = get_u8s(at_block(row, MASTER_ZERO, n) + 16 * g)
                        for c in range(some, min(some + 16, last)):
                            w = master_channel(kind, master, c)
                            if kind == 1:
                                w = vmul(vsub(w, offset), factor)
                            w = vmul(w, vsplat(get_f32(factors + 4 * c)))
                            vstore(values + 64 * (c - start), w)
                            if symmetric:
                                w = vabs(w)
                            else:
                                low = vmin(w, low)
                            high = vmax(w, high)
                    if symmetric:
                        width, steps, zero = high, vsplat(center - 1.0), vsplat(center)
                    else:
                        width, steps, zero = vsub(high, low), full, none
                    scale = vround_f16(vmin(vdiv(vmax(width, vsplat(least)), steps), vsplat(most)))
                    put_f16s(at_block(row, SCALE, n) + 32 * (first // group), vfirst(scale, lanes))
                    if not symmetric:
                        zero = vmin(vmax(vsub(none, vrint(vdiv(low, scale))), none), full)
                        put_u8s(at_block(row, ZERO, n) + 16 * (first // group), vfirst(zero, lanes))
                    for c in range(first, last):
                        at = values + 64 * (c - start)
                        # A number that is none becomes 0 here: `vmax` keeps its second argument then.
                        q = vmin(vmax(vadd(vrint(vdiv(vload(at), scale)), zero), none), full)
                        vstore(at, vfirst(q, lanes))
                chunks = (stop - start + 31) // 32
                for c in range(stop - start, 32 * chunks):
                    vstore(values + 64 * c, none)
                for chunk in range(chunks):
                    out = at_block(row, Q, n) + (start // 32 + chunk) * (64 * bits)
                    pack_chunk(bits, values + 2048 * chunk, out)

    return kernel


def add_squares() -> Kernel:
    """Row words: COUNT, 2 x, 3 bytes of its rows, 4 i32 which rows count, 5 where the address of all sums is, 6 bytes from
    there to these, 7 channels.

    One row after another, so that the sums do not depend on how many rows run together.
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        pieces = (word(row, 7) + 15) // 16
        x, sums = word(row, 2), get_i64(word(row, 5)) + word(row, 6)
        for piece in range(pieces * part // parts, pieces * (part + 1) // parts):
            total = vload(sums + 64 * piece)
            for r in range(get_i64(word(row, COUNT))):
                if get_i32(word(row, 4) + 4 * r) != 0:
                    value = vload(x + r * word(row, 3) + 64 * piece)
                    total = vadd(total, vmul(value, value))
            vstore(sums + 64 * piece, total)

    return kernel


@intrinsic  # type: ignore[misc]
def advise(typing: Any, address: Any, length: Any, advice: Any) -> Any:
    """The system call of that name (madvise): of its answer nothing depends."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        call(b, "madvise", I32, args[0], args[1], b.trunc(args[2], I32))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


def release() -> Kernel:
    """Row words: COUNT, 2 address of pages of the file, 3 bytes, 4 the advice to the system that they are not needed now."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        if part == 0:
            advise(word(row, 2), word(row, 3), word(row, 4))

    return kernel
