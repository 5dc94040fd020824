"""The input form: what products read in place of x f32 [tokens][width].

Data [chunk][padded tokens][32 channels], with zeros after the last channel up to a multiple of 128; per group of channels and
token a scale f32 [group][padded tokens], by which a product is multiplied.  A NaN or an infinity makes the scale of its group
NaN.

f16     divided by a power of two that brings the largest of a group below 2^15, so that activations of any size fit; in each
        quad the channels 0, 2, 1, 3, as the decoder of the weights gives them
i8      scale max / limit, rint(x / scale); and the sum i32 [group][padded tokens] of the integers, which zero points multiply
"""

from tvm.script import tirx as T

INFINITY_BITS = 0x7F800000


def form(integer, group, WARPS=4):
    LANES = group // 4  # of a group; a lane has the four channels of a quad
    LEVELS = LANES.bit_length() - 1

    @T.prim_func
    def form_(x_: T.handle, data_: T.handle, xs_: T.handle, xn_: T.handle, tokens: T.int32,
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
        n = T.alloc_local((4,), "int32")
        h = T.alloc_local((4,), "float16")
        words = T.alloc_local((2,), "uint32")
        most = T.alloc_local((1,), "uint32")
        count = T.alloc_local((1,), "int32")
        scale = T.alloc_local((1,), "float32")
        if block * 128 < columns:
            # The bits of |x|: they are ordered as the numbers are, and a NaN is above all.
            most[0] = T.uint32(0)
            for i in T.unroll(4):
                v[i] = T.float32(0)
                if block * 128 + lane * 4 + i < columns:
                    v[i] = x[token * width + block * 128 + lane * 4 + i]
                most[0] = T.max(most[0], T.reinterpret("uint32", v[i]) & T.uint32(0x7FFFFFFF))
            for level in T.unroll(LEVELS):
                most[0] = T.max(most[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), most[0], 1 << level, 32, 32))
            finite: T.let = most[0] < T.uint32(INFINITY_BITS)
            if integer:
                scale[0] = T.reinterpret("float32", most[0]) / limit
                count[0] = 0
                for i in T.unroll(4):
                    n[i] = 0
                    if finite and scale[0] > T.float32(0):
                        n[i] = T.Cast("int32", T.max(T.min(T.nearbyint(v[i] / scale[0]), limit), T.float32(0) - limit))
                    count[0] = count[0] + n[i]
                for level in T.unroll(LEVELS):
                    count[0] = count[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), count[0], 1 << level, 32, 32)
                data[((block * 4 + lane // 8) * padded + token) * 8 + lane % 8] = T.Cast("uint32", (
                    (n[0] & 255) | ((n[1] & 255) << 8) | ((n[2] & 255) << 16) | ((n[3] & 255) << 24)))  # fmt: skip
            else:
                # Exponents from 27 to 254: with them both powers of two below are normal numbers.
                exponent: T.let = T.max(most[0] >> T.uint32(23), T.uint32(27))
                scale[0] = T.reinterpret("float32", (exponent - T.uint32(14)) << T.uint32(23))
                inverse: T.let = T.reinterpret("float32", (T.uint32(268) - exponent) << T.uint32(23))
                for i in T.unroll(4):
                    h[i] = T.Cast("float16", T.if_then_else(finite, v[i] * inverse, T.float32(0)))
                for i in T.unroll(2):
                    words[i] = T.Cast("uint32", T.reinterpret("uint16", h[i])) | (
                        T.Cast("uint32", T.reinterpret("uint16", h[i + 2])) << T.uint32(16)
                    )
                for i in T.vectorized(2):
                    data[((block * 4 + lane // 8) * padded + token) * 16 + lane % 8 * 2 + i] = words[i]
            at: T.let = block * (128 // group) + lane // LANES
            if lane % LANES == 0 and at < groups:
                xs[at * padded + token] = T.if_then_else(finite, scale[0], T.reinterpret("float32", T.uint32(0x7FC00000)))
                if integer:
                    xn[at * padded + token] = count[0]

    return form_
