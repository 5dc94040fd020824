"""Mixtures of experts: which experts a token goes to, and what of theirs is added.

routing   f32 [token rows][2 * chosen]: shares, falling, and after them which experts they are of
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import INFINITY_BITS, MAX_F32, NAN_BITS, THREADS

NONE = 1 << 30


def route(WARPS=4):
    """The largest `chosen` of softmax(x[:, :experts]); with `normalized` divided by their sum.  A warp has a token row.

    Of equals the first.  A row with a logit that is not finite gets shares that are NaN, of the first experts.
    """

    @T.prim_func
    def route_(x_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32, experts: T.int32, chosen: T.int32,
               normalized: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, no = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part = T.cta_id([T.ceildiv(tokens, WARPS)])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        row: T.let = part * WARPS + warp
        bits = T.alloc_local((1,), "uint32")
        most = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        picked = T.alloc_local((1,), "float32")
        best = T.alloc_local((1,), "float32")
        other = T.alloc_local((1,), "float32")
        which = T.alloc_local((1,), "int32")
        candidate = T.alloc_local((1,), "int32")
        last = T.alloc_local((1,), "float32")
        at = T.alloc_local((1,), "int32")
        if row < tokens:
            bits[0] = T.uint32(0)
            most[0] = T.float32(-MAX_F32)
            for i in T.serial(T.ceildiv(experts, 32)):
                if i * 32 + lane < experts:
                    bits[0] = T.max(bits[0], T.reinterpret("uint32", x[row * width + i * 32 + lane]) & T.uint32(0x7FFFFFFF))
                    most[0] = T.max(most[0], x[row * width + i * 32 + lane])
            for level in T.unroll(5):
                bits[0] = T.max(bits[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), bits[0], 1 << level, 32, 32))
                most[0] = T.max(most[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), most[0], 1 << level, 32, 32))
            total[0] = T.float32(0)
            for i in T.serial(T.ceildiv(experts, 32)):
                if i * 32 + lane < experts:
                    total[0] = total[0] + T.exp(x[row * width + i * 32 + lane] - most[0])
            for level in T.unroll(5):
                total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total[0], 1 << level, 32, 32)
            if bits[0] >= T.uint32(INFINITY_BITS):
                total[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
            picked[0] = T.float32(0)
            last[0] = T.float32(MAX_F32)
            at[0] = -1
            for place in T.serial(chosen):
                # The largest logit after the last one in the order of falling logits and rising numbers.
                best[0] = T.float32(-MAX_F32)
                which[0] = NONE
                for i in T.serial(T.ceildiv(experts, 32)):
                    candidate[0] = i * 32 + lane
                    if candidate[0] < experts:
                        other[0] = T.float32(0)
                        if bits[0] < T.uint32(INFINITY_BITS):
                            other[0] = x[row * width + candidate[0]]
                        after: T.let = other[0] < last[0] or (other[0] == last[0] and candidate[0] > at[0])
                        if after and (other[0] > best[0] or which[0] == NONE):
                            best[0] = other[0]
                            which[0] = candidate[0]
                for level in T.unroll(5):
                    other[0] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), best[0], 1 << level, 32, 32)
                    candidate[0] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), which[0], 1 << level, 32, 32)
                    larger: T.let = other[0] > best[0] or (other[0] == best[0] and candidate[0] < which[0])
                    if candidate[0] != NONE and (which[0] == NONE or larger):
                        best[0] = other[0]
                        which[0] = candidate[0]
                last[0] = best[0]
                at[0] = which[0]
                picked[0] = picked[0] + T.exp(best[0] - most[0]) / total[0]
                if lane == 0:
                    out[row * (2 * chosen) + place] = T.exp(best[0] - most[0]) / total[0]
                    out[row * (2 * chosen) + chosen + place] = T.Cast("float32", which[0])
            if lane == 0 and normalized != 0:
                for place in T.serial(chosen):
                    out[row * (2 * chosen) + place] = out[row * (2 * chosen) + place] / picked[0]

    return route_


def route_by_sigmoids(WARPS=4):
    """The same with sigmoids for shares, of the experts whose sigmoid and bias add up to most.  A warp has a token row."""

    @T.prim_func
    def route_by_sigmoids_(x_: T.handle, bias_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32, experts: T.int32,
                           chosen: T.int32, normalized: T.int32, factor: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nb, no = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        bias = T.match_buffer(bias_, (nb,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part = T.cta_id([T.ceildiv(tokens, WARPS)])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        row: T.let = part * WARPS + warp
        bits = T.alloc_local((1,), "uint32")
        picked = T.alloc_local((1,), "float32")
        share = T.alloc_local((1,), "float32")
        best = T.alloc_local((1,), "float32")
        other = T.alloc_local((1,), "float32")
        which = T.alloc_local((1,), "int32")
        candidate = T.alloc_local((1,), "int32")
        last = T.alloc_local((1,), "float32")
        at = T.alloc_local((1,), "int32")
        if row < tokens:
            bits[0] = T.uint32(0)
            for i in T.serial(T.ceildiv(experts, 32)):
                if i * 32 + lane < experts:
                    bits[0] = T.max(bits[0], T.reinterpret("uint32", x[row * width + i * 32 + lane]) & T.uint32(0x7FFFFFFF))
            for level in T.unroll(5):
                bits[0] = T.max(bits[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), bits[0], 1 << level, 32, 32))
            picked[0] = T.float32(0)
            last[0] = T.float32(MAX_F32)
            at[0] = -1
            for place in T.serial(chosen):
                # The largest sum after the last one in the order of falling sums and rising numbers.
                best[0] = T.float32(-MAX_F32)
                which[0] = NONE
                for i in T.serial(T.ceildiv(experts, 32)):
                    candidate[0] = i * 32 + lane
                    if candidate[0] < experts:
                        other[0] = T.float32(0)
                        if bits[0] < T.uint32(INFINITY_BITS):
                            share[0] = T.float32(1) / (T.float32(1) + T.exp(-x[row * width + candidate[0]]))
                            other[0] = share[0] + bias[candidate[0]]
                        after: T.let = other[0] < last[0] or (other[0] == last[0] and candidate[0] > at[0])
                        if after and (other[0] > best[0] or which[0] == NONE):
                            best[0] = other[0]
                            which[0] = candidate[0]
                for level in T.unroll(5):
                    other[0] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), best[0], 1 << level, 32, 32)
                    candidate[0] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), which[0], 1 << level, 32, 32)
                    larger: T.let = other[0] > best[0] or (other[0] == best[0] and candidate[0] < which[0])
                    if candidate[0] != NONE and (which[0] == NONE or larger):
                        best[0] = other[0]
                        which[0] = candidate[0]
                last[0] = best[0]
                at[0] = which[0]
                share[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
                if bits[0] < T.uint32(INFINITY_BITS):
                    share[0] = T.float32(1) / (T.float32(1) + T.exp(-x[row * width + which[0]]))
                picked[0] = picked[0] + share[0]
                if lane == 0:
                    out[row * (2 * chosen) + place] = share[0]
                    out[row * (2 * chosen) + chosen + place] = T.Cast("float32", which[0])
            if normalized == 0:
                picked[0] = T.float32(1)
            if lane == 0:
                for place in T.serial(chosen):
                    share[0] = out[row * (2 * chosen) + place] / (picked[0] + T.float32(1e-20))
                    out[row * (2 * chosen) + place] = share[0] * factor

    return route_by_sigmoids_


def scatter():
    """out[places[row]] = x[row], rows of `width` channels."""

    @T.prim_func
    def scatter_(x_: T.handle, places_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, nw, no = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        places = T.match_buffer(places_, (nw,), "int32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            out[places[row] * width + channel] = x[row * width + channel]

    return scatter_


def gather_add():
    """out[row] += share * x[row * chosen + i] for i = 0 ... chosen - 1, in this order."""

    @T.prim_func
    def gather_add_(x_: T.handle, routing_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32, chosen: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, nr, no = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        routing = T.match_buffer(routing_, (nr,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        total = T.alloc_local((1,), "float32")
        if channel < width:
            total[0] = out[row * width + channel]
            for i in T.serial(chosen):
                total[0] = total[0] + routing[row * (2 * chosen) + i] * x[(row * chosen + i) * width + channel]
            out[row * width + channel] = total[0]

    return gather_add_


def gated_add():
    """out += x / (1 + exp(-gate[row][0])), rows of `width` channels; those of gate have `stride`."""

    @T.prim_func
    def gated_add_(x_: T.handle, gate_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32, stride: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, ng, no = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        gate = T.match_buffer(gate_, (ng,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            out[row * width + channel] = out[row * width + channel] + x[row * width + channel] / (
                T.float32(1) + T.exp(T.float32(0) - gate[row * stride])
            )

    return gated_add_
