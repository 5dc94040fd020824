"""Convolutions over the last rows of a session (targets/family_operations.py, ShortConv and SiluConv)."""

from __future__ import annotations

from edgeq.targets.cpu.jit.args import nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.simd import get_i32, get_i64, vadd, vfirst, vfma, vload, vmul, vsplat, vstore
from edgeq.targets.cpu.kernels.args import StateArgs
from edgeq.targets.cpu.kernels.rows.activate import SILU, active
from edgeq.targets.cpu.kernels.rows.states import snapshot_after
from edgeq.targets.states import LOG


class ShortConvArgs(StateArgs):
    """x, out    rows: `width` channels; of a gated one b, c and u of as many each side by side; the result
    row_bytes    of a row of weights, of the state and of a snapshot, padded to 16 channels
    weights      f32 [taps][padded width];  bias: f32 [padded width], where it has one
    """

    x = pointer()
    x_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    width = number()
    row_bytes = nbytes()
    weights = pointer()
    bias = pointer(0)


def short_conv(taps: int, gated: int, biased: int) -> Kernel:
    """A work item is 16 channels of a session: its rows follow one another, those of a state's ring are read back.

    gated   c * the convolution of b * u; else silu of that of x, to which with `biased` the bias is added
    """

    def kernel(record, part, parts, thread):
        args = ShortConvArgs(record)
        sessions, width, row_bytes = get_i64(args.sessions), args.width, args.row_bytes
        ring = taps - 1 + LOG
        for unit in range(part, sessions * ((width + 15) // 16), parts):
            session, channel = unit % sessions, 16 * (unit // sessions)
            c = 4 * channel
            held = get_i64(args.states + 8 * session) + args.offset + c
            for i in range(get_i32(args.begins + 4 * session), get_i32(args.begins + 4 * session + 4)):
                r = get_i32(args.order + 4 * i)
                slot = get_i32(args.slots + 4 * r)
                x = args.x + r * args.x_stride + c
                # What is beside the last channel is of another part of the row.
                product = vload(x)
                if gated:
                    product = vmul(product, vload(x + 8 * width))
                vstore(held + row_bytes * (slot % ring), vfirst(product, width - channel))
                total = vsplat(0.0)
                for j in range(taps):
                    at = (slot + ring - taps + 1 + j) % ring
                    total = vfma(vload(args.weights + row_bytes * j + c), vload(held + row_bytes * at), total)
                if biased:
                    total = vadd(total, vload(args.bias + c))
                result = vmul(vload(x + 4 * width), total) if gated else active(SILU, total)
                vstore(args.out + r * args.out_stride + c, vfirst(result, width - channel))
                snapshot = snapshot_after(args, session, slot)
                if snapshot != 0:
                    for j in range(taps - 1):
                        at = (slot + ring - taps + 2 + j) % ring
                        vstore(snapshot + row_bytes * j + c, vload(held + row_bytes * at))

    return kernel
