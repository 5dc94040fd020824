"""The scan of a state space over the rows of a session (targets/family_operations.py, SsdScan).

A work item is the heads of a session that share B in the log.  As of the delta rule, what is computed of a row is the same
whether the rows after it are in the same run or not.
"""

from __future__ import annotations

import numpy as np

from edgeq.targets.cpu.jit.args import float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_f32, get_i32, get_i64, put_f32, vfirst, vfma, vload, vmax, vmin, vmul, vsplat, vstore
from edgeq.targets.cpu.kernels.args import StateArgs
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

MAX_TOGETHER = 8
"""Rows whose products with S run together, at most."""
ASKED, STEP, DOTS = OWN, OWN + 64, OWN + 128
"""Scratch of a thread, bytes: after what scans share, 16 decays times dots of a row's C, 16 times its step; those dots of every
row; then C, products with S, decayed B."""
HEADS = DOTS + 64 * MAX_TOGETHER


class SsdScanArgs(StateArgs):
    """x          rows of u, B and C;  dt: of [heads]
    shared        heads of a work item
    log           bytes to the log; log_bytes: of one of its rows, log_u: to step u in it, after which is g
    decay         f32 [heads], -exp(decay_log);  dt_bias, skip the same;  least, most: limits of the step
    scratch       of every thread, scratch_bytes
    """

    x = pointer()
    x_stride = nbytes()
    dt = pointer()
    dt_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    heads = number()
    head_dim = number()
    groups = number()
    state_dim = number()
    shared = number()
    log = nbytes()
    log_bytes = nbytes()
    log_u = nbytes()
    decay = pointer()
    dt_bias = pointer()
    skip = pointer()
    least = float32()
    most = float32()
    scratch = pointer()
    scratch_bytes = nbytes()


def scratch_bytes(state_dim: int, head_dim: int) -> int:
    """Scratch of a thread, for dimensions that are padded to 16."""
    return HEADS + 4 * (MAX_TOGETHER * (state_dim + head_dim) + LOG * state_dim)


@inline
def place_rows(args, places, item, count):
    """B of `count` rows into the log, C into scratch, and the dots of C with the B of the log up to its row."""
    dim, group = args.state_dim, item * args.shared // (args.heads // args.groups)
    for t in range(count):
        x = args.x + get_i32(args.order + 4 * (places.begin + t)) * args.x_stride
        of_b = x + 4 * (args.heads * args.head_dim + dim * group)
        of_c, of_item = of_b + 4 * dim * args.groups, places.rows + places.key_bytes * item
        kept, c = of_item + (places.first + t) * places.log_bytes, places.units + t * places.key_bytes
        for n in range(0, dim, 16):
            vstore(kept + 4 * n, vfirst(vload(of_b + 4 * n), dim - n))
            vstore(c + 4 * n, vfirst(vload(of_c + 4 * n), dim - n))
        for j in range(places.first + t + 1):
            put_f32(places.scratch + DOTS + 64 * t + 4 * j, dot(of_item + j * places.log_bytes, c, places.key_bytes))


@inline
def steps(args, places, head, t):
    """Step of row t, its g into the log; decays since the rows of the log, and those times the dots of row t."""
    r, first, scratch = get_i32(args.order + 4 * (places.begin + t)), places.first + t, places.scratch
    step = softplus(vsplat(get_f32(args.dt + r * args.dt_stride + 4 * head) + get_f32(args.dt_bias + 4 * head)))
    # In this order what is not a number stays so.
    step = vmin(vsplat(args.most), vmax(vsplat(args.least), step))
    vstore(scratch + STEP, step)
    vstore(scratch + ASKED, vmul(vsplat(get_f32(args.decay + 4 * head)), step))
    of_g = places.rows + places.log_values + places.value_bytes * args.heads + 4 * head
    put_f32(of_g + first * places.log_bytes, get_f32(scratch + ASKED))
    decays_since(scratch, of_g, places.log_bytes, first)
    vstore(scratch + ASKED, vmul(vload(scratch + WEIGHTS), vload(scratch + DOTS + 64 * t)))


@inline
def input_and_result(args, places, head, t):
    """Step u of row t into the log, and its result."""
    r, first, dim, scratch = get_i32(args.order + 4 * (places.begin + t)), places.first + t, args.head_dim, places.scratch
    u, out = args.x + r * args.x_stride + 4 * head * dim, args.out + r * args.out_stride + 4 * head * dim
    step, whole, skip = vload(scratch + STEP), vload(scratch + WHOLE), vsplat(get_f32(args.skip + 4 * head))
    for c in range(0, dim, 16):
        log = places.rows + places.log_values + places.value_bytes * head + 4 * c
        own = vfirst(vload(u + 4 * c), dim - c)
        vstore(log + first * places.log_bytes, vmul(step, own))
        result = vmul(whole, vload(places.products + t * places.value_bytes + 4 * c))
        for j in range(first + 1):
            result = vfma(vsplat(get_f32(scratch + ASKED + 4 * j)), vload(log + j * places.log_bytes), result)
        put_up_to(out + 4 * c, vfma(skip, own, result), dim - c)


def ssd_scan(wide: int) -> Kernel:
    """`wide`: a vector is one register, of which there are 32."""
    together = MAX_TOGETHER if wide else MAX_TOGETHER // 2
    of_rows, of_one = head_products(together, 2 if wide else 1), head_products(1, 4)

    def kernel(record, part, parts, thread):
        args = SsdScanArgs(record)
        sessions, items, shared = get_i64(args.sessions), args.heads // args.shared, args.shared
        b_bytes, u_bytes = 64 * ((args.state_dim + 15) // 16), 64 * ((args.head_dim + 15) // 16)
        scratch, size = args.scratch + thread * args.scratch_bytes, args.state_dim * u_bytes
        units = scratch + HEADS
        products = units + MAX_TOGETHER * b_bytes
        turned = products + MAX_TOGETHER * u_bytes
        for unit in range(part, sessions * items, parts):
            session, item = unit % sessions, unit // sessions
            state = get_i64(args.states + 8 * session)
            i, end = np.int64(get_i32(args.begins + 4 * session)), get_i32(args.begins + 4 * session + 4)
            while i < end:
                slot = get_i32(args.slots + 4 * get_i32(args.order + 4 * i))
                first, odd = slot % LOG, slot // LOG % 2
                count = together if end - i >= together and first + together <= LOG else 1
                rows = state + args.log + odd * LOG * args.log_bytes
                places = HeadRows(
                    scratch, units, products, turned, rows, b_bytes, u_bytes, args.log_bytes, args.log_u, first, i
                )
                place_rows(args, places, item, count)
                for head in range(item * shared, (item + 1) * shared):
                    before = state + args.offset + (odd * args.heads + head) * size
                    if count > 1:
                        of_rows(args.state_dim, places, before)
                    else:
                        of_one(args.state_dim, places, before)
                    for t in range(count):
                        steps(args, places, head, t)
                        input_and_result(args, places, head, t)
                    if first + count == LOG:
                        after = state + args.offset + ((1 - odd) * args.heads + head) * size
                        close_head(places, args.state_dim, (item, head), (before, after))
                        snapshot = snapshot_after(args, session, slot + count - 1)
                        if snapshot != 0:
                            copy_state(after, snapshot + head * size, size)
                i += count

    return kernel
