"""Products with the thin matrices of a low-rank part: few rows or few columns, floats, read straight from the rows of x.  And
the thinnest, a split row.

Four partial sums, of every fourth column each, hide the latency of the additions also for a token alone.
"""

from __future__ import annotations

from edgeq.targets.cpu.jit.args import Args, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import LANES, get_f32, get_i64, lane_bf16, lane_f16, put_f32, vadd, vfma, vload, vsplat, vstore
from edgeq.targets.cpu.kernels.args import BF16_KIND, F32_KIND, ProductArgs
from edgeq.targets.cpu.kernels.products.matmul import SCRATCH_BYTES, finish, share


@inline
def column(kind, block, c):
    """Column c of sixteen rows."""
    if kind == F32_KIND:
        return vload(block + 64 * c)
    if kind == BF16_KIND:
        return lane_bf16(block + c // 2 * 64, c % 2)
    return lane_f16(block + c // 2 * 64, c % 2)


@inline
def one_token(kind, block, x, columns, out):
    """out f32 [16] = the block times x."""
    p, q, s, t = vsplat(0.0), vsplat(0.0), vsplat(0.0), vsplat(0.0)
    whole = columns // 4 * 4
    for c in range(0, whole, 4):
        p = vfma(column(kind, block, c), vsplat(get_f32(x + 4 * c)), p)
        q = vfma(column(kind, block, c + 1), vsplat(get_f32(x + 4 * c + 4)), q)
        s = vfma(column(kind, block, c + 2), vsplat(get_f32(x + 4 * c + 8)), s)
        t = vfma(column(kind, block, c + 3), vsplat(get_f32(x + 4 * c + 12)), t)
    for c in range(whole, columns):
        p = vfma(column(kind, block, c), vsplat(get_f32(x + 4 * c)), p)
    vstore(out, vadd(vadd(p, q), vadd(s, t)))


@inline
def two_tokens(kind, block, x, y, columns, out):
    """The same for x and for y, each in the order that it is added in alone."""
    p, q, s, t = vsplat(0.0), vsplat(0.0), vsplat(0.0), vsplat(0.0)
    e, f, g, h = p, q, s, t
    whole = columns // 4 * 4
    for c in range(0, whole, 4):
        w = column(kind, block, c)
        p, e = vfma(w, vsplat(get_f32(x + 4 * c)), p), vfma(w, vsplat(get_f32(y + 4 * c)), e)
        w = column(kind, block, c + 1)
        q, f = vfma(w, vsplat(get_f32(x + 4 * c + 4)), q), vfma(w, vsplat(get_f32(y + 4 * c + 4)), f)
        w = column(kind, block, c + 2)
        s, g = vfma(w, vsplat(get_f32(x + 4 * c + 8)), s), vfma(w, vsplat(get_f32(y + 4 * c + 8)), g)
        w = column(kind, block, c + 3)
        t, h = vfma(w, vsplat(get_f32(x + 4 * c + 12)), t), vfma(w, vsplat(get_f32(y + 4 * c + 12)), h)
    for c in range(whole, columns):
        w = column(kind, block, c)
        p, e = vfma(w, vsplat(get_f32(x + 4 * c)), p), vfma(w, vsplat(get_f32(y + 4 * c)), e)
    vstore(out, vadd(vadd(p, q), vadd(s, t)))
    vstore(out + 64, vadd(vadd(e, f), vadd(g, h)))


def thin_matmul(kind: int) -> Kernel:
    """A product with rows of float32 as they are; `chunks` is the number of columns."""

    def kernel(record, part, parts, thread):
        args = ProductArgs(record)
        count, columns, x_row = get_i64(args.rows), args.chunks, args.x_stride
        scratch = args.scratch + thread * SCRATCH_BYTES
        # Where there are few blocks, many tokens are shared out instead.
        first, last, start, step = 0, (args.output_channels + 15) // 16, 2 * part, 2 * parts
        if last >= parts:
            first, last = share(args.output_channels, part, parts, 1)
            start, step = 0, 2
        for n in range(first, last):
            block = args.weights + n * args.weights_block
            for r in range(start, count, step):
                x = args.x + r * x_row
                if r + 1 < count:
                    two_tokens(kind, block, x, x + x_row, columns, scratch)
                    finish(args, scratch, 2, n, r)
                else:
                    one_token(kind, block, x, columns, scratch)
                    finish(args, scratch, 1, n, r)

    return kernel


class SplitRowArgs(Args):
    """x: the channel that is kept apart, of the first row;  weights f32 [width], padded to 16 with zeros."""

    x = pointer()
    x_stride = nbytes()
    weights = pointer()
    width = number()
    y = pointer()
    y_stride = nbytes()


def split_row() -> Kernel:
    """y += x * weights."""

    def kernel(record, part, parts, thread):
        args = SplitRowArgs(record)
        width = args.width
        whole = width // LANES * LANES
        for r in range(part, get_i64(args.rows), parts):
            value, y = get_f32(args.x + r * args.x_stride), args.y + r * args.y_stride
            for c in range(0, whole, LANES):
                vstore(y + 4 * c, vfma(vload(args.weights + 4 * c), vsplat(value), vload(y + 4 * c)))
            # Another thread may write what lies after the last channel.
            for c in range(whole, width):
                put_f32(y + 4 * c, get_f32(y + 4 * c) + value * get_f32(args.weights + 4 * c))

    return kernel
