"""Operations on rows of buffers f32: embedding, norm, activation, the choice of rows."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.product import planes_of

LARGEST_F32 = 3.4028234663852886e38
THREADS = 128


def number_of(word, plane, low, quad, byte):
    """The bits that one integer has in a word of the line of its quad."""
    return (T.Cast("int32", word >> T.Cast("uint32", byte + quad * plane % 8)) & ((1 << plane) - 1)) << low


def embed(bits, zero):
    """out[token row] = row tokens[token row] of a packed integer matrix; a group has `group` channels, all of a row where 0."""
    planes = planes_of(bits)
    (p0, l0, s0), (p1, l1, s1), (p2, l2, s2) = (planes + [planes[0]] * 2)[:3]
    COUNT, CENTER = len(planes), 1 << (bits - 1)

    @T.prim_func
    def embed_(tokens_: T.handle, q_: T.handle, s_: T.handle, z_: T.handle, out_: T.handle,
               tokens: T.int32, columns: T.int32, chunks: T.int32, groups: T.int32, group: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nt, nq, ns, nz, no = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        which = T.match_buffer(tokens_, (nt,), "int32")
        q = T.match_buffer(q_, (nq,), "uint32")
        s = T.match_buffer(s_, (ns,), "float16")
        z = T.match_buffer(z_, (nz,), "uint8")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(columns, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        value = T.alloc_local((1,), "int32")
        if channel < columns:
            token: T.let = which[row]
            base: T.let = (token // 16 * chunks + channel // 32) * (bits * 16) + token % 16
            quad: T.let = channel % 32 // 4
            byte: T.let = channel % 4 * 8
            value[0] = number_of(q[base + (l0 + quad * p0 // 8) * 16], p0, s0, quad, byte)
            if COUNT > 1:
                value[0] = value[0] | number_of(q[base + (l1 + quad * p1 // 8) * 16], p1, s1, quad, byte)
            if COUNT > 2:
                value[0] = value[0] | number_of(q[base + (l2 + quad * p2 // 8) * 16], p2, s2, quad, byte)
            at: T.let = (token // 16 * groups + T.if_then_else(group > 0, channel // T.max(group, 1), 0)) * 16 + token % 16
            if zero:
                value[0] = value[0] - T.Cast("int32", z[at])
            else:
                value[0] = value[0] - CENTER
            out[row * columns + channel] = T.Cast("float32", value[0]) * T.Cast("float32", s[at])

    return embed_


def rms_norm():
    """out = x / sqrt(mean(x^2) + eps) * gain over rows of `width` channels; NaN where f32 does not hold the sum of squares."""

    @T.prim_func
    def rms_norm_(x_: T.handle, gain_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32, eps: T.float32):
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
        total[0] = T.float32(0)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                total[0] = total[0] + x[row * width + i * THREADS + tid] * x[row * width + i * THREADS + tid]
        for level in T.unroll(5):
            total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total[0], 1 << level, 32, 32)
        if lane == 0:
            sums[warp] = total[0]
        T.cuda.cta_sync()
        total[0] = T.float32(0)
        for i in T.unroll(THREADS // 32):
            total[0] = total[0] + sums[i]
        factor[0] = T.reinterpret("float32", T.uint32(0x7FC00000))
        if total[0] <= T.float32(LARGEST_F32):
            factor[0] = T.float32(1) / T.sqrt(total[0] / T.Cast("float32", width) + eps)
        for i in T.serial(T.ceildiv(width, THREADS)):
            if i * THREADS + tid < width:
                out[row * width + i * THREADS + tid] = x[row * width + i * THREADS + tid] * factor[0] * gain[i * THREADS + tid]

    return rms_norm_


def swiglu():
    """out = silu(x[:, :width]) * x[:, width : 2 width]."""

    @T.prim_func
    def swiglu_(x_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, no = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            gate: T.let = x[row * 2 * width + channel]
            out[row * width + channel] = gate / (T.float32(1) + T.exp(T.float32(0) - gate)) * x[(row * 2 + 1) * width + channel]

    return swiglu_


def select():
    """out[i] = x[wanted[i]], rows of `width` channels."""

    @T.prim_func
    def select_(x_: T.handle, wanted_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, nw, no = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        wanted = T.match_buffer(wanted_, (nw,), "int32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            out[row * width + channel] = x[wanted[row] * width + channel]

    return select_
