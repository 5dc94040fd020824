"""The quantized input: what products read in place of x f32 [tokens][width].

Data [chunk][padded tokens][32 channels], with zeros after the last channel up to a multiple of 128; per group of channels and
token a scale f32 [group][padded tokens], by which a product is multiplied.  A NaN or an infinity makes the scale of its group
NaN.

f16     in each quad the channels 0, 2, 1, 3, as the decoder of the weights gives them
i8      integers; and their sum i32 [group][padded tokens], which zero points multiply

Three rules give the numbers:

group    f16: divided by a power of two that brings the largest of a group below 2^15, so that activations of any size
         fit; i8: scale max / limit, rint(x / scale)
token    integers with one scale per token (quantize_tokens of edgeq/format/quantization.py).  Those over an asymmetric range
         of 8 bits reach from -255 to 255: f16 holds them exactly, and an mma adds 128 of their products without rounding
static   integers with given scales (quantize_static)

The same arithmetic is the beginning of a fused product (fused.py).
"""

from tvm.script import tirx as T

from edgeq.format.quantization import MIN_SPAN
from edgeq.targets.cuda.kernels.rows import INFINITY_BITS, NAN_BITS, THREADS


def quantize_block(rule, integer, group):
    """Inline: a warp quantizes a block of 128 channels of a token; a lane has the four channels v of a quad.

    of       group: limit; static: scale, limit; token: what `token_rule` left
    place    of the quad's chunk and token in the data;  at: the group
    """
    LANES = group // 4  # of a group
    LEVELS = LANES.bit_length() - 1

    @T.inline
    def integers(n, data, xn, place, at, token, padded, groups, lane):
        count = T.alloc_local((1,), "int32")
        count[0] = n[0] + n[1] + n[2] + n[3]
        for level in T.unroll(LEVELS):
            count[0] = count[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), count[0], 1 << level, 32, 32)
        data[place * 8 + lane % 8] = T.Cast("uint32", (
            (n[0] & 255) | ((n[1] & 255) << 8) | ((n[2] & 255) << 16) | ((n[3] & 255) << 24)))  # fmt: skip
        if lane % LANES == 0 and at < groups:
            xn[at * padded + token] = count[0]

    @T.inline
    def halves(h, data, place, lane):
        words = T.alloc_local((2,), "uint32")
        for i in T.unroll(2):
            words[i] = T.Cast("uint32", T.reinterpret("uint16", h[i])) | (
                T.Cast("uint32", T.reinterpret("uint16", h[i + 2])) << T.uint32(16)
            )
        for i in T.vectorized(2):
            data[place * 16 + lane % 8 * 2 + i] = words[i]

    @T.inline
    def put(v, of, data, xs, xn, place, at, token, padded, groups, lane):
        n = T.alloc_local((4,), "int32")
        h = T.alloc_local((4,), "float16")
        most = T.alloc_local((1,), "uint32")
        scale = T.alloc_local((1,), "float32")
        value = T.alloc_local((1,), "float32")
        if rule == "token":
            scale[0] = of[3]
            for i in T.unroll(4):
                value[0] = T.float32(0)
                if T.reinterpret("uint32", of[3]) != T.uint32(NAN_BITS):
                    value[0] = T.max(T.min(T.nearbyint(v[i] * of[0]), of[2]), of[1])
                if integer:
                    n[i] = T.Cast("int32", value[0])
                else:
                    h[i] = T.Cast("float16", value[0])
        else:
            # The bits of |x|: they are ordered as the numbers are, and a NaN is above all.
            most[0] = T.uint32(0)
            for i in T.unroll(4):
                most[0] = T.max(most[0], T.reinterpret("uint32", v[i]) & T.uint32(0x7FFFFFFF))
            for level in T.unroll(LEVELS):
                most[0] = T.max(most[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), most[0], 1 << level, 32, 32))
            if rule == "static":
                scale[0] = of[0]
                for i in T.unroll(4):
                    n[i] = 0
                    if most[0] < T.uint32(INFINITY_BITS):
                        n[i] = T.Cast("int32", T.max(T.min(
                            T.nearbyint(v[i] * (T.float32(1) / of[0])), of[1]), T.float32(0) - of[1]))  # fmt: skip
            elif integer:
                scale[0] = T.reinterpret("float32", most[0]) / of[0]
                for i in T.unroll(4):
                    n[i] = 0
                    if most[0] < T.uint32(INFINITY_BITS) and scale[0] > T.float32(0):
                        n[i] = T.Cast("int32", T.max(T.min(T.nearbyint(v[i] / scale[0]), of[0]), T.float32(0) - of[0]))
            else:
                # Exponents from 27 to 254: with them both powers of two below are normal numbers.
                exponent: T.let = T.max(most[0] >> T.uint32(23), T.uint32(27))
                scale[0] = T.reinterpret("float32", (exponent - T.uint32(14)) << T.uint32(23))
                inverse: T.let = T.reinterpret("float32", (T.uint32(268) - exponent) << T.uint32(23))
                for i in T.unroll(4):
                    h[i] = T.Cast("float16", T.if_then_else(most[0] < T.uint32(INFINITY_BITS), v[i] * inverse, T.float32(0)))
            if most[0] >= T.uint32(INFINITY_BITS):
                scale[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
        if integer:
            integers(n, data, xn, place, at, token, padded, groups, lane)
        else:
            halves(h, data, place, lane)
        if lane % LANES == 0 and at < groups:
            xs[at * padded + token] = scale[0]

    return put


@T.inline
def widen(span, most, value):
    """span: the range of numbers and 0 so far; most: the bits of the largest |x|."""
    most[0] = T.max(most[0], T.reinterpret("uint32", value) & T.uint32(0x7FFFFFFF))
    span[0] = T.min(span[0], value)
    span[1] = T.max(span[1], value)


@T.inline
def widen_over_warp(span, most):
    for level in T.unroll(5):
        most[0] = T.max(most[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), most[0], 1 << level, 32, 32))
        span[0] = T.min(span[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), span[0], 1 << level, 32, 32))
        span[1] = T.max(span[1], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), span[1], 1 << level, 32, 32))


@T.inline
def token_rule(of, span, most, symmetric, levels):
    """of: 1 / scale, the least and the largest integer, the scale, NaN where a number is not finite.

    levels   of the integers: 2^bits - 1, or where `symmetric` 2^(bits - 1) - 1
    """
    width = T.alloc_local((1,), "float32")
    if symmetric != 0:
        width[0] = T.max(T.float32(0) - span[0], span[1])
    else:
        width[0] = span[1] - span[0]
    of[0] = T.float32(0)
    of[3] = T.float32(0)
    if width[0] > T.float32(MIN_SPAN):
        of[0] = levels / width[0]
        of[3] = width[0] / levels
    if symmetric != 0:
        of[1] = T.float32(0) - levels
        of[2] = levels
    else:
        of[1] = T.float32(0) - T.nearbyint((T.float32(0) - span[0]) * of[0])
        of[2] = levels + of[1]
    if most[0] >= T.uint32(INFINITY_BITS):
        of[3] = T.reinterpret("float32", T.uint32(NAN_BITS))


@T.inline
def quad_of(v, x, first, at, columns):
    for i in T.unroll(4):
        v[i] = T.float32(0)
        if at + i < columns:
            v[i] = x[first + at + i]


def quantize_input(integer, group, WARPS=4):
    put = quantize_block("group", integer, group)

    @T.prim_func
    def quantize_input_(x_: T.handle, data_: T.handle, xs_: T.handle, xn_: T.handle, tokens: T.int32,
              columns: T.int32, width: T.int32, padded: T.int32, groups: T.int32, limit: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nd, ns, nn = T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        data = T.match_buffer(data_, (nd,), "uint32")
        xs = T.match_buffer(xs_, (ns,), "float32")
        xn = T.match_buffer(xn_, (nn,), "int32")
        T.device_entry()
        quarter, token = T.cta_id([T.ceildiv(columns, 128 * WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        block: T.let = quarter * WARPS + warp
        v = T.alloc_local((4,), "float32")
        of = T.alloc_local((4,), "float32")
        of[0] = limit
        if block * 128 < columns:
            quad_of(v, x, token * width, block * 128 + lane * 4, columns)
            put(v, of, data, xs, xn, (block * 4 + lane // 8) * padded + token, block * (128 // group) + lane // (group // 4),
                token, padded, groups, lane)  # fmt: skip

    return quantize_input_


def quantize_input_token(integer, group):
    """A block of threads has a token."""
    WARPS = THREADS // 32
    put = quantize_block("token", integer, group)

    @T.prim_func
    def quantize_input_token_(x_: T.handle, data_: T.handle, xs_: T.handle, xn_: T.handle, tokens: T.int32, columns: T.int32,
                    width: T.int32, padded: T.int32, groups: T.int32, symmetric: T.int32, levels: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nd, ns, nn = T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        data = T.match_buffer(data_, (nd,), "uint32")
        xs = T.match_buffer(xs_, (ns,), "float32")
        xn = T.match_buffer(xn_, (nn,), "int32")
        T.device_entry()
        token = T.cta_id([tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        ends = T.alloc_shared((WARPS, 2), "float32")
        largest = T.alloc_shared((WARPS,), "uint32")
        span = T.alloc_local((2,), "float32")
        most = T.alloc_local((1,), "uint32")
        v = T.alloc_local((4,), "float32")
        of = T.alloc_local((4,), "float32")
        span[0] = T.float32(0)
        span[1] = T.float32(0)
        most[0] = T.uint32(0)
        for i in T.serial(T.ceildiv(columns, THREADS)):
            if i * THREADS + tid < columns:
                v[0] = x[token * width + i * THREADS + tid]
                widen(span, most, v[0])
        widen_over_warp(span, most)
        if lane == 0:
            largest[warp] = most[0]
            for i in T.unroll(2):
                ends[warp, i] = span[i]
        T.cuda.cta_sync()
        for i in T.unroll(WARPS):
            most[0] = T.max(most[0], largest[i])
            span[0] = T.min(span[0], ends[i, 0])
            span[1] = T.max(span[1], ends[i, 1])
        token_rule(of, span, most, symmetric, levels)
        for i in T.serial(T.ceildiv(columns, 128 * WARPS)):
            block: T.let = i * WARPS + warp
            if block * 128 < columns:
                quad_of(v, x, token * width, block * 128 + lane * 4, columns)
                put(v, of, data, xs, xn, (block * 4 + lane // 8) * padded + token,
                    block * (128 // group) + lane // (group // 4), token, padded, groups, lane)  # fmt: skip

    return quantize_input_token_


def quantize_input_static(group, WARPS=4):
    """i8 by the scale of a token's modality: scales f32 [kinds], modality i32 per token row."""
    put = quantize_block("static", True, group)

    @T.prim_func
    def quantize_input_static_(x_: T.handle, scales_: T.handle, modality_: T.handle, data_: T.handle, xs_: T.handle,
                     xn_: T.handle, tokens: T.int32, columns: T.int32, width: T.int32, padded: T.int32, groups: T.int32,
                     kinds: T.int32, limit: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nc, nm, nd, ns, nn = T.int32(), T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        scales = T.match_buffer(scales_, (nc,), "float32")
        modality = T.match_buffer(modality_, (nm,), "int32")
        data = T.match_buffer(data_, (nd,), "uint32")
        xs = T.match_buffer(xs_, (ns,), "float32")
        xn = T.match_buffer(xn_, (nn,), "int32")
        T.device_entry()
        quarter, token = T.cta_id([T.ceildiv(columns, 128 * WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        block: T.let = quarter * WARPS + warp
        v = T.alloc_local((4,), "float32")
        of = T.alloc_local((4,), "float32")
        of[0] = scales[T.min(modality[token], kinds - 1)]
        of[1] = limit
        if block * 128 < columns:
            quad_of(v, x, token * width, block * 128 + lane * 4, columns)
            put(v, of, data, xs, xn, (block * 4 + lane // 8) * padded + token, block * (128 // group) + lane // (group // 4),
                token, padded, groups, lane)  # fmt: skip

    return quantize_input_static_
