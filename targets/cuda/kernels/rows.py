"""Operations on rows of buffers f32: embedding, activation, what is added to rows, the choice of rows."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.weights import ONE, QUARTER, WeightForm, planes_of

MAX_F32 = 3.4028234663852886e38
NAN_BITS, INFINITY_BITS = 0x7FC00000, 0x7F800000
THREADS = 128


def number_of(word, plane, low, quad, byte):
    """The bits that one integer has in a word of the line of its quad."""
    return (T.Cast("int32", word >> T.Cast("uint32", byte + quad * plane % 8)) & ((1 << plane) - 1)) << low


def embed(bits, beside):
    """out[token row] = row tokens[token row] of a packed integer matrix; a group has `group` channels, all of a row where 0."""
    weights, planes = WeightForm(bits, beside, False, 0), planes_of(bits)
    (p0, l0, s0), (p1, l1, s1), (p2, l2, s2) = (planes + [planes[0]] * 2)[:3]
    COUNT, (P, L, _) = len(planes), planes[-1]  # the plane of the coded bit of a trellis is the last one

    @T.prim_func
    def embed_(tokens_: T.handle, q_: T.handle, s_: T.handle, z_: T.handle, u_: T.handle, out_: T.handle,
               tokens: T.int32, columns: T.int32, chunks: T.int32, groups: T.int32, group: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nt, nq, ns, nz, nu, no = T.int32(), T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        which = T.match_buffer(tokens_, (nt,), "int32")
        q = T.match_buffer(q_, (nq,), "uint32")
        s = T.match_buffer(s_, (ns,), "uint8" if weights.coded else "float16")
        z = T.match_buffer(z_, (nz,), "int8" if weights.looked_up else "uint8")
        u = T.match_buffer(u_, (nu,), "float16")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(columns, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        value = T.alloc_local((1,), "int32")
        scale = T.alloc_local((1,), "float32")
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
            place: T.let = token // 16 * groups + T.if_then_else(group > 0, channel // T.max(group, 1), 0)
            at: T.let = place * 16 + token % 16
            if weights.ring:
                line: T.let = base - token % 16 + (L + quad * P // 8) * 16
                near: T.let = q[line + (token + 1) % 16] ^ q[line + (token + 15) % 16]
                value[0] = value[0] | number_of(near, 1, bits, 0, byte + quad * P % 8)
            if weights.looked_up:
                value[0] = T.Cast("int32", z[token // 16 * weights.entries + value[0]])
            elif weights.halves:
                value[0] = value[0] * 2 - weights.constant_zero
            elif weights.zero:
                value[0] = value[0] - T.Cast("int32", z[at])
            else:
                value[0] = value[0] - weights.constant_zero
            if weights.coded:
                code: T.let = T.Cast("uint32", s[place * 8 + token % 8]) >> T.Cast("uint32", token % 16 // 8 * 4)
                share: T.let = T.reinterpret("float32", T.uint32(ONE) - ((code & T.uint32(15)) << T.uint32(QUARTER)))
                scale[0] = share * T.Cast("float32", u[token // 16 * 16 + token % 16])
            else:
                scale[0] = T.Cast("float32", s[at])
            if weights.halves:
                scale[0] = scale[0] * T.float32(0.5)
            out[row * columns + channel] = T.Cast("float32", value[0]) * scale[0]

    return embed_


def activate(function, gated):
    """out = f(x[:, :width]), times x[:, width : 2 width] where it is gated; rows of x have `stride` channels."""
    apply = functions[function]

    @T.prim_func
    def activate_(x_: T.handle, out_: T.handle, tokens: T.int32, stride: T.int32, width: T.int32):
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
            value: T.let = apply(x[row * stride + channel])
            if gated:
                out[row * width + channel] = value * x[row * stride + width + channel]
            else:
                out[row * width + channel] = value

    return activate_


def activate_clamped():
    """out = g / (1 + exp(-alpha g)) * (u + 1), where g = x[:, :width] is at most `limit`, and u, the `width` numbers after it,
    within +-limit; NaN stays NaN."""

    @T.prim_func
    def activate_clamped_(x_: T.handle, out_: T.handle, tokens: T.int32, stride: T.int32, width: T.int32, alpha: T.float32,
                          limit: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, no = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        g = T.alloc_local((1,), "float32")
        u = T.alloc_local((1,), "float32")
        if channel < width:
            g[0] = x[row * stride + channel]
            g[0] = T.if_then_else(g[0] > limit, limit, g[0])
            u[0] = x[row * stride + width + channel]
            u[0] = T.if_then_else(u[0] > limit, limit, u[0])
            u[0] = T.if_then_else(u[0] < T.float32(0) - limit, T.float32(0) - limit, u[0])
            out[row * width + channel] = g[0] / (T.float32(1) + T.exp(T.float32(0) - alpha * g[0])) * (u[0] + T.float32(1))

    return activate_clamped_


functions = {
    "silu": lambda x: x / (T.float32(1) + T.exp(T.float32(0) - x)),
    "gelu": lambda x: x * T.float32(0.5) * (T.float32(1) + T.erf(x * T.float32(0.7071067811865476))),
    "gelu_pytorch_tanh": lambda x: T.float32(0.5) * x * (
        T.float32(1) + T.tanh(T.float32(0.7978845608028654) * (x + T.float32(0.044715) * (x * x * x)))
    ),
    "quick_gelu": lambda x: x / (T.float32(1) + T.exp(T.float32(-1.702) * x)),
    "relu": lambda x: T.if_then_else(x < T.float32(0), T.float32(0), x),
    "relu2": lambda x: T.if_then_else(x < T.float32(0), T.float32(0), x * x),
}  # fmt: skip


def scale():
    """out = x * factor, or with `add` added to what is there; rows of `width` channels."""

    @T.prim_func
    def scale_(x_: T.handle, out_: T.handle, tokens: T.int32, width: T.int32, add: T.int32, factor: T.float32):
        T.func_attr({"tirx.noalias": True})
        nx, no = T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        value = T.alloc_local((1,), "float32")
        if channel < width:
            value[0] = x[row * width + channel] * factor
            if add != 0:
                value[0] = out[row * width + channel] + value[0]
            out[row * width + channel] = value[0]

    return scale_


def inject():
    """out[row] = v[offset : offset + width], or with `add` added to what is there, where v is row which[row] of the table.

    which   int32 per token row; rows with a negative one stay as they are
    table   f32 [any][stride]
    """

    @T.prim_func
    def inject_(table_: T.handle, which_: T.handle, out_: T.handle,
                tokens: T.int32, width: T.int32, stride: T.int32, offset: T.int32, add: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nt, nw, no = T.int32(), T.int32(), T.int32()
        table = T.match_buffer(table_, (nt,), "float32")
        which = T.match_buffer(which_, (nw,), "int32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        value = T.alloc_local((1,), "float32")
        if channel < width and which[row] >= 0:
            value[0] = table[which[row] * stride + offset + channel]
            if add != 0:
                value[0] = out[row * width + channel] + value[0]
            out[row * width + channel] = value[0]

    return inject_


def select():
    """out[i] = x[wanted[i]], rows of `width` channels; and the same of x2, of `width2`, which may be 0."""

    @T.prim_func
    def select_(x_: T.handle, x2_: T.handle, wanted_: T.handle, out_: T.handle, out2_: T.handle,
                tokens: T.int32, width: T.int32, width2: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nx2, nw, no, no2 = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        x2 = T.match_buffer(x2_, (nx2,), "float32")
        wanted = T.match_buffer(wanted_, (nw,), "int32")
        out = T.match_buffer(out_, (no,), "float32")
        out2 = T.match_buffer(out2_, (no2,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width + width2, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < width:
            out[row * width + channel] = x[wanted[row] * width + channel]
        if channel >= width and channel < width + width2:
            out2[row * width2 + channel - width] = x2[wanted[row] * width2 + channel - width]

    return select_
