"""The gated delta rule over the rows of a session (targets/family_operations.py, DeltaRule).

A work item is a key head of a session with its value heads.  What is computed of a row is the same whether the rows after it
are in the same run or not: of several rows of a log only the products with S, which their log begins with, run together, and
each is a sum over the channels of the key in their order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from edgeq.network.delta_net import UNIT_EPS
from edgeq.targets.cpu.jit.args import float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import cgutils, inline, intrinsic, types
from edgeq.targets.cpu.jit.simd import (
    F32,
    I64,
    VF32,
    call,
    constant,
    get_f32,
    get_i32,
    get_i64,
    load,
    put_f32,
    put_lanes,
    splat,
    store,
    vabs,
    vadd,
    vdiv,
    vexp,
    vfirst,
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
from edgeq.targets.cpu.kernels.rows.activate import sigmoid_of_minus
from edgeq.targets.cpu.kernels.rows.states import put_up_to, snapshot_after
from edgeq.targets.states import LOG

MAX_TOGETHER = 4
"""Rows whose products with S run together, at most."""
WEIGHTS, PAST, ASKED, WHOLE, DOTS = 0, 64, 128, 192, 256
"""Scratch of a thread, bytes: 16 numbers of the rows of a log (decay since each, and its products with the dots of a row's key
and query), the decay since S; those dots of every row; then keys and queries, products with S, decayed keys."""
HEADS = DOTS + 2 * 64 * MAX_TOGETHER


class DeltaRuleArgs(StateArgs):
    """x          rows of queries, keys and values;  rates: of b and a
    log           bytes to the log; log_bytes: of one of its rows, log_d, log_g: to d and g in it
    decay         f32 [value_heads], -exp(decay_log);  dt_bias the same;  beta_scale: the factor of the sigmoid in beta
    scratch       of every thread, scratch_bytes
    """

    x = pointer()
    x_stride = nbytes()
    rates = pointer()
    rates_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    key_heads = number()
    value_heads = number()
    key_dim = number()
    value_dim = number()
    log = nbytes()
    log_bytes = nbytes()
    log_d = nbytes()
    log_g = nbytes()
    decay = pointer()
    dt_bias = pointer()
    beta_scale = float32()
    scratch = pointer()
    scratch_bytes = nbytes()


def scratch_bytes(key_dim: int, value_dim: int) -> int:
    """Scratch of a thread, for dimensions that are padded to 16."""
    return HEADS + 4 * (2 * MAX_TOGETHER * (key_dim + value_dim) + LOG * key_dim)


class HeadRows(NamedTuple):
    """A key head and some rows: addresses in the scratch of the thread, of the first row of the log, and padded bytes.

    first    rows of the log before them;  begin: of the first of them in `order`
    """

    scratch: int
    units: int
    products: int
    turned: int
    rows: int
    key_bytes: int
    value_bytes: int
    first: int
    begin: np.int64


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
def unit_head(x, out, dim, scale):
    """out = x [dim] of the length `scale`, padded with zeros."""
    total = vsplat(0.0)
    for c in range(0, dim, 16):
        part = vfirst(vload(x + 4 * c), dim - c)
        total = vfma(part, part, total)
    factor = vsplat(scale / math.sqrt(vsum(total) + UNIT_EPS))
    for c in range(0, dim, 16):
        vstore(out + 4 * c, vmul(vfirst(vload(x + 4 * c), dim - c), factor))


@inline
def dot(x, y, size):
    total = vsplat(0.0)
    for c in range(0, size, 64):
        total = vfma(vload(x + c), vload(y + c), total)
    return vsum(total)


@inline
def place_keys(args, places, key_head, count):
    """Keys of `count` rows into the log, keys and queries into scratch, and their dots with the keys of the log up to them."""
    dim = args.key_dim
    for t in range(count):
        x = args.x + get_i32(args.order + 4 * (places.begin + t)) * args.x_stride + 4 * dim * key_head
        row = places.rows + (places.first + t) * args.log_bytes + places.key_bytes * key_head
        key, query = places.units + 2 * t * places.key_bytes, places.units + (2 * t + 1) * places.key_bytes
        unit_head(x, query, dim, 1.0 / math.sqrt(dim))
        unit_head(x + 4 * dim * args.key_heads, key, dim, 1.0)
        for c in range(0, places.key_bytes, 64):
            vstore(row + c, vload(key + c))
        for j in range(places.first + t + 1):
            other = places.rows + j * args.log_bytes + places.key_bytes * key_head
            put_f32(places.scratch + DOTS + 128 * t + 4 * j, dot(other, key, places.key_bytes))
            put_f32(places.scratch + DOTS + 128 * t + 64 + 4 * j, dot(other, query, places.key_bytes))


@inline
def decays(args, places, head, t):
    """g of row t into the log; the decay since each row of the log, and that times the dots of row t; the decay since S."""
    r, first = get_i32(args.order + 4 * (places.begin + t)), places.first + t
    rates, scratch = args.rates + r * args.rates_stride + 4 * args.value_heads, places.scratch
    of_g = places.rows + args.log_g + 4 * head
    step = vsplat(get_f32(rates + 4 * head) + get_f32(args.dt_bias + 4 * head))
    vstore(scratch + WHOLE, vmul(vsplat(get_f32(args.decay + 4 * head)), softplus(step)))
    put_f32(of_g + first * args.log_bytes, get_f32(scratch + WHOLE))
    # From the newest row back: a sum that is taken apart again would lose digits.
    total = np.float32(0)
    for j in range(first, -1, -1):
        put_f32(scratch + WEIGHTS + 4 * j, total)
        total += get_f32(of_g + j * args.log_bytes)
    weights = vexp(vload(scratch + WEIGHTS))
    vstore(scratch + WEIGHTS, weights)
    vstore(scratch + PAST, vmul(weights, vload(scratch + DOTS + 128 * t)))
    vstore(scratch + ASKED, vmul(weights, vload(scratch + DOTS + 128 * t + 64)))
    vstore(scratch + WHOLE, vexp(vsplat(total)))


@inline
def change_and_result(args, places, head, t):
    """d of row t into the log, and its result."""
    r, first, dim = get_i32(args.order + 4 * (places.begin + t)), places.first + t, args.value_dim
    values = args.x + r * args.x_stride + 8 * args.key_heads * args.key_dim + 4 * head * dim
    out, scratch = args.out + r * args.out_stride + 4 * head * dim, places.scratch
    whole = vload(scratch + WHOLE)
    minus = vsub(vsplat(0.0), whole)
    b = get_f32(args.rates + r * args.rates_stride + 4 * head)
    beta = vmul(vsplat(args.beta_scale), sigmoid_of_minus(vsplat(-b)))
    for c in range(0, dim, 16):
        log = places.rows + args.log_d + places.value_bytes * head + 4 * c
        of_key = places.products + 2 * t * places.value_bytes + 4 * c
        d = vfma(minus, vload(of_key), vfirst(vload(values + 4 * c), dim - c))
        result = vmul(whole, vload(of_key + places.value_bytes))
        for j in range(first):
            other = vload(log + j * args.log_bytes)
            d = vfma(vsplat(-get_f32(scratch + PAST + 4 * j)), other, d)
            result = vfma(vsplat(get_f32(scratch + ASKED + 4 * j)), other, result)
        d = vmul(beta, d)
        vstore(log + first * args.log_bytes, d)
        result = vfma(vsplat(get_f32(scratch + ASKED + 4 * first)), d, result)
        put_up_to(out + 4 * c, result, dim - c)


@inline
def close_head(args, places, heads, before, after):
    """The S of a head for the next log; heads: of the key and of the value."""
    key_head, head = heads
    for j in range(LOG):
        weight, key = vsplat(get_f32(places.scratch + WEIGHTS + 4 * j)), places.rows + j * args.log_bytes
        for c in range(0, places.key_bytes, 64):
            put_lanes(vmul(weight, vload(key + places.key_bytes * key_head + c)), places.turned + LOG * c + 4 * j, 4 * LOG)
    for c in range(0, places.value_bytes, 64):
        rows = places.rows + args.log_d + places.value_bytes * head + c
        close_log(
            (before + c, places.value_bytes), after + c, args.key_dim, (rows, args.log_bytes),
            (places.turned, places.scratch + WHOLE),
        )  # fmt: skip


def head_products(count: int, vectors: int) -> Any:
    """A function (args, places, before): products of `count` units with all columns of the S at address `before`."""
    tile, rest = state_products(count, vectors), state_products(count, 1)

    @inline
    def products(args, places, before):
        row, c = places.value_bytes, 0
        while c + 64 * vectors <= row:
            tile(before + c, row, args.key_dim, (places.units, places.key_bytes), (places.products + c, row))
            c += 64 * vectors
        while c < row:
            rest(before + c, row, args.key_dim, (places.units, places.key_bytes), (places.products + c, row))
            c += 64

    return products


def delta_rule(wide: int) -> Kernel:
    """`wide`: a vector is one register, of which there are 32."""
    together = MAX_TOGETHER if wide else MAX_TOGETHER // 2
    of_rows, of_one = head_products(2 * together, 2 if wide else 1), head_products(2, 4 if wide else 2)

    def kernel(record, part, parts, thread):
        args = DeltaRuleArgs(record)
        sessions, shared = get_i64(args.sessions), args.value_heads // args.key_heads
        key_bytes, value_bytes = 64 * ((args.key_dim + 15) // 16), 64 * ((args.value_dim + 15) // 16)
        scratch, size = args.scratch + thread * args.scratch_bytes, args.key_dim * value_bytes
        units = scratch + HEADS
        products = units + 2 * MAX_TOGETHER * key_bytes
        turned = products + 2 * MAX_TOGETHER * value_bytes
        for unit in range(part, sessions * args.key_heads, parts):
            session, key_head = unit % sessions, unit // sessions
            state = get_i64(args.states + 8 * session)
            i, end = np.int64(get_i32(args.begins + 4 * session)), get_i32(args.begins + 4 * session + 4)
            while i < end:
                slot = get_i32(args.slots + 4 * get_i32(args.order + 4 * i))
                first, odd = slot % LOG, slot // LOG % 2
                count = together if end - i >= together and first + together <= LOG else 1
                rows = state + args.log + odd * LOG * args.log_bytes
                places = HeadRows(scratch, units, products, turned, rows, key_bytes, value_bytes, first, i)
                place_keys(args, places, key_head, count)
                for head in range(key_head * shared, (key_head + 1) * shared):
                    before = state + args.offset + (odd * args.value_heads + head) * size
                    if count > 1:
                        of_rows(args, places, before)
                    else:
                        of_one(args, places, before)
                    for t in range(count):
                        decays(args, places, head, t)
                        change_and_result(args, places, head, t)
                    if first + count == LOG:
                        after = state + args.offset + ((1 - odd) * args.value_heads + head) * size
                        close_head(args, places, (key_head, head), before, after)
                        snapshot = snapshot_after(args, session, slot + count - 1)
                        if snapshot != 0:
                            for n in range(0, size, 64):
                                vstore(snapshot + head * size + n, vload(after + n))
                i += count

    return kernel
