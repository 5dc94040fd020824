"""Norms of heads that gates multiply (targets/family_operations.py, GatedNorm)."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.norms import add_over_warp, add_square, inverse_root
from edgeq.targets.cuda.kernels.rows import THREADS, functions

WARPS = THREADS // 32


def gated_norm(first):
    """out = x / sqrt(mean(x^2) + eps) * gain over every head, times silu(gate); `first`: the mean is of x times silu(gate).

    A warp has a head of a row.  gain   f32 [head_dim], or [heads * head_dim] with `gain_step` head_dim in place of 0
    """

    @T.prim_func
    def gated_norm_(x_: T.handle, gate_: T.handle, gain_: T.handle, out_: T.handle, tokens: T.int32, gate_stride: T.int32,
                    heads: T.int32, head_dim: T.int32, gain_step: T.int32, eps: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "float32")
        gate = T.match_buffer(gate_, (T.int32(),), "float32")
        gain = T.match_buffer(gain_, (T.int32(),), "float32")
        out = T.match_buffer(out_, (T.int32(),), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(heads, WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        head: T.let = part * WARPS + warp
        at: T.let = (row * heads + head) * head_dim
        of_gate: T.let = row * gate_stride + head * head_dim
        total = T.alloc_local((1,), "float32")
        factor = T.alloc_local((1,), "float32")
        value = T.alloc_local((1,), "float32")
        if head < heads:
            total[0] = T.float32(0)
            for i in T.serial(T.ceildiv(head_dim, 32)):
                if i * 32 + lane < head_dim:
                    value[0] = x[at + i * 32 + lane]
                    if first:
                        value[0] = value[0] * functions["silu"](gate[of_gate + i * 32 + lane])
                    add_square(total, value[0])
            add_over_warp(total)
            inverse_root(factor, total, head_dim, eps)
            for i in T.serial(T.ceildiv(head_dim, 32)):
                if i * 32 + lane < head_dim:
                    value[0] = x[at + i * 32 + lane] * functions["silu"](gate[of_gate + i * 32 + lane])
                    out[at + i * 32 + lane] = value[0] * factor[0] * gain[head * gain_step + i * 32 + lane]

    return gated_norm_
