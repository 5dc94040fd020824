"""The gated delta rule over the rows of a session (targets/family_operations.py, DeltaRule).

A work item is a key head of a session with its value heads.  What is computed of a row is the same whether the rows after it
are in the same run or not: of several rows of a log only the products with S, which their log begins with, run together, and
each is a sum over the channels of the key in their order.
"""

from __future__ import annotations

import math

import numpy as np

from edgeq.network.delta_net import UNIT_EPS
from edgeq.targets.cpu.jit.args import float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import (
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    vfirst,
    vfma,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from edgeq.targets.cpu.kernels.args import StateArgs
from edgeq.targets.cpu.kernels.rows.activate import sigmoid_of_minus
from edgeq.targets.cpu.kernels.rows.states import (
    OWN,
    WEIGHTS,
    WHOLE,
    HeadRows,
    close_head,
    copy_state,
    decays_since,
    dot,
    head_products,
    put_up_to,
    snapshot_after,
    softplus,
)
from edgeq.targets.states import LOG

MAX_TOGETHER = 4
"""Rows whose products with S run together, at most."""
PAST, ASKED, DOTS = OWN, OWN + 64, OWN + 128
"""Scratch of a thread, bytes: after what scans share, 16 numbers of the rows of a log, the decay since each times the dots of a
row's key and query; those dots of every row; then keys and queries, products with S, decayed keys."""
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
    decays_since(scratch, of_g, args.log_bytes, first)
    weights = vload(scratch + WEIGHTS)
    vstore(scratch + PAST, vmul(weights, vload(scratch + DOTS + 128 * t)))
    vstore(scratch + ASKED, vmul(weights, vload(scratch + DOTS + 128 * t + 64)))


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
                log = args.log_bytes, args.log_d
                places = HeadRows(scratch, units, products, turned, rows, key_bytes, value_bytes, *log, first, i)
                place_keys(args, places, key_head, count)
                for head in range(key_head * shared, (key_head + 1) * shared):
                    before = state + args.offset + (odd * args.value_heads + head) * size
                    if count > 1:
                        of_rows(args.key_dim, places, before)
                    else:
                        of_one(args.key_dim, places, before)
                    for t in range(count):
                        decays(args, places, head, t)
                        change_and_result(args, places, head, t)
                    if first + count == LOG:
                        after = state + args.offset + ((1 - odd) * args.value_heads + head) * size
                        close_head(places, args.key_dim, (key_head, head), (before, after))
                        snapshot = snapshot_after(args, session, slot + count - 1)
                        if snapshot != 0:
                            copy_state(after, snapshot + head * size, size)
                i += count

    return kernel
