"""Attention over the pages of the cache, as cache.py describes them."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import NAN_BITS
from edgeq.targets.rows import PAGE

LEAST_SCORE = -1e30


def places(kv):
    """Inline: where the numbers of a head are in a page."""

    @T.inline
    def head_of(inside, values, scales, layer, kv_heads, head, head_dim, high):
        # From the beginning of a page to the head's keys, and from keys to values, in units of 16 bytes; to the scales in f32.
        if kv == "f16":
            inside[0] = (layer * 2 * kv_heads + head) * (PAGE * head_dim // 8)
            values[0] = kv_heads * (PAGE * head_dim // 8)
        elif kv == "int8":
            inside[0] = (layer * 2 * kv_heads + head) * (PAGE // 16 * (head_dim + 4))
            values[0] = kv_heads * (PAGE // 16 * (head_dim + 4))
            scales[0] = PAGE * head_dim // 4
        else:
            each: T.let = (head_dim - high + 1) // 2 + high
            extra: T.let = T.if_then_else(high < head_dim, 8, 0) + T.if_then_else(high > 0, 8, 0)
            inside[0] = (layer * 2 * kv_heads + head) * (PAGE // 16 * (each + extra))
            values[0] = kv_heads * (PAGE // 16 * (each + extra))
            scales[0] = PAGE // 4 * each

    return head_of


def code_at(pool, page, byte):
    """A byte of a half of a page, from words."""
    word = pool[page * T.int64(4) + T.Cast("int64", byte // 4)]
    return (word >> T.Cast("uint32", byte % 4 * 8)) & T.uint32(255)


def arithmetic(kv, head_dim):
    """Inline: the score of a slot before it is added up with others, and one dimension of a value."""
    UNIT = 8 if head_dim % 8 == 0 else 2 if kv == "f16" else 4  # numbers of a head that are loaded together

    @T.inline
    def dot(score, eight, words, query, sums, warp, pool, numbers, page, scales, place, high):
        score[0] = T.float32(0)
        if kv == "f16":
            for i in T.serial(head_dim // UNIT):
                for v in T.vectorized(UNIT):
                    eight[v] = pool[
                        (page * T.int64(8 // UNIT) + T.Cast("int64", place * (head_dim // UNIT) + i)) * T.int64(UNIT) + v
                    ]
                for v in T.unroll(UNIT):
                    score[0] = score[0] + query[warp, i * UNIT + v] * T.Cast("float32", eight[v])
        elif kv == "int8":
            for i in T.serial(head_dim // UNIT):
                for v in T.vectorized(UNIT // 4):
                    words[v] = pool[
                        page * T.int64(4) + T.Cast("int64", place * (head_dim // UNIT) + i) * T.int64(UNIT // 4) + v
                    ]
                for v in T.unroll(UNIT):
                    # A byte with its sign: up to the highest bits, and down again.
                    code: T.let = T.reinterpret("int32", words[v // 4] << T.uint32(24 - v % 4 * 8)) >> 24
                    score[0] = score[0] + query[warp, i * UNIT + v] * T.Cast("float32", code)
            score[0] = score[0] * numbers[page * T.int64(4) + T.Cast("int64", scales + place)]
        else:
            low: T.let = head_dim - high
            each: T.let = (low + 1) // 2 + high
            part = T.alloc_local((1,), "float32")
            part[0] = T.float32(0)
            for i in T.serial((low + 1) // 2):
                code: T.let = code_at(pool, page, place * each + i)
                part[0] = part[0] + query[warp, i * 2] * T.Cast("float32", code & T.uint32(15))
                if i * 2 + 1 < low:
                    part[0] = part[0] + query[warp, i * 2 + 1] * T.Cast("float32", code >> T.uint32(4))
            at: T.let = page * T.int64(4) + T.Cast("int64", scales + place)
            if low > 0:
                score[0] = part[0] * numbers[at] + sums[0] * numbers[at + T.int64(PAGE)]
            if high > 0:
                part[0] = T.float32(0)
                for i in T.serial(high):
                    code: T.let = code_at(pool, page, place * each + (low + 1) // 2 + i)
                    part[0] = part[0] + query[warp, low + i] * T.Cast("float32", code)
                after: T.let = at + T.Cast("int64", T.if_then_else(low > 0, 2 * PAGE, 0))
                score[0] = score[0] + (part[0] * numbers[after] + sums[1] * numbers[after + T.int64(PAGE)])

    @T.inline
    def take(value, pool, numbers, page, scales, place, dimension, high):
        if kv == "f16":
            value[0] = T.Cast("float32", pool[page * T.int64(8) + T.Cast("int64", place * head_dim + dimension)])
        elif kv == "int8":
            code: T.let = T.reinterpret("int32", code_at(pool, page, place * head_dim + dimension) << T.uint32(24)) >> 24
            value[0] = T.Cast("float32", code) * numbers[page * T.int64(4) + T.Cast("int64", scales + place)]
        else:
            low: T.let = head_dim - high
            each: T.let = (low + 1) // 2 + high
            at: T.let = page * T.int64(4) + T.Cast("int64", scales + place)
            if dimension < low:
                pair: T.let = code_at(pool, page, place * each + dimension // 2)
                code: T.let = (pair >> T.Cast("uint32", dimension % 2 * 4)) & T.uint32(15)
                value[0] = T.Cast("float32", code) * numbers[at] + numbers[at + T.int64(PAGE)]
            else:
                after: T.let = at + T.Cast("int64", T.if_then_else(low > 0, 2 * PAGE, 0))
                whole: T.let = code_at(pool, page, place * each + (low + 1) // 2 + dimension - low)
                value[0] = T.Cast("float32", whole) * numbers[after] + numbers[after + T.int64(PAGE)]

    return dot, take


def fold(head_dim):
    """Inline: the sums of a part, with the largest score that they are relative to, added to those of the parts before it."""
    EACH = -(-head_dim // 32)

    @T.inline
    def fold_(merged, all_, acc, most, total, old, new, begun):
        # all_: the largest score and the total of the parts so far.  Rounded as written: both callers have to agree in bits.
        old[0] = T.float32(0)
        if begun:
            old[0] = T.exp(all_[0] - T.max(all_[0], most))
        new[0] = T.exp(most - T.if_then_else(begun, T.max(all_[0], most), most))
        all_[0] = T.if_then_else(begun, T.max(all_[0], most), most)
        if begun:
            T.ptx.mul.rn.f32(all_[1], all_[1], old[0])
            T.ptx.mul.rn.f32(new[1], total, new[0])
            T.ptx.add.rn.f32(all_[1], all_[1], new[1])
        else:
            all_[1] = total
        for i in T.unroll(EACH):
            if begun:
                T.ptx.mul.rn.f32(merged[i], merged[i], old[0])
                T.ptx.mul.rn.f32(new[1], acc[i], new[0])
                T.ptx.add.rn.f32(merged[i], merged[i], new[1])
            else:
                merged[i] = acc[i]

    return fold_


def attend(head_dim, kv, PART, WARPS=4):
    """out = softmax(q k^T * scale) v over the slots from firsts[row] up to lasts[row], without it.

    A block has up to WARPS query heads of one token row that read the same keys and values, a warp one head.  The slots are
    taken in parts of PART, each by sums of its own (online softmax, Milakov and Gimelshein 2018), which are added in the order
    of the parts: so a row's sums do not depend on which rows run with it, nor on how the rows were cut into runs.  With
    `parts` above 0 blocks take one part each side by side, and the last of a row and its heads to end adds their sums;
    parts that a row does not see are left out.  Else one block takes one part after the other: the same bits.

    A lane has one slot of a block of 32 while scores are made, and every 32nd dimension while values are added.

    firsts, lasts   int32 per token row; with a `window` above 0 the row sees no more than the last that many
    sums            f32 [rows][heads][parts][STRIDE];  arrived: int32 [rows][blocks of heads], 0 before and after
    high            dimensions of an int4 cache that have 8 bits
    """
    EACH = -(-head_dim // 32)
    STRIDE = EACH * 32 + 32  # lines of a cache: no block has read what another one writes
    POOL = "float16" if kv == "f16" else "uint32"
    head_of = places(kv)
    dot, take = arithmetic(kv, head_dim)
    fold_ = fold(head_dim)

    @T.prim_func
    def attend_(q_: T.handle, pool_: T.handle, numbers_: T.handle, pages_: T.handle, tables_: T.handle, firsts_: T.handle,
                lasts_: T.handle, out_: T.handle, sums_: T.handle, arrived_: T.handle, tokens: T.int32, width: T.int32,
                heads: T.int32, kv_heads: T.int32, layer: T.int32, window: T.int32, high: T.int32, parts: T.int32,
                scale: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nq, np, nn, ng, nt, nf, nl, no, nu, na = (
            T.int32(),
            T.int64(),
            T.int64(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
            T.int32(),
        )
        q = T.match_buffer(q_, (nq,), "float32")
        pool = T.match_buffer(pool_, (np,), POOL)
        numbers = T.match_buffer(numbers_, (nn,), "float32")
        pages = T.match_buffer(pages_, (ng,), "int64")
        tables = T.match_buffer(tables_, (nt,), "int32")
        firsts = T.match_buffer(firsts_, (nf,), "int32")
        lasts = T.match_buffer(lasts_, (nl,), "int32")
        out = T.match_buffer(out_, (no,), "float32")
        sums = T.match_buffer(sums_, (nu,), "float32")
        arrived = T.match_buffer(arrived_, (na,), "int32")
        T.device_entry()
        tile, row, at_part = T.cta_id([kv_heads * T.ceildiv(T.floordiv(heads, kv_heads), WARPS), tokens, T.max(parts, 1)])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        query = T.alloc_shared((WARPS, head_dim), "float32")
        weights = T.alloc_shared((WARPS, 32), "float32")
        before = T.alloc_shared((1,), "int32")
        eight = T.alloc_local((8,), "float16")
        words = T.alloc_local((2,), "uint32")
        acc = T.alloc_local((EACH,), "float32")
        merged = T.alloc_local((EACH,), "float32")
        score = T.alloc_local((1,), "float32")
        value = T.alloc_local((1,), "float32")
        shares = T.alloc_local((2,), "float32")  # sums of the query's dimensions in 4 bits, and of those in 8
        most = T.alloc_local((2,), "float32")  # before and with this block
        weight = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        all_ = T.alloc_local((2,), "float32")
        old = T.alloc_local((1,), "float32")
        new = T.alloc_local((2,), "float32")
        inside = T.alloc_local((1,), "int32")
        values = T.alloc_local((1,), "int32")
        scales = T.alloc_local((1,), "int32")
        group: T.let = heads // kv_heads
        tiles: T.let = T.ceildiv(group, WARPS)
        kv_head: T.let = tile // tiles
        within: T.let = tile % tiles * WARPS + warp
        head: T.let = kv_head * group + within
        end: T.let = lasts[row]
        first: T.let = T.if_then_else(window > 0, T.max(end - window, firsts[row]), firsts[row])
        first_part: T.let = first // PART
        last_part: T.let = (end - 1) // PART
        start: T.let = T.if_then_else(parts > 0, T.max(at_part, first_part), first_part)
        stop: T.let = T.if_then_else(parts > 0, T.min(at_part, last_part), last_part)

        @T.inline
        def finish():
            # Where no score is above LEAST_SCORE, the result is NaN, as that of a NaN score is by itself.
            if all_[0] <= T.float32(LEAST_SCORE):
                all_[1] = T.reinterpret("float32", T.uint32(NAN_BITS))
            for i in T.unroll(EACH):
                if i * 32 + lane < head_dim:
                    out[row * (heads * head_dim) + head * head_dim + i * 32 + lane] = merged[i] / all_[1]

        if start <= stop and within < group:
            head_of(inside, values, scales, layer, kv_heads, kv_head, head_dim, high)
            for i in T.unroll(2):
                shares[i] = T.float32(0)
            for i in T.unroll(EACH):
                if i * 32 + lane < head_dim:
                    value[0] = q[row * width + head * head_dim + i * 32 + lane] * scale
                    query[warp, i * 32 + lane] = value[0]
                    if kv == "int4":
                        if i * 32 + lane < head_dim - high:
                            shares[0] = shares[0] + value[0]
                        else:
                            shares[1] = shares[1] + value[0]
            if kv == "int4":
                for level in T.unroll(5):
                    for i in T.unroll(2):
                        shares[i] = shares[i] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), shares[i], 1 << level, 32, 32)
            T.cuda.warp_sync()
            for part in T.serial(start, stop + 1):
                total[0] = T.float32(0)
                most[1] = T.float32(LEAST_SCORE)
                for i in T.unroll(EACH):
                    acc[i] = T.float32(0)
                for block in T.serial(
                    T.max(first // 32, part * (PART // 32)), T.min(T.ceildiv(end, 32), (part + 1) * (PART // 32))
                ):
                    page: T.let = pages[tables[row] + block * 32 // PAGE] + T.Cast("int64", inside[0])
                    slot: T.let = block * 32 + lane
                    seen: T.let = slot >= first and slot < end
                    score[0] = T.float32(LEAST_SCORE)
                    if seen:
                        dot(score, eight, words, query, shares, warp, pool, numbers, page, scales[0], slot % PAGE, high)
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
                                take(value, pool, numbers, page + T.Cast("int64", values[0]), scales[0],
                                     (block * 32 + j) % PAGE, i * 32 + lane, high)  # fmt: skip
                                acc[i] = acc[i] + weights[warp, j] * value[0]
                    T.cuda.warp_sync()
                for level in T.unroll(5):
                    total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total[0], 1 << level, 32, 32)
                fold_(merged, all_, acc, most[1], total[0], old, new, part > start)
            if parts > 0 and first_part < last_part:
                line: T.let = ((row * heads + head) * parts + at_part) * STRIDE
                for i in T.unroll(EACH):
                    sums[line + i * 32 + lane] = merged[i]
                if lane < 2:
                    sums[line + EACH * 32 + lane] = T.if_then_else(lane == 0, all_[0], all_[1])
                T.cuda.thread_fence()
            else:
                finish()
        if start <= stop and parts > 0 and first_part < last_part:
            T.cuda.cta_sync()
            if warp == 0 and lane == 0:
                before[0] = T.cuda.atomic_add(arrived.ptr_to([row * (kv_heads * tiles) + tile]), 1)
            T.cuda.cta_sync()
            if before[0] == last_part - first_part:
                T.cuda.thread_fence()
                if warp == 0 and lane == 0:
                    arrived[row * (kv_heads * tiles) + tile] = 0
                if within < group:
                    for part in T.serial(first_part, last_part + 1):
                        other: T.let = ((row * heads + head) * parts + part) * STRIDE
                        for i in T.unroll(EACH):
                            acc[i] = sums[other + i * 32 + lane]
                        most[0] = sums[other + EACH * 32]
                        total[0] = sums[other + EACH * 32 + 1]
                        fold_(merged, all_, acc, most[0], total[0], old, new, part > first_part)
                    finish()

    return attend_
