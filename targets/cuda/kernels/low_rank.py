"""Low-rank parts of layers, b (a x): products of floats with few channels between them.

`low_rank` makes a x, through a norm where the layer's input comes after one.  It has few output channels, and the memory of a
GPU is slow to answer: so blocks of threads share its input channels, and the last one to end adds their sums in order.
What adds b to a product is `low_rank_row`, in a kernel of its own (`low_rank_add`) or in that of the product (fused.py).

The order of the file: [block of 16 output channels][word][16], as in floats.py.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.floats import channels, number
from edgeq.targets.cuda.kernels.prologue import TOKENS, WARPS, norm_rows, read_channels
from edgeq.targets.cuda.kernels.rows import THREADS

CHANNELS = 256
"""Input channels of a round."""
BF16, F32 = 2, 3
"""Kinds of b; f16 is 1, and 0 that there is no low-rank part."""


def low_rank(kind, PARTS=8):
    """out = a x', f32 [tokens][rank]; x' is a norm of x, or x.

    One of `shares` blocks of threads has `each` rounds of input channels, 16 output channels and TOKENS token rows; a thread
    one output channel and every PARTS-th word of it.

    gain, shift, norm, eps   of the norm (prologue.py)
    sums      f32 [tiles of tokens][blocks of 16][shares][tokens of a tile][16]
    arrived   i32 [tiles of tokens][blocks of 16], 0 before and after
    """
    EACH = channels(kind)

    @T.prim_func
    def low_rank_(x_: T.handle, gain_: T.handle, shift_: T.handle, a_: T.handle, out_: T.handle, sums_: T.handle,
                  arrived_: T.handle, tokens: T.int32, columns: T.int32, width_in: T.int32, rank: T.int32, norm: T.int32,
                  eps: T.float32, shares: T.int32, each: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "float32")
        gain = T.match_buffer(gain_, (T.int32(),), "float32")
        shift = T.match_buffer(shift_, (T.int32(),), "float32")
        a = T.match_buffer(a_, (T.int32(),), "uint32")
        out = T.match_buffer(out_, (T.int32(),), "float32")
        sums = T.match_buffer(sums_, (T.int32(),), "float32")
        arrived = T.match_buffer(arrived_, (T.int32(),), "int32")
        T.device_entry()
        share, block, tile = T.cta_id([shares, T.ceildiv(rank, 16), T.ceildiv(tokens, TOKENS)])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        count: T.let = T.min(TOKENS, tokens - tile * TOKENS)
        words: T.let = T.ceildiv(columns, EACH)
        place: T.let = tile * T.ceildiv(rank, 16) + block
        read = T.alloc_shared((TOKENS * CHANNELS,), "float32")
        added = T.alloc_shared((PARTS * 16 * TOKENS,), "float32")
        stats = T.alloc_shared((TOKENS * 2,), "float32")
        of_warps = T.alloc_shared((TOKENS * WARPS,), "float32")
        before = T.alloc_shared((1,), "int32")
        acc = T.alloc_local((TOKENS,), "float32")
        w = T.alloc_local((2,), "float32")
        values = T.alloc_local((CHANNELS // THREADS,), "float32")
        total = T.alloc_local((1,), "float32")
        for n in T.unroll(TOKENS):
            acc[n] = T.float32(0)
        if norm != 0:
            norm_rows(x, stats, of_warps, tile * TOKENS, count, width_in, norm, eps, warp, lane)
        for i in T.serial(each):
            start: T.let = (share * each + i) * CHANNELS
            T.cuda.cta_sync()
            for n in T.serial(count):
                # The part reads what the layer does before its order and its scale.
                read_channels(values, CHANNELS // THREADS, x, gain, shift, arrived, gain, stats, tile * TOKENS + n, n,
                              start + tid, THREADS, columns, width_in, norm, 0, 0)  # fmt: skip
                for c in T.unroll(CHANNELS // THREADS):
                    read[n * CHANNELS + c * THREADS + tid] = values[c]
            T.cuda.cta_sync()
            for k in T.unroll(CHANNELS // EACH // PARTS):
                inside: T.let = k * PARTS + tid // 16
                at: T.let = start // EACH + inside
                if at < words:
                    word: T.let = a[(block * words + at) * 16 + tid % 16]
                    w[0] = number(kind, word, 0)
                    if EACH == 2:
                        w[1] = number(kind, word, 1)
                    for n in T.unroll(TOKENS):
                        if n < count:
                            for c in T.unroll(EACH):
                                T.ptx.fma.rn.f32(acc[n], w[c], read[n * CHANNELS + inside * EACH + c], acc[n])
        for n in T.unroll(TOKENS):
            added[tid // 16 * (16 * TOKENS) + n * 16 + tid % 16] = acc[n]
        T.cuda.cta_sync()
        total[0] = T.float32(0)
        for i in T.unroll(PARTS):
            total[0] = total[0] + added[i * (16 * TOKENS) + tid]
        sums[(place * shares + share) * THREADS + tid] = total[0]
        T.cuda.cta_sync()
        if tid == 0:
            T.cuda.thread_fence()  # after the barrier, so of what all threads wrote (PTX memory model, cumulativity)
            before[0] = T.cuda.atomic_add(arrived.ptr_to([place]), 1)
        T.cuda.cta_sync()
        if before[0] == shares - 1:
            T.cuda.thread_fence()
            if tid == 0:
                arrived[place] = 0
            total[0] = T.float32(0)
            for i in T.serial(shares):
                total[0] = total[0] + sums[(place * shares + i) * THREADS + tid]
            if tid // 16 < count and block * 16 + tid % 16 < rank:
                out[(tile * TOKENS + tid // 16) * rank + block * 16 + tid % 16] = total[0]

    return low_rank_


@T.inline
def low_rank_row(total, b, inner, row, token, rank, kind):
    """total[0]: the sum over the rank of output channel `row` of b, of `kind`, times row `token` of inner."""
    w = T.alloc_local((2,), "float32")
    total[0] = T.float32(0)
    if kind == F32:
        for r in T.serial(rank):
            w[0] = T.reinterpret("float32", b[(row // 16 * rank + r) * 16 + row % 16])
            T.ptx.fma.rn.f32(total[0], w[0], inner[token * rank + r], total[0])
    else:
        for i in T.serial(T.ceildiv(rank, 2)):
            word: T.let = b[(row // 16 * T.ceildiv(rank, 2) + i) * 16 + row % 16]
            w[0] = T.if_then_else(kind == BF16, number("bf16", word, 0), number("f16", word, 0))
            w[1] = T.if_then_else(kind == BF16, number("bf16", word, 1), number("f16", word, 1))
            for c in T.unroll(2):
                if i * 2 + c < rank:
                    T.ptx.fma.rn.f32(total[0], w[c], inner[token * rank + i * 2 + c], total[0])


def low_rank_add():
    """y += b inner, for 16 output channels and TOKENS token rows; b of kind `low_kind`."""

    @T.prim_func
    def low_rank_add_(low_b_: T.handle, inner_: T.handle, y_: T.handle, tokens: T.int32, rank: T.int32, low_kind: T.int32,
                      rows: T.int32, width: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        low_b = T.match_buffer(low_b_, (T.int32(),), "uint32")
        inner = T.match_buffer(inner_, (T.int32(),), "float32")
        y = T.match_buffer(y_, (T.int32(),), "float32")
        T.device_entry()
        tile, block = T.cta_id([T.ceildiv(tokens, TOKENS), T.ceildiv(rows, 16)])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        total = T.alloc_local((1,), "float32")
        token: T.let = tile * TOKENS + tid // 16
        row: T.let = block * 16 + tid % 16
        if token < tokens and row < rows:
            low_rank_row(total, low_b, inner, row, token, rank, low_kind)
            y[token * width + row] = y[token * width + row] + total[0]

    return low_rank_add_
