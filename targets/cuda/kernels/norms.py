"""Norms, over rows of a buffer f32 and over the heads of a row.

A row whose squares add up to more than f32 holds becomes NaN.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import MAX_F32, NAN_BITS, THREADS


@T.inline
def add_square(total, x):
    """total[0] + x * x, each rounded: a compiler may not make one operation of it in one kernel and two in another."""
    square = T.alloc_local((1,), "float32")
    T.ptx.mul.rn.f32(square[0], x, x)
    T.ptx.add.rn.f32(total[0], total[0], square[0])


@T.inline
def add_over_warp(total):
    for level in T.unroll(5):
        total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total[0], 1 << level, 32, 32)


@T.inline
def add_up(total, sums, warp, lane):
    """total[0] of all threads of a block, in every one of them; `sums` is shared memory of its own."""
    add_over_warp(total)
    if lane == 0:
        sums[warp] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for i in T.unroll(THREADS // 32):
        total[0] = total[0] + sums[i]


@T.inline
def inverse_root(factor, total, width, eps):
    factor[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
    if total[0] <= T.float32(MAX_F32):
        factor[0] = T.float32(1) / T.sqrt(total[0] / T.Cast("float32", width) + eps)


def rms_norm():
    """out = x / sqrt(mean(x^2) + eps) * gain over rows of `width` channels; with `add` added to what is there."""

    @T.prim_func
    def rms_norm_(x_: T.handle, gain_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32, add: T.int32, eps: T.float32):
        T.func_attr({"tirx.noalias": True})
        nx, ng, no = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        gain = T.match_buffer(gain_, (ng,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        row = T.cta_id([tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        sums = T.alloc_shared((THREADS // 32,), "float32")
        total = T.alloc_local((1,), "float32")
        factor = T.alloc_local((1,), "float32")
        value = T.alloc_local((1,), "float32")
        total[0] = T.float32(0)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                add_square(total, x[row * width + i * THREADS + tid])
        add_up(total, sums, warp, lane)
        inverse_root(factor, total, width, eps)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                value[0] = x[row * width + i * THREADS + tid] * factor[0] * gain[i * THREADS + tid]
                if add != 0:
                    value[0] = out[row * width + i * THREADS + tid] + value[0]
                out[row * width + i * THREADS + tid] = value[0]

    return rms_norm_


def layer_norm():
    """out = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias over rows of `width` channels."""

    @T.prim_func
    def layer_norm_(x_: T.handle, gain_: T.handle, bias_: T.handle, out_: T.handle,
                    tokens: T.int32, width: T.int32, eps: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, ng, nb, no = T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        gain = T.match_buffer(gain_, (ng,), "float32")
        bias = T.match_buffer(bias_, (nb,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        row = T.cta_id([tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        first = T.alloc_shared((THREADS // 32,), "float32")
        second = T.alloc_shared((THREADS // 32,), "float32")
        total = T.alloc_local((1,), "float32")
        mean = T.alloc_local((1,), "float32")
        factor = T.alloc_local((1,), "float32")
        apart = T.alloc_local((1,), "float32")
        total[0] = T.float32(0)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                total[0] = total[0] + x[row * width + i * THREADS + tid]
        add_up(total, first, warp, lane)
        mean[0] = total[0] / T.Cast("float32", width)
        total[0] = T.float32(0)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                apart[0] = x[row * width + i * THREADS + tid] - mean[0]
                add_square(total, apart[0])
        add_up(total, second, warp, lane)
        inverse_root(factor, total, width, eps)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                apart[0] = (x[row * width + i * THREADS + tid] - mean[0]) * factor[0] * gain[i * THREADS + tid]
                T.ptx.add.rn.f32(apart[0], apart[0], bias[i * THREADS + tid])
                out[row * width + i * THREADS + tid] = apart[0]

    return layer_norm_


def value_norm():
    """Every head of x[:, first:] divided by the root of its mean square, to x[:, to:], which may be the same; a warp has one
    head."""
    WARPS = THREADS // 32

    @T.prim_func
    def value_norm_(x_: T.handle, tokens: T.int32, width: T.int32, first: T.int32, to: T.int32, heads: T.int32,
                    head_dim: T.int32, eps: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx = T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(heads, WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        head: T.let = part * WARPS + warp
        total = T.alloc_local((1,), "float32")
        factor = T.alloc_local((1,), "float32")
        if head < heads:
            at: T.let = row * width + head * head_dim
            total[0] = T.float32(0)
            for i in T.serial(T.ceildiv(head_dim, 32)):
                if i * 32 + lane < head_dim:
                    add_square(total, x[at + first + i * 32 + lane])
            add_over_warp(total)
            inverse_root(factor, total, head_dim, eps)
            for i in T.serial(T.ceildiv(head_dim, 32)):
                if i * 32 + lane < head_dim:
                    x[at + to + i * 32 + lane] = x[at + first + i * 32 + lane] * factor[0]

    return value_norm_


@T.inline
def norm_head(x, at, gain, head_dim, eps, lane):
    """By one warp: x[at : at + head_dim] divided by the root of its mean square, times gain [head_dim]."""
    total = T.alloc_local((1,), "float32")
    factor = T.alloc_local((1,), "float32")
    total[0] = T.float32(0)
    for i in T.serial(T.ceildiv(head_dim, 32)):
        if i * 32 + lane < head_dim:
            add_square(total, x[at + i * 32 + lane])
    add_over_warp(total)
    inverse_root(factor, total, head_dim, eps)
    for i in T.serial(T.ceildiv(head_dim, 32)):
        if i * 32 + lane < head_dim:
            x[at + i * 32 + lane] = x[at + i * 32 + lane] * factor[0] * gain[i * 32 + lane]


def head_norm():
    """In place, every head of a row; a warp has one head."""
    WARPS = THREADS // 32

    @T.prim_func
    def head_norm_(x_: T.handle, gain_: T.handle, tokens: T.int32, width: T.int32, heads: T.int32, head_dim: T.int32,
                   eps: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, ng = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        gain = T.match_buffer(gain_, (ng,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(heads, WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        head: T.let = part * WARPS + warp
        if head < heads:
            norm_head(x, row * width + head * head_dim, gain, head_dim, eps, lane)

    return head_norm_
