"""Weights rounded again from their master, for other scales of the input channels: the rule of edgeq/format/quantization.py,
bit for bit, in the order of the file.

A vector holds one channel of the sixteen rows of a block, so a group's range, scale and zero point need nothing across lanes.
A span of channels, at least a chunk and at least a group, waits in the scratch of a thread between the pass that finds its
range and the one that rounds it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.errors import UnsupportedError
from edgeq.format.codec import CHUNK, LINE, PLANES, QUADS, ROWS, Codec
from edgeq.format.quantization import MAX_SCALE, MIN_RANGE
from edgeq.format.records import Weight
from edgeq.targets.cpu.jit.args import Args, nbytes, number, pointer
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline, intrinsic, literal_intrinsic, types
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
    put_octets,
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
from edgeq.targets.cpu.kernels.args import F16_KIND, F32_KIND, FLOAT_KINDS

BYTES_KIND = 1
MASTER_KINDS = {"int": BYTES_KIND, **FLOAT_KINDS}


def literals(master: Weight, codec: Codec) -> tuple[int, int, int, int]:
    """Literals of the kernel that rounds `master` to `codec`.  UnsupportedError: it does not read such a master."""
    kind = MASTER_KINDS.get(master.codec.kind)
    if kind is None or (kind == BYTES_KIND and master.codec.bits != 8):
        raise UnsupportedError(
            f"the cpu target reads masters of i8, f16, bf16 and f32, not {master.codec.name}; run with --target reference"
        )
    return kind, int(master.codec.symmetric), codec.bits, int(codec.symmetric)


def span_of(columns: int, group: int) -> int:
    """Channels that are rounded together: whole groups and whole chunks."""
    return max(group, CHUNK) if group else padded(columns, CHUNK)


def scratch_bytes(columns: int, group: int) -> int:
    return 4 * ROWS * padded(span_of(columns, group), CHUNK)


@literal_intrinsic
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
def master_channel(kind, q, c):
    """Channel c of the block at q: stored bytes, or values."""
    if kind == BYTES_KIND:
        return lane_bytes(q + c // 4 * 64, c % 4)
    if kind == F32_KIND:
        return vload(q + c * 64)
    if kind == F16_KIND:
        return lane_f16(q + c // 2 * 64, c % 2)
    return lane_bf16(q + c // 2 * 64, c % 2)


class RequantizeArgs(Args):
    """For every array its address and the bytes from one block of 16 output channels to the next.

    master_group, group   channels of a group
    factors               f32 [columns] that the master is multiplied by
    scratch_bytes         of every thread, from `scratch` on
    """

    master = pointer()
    master_block = nbytes()
    master_scales = pointer(0)
    master_scales_block = nbytes(0)
    master_zeros = pointer(0)
    master_zeros_block = nbytes(0)
    master_group = number()
    factors = pointer()
    output_channels = number()
    columns = number()
    group = number()
    scratch = pointer()
    scratch_bytes = nbytes()
    q = pointer()
    q_block = nbytes()
    scales = pointer()
    scales_block = nbytes()
    zeros = pointer(0)
    zeros_block = nbytes(0)


def requantize(kind: int, master_symmetric: int, bits: int, symmetric: int) -> Kernel:
    """A master times its factors, rounded to integers of `bits` bits."""
    top = float((1 << bits) - 1)
    center = float(1 << (bits - 1))
    least, most = MIN_RANGE, MAX_SCALE

    def kernel(record, part, parts, thread):
        args = RequantizeArgs(record)
        rows, columns, group = args.output_channels, args.columns, args.group
        factors, values = args.factors, args.scratch + thread * args.scratch_bytes
        master_group = args.master_group
        blocks, span = (rows + 15) // 16, (max(group, 32) + 31) // 32 * 32
        none, full = vsplat(0.0), vsplat(top)
        for n in range(blocks * part // parts, blocks * (part + 1) // parts):
            master, lanes = args.master + n * args.master_block, rows - 16 * n
            offset, factor = vsplat(128.0), vsplat(1.0)
            for start in range(0, columns, span):
                stop = min(start + span, columns)
                for first in range(start, stop, group):
                    last = min(first + group, stop)
                    low, high, invalid = vsplat(3e38), vsplat(-3e38), none
                    for some in range(first, last, 16):
                        if kind == 1:
                            g = some // master_group
                            factor = get_f16s(args.master_scales + n * args.master_scales_block + 32 * g)
                            if not master_symmetric:
                                offset = get_u8s(args.master_zeros + n * args.master_zeros_block + 16 * g)
                        for c in range(some, min(some + 16, last)):
                            w = master_channel(kind, master, c)
                            if kind == 1:
                                w = vmul(vsub(w, offset), factor)
                            w = vmul(w, vsplat(get_f32(factors + 4 * c)))
                            vstore(values + 64 * (c - start), w)
                            # 0, or NaN for what is not finite: `vmin` and `vmax` would pass over it.
                            invalid = vadd(invalid, vsub(w, w))
                            if symmetric:
                                w = vabs(w)
                            else:
                                low = vmin(w, low)
                            high = vmax(w, high)
                    if symmetric:
                        width, steps, zero = high, vsplat(center - 1.0), vsplat(center)
                    else:
                        width, steps, zero = vsub(high, low), full, none
                    scale = vmin(vdiv(vmax(width, vsplat(least)), steps), vsplat(most))
                    scale = vround_f16(vadd(scale, invalid))
                    put_f16s(args.scales + n * args.scales_block + 32 * (first // group), vfirst(scale, lanes))
                    if not symmetric:
                        zero = vmin(vmax(vsub(none, vrint(vdiv(low, scale))), none), full)
                        put_octets(args.zeros + n * args.zeros_block + 16 * (first // group), vfirst(zero, lanes))
                    for c in range(first, last):
                        at = values + 64 * (c - start)
                        # A number that is none becomes 0 here: `vmax` keeps its second argument then.
                        q = vmin(vmax(vadd(vrint(vdiv(vload(at), scale)), zero), none), full)
                        vstore(at, vfirst(q, lanes))
                chunks = (stop - start + 31) // 32
                for c in range(stop - start, 32 * chunks):
                    vstore(values + 64 * c, none)
                for chunk in range(chunks):
                    out = args.q + n * args.q_block + (start // 32 + chunk) * (64 * bits)
                    pack_chunk(bits, values + 2048 * chunk, out)

    return kernel


class SquaresArgs(Args):
    """counted i32: which rows count; sums_pointer: where the address of all sums lies; sums_offset: from there to these."""

    x = pointer()
    x_stride = nbytes()
    counted = pointer()
    sums_pointer = pointer()
    sums_offset = nbytes()
    columns = number()


def add_squares() -> Kernel:
    """Squares of x added to sums over rows.

    One row after another, so that the sums do not depend on how many rows run together.
    """

    def kernel(record, part, parts, thread):
        args = SquaresArgs(record)
        pieces = (args.columns + 15) // 16
        x, sums = args.x, get_i64(args.sums_pointer) + args.sums_offset
        for piece in range(pieces * part // parts, pieces * (part + 1) // parts):
            total = vload(sums + 64 * piece)
            for r in range(get_i64(args.rows)):
                if get_i32(args.counted + 4 * r) != 0:
                    value = vload(x + r * args.x_stride + 64 * piece)
                    total = vadd(total, vmul(value, value))
            vstore(sums + 64 * piece, total)

    return kernel


@intrinsic
def advise(typing: Any, address: Any, length: Any, advice: Any) -> Any:
    """The system call of that name (madvise): of its answer nothing depends."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        call(b, "madvise", I32, args[0], args[1], b.trunc(args[2], I32))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


class ReleaseArgs(Args):
    """pages of the file, which the system is told (`advice`) are not needed now."""

    pages = pointer()
    length = nbytes()
    advice = number()


def release() -> Kernel:
    """Lets pages of the file leave memory."""

    def kernel(record, part, parts, thread):
        args = ReleaseArgs(record)
        if part == 0:
            advise(args.pages, args.length, args.advice)

    return kernel
