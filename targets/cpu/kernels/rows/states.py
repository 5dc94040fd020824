"""What kernels of states and of their gates share: where a snapshot goes, masked stores, and the scan over a log (StateSpec):
its loop, products with S, decays, and the S of the next log."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from edgeq.targets.cpu.jit.args import nbytes, number, pointer
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
    get_i32,
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
from edgeq.targets.cpu.kernels.args import StateArgs
from edgeq.targets.rows import PAGE
from edgeq.targets.states import LOG

POSITIONS = PAGE
WEIGHTS, WHOLE, OWN = 0, 64, 128
"""Scratch of a thread in a scan over a log, bytes: 16 decays since the rows of the log, 16 equal ones since S; what follows is
the kernel's own."""


class ScanArgs(StateArgs):
    """What every scan over a log reads.  A work item is a key head of a session with its heads of values.

    x             rows of keys, values and what asks;  rates: of numbers for each head
    key_heads     of keys in a row of the log;  heads: of values
    log           bytes to the log; log_bytes: of one of its rows: keys, from log_values on values, then g of each head
    decay         f32 [heads], -exp(decay_log);  dt_bias the same
    scratch       of every thread, scratch_bytes
    """

    x = pointer()
    x_stride = nbytes()
    rates = pointer()
    rates_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    key_heads = number()
    heads = number()
    key_dim = number()
    value_dim = number()
    log = nbytes()
    log_bytes = nbytes()
    log_values = nbytes()
    decay = pointer()
    dt_bias = pointer()
    scratch = pointer()
    scratch_bytes = nbytes()


class Scan(NamedTuple):
    """What a scan has of its own.

    args      class of its arguments
    most      rows whose products with S run together, at most;  units: vectors of a row that are multiplied with S
    columns   vectors of S beside each other for one row, where a vector is one register and where it is not
    scratch   bytes of a thread before the units, their products with S and the decayed keys
    place     (args, places, key_head, count): keys of `count` rows into the log, units into scratch
    row       (args, places, head, t): values and g of row t into the log, and its result
    """

    args: type[ScanArgs]
    most: int
    units: int
    columns: tuple[int, int]
    scratch: int
    place: Any
    row: Any

    def scratch_bytes(self, key_dim: int, value_dim: int) -> int:
        """Scratch of a thread, for dimensions that are padded to 16."""
        return self.scratch + 4 * (self.most * self.units * (key_dim + value_dim) + LOG * key_dim)


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


def scan_kernel(scan: Scan, wide: int) -> Any:
    """The loop over sessions, their rows log by log, and heads; `wide`: a vector is one register, of which there are 32.

    What is computed of a row is the same whether the rows after it are in the same run or not: of several rows of a log only
    the products with S, which their log begins with, run together, and each is a sum over the channels of the key in their
    order.
    """
    args_of, place, row = scan.args, scan.place, scan.row
    most, unit_count, before_units = scan.most, scan.units, scan.scratch
    together = most if wide else most // 2
    of_rows = head_products(unit_count * together, 2 if wide else 1)
    of_one = head_products(unit_count, scan.columns[0] if wide else scan.columns[1])

    def kernel(record, part, parts, thread):
        args = args_of(record)
        sessions, shared = get_i64(args.sessions), args.heads // args.key_heads
        key_bytes, value_bytes = 64 * ((args.key_dim + 15) // 16), 64 * ((args.value_dim + 15) // 16)
        scratch, size = args.scratch + thread * args.scratch_bytes, args.key_dim * value_bytes
        units = scratch + before_units
        products = units + unit_count * most * key_bytes
        turned = products + unit_count * most * value_bytes
        for item in range(part, sessions * args.key_heads, parts):
            session, key_head = item % sessions, item // sessions
            state = get_i64(args.states + 8 * session)
            i, end = np.int64(get_i32(args.begins + 4 * session)), get_i32(args.begins + 4 * session + 4)
            while i < end:
                slot = get_i32(args.slots + 4 * get_i32(args.order + 4 * i))
                first, odd = slot % LOG, slot // LOG % 2
                count = together if end - i >= together and first + together <= LOG else 1
                rows = state + args.log + odd * LOG * args.log_bytes
                log = args.log_bytes, args.log_values
                places = HeadRows(scratch, units, products, turned, rows, key_bytes, value_bytes, *log, first, i)
                place(args, places, key_head, count)
                for head in range(key_head * shared, (key_head + 1) * shared):
                    before = state + args.offset + (odd * args.heads + head) * size
                    if count > 1:
                        of_rows(args.key_dim, places, before)
                    else:
                        of_one(args.key_dim, places, before)
                    for t in range(count):
                        row(args, places, head, t)
                    if first + count == LOG:
                        after = state + args.offset + ((1 - odd) * args.heads + head) * size
                        close_head(places, args.key_dim, (key_head, head), (before, after))
                        snapshot = snapshot_after(args, session, slot + count - 1)
                        if snapshot != 0:
                            copy_state(after, snapshot + head * size, size)
                i += count

    return kernel
