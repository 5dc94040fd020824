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
TOGETHER = 16
"""Channels of a thread that a norm asks for before it adds any: of 2,048 all, so that it waits for L2 once."""


@T.inline
def read_row(values, x, row, first, width):
    """values[k]: channel `first + k * THREADS` of the row that begins at x[row], or its last one."""
    for k in T.unroll(TOGETHER):
        values[k] = x[row + T.min(first + k * THREADS, width - 1)]


@T.inline
def norm_rows(x, stats, sums, first, count, width, norm, eps, warp, lane):
    """stats: of each of `count` rows from `first` on its mean, 0 for RMS, and the inverse root of its mean square."""
    tid: T.let = warp * 32 + lane
    total = T.alloc_local((1,), "float32")
    values = T.alloc_local((TOGETHER,), "float32")
    if norm == LAYER:
        for n in T.serial(count):
            total[0] = T.float32(0)
            for i in T.serial(T.ceildiv(width, TOGETHER * THREADS)):
                read_row(values, x, (first + n) * width, i * (TOGETHER * THREADS) + tid, width)
                for k in T.unroll(TOGETHER):
                    if (i * TOGETHER + k) * THREADS + tid < width:
                        total[0] = total[0] + values[k]
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
        for i in T.serial(T.ceildiv(width, TOGETHER * THREADS)):
            read_row(values, x, (first + n) * width, i * (TOGETHER * THREADS) + tid, width)
            for k in T.unroll(TOGETHER):
                if (i * TOGETHER + k) * THREADS + tid < width:
                    add_square(total, values[k] - stats[n * 2])
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
def read_channels(values, many, x, gain, shift, order, scale, stats, row, n, first, apart, end, width, norm, ordered, scaled):
    """values[i]: channel `first + i * apart` of what the product reads of row n of the block, which is row `row` of x; 0 from
    `end` on.

    All of x is asked for before any of it is used, and so on: each waits for L2 once, and not once for each channel.
    """
    source = T.alloc_local((many,), "int32")
    factors = T.alloc_local((many,), "float32")
    for i in T.unroll(many):
        source[i] = T.min(first + i * apart, end - 1)
    if ordered != 0:
        for i in T.unroll(many):
            source[i] = order[source[i]]
    for i in T.unroll(many):
        values[i] = x[row * width + source[i]]
    if norm != 0:
        for i in T.unroll(many):
            factors[i] = gain[source[i]]
        for i in T.unroll(many):
            values[i] = (values[i] - stats[n * 2]) * stats[n * 2 + 1] * factors[i]
    if norm == LAYER:
        for i in T.unroll(many):
            factors[i] = shift[source[i]]
        for i in T.unroll(many):
            T.ptx.add.rn.f32(values[i], values[i], factors[i])
    if scaled != 0:
        for i in T.unroll(many):
            factors[i] = scale[T.min(first + i * apart, end - 1)]
        for i in T.unroll(many):
            values[i] = values[i] * factors[i]
    for i in T.unroll(many):
        if first + i * apart >= end:
            values[i] = T.float32(0)


@T.inline
def range_of_rows(read, rules, ends, largest, start, columns, count, symmetric, levels, warp, lane):
    """rules: of each row what `token_rule` says of its channels from `start` on; read(values, n, first, apart, end)."""
    tid: T.let = warp * 32 + lane
    span = T.alloc_local((2,), "float32")
    most = T.alloc_local((1,), "uint32")
    values = T.alloc_local((4,), "float32")
    of = T.alloc_local((4,), "float32")
    for n in T.serial(count):
        span[0] = T.float32(0)
        span[1] = T.float32(0)
        most[0] = T.uint32(0)
        for i in T.serial(T.ceildiv(columns, 4 * THREADS)):
            read(values, n, start + i * (4 * THREADS) + tid, THREADS, start + columns)
            for k in T.unroll(4):
                widen(span, most, values[k])
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
