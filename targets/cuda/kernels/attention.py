"""Positions, the cache and attention.  A page of the cache holds f16 [layer][keys, values][kv head][64 positions][head_dim].

pool      f16: the address that page offsets count from
pages     int64, in units of 8 numbers: offset of each page of each session of the run
tables    int32 per token row: where its session's pages begin in `pages`
slots     int32 per token row: its place in the cache of its session
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import LARGEST_F32
from edgeq.targets.rows import PAGE

LARGEST_F16 = 65504.0
LEAST_SCORE = -1e30
THREADS = 128


def rope(THREADS=THREADS):
    """In place: (a, b) = (x[i], x[i + pairs]) of each head become (a cos - b sin, b cos + a sin).

    cos, sin   [token rows][pairs]
    """

    @T.prim_func
    def rope_(x_: T.handle, cos_: T.handle, sin_: T.handle,
              tokens: T.int32, width: T.int32, heads: T.int32, head_dim: T.int32, pairs: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nc, ns = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        cos = T.match_buffer(cos_, (nc,), "float32")
        sin = T.match_buffer(sin_, (ns,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(heads * pairs, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        unit: T.let = part * THREADS + warp * 32 + lane
        old = T.alloc_local((2,), "float32")
        if unit < heads * pairs:
            at: T.let = row * width + unit // pairs * head_dim + unit % pairs
            c: T.let = cos[row * pairs + unit % pairs]
            s: T.let = sin[row * pairs + unit % pairs]
            old[0] = x[at]
            old[1] = x[at + pairs]
            x[at] = old[0] * c - old[1] * s
            x[at + pairs] = old[1] * c + old[0] * s

    return rope_


def cache_write():
    """Keys k and values v [token rows, width] into the slots of their rows, as f16; an infinity becomes NaN."""

    @T.prim_func
    def cache_write_(k_: T.handle, v_: T.handle, pool_: T.handle, pages_: T.handle, tables_: T.handle, slots_: T.handle,
                     tokens: T.int32, width: T.int32, kv_heads: T.int32, head_dim: T.int32, layer: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nk, nv, np, ng, nt, ns = T.int32(), T.int32(), T.int64(), T.int32(), T.int32(), T.int32()
        k = T.match_buffer(k_, (nk,), "float32")
        v = T.match_buffer(v_, (nv,), "float32")
        pool = T.match_buffer(pool_, (np,), "float16")
        pages = T.match_buffer(pages_, (ng,), "int64")
        tables = T.match_buffer(tables_, (nt,), "int32")
        slots = T.match_buffer(slots_, (ns,), "int32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(kv_heads * head_dim, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        unit: T.let = part * THREADS + warp * 32 + lane
        if unit < kv_heads * head_dim:
            slot: T.let = slots[row]
            page: T.let = pages[tables[row] + slot // PAGE] * T.int64(8)
            inside: T.let = ((layer * 2 * kv_heads + unit // head_dim) * PAGE + slot % PAGE) * head_dim + unit % head_dim
            pool[page + T.Cast("int64", inside)] = rounded(k[row * width + unit])
            pool[page + T.Cast("int64", inside + kv_heads * PAGE * head_dim)] = rounded(v[row * width + unit])

    return cache_write_


def rounded(x):
    """x as f16: limited to its range, infinities and NaN as NaN."""
    finite = T.abs(x) <= T.float32(LARGEST_F32)
    limited = T.max(T.min(x, T.float32(LARGEST_F16)), T.float32(-LARGEST_F16))
    return T.Cast("float16", T.if_then_else(finite, limited, T.reinterpret("float32", T.uint32(0x7FC00000))))


def attend(head_dim, WARPS=4):
    """out = softmax(q k^T * scale) v over the slots 0 ... its own of each token row; `window` above 0: the last that many.

    A warp has one query head of one token row and goes through the slots in blocks of 32, so a row's sums do not depend on
    which rows run with it, nor on how the rows were cut into runs.  A lane has one slot of a block while scores are made, and
    every 32nd dimension while values are added (online softmax, Milakov and Gimelshein 2018).
    """
    EACH = -(-head_dim // 32)

    @T.prim_func
    def attend_(q_: T.handle, pool_: T.handle, pages_: T.handle, tables_: T.handle, slots_: T.handle, out_: T.handle,
                tokens: T.int32, width: T.int32, heads: T.int32, kv_heads: T.int32, layer: T.int32, window: T.int32,
                scale: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nq, np, ng, nt, ns, no = T.int32(), T.int64(), T.int32(), T.int32(), T.int32(), T.int32()
        q = T.match_buffer(q_, (nq,), "float32")
        pool = T.match_buffer(pool_, (np,), "float16")
        pages = T.match_buffer(pages_, (ng,), "int64")
        tables = T.match_buffer(tables_, (nt,), "int32")
        slots = T.match_buffer(slots_, (ns,), "int32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(heads, WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        head: T.let = part * WARPS + warp
        query = T.alloc_shared((WARPS, head_dim), "float32")
        weights = T.alloc_shared((WARPS, 32), "float32")
        eight = T.alloc_local((8,), "float16")
        acc = T.alloc_local((EACH,), "float32")
        score = T.alloc_local((1,), "float32")
        most = T.alloc_local((2,), "float32")  # before and with this block
        weight = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        if head < heads:
            end: T.let = slots[row] + 1
            first: T.let = T.if_then_else(window > 0, T.max(end - window, 0), 0)
            # In units of 8 numbers, keys of this head; values follow after those of all heads.
            inside: T.let = (layer * 2 * kv_heads + head // (heads // kv_heads)) * (PAGE * head_dim // 8)
            values: T.let = kv_heads * (PAGE * head_dim // 8)
            for i in T.unroll(EACH):
                acc[i] = T.float32(0)
                if i * 32 + lane < head_dim:
                    query[warp, i * 32 + lane] = q[row * width + head * head_dim + i * 32 + lane] * scale
            total[0] = T.float32(0)
            most[1] = T.float32(LEAST_SCORE)
            T.cuda.warp_sync()
            for block in T.serial(first // 32, T.ceildiv(end, 32)):
                page: T.let = pages[tables[row] + block * 32 // PAGE] + T.Cast("int64", inside)
                slot: T.let = block * 32 + lane
                seen: T.let = slot >= first and slot < end
                score[0] = T.float32(LEAST_SCORE)
                if seen:
                    score[0] = T.float32(0)
                    for i in T.serial(head_dim // 8):
                        for v in T.vectorized(8):
                            eight[v] = pool[(page + T.Cast("int64", slot % PAGE * (head_dim // 8) + i)) * T.int64(8) + v]
                        for v in T.unroll(8):
                            score[0] = score[0] + query[warp, i * 8 + v] * T.Cast("float32", eight[v])
                most[0] = most[1]
                most[1] = T.max(most[1], score[0])
                for level in T.unroll(5):
                    most[1] = T.max(most[1], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), most[1], 1 << level, 32, 32))
                weight[0] = T.float32(0)
                if seen:
                    weight[0] = T.exp(score[0] - most[1])
                weights[warp, lane] = weight[0]
                total[0] = total[0] * T.exp(most[0] - most[1]) + weight[0]
                for i in T.unroll(EACH):
                    acc[i] = acc[i] * T.exp(most[0] - most[1])
                T.cuda.warp_sync()
                for j in T.serial(T.max(first - block * 32, 0), T.min(end - block * 32, 32)):
                    for i in T.unroll(EACH):
                        if i * 32 + lane < head_dim:
                            dimension: T.let = (block * 32 + j) % PAGE * head_dim + i * 32 + lane
                            value: T.let = pool[(page + T.Cast("int64", values)) * T.int64(8) + T.Cast("int64", dimension)]
                            acc[i] = acc[i] + weights[warp, j] * T.Cast("float32", value)
                T.cuda.warp_sync()
            for level in T.unroll(5):
                total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total[0], 1 << level, 32, 32)
            # Where no score is above LEAST_SCORE, the result is NaN, as that of a NaN score is by itself.
            if most[1] <= T.float32(LEAST_SCORE):
                total[0] = T.reinterpret("float32", T.uint32(0x7FC00000))
            for i in T.unroll(EACH):
                if i * 32 + lane < head_dim:
                    out[row * (heads * head_dim) + head * head_dim + i * 32 + lane] = acc[i] / total[0]

    return attend_
