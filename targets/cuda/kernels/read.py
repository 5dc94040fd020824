"""Memory read once and nothing else: how fast a GPU reads is what decode reaches a share of."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import THREADS

READS_AHEAD = 4
"""Reads of 16 bytes that a thread has asked for."""


def read_memory():
    """out[thread]: the exclusive or of all words that the thread read; `rounds` times READS_AHEAD vectors of 4 words each."""

    @T.prim_func
    def read_memory_(x_: T.handle, out_: T.handle, ctas: T.int32, rounds: T.int32):
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "uint32")
        out = T.match_buffer(out_, (T.int32(),), "uint32")
        T.device_entry()
        cta = T.cta_id([ctas])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        thread: T.let = cta * THREADS + warp * 32 + lane
        words = T.alloc_local((READS_AHEAD * 4,), "uint32")
        all_ = T.alloc_local((1,), "uint32")
        all_[0] = T.uint32(0)
        for i in T.serial(rounds):
            for u in T.unroll(READS_AHEAD):
                for v in T.vectorized(4):
                    words[u * 4 + v] = x[((i * READS_AHEAD + u) * ctas * THREADS + thread) * 4 + v]
            for u in T.unroll(READS_AHEAD * 4):
                all_[0] = all_[0] ^ words[u]
        out[thread] = all_[0]

    return read_memory_
