"""What kernels of states and of their gates share: where a snapshot goes, masked stores, and of scans over a log (StateSpec)
products with S, decays, and the S of the next log."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import cgutils, inline, intrinsic, types
from edgeq.targets.cpu.jit.simd import (
    ADDRESS,
    F32,
    I32,
    I64,
    LANES,
    VF32,
    VOID,
    call,
    constant,
    f32x16,
    get_f32,
    get_i64,
    load,
    primitive,
    put_f32,
    put_lanes,
    splat,
    store,
    vabs,
    vadd,
    vdiv,
    vexp,
    vfma,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from edgeq.targets.rows import PAGE
from edgeq.targets.states import LOG

POSITIONS = PAGE
WEIGHTS, WHOLE, OWN = 0, 64, 128
"""Scratch of a thread in a scan over a log, bytes: 16 decays since the rows of the log, 16 equal ones since S; what follows is
the kernel's own."""


class HeadRows(NamedTuple):
    """A head and some rows: addresses in the scratch of the thread, of the first row of the log, and padded bytes.

    units       vectors whose products with S are taken, and where those lie;  turned: decayed keys
    log_values  from a row of the log, which begins with keys, to its values
    first       rows of the log before them;  begin: of the first of them in `order`
    """

    scratch: int
    units: int
    products: int
    turned: int
    rows: int
    key_bytes: int
    value_bytes: int
    log_bytes: int
    log_values: int
    first: int
    begin: np.int64


@inline
def snapshot_after(args, session, slot):
    """Address of this layer's part of the snapshot that is taken after `slot`, or 0; `args`: of StateArgs."""
    if slot % POSITIONS != POSITIONS - 1:
        return 0
    snapshot = get_i64(get_i64(args.snapshots + 8 * session) + 8 * (slot // POSITIONS))
    return snapshot + args.snapshot_offset if snapshot != 0 else 0


@inline
def put_up_to(address, x, left):
    """Store x, or its first `left` lanes where a row or a head ends in it."""
    if left >= LANES:
        vstore(address, x)
    else:
        put_first(address, x, left)


@primitive(VOID, ADDRESS, f32x16, types.int64)
def put_first(b: Any, address: Any, x: Any, count: Any) -> None:
    """Store x in the first `count` lanes; what is beside them stays as it is, for it may be another thread's."""
    vector = ir.VectorType(I64, LANES)
    inside = b.icmp_signed("<", ir.Constant(vector, list(range(LANES))), splat(b, count, vector))
    place = b.inttoptr(address, VF32.as_pointer())
    call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), x, place, ir.Constant(I32, 4), inside)


def state_products(count: int, vectors: int) -> Any:
    """A function (state, row, channels, x, into): into[n][16 v + lane] = sum over the channels of x[n] times state, for `count`
    vectors x and `vectors` x 16 columns of the state, whose rows of a channel lie `row` bytes apart.

    x and into are each an address and the bytes from one vector to the next.
    """
    many, width = count, vectors

    @intrinsic
    def products(typing: Any, state: Any, row: Any, channels: Any, x: Any, into: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            state, row, channels, x, into = values
            (x, step), (into, into_step) = (cgutils.unpack_tuple(b, each, 2) for each in (x, into))
            sums = [[cgutils.alloca_once(b, VF32) for _ in range(width)] for _ in range(many)]
            for slot in (slot for each in sums for slot in each):
                b.store(constant(VF32, 0.0), slot)
            starts = [b.add(x, b.mul(step, ir.Constant(I64, n))) for n in range(many)]
            with cgutils.for_range(b, channels) as loop:
                line = b.add(state, b.mul(loop.index, row))
                parts = [load(b, b.add(line, ir.Constant(I64, 64 * v)), VF32, 4) for v in range(width)]
                for n in range(many):
                    number = load(b, b.add(starts[n], b.mul(loop.index, ir.Constant(I64, 4))), F32, 4)
                    factor = splat(b, number, VF32)
                    for v in range(width):
                        b.store(call(b, "llvm.fmuladd.v16f32", VF32, parts[v], factor, b.load(sums[n][v])), sums[n][v])
            for n in range(many):
                for v in range(width):
                    place = b.add(b.add(into, b.mul(into_step, ir.Constant(I64, n))), ir.Constant(I64, 64 * v))
                    store(b, b.load(sums[n][v]), place, 4)
            return context.get_dummy_value()

        pair = types.UniTuple(types.intp, 2)
        return types.void(types.intp, types.intp, types.intp, pair, pair), codegen

    return products


@intrinsic
def close_log(typing: Any, before: Any, after: Any, channels: Any, rows: Any, factors: Any) -> Any:
    """Sixteen columns of the S of the next log: after[i] = whole * before[i] + sum over the log's rows j of turned[i][j] d[j].

    before, after   an address and the bytes from one channel to the next;  rows: the same of d
    factors         addresses of turned [channels][LOG] and of whole, sixteen equal numbers
    """

    def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
        before, after, channels, rows, factors = values
        (before, step), (rows, rows_step), (turned, whole) = (
            cgutils.unpack_tuple(b, each, 2) for each in (before, rows, factors)
        )
        changes = [load(b, b.add(rows, b.mul(rows_step, ir.Constant(I64, j))), VF32, 4) for j in range(LOG)]
        decay = load(b, whole, VF32, 4)
        with cgutils.for_range(b, channels) as loop:
            offset = b.mul(loop.index, step)
            total = b.fmul(load(b, b.add(before, offset), VF32, 4), decay)
            line = b.add(turned, b.mul(loop.index, ir.Constant(I64, 4 * LOG)))
            for j in range(LOG):
                factor = splat(b, load(b, b.add(line, ir.Constant(I64, 4 * j)), F32, 4), VF32)
                total = call(b, "llvm.fmuladd.v16f32", VF32, factor, changes[j], total)
            store(b, total, b.add(after, offset), 4)
        return context.get_dummy_value()

    pair = types.UniTuple(types.intp, 2)
    return types.void(pair, types.intp, types.intp, pair, pair), codegen


@inline
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + 2 artanh(u / (2 + u)) with u = exp(-|x|), by seven terms of the series: an argument of at
    most 1/3 leaves 2e-8 of the result."""
    u = vexp(vsub(vsplat(0.0), vabs(x)))
    s = vdiv(u, vadd(u, vsplat(2.0)))
    z = vmul(s, s)
    p = vfma(vsplat(0.07692307692307693), z, vsplat(0.09090909090909091))
    p = vfma(p, z, vsplat(0.1111111111111111))
    p = vfma(p, z, vsplat(0.14285714285714285))
    p = vfma(p, z, vsplat(0.2))
    p = vfma(p, z, vsplat(0.3333333333333333))
    p = vfma(p, z, vsplat(1.0))
    return vfma(vadd(s, s), p, vmax(vsplat(0.0), x))


@inline
def dot(x, y, size):
    total = vsplat(0.0)
    for c in range(0, size, 64):
        total = vfma(vload(x + c), vload(y + c), total)
    return vsum(total)


def head_products(count: int, vectors: int) -> Any:
    """A function (channels, places, before): products of `count` units with all columns of the S at address `before`."""
    tile, rest = state_products(count, vectors), state_products(count, 1)

    @inline
    def products(channels, places, before):
        row, c = places.value_bytes, 0
        while c + 64 * vectors <= row:
            tile(before + c, row, channels, (places.units, places.key_bytes), (places.products + c, row))
            c += 64 * vectors
        while c < row:
            rest(before + c, row, channels, (places.units, places.key_bytes), (places.products + c, row))
            c += 64

    return products


@inline
def decays_since(scratch, of_g, log_bytes, newest):
    """The decays since each row of the log up to `newest`, and since S; of_g: address of g of the first row."""
    # From the newest row back: a sum that is taken apart again would lose digits.
    total = np.float32(0)
    for j in range(newest, -1, -1):
        put_f32(scratch + WEIGHTS + 4 * j, total)
        total += get_f32(of_g + j * log_bytes)
    vstore(scratch + WEIGHTS, vexp(vload(scratch + WEIGHTS)))
    vstore(scratch + WHOLE, vexp(vsplat(total)))


@inline
def close_head(places, channels, heads, states):
    """The S of a head for the next log, from the decays of its last row; heads: of the key and of the value."""
    (key_head, head), (before, after) = heads, states
    for j in range(LOG):
        weight, key = vsplat(get_f32(places.scratch + WEIGHTS + 4 * j)), places.rows + j * places.log_bytes
        for c in range(0, places.key_bytes, 64):
            put_lanes(vmul(weight, vload(key + places.key_bytes * key_head + c)), places.turned + LOG * c + 4 * j, 4 * LOG)
    for c in range(0, places.value_bytes, 64):
        rows = places.rows + places.log_values + places.value_bytes * head + c
        close_log(
            (before + c, places.value_bytes), after + c, channels, (rows, places.log_bytes),
            (places.turned, places.scratch + WHOLE),
        )  # fmt: skip


@inline
def copy_state(state, to, size):
    for n in range(0, size, 64):
        vstore(to + n, vload(state + n))
