"""Masters rounded again for other scales of the input channels, by the rule of edgeq/format/quantization.py bit for bit, and
the sums of squares that the scales follow from.  No product is contracted with a sum: both are single instructions.
"""

from tvm.script import tirx as T

from edgeq.format.quantization import MAX_SCALE, MIN_RANGE
from edgeq.targets.cuda.kernels.floats import channels, number
from edgeq.targets.cuda.kernels.rows import INFINITY_BITS, MAX_F32, NAN_BITS, THREADS, number_of
from edgeq.targets.cuda.kernels.weights import planes_of


def add_squares():
    """sums[c] += x[row][c]^2 for the rows that count, in their order."""

    @T.prim_func
    def add_squares_(x_: T.handle, counted_: T.handle, sums_: T.handle, tokens: T.int32, columns: T.int32, width: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, nc, ns = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        counted = T.match_buffer(counted_, (nc,), "int32")
        sums = T.match_buffer(sums_, (ns,), "float32")
        T.device_entry()
        part = T.cta_id([T.ceildiv(columns, THREADS)])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        total = T.alloc_local((1,), "float32")
        square = T.alloc_local((1,), "float32")
        if channel < columns:
            total[0] = sums[channel]
            for row in T.serial(tokens):
                if counted[row] != 0:
                    T.ptx.mul.rn.f32(square[0], x[row * width + channel], x[row * width + channel])
                    T.ptx.add.rn.f32(total[0], total[0], square[0])
            sums[channel] = total[0]

    return add_squares_


def master_numbers(kind, master_bits, master_zero):
    """Inline: one number of a master, an integer with its scale or a float, times the factor of its channel."""
    INTEGER = master_bits > 0
    planes = planes_of(master_bits) if INTEGER else [(8, 0, 0)]
    (p0, l0, s0), (p1, l1, s1), (p2, l2, s2) = (planes + [planes[0]] * 2)[:3]
    COUNT, EACH = len(planes), 1 if INTEGER else channels(kind)

    @T.inline
    def read(w, whole, master, scales, zeros, factors, row, channel, columns, group):
        if INTEGER:
            base: T.let = (row // 16 * T.ceildiv(columns, 32) + channel // 32) * (master_bits * 16) + row % 16
            quad: T.let = channel % 32 // 4
            byte: T.let = channel % 4 * 8
            whole[0] = number_of(master[base + (l0 + quad * p0 // 8) * 16], p0, s0, quad, byte)
            if COUNT > 1:
                whole[0] = whole[0] | number_of(master[base + (l1 + quad * p1 // 8) * 16], p1, s1, quad, byte)
            if COUNT > 2:
                whole[0] = whole[0] | number_of(master[base + (l2 + quad * p2 // 8) * 16], p2, s2, quad, byte)
            at: T.let = (row // 16 * T.ceildiv(columns, group) + channel // group) * 16 + row % 16
            if master_zero:
                whole[0] = whole[0] - T.Cast("int32", zeros[at])
            else:
                whole[0] = whole[0] - (1 << (master_bits - 1))
            T.ptx.mul.rn.f32(w[0], T.Cast("float32", whole[0]), T.Cast("float32", scales[at]))
        else:
            word: T.let = master[(row // 16 * T.ceildiv(columns, EACH) + channel // EACH) * 16 + row % 16]
            w[0] = T.if_then_else(channel % EACH == 0, number(kind, word, 0), number(kind, word, EACH - 1))
        T.ptx.mul.rn.f32(w[0], w[0], factors[channel])

    return read


def packing(bits):
    """Inline: the bits of one code into the words of its chunk that its output channel has, one of every line."""
    planes = planes_of(bits)
    (p0, l0, s0), (p1, l1, s1), (p2, l2, s2) = (planes + [planes[0]] * 2)[:3]
    COUNT = len(planes)

    @T.inline
    def plane(lines, code, quad, byte, p, first, low):
        for k in T.unroll(p):
            if quad * p // 8 == k:
                lines[first + k] = lines[first + k] | (
                    ((code[0] >> T.uint32(low)) & T.uint32((1 << p) - 1)) << T.Cast("uint32", quad * p % 8 + byte * 8)
                )

    @T.inline
    def put(lines, code, quad, byte):
        plane(lines, code, quad, byte, p0, l0, s0)
        if COUNT > 1:
            plane(lines, code, quad, byte, p1, l1, s1)
        if COUNT > 2:
            plane(lines, code, quad, byte, p2, l2, s2)

    return put


def requantize(kind, master_bits, master_zero, bits, zero):
    """W diag(s) rounded to `bits` bits: a thread has the groups of one output channel that lie in a span of whole chunks.

    span           channels of a thread: a multiple of 32 and of `group`
    master_group   channels of a group of the master, all of a row where it has one
    """
    read = master_numbers(kind, master_bits, master_zero)
    TOP, CENTER = (1 << bits) - 1, 1 << (bits - 1)
    put = packing(bits)

    @T.prim_func
    def requantize_(master_: T.handle, scales_: T.handle, zeros_: T.handle, factors_: T.handle, q_: T.handle, qs_: T.handle,
                    qz_: T.handle, rows: T.int32, columns: T.int32, master_group: T.int32, group: T.int32,
                    span: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nm, ns, nz, nf, nq, nqs, nqz = T.int32(), T.int32(), T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        master = T.match_buffer(master_, (nm,), "uint32")
        scales = T.match_buffer(scales_, (ns,), "float16")
        zeros = T.match_buffer(zeros_, (nz,), "uint8")
        factors = T.match_buffer(factors_, (nf,), "float32")
        q = T.match_buffer(q_, (nq,), "uint32")
        qs = T.match_buffer(qs_, (nqs,), "float16")
        qz = T.match_buffer(qz_, (nqz,), "uint8")
        T.device_entry()
        piece, part = T.cta_id([T.ceildiv(columns, span), T.ceildiv(rows, THREADS)])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        row: T.let = part * THREADS + warp * 32 + lane
        w = T.alloc_local((1,), "float32")
        whole = T.alloc_local((1,), "int32")
        least = T.alloc_local((1,), "float32")
        most = T.alloc_local((1,), "float32")
        worst = T.alloc_local((1,), "uint32")
        wide = T.alloc_local((1,), "float32")
        stored = T.alloc_local((1,), "float16")
        scale = T.alloc_local((1,), "float32")
        offset = T.alloc_local((1,), "float32")
        code = T.alloc_local((1,), "uint32")
        lines = T.alloc_local((bits,), "uint32")
        if row < rows:
            first: T.let = piece * span
            # A chunk at a time, and before it the groups that begin in it.
            for chunk in T.serial(T.ceildiv(T.min(span, columns - first), 32)):
                for line in T.unroll(bits):
                    lines[line] = T.uint32(0)
                for c in T.serial(T.min(32, columns - first - chunk * 32)):
                    channel: T.let = first + chunk * 32 + c
                    if channel % group == 0:
                        least[0] = T.float32(MAX_F32)
                        most[0] = T.float32(-MAX_F32)
                        worst[0] = T.uint32(0)
                        for i in T.serial(T.min(group, columns - channel)):
                            read(w, whole, master, scales, zeros, factors, row, channel + i, columns, master_group)
                            worst[0] = T.max(worst[0], T.reinterpret("uint32", w[0]) & T.uint32(0x7FFFFFFF))
                            least[0] = T.min(least[0], w[0])
                            most[0] = T.max(most[0], w[0])
                        if zero:
                            wide[0] = T.max(most[0] - least[0], T.float32(MIN_RANGE)) / T.float32(TOP)
                        else:
                            wide[0] = T.max(T.reinterpret("float32", worst[0]), T.float32(MIN_RANGE))
                            wide[0] = wide[0] / T.float32(CENTER - 1)
                        wide[0] = T.min(wide[0], T.float32(MAX_SCALE))
                        if worst[0] >= T.uint32(INFINITY_BITS):
                            wide[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
                        stored[0] = T.Cast("float16", wide[0])
                        scale[0] = T.Cast("float32", stored[0])
                        at: T.let = (row // 16 * T.ceildiv(columns, group) + channel // group) * 16 + row % 16
                        qs[at] = stored[0]
                        if zero:
                            offset[0] = T.float32(0) - T.nearbyint(least[0] / scale[0])
                            offset[0] = T.max(T.min(offset[0], T.float32(TOP)), T.float32(0))
                            qz[at] = T.Cast("uint8", offset[0])
                        else:
                            offset[0] = T.float32(CENTER)
                    read(w, whole, master, scales, zeros, factors, row, channel, columns, master_group)
                    code[0] = T.uint32(0)
                    if worst[0] < T.uint32(INFINITY_BITS):
                        code[0] = T.Cast("uint32", T.max(T.min(
                            T.nearbyint(w[0] / scale[0]) + offset[0], T.float32(TOP)), T.float32(0)))  # fmt: skip
                    put(lines, code, c // 4, c % 4)
                for line in T.unroll(bits):
                    q[((row // 16 * T.ceildiv(columns, 32) + first // 32 + chunk) * bits + line) * 16 + row % 16] = lines[line]

    return requantize_
