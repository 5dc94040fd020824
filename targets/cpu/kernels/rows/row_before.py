"""What was kept of the row of the slot before (targets/family_operations.py, RowBefore)."""

from __future__ import annotations

from edgeq.targets.cpu.jit.args import nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.simd import get_i32, get_i64, vfirst, vload, vstore
from edgeq.targets.cpu.kernels.args import StateArgs
from edgeq.targets.cpu.kernels.rows.states import snapshot_after
from edgeq.targets.states import LOG


class RowBeforeArgs(StateArgs):
    """x, out    rows of `width` channels: what is kept, and the result
    row_bytes    of a row of the state and of a snapshot, padded to 16 channels
    """

    x = pointer(0)
    x_stride = nbytes(0)
    out = pointer()
    out_stride = nbytes()
    width = number()
    row_bytes = nbytes()


def row_before(keeps: int) -> Kernel:
    """A work item is 16 channels of a session, whose rows follow one another.

    keeps   the row itself is kept for the next one
    """

    def kernel(record, part, parts, thread):
        args = RowBeforeArgs(record)
        sessions, width, row_bytes = get_i64(args.sessions), args.width, args.row_bytes
        ring = 1 + LOG
        for unit in range(part, sessions * ((width + 15) // 16), parts):
            session, channel = unit % sessions, 16 * (unit // sessions)
            c = 4 * channel
            held = get_i64(args.states + 8 * session) + args.offset + c
            for i in range(get_i32(args.begins + 4 * session), get_i32(args.begins + 4 * session + 4)):
                r = get_i32(args.order + 4 * i)
                slot = get_i32(args.slots + 4 * r)
                before = vload(held + row_bytes * ((slot + ring - 1) % ring))
                vstore(args.out + r * args.out_stride + c, vfirst(before, width - channel))
                if keeps:
                    # What is beside the last channel is of another buffer.
                    own = vfirst(vload(args.x + r * args.x_stride + c), width - channel)
                    vstore(held + row_bytes * (slot % ring), own)
                    snapshot = snapshot_after(args, session, slot)
                    if snapshot != 0:
                        vstore(snapshot + c, own)

    return kernel
