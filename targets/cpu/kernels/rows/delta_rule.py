"""The gated delta rule over the rows of a session (targets/family_operations.py, DeltaRule).

Two vectors of a row are multiplied with S: its key and its query.
"""

from __future__ import annotations

import math

from edgeq.network.delta_net import UNIT_EPS
from edgeq.targets.cpu.jit.args import float32
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import (
    get_f32,
    get_i32,
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
from edgeq.targets.cpu.kernels.rows.activate import sigmoid_of_minus
from edgeq.targets.cpu.kernels.rows.states import (
    OWN,
    WEIGHTS,
    WHOLE,
    Scan,
    ScanArgs,
    decays_since,
    dot,
    put_up_to,
    scan_kernel,
    softplus,
)

MAX_TOGETHER = 4
"""Rows whose products with S run together, at most."""
PAST, ASKED, DOTS = OWN, OWN + 64, OWN + 128
"""Scratch of a thread, bytes: after what scans share, 16 numbers of the rows of a log, the decay since each times the dots of a
row's key and query; those dots of every row; then keys and queries, products with S, decayed keys."""
HEADS = DOTS + 2 * 64 * MAX_TOGETHER


class DeltaRuleArgs(ScanArgs):
    """x: rows of queries, keys and values;  rates: of b and a;  beta_scale: the factor of the sigmoid in beta"""

    beta_scale = float32()


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
        row = places.rows + (places.first + t) * places.log_bytes + places.key_bytes * key_head
        key, query = places.units + 2 * t * places.key_bytes, places.units + (2 * t + 1) * places.key_bytes
        unit_head(x, query, dim, 1.0 / math.sqrt(dim))
        unit_head(x + 4 * dim * args.key_heads, key, dim, 1.0)
        for c in range(0, places.key_bytes, 64):
            vstore(row + c, vload(key + c))
        for j in range(places.first + t + 1):
            other = places.rows + j * places.log_bytes + places.key_bytes * key_head
            put_f32(places.scratch + DOTS + 128 * t + 4 * j, dot(other, key, places.key_bytes))
            put_f32(places.scratch + DOTS + 128 * t + 64 + 4 * j, dot(other, query, places.key_bytes))


@inline
def decays(args, places, head, t):
    """g of row t into the log; the decay since each row of the log, and that times the dots of row t; the decay since S."""
    r, first = get_i32(args.order + 4 * (places.begin + t)), places.first + t
    rates, scratch = args.rates + r * args.rates_stride + 4 * args.heads, places.scratch
    of_g = places.rows + places.log_values + places.value_bytes * args.heads + 4 * head
    step = vsplat(get_f32(rates + 4 * head) + get_f32(args.dt_bias + 4 * head))
    vstore(scratch + WHOLE, vmul(vsplat(get_f32(args.decay + 4 * head)), softplus(step)))
    put_f32(of_g + first * places.log_bytes, get_f32(scratch + WHOLE))
    decays_since(scratch, of_g, places.log_bytes, first)
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
        log = places.rows + places.log_values + places.value_bytes * head + 4 * c
        of_key = places.products + 2 * t * places.value_bytes + 4 * c
        d = vfma(minus, vload(of_key), vfirst(vload(values + 4 * c), dim - c))
        result = vmul(whole, vload(of_key + places.value_bytes))
        for j in range(first):
            other = vload(log + j * places.log_bytes)
            d = vfma(vsplat(-get_f32(scratch + PAST + 4 * j)), other, d)
            result = vfma(vsplat(get_f32(scratch + ASKED + 4 * j)), other, result)
        d = vmul(beta, d)
        vstore(log + first * places.log_bytes, d)
        result = vfma(vsplat(get_f32(scratch + ASKED + 4 * first)), d, result)
        put_up_to(out + 4 * c, result, dim - c)


@inline
def row_of_head(args, places, head, t):
    decays(args, places, head, t)
    change_and_result(args, places, head, t)


SCAN = Scan(DeltaRuleArgs, MAX_TOGETHER, 2, (4, 2), HEADS, place_keys, row_of_head)


def delta_rule(wide: int) -> Kernel:
    kernel: Kernel = scan_kernel(SCAN, wide)
    return kernel
