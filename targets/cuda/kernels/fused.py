"""A product for few token rows with what comes before and after it.

Before: norm, order, scale and quantization of the input.  After: bias and residual, an activation, or what heads and the cache
ask for.

A block of threads has up to 8 token rows and one or more blocks of 16 output channels: with a gate its own and those of the
other factor, or a whole head.  It goes through the input channels in rounds: the quantized input of a round is made in shared
memory, once for all of its output channels.  Products, and the order in which they are added, are those of `matvec`
(product.py).  Weights in two blocks of input channels are read one after the other, and the sums of the second are added to
those of the first.  To both the low-rank part of the layer is added, b inner, where inner is what `low_rank` made
(low_rank.py).

    x, q, s, z, u, bias, y   as in product.py, but x f32 [token rows][width_in];  names with a 2 are those of the second block
    gain, shift, norm, eps   of the norm (prologue.py)
    order, scale             i32 and f32 [columns + columns2]
    limit                    of the integers of `group` and `static`, `levels` of `token`
    low_b, inner, low_kind, rank   of the low-rank part; kind 0: there is none
    ctas, each, most         blocks of threads; output blocks of each, and how many there are, where gated of either factor
    ahead                    rounds of output blocks whose weights are asked for before they are multiplied
    shares                   of the rounds of input channels; each has blocks of threads of its own
    sums                     f32 [tile of tokens][block of threads][output block][group][token of the tile][16]: with shares
                             above 1 the products of groups, which the last share of a block of threads adds in their order
    arrived                  i32 [tile of tokens][block of threads]: shares that have left theirs, 0 before and after
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.block_codec import BlockCodec
from edgeq.targets.cuda.kernels.epilogue import finishing_heads
from edgeq.targets.cuda.kernels.low_rank import low_rank_row
from edgeq.targets.cuda.kernels.prologue import TOKENS, WARPS, norm_rows, range_of_rows, read_channels
from edgeq.targets.cuda.kernels.rows import functions
from edgeq.targets.cuda.kernels.shares import add_products, arrive, begin_to_read, end_of, first_of, leave_products
from edgeq.targets.cuda.kernels.turns import ask_turn, block_of

MAX_HEAD = 256
BLOCKS = {"rows": 8, "activate": 8, "heads": MAX_HEAD // 16}
"""Output blocks that a block of threads has at most."""
POOLS = {"f16": "float16", "int8": "int8", "int4": "uint8"}


def fused_rows(rule, *codecs):
    """y = W x' + bias; with `add` added to what is there."""
    return fused("rows", rule, codecs)


def fused_activate(function, gated, rule, *codecs):
    """out = f(W x' + bias), times the other factor's W x' + bias where it is gated."""
    return fused("activate", rule, codecs, function=function, gated=gated)


def fused_heads(kv, rotated, rule, *codecs):
    """y = W x' + bias; queries and keys through norm, rotary positions and rotation; keys and values into the cache too.

    first        of the heads that W makes, of `heads` of queries, then `kv_heads` of keys and as many of values
    head_normed, head_eps, q_gain, k_gain   as head_norm;  angles, places, pairs: as rope, 0 pairs for none
    matrix, rotation                        as head_rotate, where `rotated`
    """
    return fused("heads", rule, codecs, kv=kv, rotated=rotated)


def fused(after, rule, codecs, function="silu", gated=False, kv="f16", rotated=False):
    one, *others = (BlockCodec(rule, *codecs[i : i + 4]) for i in range(0, len(codecs), 4))
    TWO = bool(others)
    two = others[0] if TWO else one
    INPUT, GROUPS = (max(one.chunks * one.steps * one.words, two.chunks * two.steps * two.words),
                    max(one.groups, two.groups))  # fmt: skip
    SPAN = 16 * BLOCKS[after]
    apply = functions[function]
    finish = finishing_heads(kv, rotated)

    @T.prim_func
    def fused_(x_: T.handle, gain_: T.handle, shift_: T.handle, order_: T.handle, scale_: T.handle, scales_: T.handle,
               modality_: T.handle, q_: T.handle, s_: T.handle, z_: T.handle, u_: T.handle,
               q2_: T.handle, s2_: T.handle, z2_: T.handle, u2_: T.handle, bias_: T.handle, low_b_: T.handle, inner_: T.handle,
               y_: T.handle, angles_: T.handle, places_: T.handle, q_gain_: T.handle, k_gain_: T.handle,
               matrix_: T.handle, rotation_: T.handle, pool_: T.handle, numbers_: T.handle, pages_: T.handle,
               tables_: T.handle, slots_: T.handle, sums_: T.handle, arrived_: T.handle,
               tokens: T.int32, width_in: T.int32, norm: T.int32, ordered: T.int32,
               scaled: T.int32, eps: T.float32, kinds: T.int32, symmetric: T.int32, limit: T.float32, limit2: T.float32,
               columns: T.int32, columns2: T.int32, groups: T.int32, groups2: T.int32, chunks: T.int32, chunks2: T.int32,
               stride: T.int32, stride2: T.int32, rows: T.int32, width: T.int32, has_bias: T.int32, add: T.int32,
               low_kind: T.int32, rank: T.int32,
               ctas: T.int32, each: T.int32, most: T.int32, ahead: T.int32, shares: T.int32,
               first: T.int32, heads: T.int32, kv_heads: T.int32,
               head_dim: T.int32, head_normed: T.int32, head_eps: T.float32, pairs: T.int32, layer: T.int32, high: T.int32,
               top: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "float32")
        gain = T.match_buffer(gain_, (T.int32(),), "float32")
        shift = T.match_buffer(shift_, (T.int32(),), "float32")
        order = T.match_buffer(order_, (T.int32(),), "int32")
        scale = T.match_buffer(scale_, (T.int32(),), "float32")
        scales = T.match_buffer(scales_, (T.int32(),), "float32")
        modality = T.match_buffer(modality_, (T.int32(),), "int32")
        q = T.match_buffer(q_, (T.int32(),), "uint32")
        s = T.match_buffer(s_, (T.int32(),), one.weights.scale_type)
        z = T.match_buffer(z_, (T.int32(),), one.weights.zero_type)
        u = T.match_buffer(u_, (T.int32(),), "float16")
        q2 = T.match_buffer(q2_, (T.int32(),), "uint32")
        s2 = T.match_buffer(s2_, (T.int32(),), two.weights.scale_type)
        z2 = T.match_buffer(z2_, (T.int32(),), two.weights.zero_type)
        u2 = T.match_buffer(u2_, (T.int32(),), "float16")
        bias = T.match_buffer(bias_, (T.int32(),), "float32")
        low_b = T.match_buffer(low_b_, (T.int32(),), "uint32")
        inner = T.match_buffer(inner_, (T.int32(),), "float32")
        y = T.match_buffer(y_, (T.int32(),), "float32")
        angles = T.match_buffer(angles_, (T.int32(),), "float32")
        places = T.match_buffer(places_, (T.int32(),), "int32")
        q_gain = T.match_buffer(q_gain_, (T.int32(),), "float32")
        k_gain = T.match_buffer(k_gain_, (T.int32(),), "float32")
        matrix = T.match_buffer(matrix_, (T.int32(),), "int8")
        rotation = T.match_buffer(rotation_, (T.int32(),), "float32")
        pool = T.match_buffer(pool_, (T.int64(),), POOLS[kv])
        numbers = T.match_buffer(numbers_, (T.int64(),), "float32")
        pages = T.match_buffer(pages_, (T.int32(),), "int64")
        tables = T.match_buffer(tables_, (T.int32(),), "int32")
        slots = T.match_buffer(slots_, (T.int32(),), "int32")
        sums = T.match_buffer(sums_, (T.int32(),), "float32")
        arrived = T.match_buffer(arrived_, (T.int32(),), "int32")
        T.device_entry()
        cta, tile, share = T.cta_id([ctas, T.ceildiv(tokens, TOKENS), shares])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid = T.thread_id([WARPS * 32])
        g: T.let = lane // 4
        t: T.let = lane % 4
        count: T.let = T.min(TOKENS, tokens - tile * TOKENS)
        quantized = T.alloc_shared((INPUT * TOKENS,), "uint32")
        xs = T.alloc_shared((GROUPS * TOKENS,), "float32")
        xn = T.alloc_shared((GROUPS * TOKENS,), "int32")
        part = T.alloc_shared((GROUPS * 128,), "float32")
        result = T.alloc_shared((TOKENS * SPAN,), "float32")
        second = T.alloc_shared((TOKENS * SPAN if TWO else 1,), "float32")
        stats = T.alloc_shared((TOKENS * 2,), "float32")
        of_warps = T.alloc_shared((TOKENS * WARPS,), "float32")
        rules = T.alloc_shared((TOKENS * 4,), "float32")
        ends = T.alloc_shared((TOKENS * WARPS * 2,), "float32")
        largest = T.alloc_shared((TOKENS * WARPS,), "uint32")
        whole = T.alloc_shared((WARPS * MAX_HEAD if rotated else 1,), "int32")
        v = T.alloc_local((4,), "float32")
        of = T.alloc_local((4,), "float32")
        acc = T.alloc_local((4,), "float32")
        sum_of = T.alloc_local((4,), "uint32")
        w = T.alloc_local((max(one.loaded, two.loaded),), "uint32")
        quad = T.alloc_local((2, 2), "uint32")
        b = T.alloc_local((4,), "uint32")
        a = T.alloc_local((8,), "uint32")
        sc = T.alloc_local((one.numbers,), one.weights.number_type)
        sc2 = T.alloc_local((two.numbers,), two.weights.number_type)
        zp = T.alloc_local((max(one.numbers, two.numbers),), "int32")
        zero = T.alloc_local((2,), "int32")
        of_tokens = T.alloc_local((2,), "float32")
        sums_of_x = T.alloc_local((2,), "int32")
        table = T.alloc_local((max(one.weights.table_words, two.weights.table_words),), "uint32")
        above = T.alloc_local((2,), "float32")
        pr = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        value = T.alloc_local((1,), "float32")
        turn = T.alloc_local((2,), "int32")  # rounds and output blocks that are asked for before they are multiplied
        stop = T.alloc_local((1,), "int32")  # the round after the last one
        before = T.alloc_shared((1,), "int32")
        last = T.alloc_local((1,), "int32")
        # What many turns share.
        read_at = T.alloc_local((3,), "int32")
        number_at = T.alloc_local((1,), "int32")
        of_block = T.alloc_local((1,), "int32")
        input_at = T.alloc_local((1,), "int32")
        sum_at = T.alloc_local((1,), "int32")
        blocks: T.let = each * (2 if gated else 1)
        place: T.let = tile * ctas + cta

        @T.inline
        def keep(to, i, value):
            # By a `mov` of its own, as the compiler would rather compute it in each turn.  With zero points it may: an H100
            # holds seven blocks of threads up to 72 registers.
            if one.weights.zero:
                to[i] = value
            else:
                T.ptx.mov.s32(to[i], value)

        @T.inline
        def read(to, n, first, apart, end):
            read_channels(to, 4, x, gain, shift, order, scale, stats, tile * TOKENS + n, n, first, apart, end, width_in, norm,
                          ordered, scaled)  # fmt: skip

        @T.inline
        def make_form(code, put, r, start, columns, groups, limit):
            BLOCKS_OF_ROUND = code.groups * code.group // 128
            for i in T.serial(T.ceildiv(count * BLOCKS_OF_ROUND, WARPS)):
                n: T.let = (i * WARPS + warp) // BLOCKS_OF_ROUND
                inside: T.let = (i * WARPS + warp) % BLOCKS_OF_ROUND
                channel: T.let = (r * BLOCKS_OF_ROUND + inside) * 128
                if n < count and channel < columns:
                    read(v, n, start + channel + lane * 4, 1, start + columns)
                    if code.rule == "group":
                        of[0] = limit
                    elif code.rule == "static":
                        of[0] = scales[T.min(modality[tile * TOKENS + n], kinds - 1)]
                        of[1] = limit
                    else:
                        for c in T.unroll(4):
                            of[c] = rules[n * 4 + c]
                    put(v, of, quantized, xs, xn, (inside * 4 + lane // 8) * TOKENS + n,
                        inside * (128 // code.group) + lane // (code.group // 4), n, TOKENS,
                        groups - r * code.groups, lane)  # fmt: skip

        @T.inline
        def multiply_group(code, decode, operand_a, operand_b, multiply, scaled, acc, sc, i, h):
            at: T.let = i * WARPS + warp
            of_step: T.let = i * code.parts + h
            for k in T.unroll(4):
                acc[k] = T.Cast(code.sum, 0)
            for c in T.unroll(code.chunks):
                decode(w, (i * code.chunks + c) * code.weights.words, quad, table, 0, g, t)
                for k in T.unroll(2):
                    zero[k] = zp[of_step * 2 + k]
                operand_a(a, quad, zero)
                operand_b(b, quantized, (i * WARPS * code.chunks + c) * TOKENS, input_at[0])
                multiply(acc, 0, a, 0, b, h)
            for n in T.unroll(2):
                of_tokens[n] = xs[(at * code.parts + h) * TOKENS + t * 2 + n]
                if code.integer:
                    sums_of_x[n] = xn[(at * code.parts + h) * TOKENS + t * 2 + n]
            for k in T.unroll(2):
                for n in T.unroll(2):
                    scaled(pr, acc, k * 2 + n, sc[of_step * 2 + k], zp[of_step * 2 + k], of_tokens, sums_of_x, n)
                    part[(at * code.parts + h) * 128 + (g * 2 + k) * 8 + t * 2 + n] = pr[0]

        @T.inline
        def multiply_block(
            code, begin, numbers, load, decode, operand_a, operand_b, multiply, scaled, acc, sc, q, s, z, u, r, block,
            groups, chunks, stride
        ):  # fmt: skip
            begin(table, above, 0, z, u, block, g)
            # All of the round that this warp reads is asked for before the first product.
            step: T.let = r * code.steps + warp
            if code.whole(step + code.steps - WARPS + 1, groups, chunks):
                # Of whole groups all lies at constant distances from two addresses.
                for i in T.unroll(code.steps // WARPS):
                    for c in T.unroll(code.chunks):
                        load(q, w, (i * code.chunks + c) * code.weights.words, read_at,
                             (block * chunks + (i * WARPS * code.chunks + c)) * (code.bits * 16))  # fmt: skip
                    for h in T.unroll(code.parts):
                        numbers(sc, zp, i * code.parts + h, above, 0, s, z,
                                block * of_block[0] + number_at[0] + (i * WARPS * code.parts + h) * stride, g)  # fmt: skip
            else:
                for i in T.unroll(code.steps // WARPS):
                    for c in T.unroll(code.chunks):
                        chunk: T.let = T.min((step + i * WARPS) * code.chunks + c, chunks - 1)
                        load(q, w, (i * code.chunks + c) * code.weights.words, code.weights.places(g, t),
                             (block * chunks + chunk) * (code.bits * 16))  # fmt: skip
                    for h in T.unroll(code.parts):
                        grp: T.let = T.min((step + i * WARPS) * code.parts + h, groups - 1)
                        numbers(sc, zp, i * code.parts + h, above, 0, s, z, block * of_block[0] + grp * stride, g)
                # Without it the compiler makes one of both, which computes each address.
                T.ptx.prmt.b32(w[0], w[0], w[0], T.uint32(0x3210))
            for i in T.unroll(code.steps // WARPS):
                for h in T.unroll(code.parts):
                    # What comes of a first step behind the last group is not read.
                    if i == 0 and h == 0 or (step + i * WARPS) * code.parts + h < groups:
                        multiply_group(code, decode, operand_a, operand_b, multiply, scaled, acc, sc, i, h)

        @T.inline
        def ask(code, q, s, z, groups, chunks, stride, turns, r, j):
            # What a turn reads, one round of an output block, comes from memory while others are multiplied.  As many warps as
            # it has lines for ask for it, and the next ones for the turn after it.
            if turns % code.takers == warp // code.asking and r < stop[0]:
                ask_turn(code, q, s, z, block_of(j, cta, each, most, gated), r, groups, chunks, stride,
                         tid % (code.asking * 32))  # fmt: skip

        @T.inline
        def ask_first(code, q, s, z, groups, chunks, stride):
            T.ptx.mov.s32(stop[0], end_of(share, shares, T.ceildiv(groups, code.groups)))
            turn[0] = 0
            turn[1] = 0
            for n in T.serial(ahead):
                ask(code, q, s, z, groups, chunks, stride, n,
                    first_of(share, shares, T.ceildiv(groups, code.groups)) + turn[0], turn[1])  # fmt: skip
                turn[1] = turn[1] + 1
                if turn[1] == blocks:
                    turn[0] = turn[0] + 1
                    turn[1] = 0

        @T.inline
        def ask_next(code, q, s, z, groups, chunks, stride, r, j):
            over: T.let = T.Cast("int32", j + turn[1] >= blocks)
            ask(code, q, s, z, groups, chunks, stride, j, r + turn[0] + over, j + turn[1] - over * blocks)

        @T.inline
        def read_from(code, i, r):
            T.ptx.mov.s32(read_at[i], code.weights.places(g, t)[i] + (r * code.steps + warp) * code.chunks * (code.bits * 8))

        @T.inline
        def multiply_rows(
            code, put, begin, numbers, load, decode, operand_a, operand_b, multiply, scaled, acc, sc, to, q, s, z, u,
            start, columns, groups, chunks, stride, limit
        ):  # fmt: skip
            keep(input_at, 0, t + (warp * code.chunks * TOKENS + g) * (8 if code.group == 16 else 4))
            for j in T.serial(blocks):
                to[sum_at[0] + j * 16] = T.float32(0)
            for r in T.serial(first_of(share, shares, T.ceildiv(groups, code.groups)), stop[0]):
                make_form(code, put, r, start, columns, groups, limit)
                T.cuda.cta_sync()
                read_from(code, 0, r)
                if code.weights.planes > 1:
                    read_from(code, 1, r)
                if code.weights.planes > 2:
                    read_from(code, 2, r)
                keep(number_at, 0, (r * code.steps + warp) * code.parts * stride)
                T.ptx.mov.s32(of_block[0], (groups - 1) * stride + 1)
                for j in T.serial(blocks):
                    ask_next(code, q, s, z, groups, chunks, stride, r, j)
                    multiply_block(code, begin, numbers, load, decode, operand_a, operand_b, multiply, scaled, acc, sc,
                                   q, s, z, u, r, block_of(j, cta, each, most, gated), groups, chunks, stride)  # fmt: skip
                    T.cuda.cta_sync()
                    held: T.let = T.min(code.groups, groups - r * code.groups)
                    if not TWO and shares > 1:
                        leave_products(sums, (place * blocks + j) * groups * 128, r * code.groups, part, held, count, tid)
                    else:
                        total[0] = to[sum_at[0] + j * 16]
                        if held == code.groups:
                            for i in T.unroll(code.groups):
                                T.ptx.add.rn.f32(total[0], total[0], part[i * 128 + tid])
                        else:
                            for i in T.serial(held):
                                T.ptx.add.rn.f32(total[0], total[0], part[i * 128 + tid])
                        to[sum_at[0] + j * 16] = total[0]
                    T.cuda.cta_sync()

        keep(sum_at, 0, tid % 8 * SPAN + tid // 8)
        # Before the norm.
        ask_first(one, q, s, z, groups, chunks, stride)
        if norm != 0:
            norm_rows(x, stats, of_warps, tile * TOKENS, count, width_in, norm, eps, warp, lane)
        if rule == "token":
            range_of_rows(read, rules, ends, largest, 0, columns, count, symmetric, limit, warp, lane)
        multiply_rows(
            one, *one.inlines, sum_of if one.integer else acc, sc, result, q, s, z, u, 0, columns, groups, chunks, stride, limit
        )
        if TWO:
            ask_first(two, q2, s2, z2, groups2, chunks2, stride2)
            if rule == "token":
                range_of_rows(read, rules, ends, largest, columns, columns2, count, symmetric, limit2, warp, lane)
            multiply_rows(two, *two.inlines, sum_of if two.integer else acc, sc2, second, q2, s2, z2, u2, columns, columns2,
                          groups2, chunks2, stride2, limit2)  # fmt: skip
        last[0] = 1
        if not TWO and shares > 1:
            arrive(before, arrived, place, tid)
            last[0] = T.Cast("int32", before[0] == shares - 1)
            if last[0] != 0:
                begin_to_read(arrived, place, tid)
                for j in T.serial(blocks):
                    add_products(total, sums, (place * blocks + j) * groups * 128, part, groups, one.groups, count, tid)
                    result[tid % 8 * SPAN + j * 16 + tid // 8] = total[0]
        if last[0] != 0:
            for j in T.serial(blocks):
                at: T.let = tid % 8 * SPAN + j * 16 + tid // 8
                row: T.let = block_of(j, cta, each, most, gated) * 16 + tid // 8
                if tid % 8 < count and row < rows:
                    total[0] = result[at]
                    if has_bias != 0:
                        T.ptx.add.rn.f32(total[0], total[0], bias[row])
                    if add != 0:
                        T.ptx.add.rn.f32(total[0], y[(tile * TOKENS + tid % 8) * width + row], total[0])
                    if TWO:
                        T.ptx.add.rn.f32(total[0], total[0], second[at])
                    if low_kind != 0:
                        low_rank_row(value, low_b, inner, row, tile * TOKENS + tid % 8, rank, low_kind)
                        total[0] = total[0] + value[0]
                    if after == "rows":
                        if cta * each + j < most:
                            y[(tile * TOKENS + tid % 8) * width + row] = total[0]
                    else:
                        result[at] = total[0]
            if after == "activate":
                for j in T.serial(each):
                    at: T.let = tid % 8 * SPAN + j * 16 + tid // 8
                    channel: T.let = (cta * each + j) * 16 + tid // 8
                    if tid % 8 < count and channel < width:
                        made: T.let = apply(result[at])
                        if gated:
                            y[(tile * TOKENS + tid % 8) * width + channel] = made * result[at + each * 16]
                        else:
                            y[(tile * TOKENS + tid % 8) * width + channel] = made
            if after == "heads":
                T.cuda.cta_sync()
                for i in T.serial(TOKENS // WARPS):
                    n: T.let = i * WARPS + warp
                    if n < count:
                        finish(result, n * SPAN, whole, warp * MAX_HEAD, tile * TOKENS + n, first + cta, heads, kv_heads,
                               head_dim, head_normed, head_eps, q_gain, k_gain, angles, places, pairs, matrix, rotation,
                               pool, numbers, pages, tables, slots, layer, high, top, lane)  # fmt: skip
                        for c in T.serial(T.ceildiv(head_dim, 32)):
                            if c * 32 + lane < head_dim:
                                y[(tile * TOKENS + n) * width + cta * head_dim + c * 32 + lane] = result[
                                    n * SPAN + c * 32 + lane
                                ]

    return fused_
