"""How a fused product reads its input: rows of f32 through a norm, an order and a scale, to quantized ones in shared memory.

A block of threads has up to TOKENS token rows.  What it computes has the bits of the kernels for the operations one by one:
rms_norm and layer_norm, arrange, and those of quantize_input.py.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.norms import add_over_warp, add_square, inverse_root
from edgeq.targets.cuda.kernels.quantize_input import token_rule, widen, widen_over_warp
from edgeq.targets.cuda.kernels.rows import THREADS

TOKENS = 8
WARPS = THREADS // 32
RMS, LAYER = 1, 2
"""Norms; 0: none."""


@T.inline
def norm_rows(x, stats, sums, first, count, width, norm, eps, warp, lane):
    """stats: of each of `count` rows from `first` on its mean, 0 for RMS, and the inverse root of its mean square."""
    tid: T.let = warp * 32 + lane
    total = T.alloc_local((1,), "float32")
    if norm == LAYER:
        for n in T.serial(count):
            total[0] = T.float32(0)
            for i in T.serial(T.ceildiv(width, THREADS)):
                if i * THREADS + tid < width:
                    total[0] = total[0] + x[(first + n) * width + i * THREADS + tid]
            add_over_warp(total)
            if lane == 0:
                sums[n * WARPS + warp] = total[0]
        T.cuda.cta_sync()
    if tid < count:
        total[0] = T.float32(0)
        if norm == LAYER:
            for i in T.unroll(WARPS):
                total[0] = total[0] + sums[tid * WARPS + i]
        stats[tid * 2] = total[0] / T.Cast("float32", width)
    T.cuda.cta_sync()
    for n in T.serial(count):
        total[0] = T.float32(0)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                add_square(total, x[(first + n) * width + i * THREADS + tid] - stats[n * 2])
        add_over_warp(total)
        if lane == 0:
            sums[n * WARPS + warp] = total[0]
    T.cuda.cta_sync()
    if tid < count:
        factor = T.alloc_local((1,), "float32")
        total[0] = T.float32(0)
        for i in T.unroll(WARPS):
            total[0] = total[0] + sums[tid * WARPS + i]
        inverse_root(factor, total, width, eps)
        stats[tid * 2 + 1] = factor[0]
    T.cuda.cta_sync()


@T.inline
def read_channel(value, x, gain, shift, order, scale, stats, row, n, channel, width, norm, ordered, scaled):
    """value[0]: channel `channel` of what the product reads of row n of the block, which is row `row` of x."""
    source = T.alloc_local((1,), "int32")
    source[0] = channel
    if ordered != 0:
        source[0] = order[channel]
    value[0] = x[row * width + source[0]]
    if norm != 0:
        value[0] = (value[0] - stats[n * 2]) * stats[n * 2 + 1] * gain[source[0]]
    if norm == LAYER:
        T.ptx.add.rn.f32(value[0], value[0], shift[source[0]])
    if scaled != 0:
        value[0] = value[0] * scale[channel]


@T.inline
def range_of_rows(read, rules, ends, largest, start, columns, count, symmetric, levels, warp, lane):
    """rules: of each row what `token_rule` says of its channels from `start` on; read(value, n, channel)."""
    tid: T.let = warp * 32 + lane
    span = T.alloc_local((2,), "float32")
    most = T.alloc_local((1,), "uint32")
    value = T.alloc_local((1,), "float32")
    of = T.alloc_local((4,), "float32")
    for n in T.serial(count):
        span[0] = T.float32(0)
        span[1] = T.float32(0)
        most[0] = T.uint32(0)
        for i in T.serial(T.ceildiv(columns, THREADS)):
            if i * THREADS + tid < columns:
                read(value, n, start + i * THREADS + tid)
                widen(span, most, value[0])
        widen_over_warp(span, most)
        if lane == 0:
            largest[n * WARPS + warp] = most[0]
            for i in T.unroll(2):
                ends[(n * WARPS + warp) * 2 + i] = span[i]
    T.cuda.cta_sync()
    if tid < count:
        span[0] = T.float32(0)
        span[1] = T.float32(0)
        most[0] = T.uint32(0)
        for i in T.unroll(WARPS):
            most[0] = T.max(most[0], largest[tid * WARPS + i])
            span[0] = T.min(span[0], ends[(tid * WARPS + i) * 2])
            span[1] = T.max(span[1], ends[(tid * WARPS + i) * 2 + 1])
        token_rule(of, span, most, symmetric, levels)
        for i in T.unroll(4):
            rules[tid * 4 + i] = of[i]
    T.cuda.cta_sync()
