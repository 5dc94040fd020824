"""Matrices of f16, bf16 and f32: products with rows of f32, and rows of an embedding.

The order of the file: [block of 16 output channels][word][16], a word is two neighbouring channels of 16 bits, or one of 32.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import THREADS


def channels(kind):
    """Channels in a word."""
    return 1 if kind == "f32" else 2


def number(kind, word, which):
    """Channel 0 or 1 of a word, as f32."""
    if kind == "f32":
        return T.reinterpret("float32", word)
    if kind == "bf16":
        return T.reinterpret("float32", word & T.uint32(0xFFFF0000) if which else word << T.uint32(16))
    bits = T.Cast("uint16", word >> T.uint32(16) if which else word & T.uint32(0xFFFF))
    return T.Cast("float32", T.reinterpret("float16", bits))


def float_product(kind, TOKENS=8, PARTS=8):
    """y = W x + bias for 16 output channels and TOKENS tokens; with `add` added to what is there.

    A thread has one output channel and every PARTS-th word of it; the sums are added in the order of the parts, so a token's
    do not depend on which tokens run with it.
    """
    EACH = channels(kind)

    @T.prim_func
    def float_product_(x_: T.handle, q_: T.handle, bias_: T.handle, y_: T.handle, tokens: T.int32, columns: T.int32,
                       stride: T.int32, rows: T.int32, width: T.int32, has_bias: T.int32, add: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nq, nb, ny = T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        q = T.match_buffer(q_, (nq,), "uint32")
        bias = T.match_buffer(bias_, (nb,), "float32")
        y = T.match_buffer(y_, (ny,), "float32")
        T.device_entry()
        tile, block = T.cta_id([T.ceildiv(tokens, TOKENS), T.ceildiv(rows, 16)])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        part: T.let = tid // 16
        sums = T.alloc_shared((PARTS, 16 * TOKENS), "float32")
        acc = T.alloc_local((TOKENS,), "float32")
        w = T.alloc_local((2,), "float32")
        total = T.alloc_local((1,), "float32")
        words: T.let = T.ceildiv(columns, EACH)
        for n in T.unroll(TOKENS):
            acc[n] = T.float32(0)
        for i in T.serial(T.ceildiv(words, PARTS)):
            at: T.let = i * PARTS + part
            if at < words:
                word: T.let = q[(block * words + at) * 16 + tid % 16]
                w[0] = number(kind, word, 0)
                if EACH == 2:
                    w[1] = number(kind, word, 1)
                for n in T.unroll(TOKENS):
                    if tile * TOKENS + n < tokens:
                        for c in T.unroll(EACH):
                            if at * EACH + c < columns:
                                acc[n] = acc[n] + w[c] * x[(tile * TOKENS + n) * stride + at * EACH + c]
        for n in T.unroll(TOKENS):
            sums[part, n * 16 + tid % 16] = acc[n]
        T.cuda.cta_sync()
        token: T.let = tile * TOKENS + tid // 16
        row: T.let = block * 16 + tid % 16
        if token < tokens and row < rows:
            total[0] = T.float32(0)
            for i in T.unroll(PARTS):
                total[0] = total[0] + sums[i, tid]
            if has_bias != 0:
                total[0] = total[0] + bias[row]
            if add != 0:
                total[0] = y[token * width + row] + total[0]
            y[token * width + row] = total[0]

    return float_product_


def embed_float(kind):
    """out[token row] = row tokens[token row] of a matrix of floats."""
    EACH = channels(kind)

    @T.prim_func
    def embed_float_(which_: T.handle, q_: T.handle, out_: T.handle, tokens: T.int32, columns: T.int32):
        T.func_attr({"tirx.noalias": True})
        nw, nq, no = T.int32(), T.int32(), T.int32()
        which = T.match_buffer(which_, (nw,), "int32")
        q = T.match_buffer(q_, (nq,), "uint32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(columns, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < columns:
            token: T.let = which[row]
            word: T.let = q[(token // 16 * T.ceildiv(columns, EACH) + channel // EACH) * 16 + token % 16]
            out[row * columns + channel] = T.if_then_else(
                channel % EACH == 0, number(kind, word, 0), number(kind, word, EACH - 1)
            )

    return embed_float_
