"""Products of packed integer weights and the quantized input: y = W x.

The order of the file is that of the tensor cores.  Weights are operand A of an mma, 16 output channels, and eight tokens the
columns of B.  Lane (g = lane / 4, t = lane % 4) has output channels 2g and 2g + 1 of a block, and of every chunk of 32 input
channels the quads 2t and 2t + 1, which are 8 neighbouring bytes of a line, so a warp reads whole lines.  Where groups have 16
channels it has the quads t and t + 4, and each mma is one group.  The channels of a chunk come in an order in which A and B
agree.

The sum of a token does not depend on which tokens run with it.  Per group there is one chain of mma; its result times the two
scales is rounded, and these products are added in the order of the groups.  `matvec` computes groups side by side, leaves the
products in shared memory and adds them in order; `matmul` goes through the groups one after the other, in registers.

    x       quantized: [chunk][padded tokens][32 channels], f16 or i8 (quantize_input.py)
    xs, xn  scale f32 and sum i32 of a token and group, [group][padded tokens]
    q, s, z, u   weights and what lies beside them, as in the file (weights.py); stride 0: one scale for all groups ("row")
    y       f32 [tokens][width], with `add` added to what is there; bias f32, read where has_bias
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.weights import WeightForm

CENTER_F16, HALVES_F16, NIBBLES_F16 = 0x6400, 0x5C00, 0x5400
"""1024 in f16: its bits | q are 1024 + q for q below 1024, without a conversion.  And 256: its bits | 4 q are 256 + q for q
below 256, and halves are exact there.  And 64: its bits | 16 q are 64 + q for q below 64, and sixteenths are."""
SIXTEENTH_F16, NEXT_F16 = 0x2C00, 0x6380
"""1 / 16 in f16, and 960: 1024 - 960 is 64."""
AND_OR = 0xEA
"""(a & b) | c as the table of a lop3."""


def arithmetic(weights):
    """Inline: operand A of a chunk, operand B of it, their mma, and the product of a group's sum with its scales.

    Of `halves` zero points are half steps, and of integers the scale is that of half a step; of `nibbles` quad[0, v] has both
    quads of a channel in its halves of bytes.

    Each pair of numbers of operand A takes the fewest instructions: one that puts its bits into f16 numbers, and one that
    takes the zero point from them, exactly.
    """
    integer, small, halves, nibbles = weights.integer, weights.group == 16, weights.halves, weights.nibbles

    @T.inline
    def pair(to, word, mask, bits):
        T.ptx.lop3.b32(to, word, T.uint32(mask), T.uint32(bits * 0x10001), AND_OR)

    @T.inline
    def pair_of_bytes(to, quad, p, zero):
        if halves:
            pair(to, (quad >> T.Cast("uint32", 6 * p)) << T.Cast("uint32", 2 - 2 * p), 0x03FC03FC, HALVES_F16)
            T.ptx.sub.rn.f16x2(to, to, T.Cast("uint32", (zero * 2 + HALVES_F16) * 0x10001))
        else:
            T.ptx.prmt.b32(to, quad, T.uint32((CENTER_F16 >> 8) * 0x01010101), T.Cast("uint32", 0x4240 + 0x0101 * p))
            T.ptx.sub.rn.f16x2(to, to, T.Cast("uint32", (zero + CENTER_F16) * 0x10001))

    @T.inline
    def pair_of_nibbles(to, word, k, p, zero):
        # That of quad 0 lies at bit 8 p, that of quad 1 four bits above.
        if halves:
            if k + p == 0:
                pair(to, word << T.uint32(4), 0x00F000F0, NIBBLES_F16)
            else:
                pair(to, word >> T.Cast("uint32", 8 * p + 4 * k - 4), 0x00F000F0, NIBBLES_F16)
            T.ptx.sub.rn.f16x2(to, to, T.Cast("uint32", (zero * 8 + NIBBLES_F16) * 0x10001))
        elif k == 0:
            pair(to, word >> T.Cast("uint32", 8 * p), 0x000F000F, CENTER_F16)
            T.ptx.sub.rn.f16x2(to, to, T.Cast("uint32", (zero + CENTER_F16) * 0x10001))
        else:
            below = T.alloc_local((1,), "uint32")
            T.ptx.sub.rn.f16x2(below[0], T.uint32(NEXT_F16 * 0x10001), T.Cast("uint32", (zero + CENTER_F16) * 0x10001))
            pair(to, word >> T.Cast("uint32", 8 * p), 0x00F000F0, CENTER_F16)
            T.ptx.fma.rn.f16x2(to, to, T.uint32(SIXTEENTH_F16 * 0x10001), below[0])

    @T.inline
    def operand_a(a, quad, zp):
        for k in T.unroll(2):
            for v in T.unroll(2):
                if integer:
                    a[k * 2 + v] = quad[k, v]
                else:
                    for p in T.unroll(2):
                        if nibbles:
                            pair_of_nibbles(a[k * 4 + p * 2 + v], quad[0, v], k, p, zp[v])
                        else:
                            pair_of_bytes(a[k * 4 + p * 2 + v], quad[k, v], p, zp[v])

    @T.inline
    def operand_b(b, x, token, t):
        # `token`: which token of which chunk
        if small:
            for k in T.unroll(2):
                if integer:
                    b[k] = x[token * 8 + t + 4 * k]
                else:
                    for v in T.vectorized(2):
                        b[2 * k + v] = x[token * 16 + (t + 4 * k) * 2 + v]
        elif integer:
            for v in T.vectorized(2):
                b[v] = x[token * 8 + t * 2 + v]
        else:
            for v in T.vectorized(4):
                b[v] = x[token * 16 + t * 4 + v]

    @T.inline
    def multiply(acc, at, a, a0, b, h):
        # Adds to acc[at : at + 4]; of groups of 16 only group h of the chunk.
        if integer:
            if small:
                T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32(
                    acc[at], acc[at + 1], acc[at + 2], acc[at + 3],
                    a[a0 + 2 * h], a[a0 + 2 * h + 1], T.uint32(0), T.uint32(0), b[h], T.uint32(0),
                    acc[at], acc[at + 1], acc[at + 2], acc[at + 3])  # fmt: skip
            else:
                T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32(
                    acc[at], acc[at + 1], acc[at + 2], acc[at + 3],
                    a[a0], a[a0 + 1], a[a0 + 2], a[a0 + 3], b[0], b[1],
                    acc[at], acc[at + 1], acc[at + 2], acc[at + 3])  # fmt: skip
        else:
            for k in T.unroll(2):
                if not small or k == h:
                    T.ptx.mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32(
                        acc[at], acc[at + 1], acc[at + 2], acc[at + 3],
                        a[a0 + 4 * k], a[a0 + 4 * k + 1], a[a0 + 4 * k + 2], a[a0 + 4 * k + 3], b[2 * k], b[2 * k + 1],
                        acc[at], acc[at + 1], acc[at + 2], acc[at + 3])  # fmt: skip

    @T.inline
    def scaled(pr, acc, at, scale, zp, xs, xn, token):
        # `token`: which token of which group
        if integer and halves:
            T.ptx.mul.rn.f32(pr[0], T.Cast("float32", T.reinterpret("int32", acc[at]) * 2 - zp * xn[token]), xs[token])
        elif integer:
            T.ptx.mul.rn.f32(pr[0], T.Cast("float32", T.reinterpret("int32", acc[at]) - zp * xn[token]), xs[token])
        else:
            T.ptx.mul.rn.f32(pr[0], acc[at], xs[token])
        T.ptx.mul.rn.f32(pr[0], pr[0], T.Cast("float32", scale))

    return operand_a, operand_b, multiply, scaled


def matvec(bits, beside, integer, group, WARPS=4):
    PER, CHUNKS, PARTS = 4, max(1, group // 32), 2 if group == 16 else 1
    ROUND, SUM = PER * WARPS, "uint32" if integer else "float32"
    weights = WeightForm(bits, beside, integer, group)
    begin, numbers, load, decode = weights.inlines
    operand_a, operand_b, multiply, scaled = arithmetic(weights)

    @T.prim_func
    def matvec_(x_: T.handle, xs_: T.handle, xn_: T.handle, q_: T.handle, s_: T.handle, z_: T.handle, u_: T.handle,
             y_: T.handle, bias_: T.handle, groups: T.int32, chunks: T.int32, stride: T.int32, tokens: T.int32, padded: T.int32,
             rows: T.int32, width: T.int32, has_bias: T.int32, add: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nxs, nxn, nq, ns, nz, nu, ny, nb = (
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
        )
        x = T.match_buffer(x_, (nx,), "uint32")
        xs = T.match_buffer(xs_, (nxs,), "float32")
        xn = T.match_buffer(xn_, (nxn,), "int32")
        q = T.match_buffer(q_, (nq,), "uint32")
        s = T.match_buffer(s_, (ns,), weights.scale_type)
        z = T.match_buffer(z_, (nz,), weights.zero_type)
        u = T.match_buffer(u_, (nu,), "float16")
        y = T.match_buffer(y_, (ny,), "float32")
        bias = T.match_buffer(bias_, (nb,), "float32")
        T.device_entry()
        block, tile = T.cta_id([T.ceildiv(rows, 16), T.ceildiv(tokens, 8)])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        g: T.let = lane // 4
        t: T.let = lane % 4
        part = T.alloc_shared((ROUND * PARTS, 128), "float32")
        acc = T.alloc_local((4,), SUM)
        w = T.alloc_local((weights.words,), "uint32")
        quad = T.alloc_local((2, 2), "uint32")
        b = T.alloc_local((4,), "uint32")
        a = T.alloc_local((8,), "uint32")
        sc = T.alloc_local((2,), weights.number_type)
        zp = T.alloc_local((2,), "int32")
        table = T.alloc_local((weights.table_words,), "uint32")
        above = T.alloc_local((2,), "float32")
        pr = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        total[0] = T.float32(0)
        begin(table, above, 0, z, u, block, g)
        for r in T.serial(T.ceildiv(groups, ROUND * PARTS)):
            for i in T.serial(PER):
                for h in T.unroll(PARTS):
                    at: T.let = i * WARPS + warp
                    step: T.let = r * ROUND + at
                    grp: T.let = step * PARTS + h
                    if grp < groups:
                        at_scale: T.let = block * ((groups - 1) * stride + 1) + grp * stride
                        numbers(sc, zp, 0, above, 0, s, z, at_scale, g)
                        for v in T.unroll(4):
                            acc[v] = T.Cast(SUM, 0)
                        for c in T.unroll(CHUNKS):
                            chunk: T.let = step * CHUNKS + c
                            load(q, w, 0, weights.places(g, t), (block * chunks + T.min(chunk, chunks - 1)) * (bits * 16))
                            decode(w, 0, quad, table, 0, g, t)
                            operand_a(a, quad, zp)
                            operand_b(b, x, chunk * padded + tile * 8 + g, t)
                            multiply(acc, 0, a, 0, b, h)
                        for v in T.unroll(2):
                            for n in T.unroll(2):
                                scaled(pr, acc, v * 2 + n, sc[v], zp[v], xs, xn, grp * padded + tile * 8 + t * 2 + n)
                                part[at * PARTS + h, (g * 2 + v) * 8 + t * 2 + n] = pr[0]
            T.cuda.cta_sync()
            for i in T.serial(T.min(ROUND * PARTS, groups - r * (ROUND * PARTS))):
                T.ptx.add.rn.f32(total[0], total[0], part[i, tid])
            T.cuda.cta_sync()
        token: T.let = tile * 8 + tid % 8
        row: T.let = block * 16 + tid // 8
        if token < tokens and row < rows:
            if has_bias != 0:
                T.ptx.add.rn.f32(total[0], total[0], bias[row])
            if add != 0:
                T.ptx.add.rn.f32(total[0], y[token * width + row], total[0])
            y[token * width + row] = total[0]

    return matvec_


def matmul(bits, beside, integer, group, WARPS=4, BLOCKS=2, TILES=8):
    """A warp has BLOCKS blocks of output channels and 8 TILES tokens; the next chunks of x come while these are read."""
    CHUNKS, PARTS, TOKENS = max(1, group // 32), 2 if group == 16 else 1, 8 * TILES
    SUM, WORDS, QUADS = "uint32" if integer else "float32", 8 if integer else 16, 4 if integer else 8
    LINE = TOKENS * WORDS // 4  # copies of 16 bytes for a chunk
    COPIES = CHUNKS * LINE
    weights = WeightForm(bits, beside, integer, group)
    begin, numbers, load, decode = weights.inlines
    operand_a, operand_b, multiply, scaled = arithmetic(weights)

    @T.prim_func
    def matmul_(x_: T.handle, xs_: T.handle, xn_: T.handle, q_: T.handle, s_: T.handle, z_: T.handle, u_: T.handle,
              y_: T.handle, bias_: T.handle, groups: T.int32, chunks: T.int32, stride: T.int32, tokens: T.int32,
              padded: T.int32, rows: T.int32, width: T.int32, has_bias: T.int32, add: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nxs, nxn, nq, ns, nz, nu, ny, nb = (
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
        )
        x = T.match_buffer(x_, (nx,), "uint32")
        xs = T.match_buffer(xs_, (nxs,), "float32")
        xn = T.match_buffer(xn_, (nxn,), "int32")
        q = T.match_buffer(q_, (nq,), "uint32")
        s = T.match_buffer(s_, (ns,), weights.scale_type)
        z = T.match_buffer(z_, (nz,), weights.zero_type)
        u = T.match_buffer(u_, (nu,), "float16")
        y = T.match_buffer(y_, (ny,), "float32")
        bias = T.match_buffer(bias_, (nb,), "float32")
        T.device_entry()
        tile, column = T.cta_id([T.ceildiv(tokens, TOKENS), T.ceildiv(rows, 16 * WARPS * BLOCKS)])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        g: T.let = lane // 4
        t: T.let = lane % 4
        ahead = T.alloc_shared((2 * COPIES * 4,), "uint32")
        acc = T.alloc_local((BLOCKS * TILES * 4,), SUM)
        total = T.alloc_local((BLOCKS * TILES * 4,), "float32")
        w = T.alloc_local((weights.words,), "uint32")
        quad = T.alloc_local((2, 2), "uint32")
        a = T.alloc_local((BLOCKS * QUADS,), "uint32")
        one = T.alloc_local((QUADS,), "uint32")
        b = T.alloc_local((4,), "uint32")
        sc = T.alloc_local((BLOCKS * 2,), weights.number_type)
        zp = T.alloc_local((BLOCKS * 2,), "int32")
        table = T.alloc_local((BLOCKS * weights.table_words,), "uint32")
        above = T.alloc_local((BLOCKS * 2,), "float32")
        zz = T.alloc_local((2,), "int32")
        pr = T.alloc_local((1,), "float32")
        blocks: T.let = T.ceildiv(rows, 16)
        steps: T.let = T.ceildiv(groups, PARTS)

        @T.inline
        def fetch(stage, step):
            for i in T.unroll(COPIES // (WARPS * 32)):
                u: T.let = i * WARPS * 32 + tid
                chunk: T.let = step * CHUNKS + u // LINE
                T.ptx["cp.async.cg.shared.global"](
                    ahead.ptr_to([(stage * COPIES + u) * 4]),
                    x.ptr_to([(chunk * padded + tile * TOKENS) * WORDS + u % LINE * 4]),
                    16,
                )
            T.ptx.cp.async_.commit_group()

        for j in T.unroll(BLOCKS):
            begin(table, above, j, z, u, T.min((column * WARPS + warp) * BLOCKS + j, blocks - 1), g)
        for i in T.serial(BLOCKS * TILES * 4):
            total[i] = T.float32(0)
        fetch(0, 0)
        for step in T.serial(steps):
            if step + 1 < steps:
                fetch((step + 1) % 2, step + 1)
                T.ptx.cp.async_.wait_group(1)
            else:
                T.ptx.cp.async_.wait_group(0)
            T.cuda.cta_sync()
            for h in T.unroll(PARTS):
                grp: T.let = step * PARTS + h
                if grp < groups:
                    for j in T.unroll(BLOCKS):
                        block: T.let = T.min((column * WARPS + warp) * BLOCKS + j, blocks - 1)
                        at_scale: T.let = block * ((groups - 1) * stride + 1) + grp * stride
                        numbers(sc, zp, j, above, j, s, z, at_scale, g)
                    for i in T.unroll(BLOCKS * TILES * 4):
                        acc[i] = T.Cast(SUM, 0)
                    for c in T.unroll(CHUNKS):
                        for j in T.unroll(BLOCKS):
                            row_block: T.let = T.min((column * WARPS + warp) * BLOCKS + j, blocks - 1)
                            load(
                                q,
                                w,
                                0,
                                weights.places(g, t),
                                (row_block * chunks + T.min(step * CHUNKS + c, chunks - 1)) * (bits * 16),
                            )
                            decode(w, 0, quad, table, j, g, t)
                            for v in T.unroll(2):
                                zz[v] = zp[j * 2 + v]
                            operand_a(one, quad, zz)
                            for i in T.unroll(QUADS):
                                a[j * QUADS + i] = one[i]
                        for n in T.unroll(TILES):
                            operand_b(b, ahead, (step % 2 * CHUNKS + c) * TOKENS + n * 8 + g, t)
                            for j in T.unroll(BLOCKS):
                                multiply(acc, (j * TILES + n) * 4, a, j * QUADS, b, h)
                    for n in T.unroll(TILES):
                        for j in T.unroll(BLOCKS):
                            for i in T.unroll(4):
                                scaled(pr, acc, (j * TILES + n) * 4 + i, sc[j * 2 + i // 2], zp[j * 2 + i // 2], xs, xn,
                                       grp * padded + tile * TOKENS + n * 8 + t * 2 + i % 2)  # fmt: skip
                                T.ptx.add.rn.f32(total[(j * TILES + n) * 4 + i], total[(j * TILES + n) * 4 + i], pr[0])
            T.cuda.cta_sync()
        for j in T.unroll(BLOCKS):
            for n in T.unroll(TILES):
                for i in T.unroll(4):
                    row: T.let = ((column * WARPS + warp) * BLOCKS + j) * 16 + g * 2 + i // 2
                    token: T.let = tile * TOKENS + n * 8 + t * 2 + i % 2
                    if row < rows and token < tokens:
                        pr[0] = total[(j * TILES + n) * 4 + i]
                        if has_bias != 0:
                            T.ptx.add.rn.f32(pr[0], pr[0], bias[row])
                        if add != 0:
                            T.ptx.add.rn.f32(pr[0], y[token * width + row], pr[0])
                        y[token * width + row] = pr[0]

    return matmul_
