"""Operations that change numbers f32 in place: factors, gates, caps, shares of experts."""

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
