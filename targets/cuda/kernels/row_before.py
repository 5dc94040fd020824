"""What was kept of the row of the slot before (targets/family_operations.py, RowBefore); parameters as of short_conv.py."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import THREADS
from edgeq.targets.states import LOG

WARPS, RING = THREADS // 32, 1 + LOG


def row_before(keeps):
    """out = x of the row before, of the first row of a session what the ring of its state has of that slot.

    A block of threads has 32 channels of a session, a warp every WARPS-th of its rows.  Only when the ring was read, the last
    rows of the run are written there.  `keeps` false: nothing is, and each row reads the ring.
    """

    @T.prim_func
    def row_before_(x_: T.handle, out_: T.handle, order_: T.handle, begins_: T.handle, slots_: T.handle, states_: T.handle,
                    snapshots_: T.handle, numbers_: T.handle, sessions: T.int32, state: T.int32, snapshot: T.int32,
                    stride: T.int32, width: T.int32, padded: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "float32")
        out = T.match_buffer(out_, (T.int32(),), "float32")
        order = T.match_buffer(order_, (T.int32(),), "int32")
        begins = T.match_buffer(begins_, (T.int32(),), "int32")
        slots = T.match_buffer(slots_, (T.int32(),), "int32")
        states = T.match_buffer(states_, (T.int32(),), "int64")
        snapshots = T.match_buffer(snapshots_, (T.int32(),), "int64")
        numbers = T.match_buffer(numbers_, (T.int64(),), "float32")
        T.device_entry()
        part, session = T.cta_id([T.ceildiv(width, 32), sessions])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        channel: T.let = part * 32 + lane
        begin: T.let = begins[session]
        count: T.let = begins[session + 1] - begin
        kept: T.let = T.min(count, RING)
        held: T.let = states[session] + T.Cast("int64", state)
        value = T.alloc_local((1,), "float32")
        for i in T.serial(T.ceildiv(count, WARPS)):
            at: T.let = i * WARPS + warp
            if at < count and channel < width:
                row: T.let = order[begin + at]
                if keeps:
                    if at > 0:
                        value[0] = x[order[begin + at - 1] * stride + channel]
                    else:
                        first: T.let = (slots[row] + LOG) % RING
                        value[0] = numbers[held + T.Cast("int64", first * padded + channel)]
                    if snapshots[row] != T.int64(0):
                        numbers[snapshots[row] + T.Cast("int64", snapshot + channel)] = x[row * stride + channel]
                else:
                    place: T.let = (slots[row] + LOG) % RING
                    value[0] = numbers[held + T.Cast("int64", place * padded + channel)]
                out[row * width + channel] = value[0]
        if keeps:
            T.cuda.cta_sync()
            for i in T.serial(T.ceildiv(kept, WARPS)):
                at: T.let = count - kept + i * WARPS + warp
                if at < count and channel < width:
                    row: T.let = order[begin + at]
                    place: T.let = slots[row] % RING
                    numbers[held + T.Cast("int64", place * padded + channel)] = x[row * stride + channel]

    return row_before_
