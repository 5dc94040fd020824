"""Operations that change numbers f32, most of them in place: factors, gates, caps, limits, means, shares of experts."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import THREADS, functions

GATES = {
    "sigmoid": lambda z: T.float32(1) / (T.float32(1) + T.exp(T.float32(0) - z)),
    "silu": functions["silu"],
    "none": lambda z: z,
}


def gate(function):
    """x *= f(gate), the first `width` channels of rows of `stride`; rows of the gate have `gate_stride`."""
    apply = GATES[function]

    @T.prim_func
    def gate_(x_: T.handle, gate_: T.handle, tokens: T.int32, stride: T.int32, gate_stride: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, ng = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        gate = T.match_buffer(gate_, (ng,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            x[row * stride + channel] = x[row * stride + channel] * apply(gate[row * gate_stride + channel])

    return gate_


def array_scale():
    """x *= factor[0], rows of `width` channels."""

    @T.prim_func
    def array_scale_(x_: T.handle, factor_: T.handle, tokens: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, nf = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        factor = T.match_buffer(factor_, (nf,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            x[row * width + channel] = x[row * width + channel] * factor[0]

    return array_scale_


def soft_cap():
    """x = cap * tanh(x / cap), rows of `width` channels."""

    @T.prim_func
    def soft_cap_(x_: T.handle, tokens: T.int32, width: T.int32, cap: T.float32):
        T.func_attr({"tirx.noalias": True})
        nx = T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            x[row * width + channel] = cap * T.tanh(x[row * width + channel] / cap)

    return soft_cap_


def limit():
    """out = x, but at least `least` and at most `most`, `width` channels of rows of `stride`; rows of `out` have `out_stride`.

    NaN stays: no comparison with it is true.  `out` may be x.
    """

    @T.prim_func
    def limit_(x_: T.handle, out_: T.handle, tokens: T.int32, stride: T.int32, out_stride: T.int32, width: T.int32,
               least: T.float32, most: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, no = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            value: T.let = x[row * stride + channel]
            out[row * out_stride + channel] = T.if_then_else(value < least, least, T.if_then_else(value > most, most, value))

    return limit_


def row_mean():
    """out = the mean of `count` parts of x side by side, each of `width` channels."""

    @T.prim_func
    def row_mean_(x_: T.handle, out_: T.handle, tokens: T.int32, count: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, no = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        total = T.alloc_local((1,), "float32")
        if channel < width:
            total[0] = T.float32(0)
            for i in T.serial(count):
                total[0] = total[0] + x[(row * count + i) * width + channel]
            out[row * width + channel] = total[0] / T.Cast("float32", count)

    return row_mean_


def scale_shift():
    """x = x * scale + shift, channel by channel, rows of `width` channels."""

    @T.prim_func
    def scale_shift_(x_: T.handle, scale_: T.handle, shift_: T.handle, tokens: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, nf, ns = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        scale = T.match_buffer(scale_, (nf,), "float32")
        shift = T.match_buffer(shift_, (ns,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            x[row * width + channel] = x[row * width + channel] * scale[channel] + shift[channel]

    return scale_shift_


def share_scale():
    """routing[:, i] *= scales[routing[:, chosen + i]], i < chosen."""

    @T.prim_func
    def share_scale_(routing_: T.handle, scales_: T.handle, tokens: T.int32, chosen: T.int32):
        T.func_attr({"tirx.noalias": True})
        nr, ns = T.int32(), T.int32()
        routing = T.match_buffer(routing_, (nr,), "float32")
        scales = T.match_buffer(scales_, (ns,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(chosen, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        i: T.let = part * THREADS + warp * 32 + lane
        if i < chosen:
            expert: T.let = T.Cast("int32", routing[row * (2 * chosen) + chosen + i])
            routing[row * (2 * chosen) + i] = routing[row * (2 * chosen) + i] * scales[expert]

    return share_scale_
