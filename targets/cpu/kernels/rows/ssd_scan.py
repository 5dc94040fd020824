"""The scan of a state space over the rows of a session (targets/family_operations.py, SsdScan).

One vector of a row is multiplied with S: its C.  A key head is the heads that share B in the log.
"""

from __future__ import annotations

from edgeq.targets.cpu.jit.args import float32, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_f32, get_i32, put_f32, vfirst, vfma, vload, vmax, vmin, vmul, vsplat, vstore
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

MAX_TOGETHER = 8
"""Rows whose products with S run together, at most."""
ASKED, STEP, DOTS = OWN, OWN + 64, OWN + 128
"""Scratch of a thread, bytes: after what scans share, 16 decays times dots of a row's C, 16 times its step; those dots of every
row; then C, products with S, decayed B."""
HEADS = DOTS + 64 * MAX_TOGETHER


class SsdScanArgs(ScanArgs):
    """x: rows of u, B and C, of `groups`;  rates: of dt;  skip: f32 [heads];  least, most: limits of the step"""

    groups = number()
    skip = pointer()
    least = float32()
    most = float32()


@inline
def place_rows(args, places, key_head, count):
    """B of `count` rows into the log, C into scratch, and the dots of C with the B of the log up to its row."""
    dim, group = args.key_dim, key_head * args.groups // args.key_heads
    for t in range(count):
        x = args.x + get_i32(args.order + 4 * (places.begin + t)) * args.x_stride
        of_b = x + 4 * (args.heads * args.value_dim + dim * group)
        of_c, of_log = of_b + 4 * dim * args.groups, places.rows + places.key_bytes * key_head
        kept, c = of_log + (places.first + t) * places.log_bytes, places.units + t * places.key_bytes
        for n in range(0, dim, 16):
            vstore(kept + 4 * n, vfirst(vload(of_b + 4 * n), dim - n))
            vstore(c + 4 * n, vfirst(vload(of_c + 4 * n), dim - n))
        for j in range(places.first + t + 1):
            put_f32(places.scratch + DOTS + 64 * t + 4 * j, dot(of_log + j * places.log_bytes, c, places.key_bytes))


@inline
def steps(args, places, head, t):
    """Step of row t, its g into the log; decays since the rows of the log, and those times the dots of row t."""
    r, first, scratch = get_i32(args.order + 4 * (places.begin + t)), places.first + t, places.scratch
    step = softplus(vsplat(get_f32(args.rates + r * args.rates_stride + 4 * head) + get_f32(args.dt_bias + 4 * head)))
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
    r, first, dim, scratch = get_i32(args.order + 4 * (places.begin + t)), places.first + t, args.value_dim, places.scratch
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


@inline
def row_of_head(args, places, head, t):
    steps(args, places, head, t)
    input_and_result(args, places, head, t)


SCAN = Scan(SsdScanArgs, MAX_TOGETHER, 1, (4, 4), HEADS, place_rows, row_of_head)


def ssd_scan(wide: int) -> Kernel:
    kernel: Kernel = scan_kernel(SCAN, wide)
    return kernel
