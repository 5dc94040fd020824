"""Convolutions over the last rows of a session (targets/family_operations.py, ShortConv and SiluConv).

numbers   the address that states and snapshots count from, f32; they lie as targets/state_layout.py says
order     int32: the token rows of the run by session and slot; begins: int32 per session, and one more, its first in `order`
slots     int32 per token row: its place in its session
states    int64 per session: where its states begin;  snapshots: int64 per token row, where one begins that is taken after it,
          or 0;  state, snapshot: numbers in both before those of this layer
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import THREADS, functions
from edgeq.targets.states import LOG

WARPS = THREADS // 32


def short_conv(gated):
    """out = c * the convolution of b * u, with b, c and u side by side in x; else silu of that of x, plus bias.

    A block of threads has 32 channels of a session, a warp every WARPS-th of its rows: those that the run does not have are
    read from the ring of the state, and only when all were read, the last ones of the run are written there.
    """

    @T.inline
    def read_input(value, x, numbers, order, begin, first, slot, held, channel, stride, width, padded, taps):
        """value[0]: the input of a slot, of a token row of the run or of one before it."""
        if slot >= first:
            row: T.let = order[begin + slot - first]
            value[0] = x[row * stride + channel]
            if gated:
                value[0] = value[0] * x[row * stride + 2 * width + channel]
        else:
            # Before slot 0 there are zeros, which nothing has overwritten yet.
            place: T.let = (slot + taps - 1 + LOG) % (taps - 1 + LOG)
            value[0] = numbers[held + T.Cast("int64", place * padded + channel)]

    @T.prim_func
    def short_conv_(x_: T.handle, weight_: T.handle, bias_: T.handle, out_: T.handle, order_: T.handle, begins_: T.handle,
                    slots_: T.handle, states_: T.handle, snapshots_: T.handle, numbers_: T.handle, sessions: T.int32,
                    state: T.int32, snapshot: T.int32, stride: T.int32, width: T.int32, padded: T.int32, taps: T.int32,
                    has_bias: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "float32")
        weight = T.match_buffer(weight_, (T.int32(),), "float32")
        bias = T.match_buffer(bias_, (T.int32(),), "float32")
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
        kept: T.let = T.min(count, taps - 1 + LOG)
        held: T.let = states[session] + T.Cast("int64", state)
        first = T.alloc_local((1,), "int32")
        value = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        first[0] = 0
        if count > 0:
            first[0] = slots[order[begin]]
        for i in T.serial(T.ceildiv(count, WARPS)):
            at: T.let = i * WARPS + warp
            if at < count and channel < width:
                row: T.let = order[begin + at]
                oldest: T.let = first[0] + at - taps + 1
                total[0] = T.float32(0)
                for j in T.serial(taps):
                    read_input(
                        value, x, numbers, order, begin, first[0], oldest + j, held, channel, stride, width, padded, taps
                    )
                    T.ptx.fma.rn.f32(total[0], weight[channel * taps + j], value[0], total[0])
                if gated:
                    out[row * width + channel] = x[row * stride + width + channel] * total[0]
                else:
                    if has_bias != 0:
                        total[0] = total[0] + bias[channel]
                    out[row * width + channel] = functions["silu"](total[0])
                if snapshots[row] != T.int64(0):
                    for j in T.serial(taps - 1):
                        read_input(
                            value, x, numbers, order, begin, first[0], oldest + 1 + j, held, channel, stride, width, padded,
                            taps,
                        )  # fmt: skip
                        numbers[snapshots[row] + T.Cast("int64", snapshot + j * padded + channel)] = value[0]
        T.cuda.cta_sync()
        for i in T.serial(T.ceildiv(kept, WARPS)):
            at: T.let = count - kept + i * WARPS + warp
            if at < count and channel < width:
                read_input(value, x, numbers, order, begin, first[0], first[0] + at, held, channel, stride, width, padded, taps)
                place: T.let = (first[0] + at) % (taps - 1 + LOG)
                numbers[held + T.Cast("int64", place * padded + channel)] = value[0]

    return short_conv_
