"""Attention over the pages of the cache, by tensor cores.

A block of threads has 16 * TILES query rows that read the same keys and values: the query heads of one kv head, of one token
row or of several neighbouring ones of a session.  It takes a page of 64 slots after the other:

    scores    queries are operand A of an mma, keys B: a warp has 16 slots, of all query rows
    weights   of the scores, in shared memory: 128 / rows threads have a row (attention_rows.py)
    sums      weights are A, values B: a warp has every fourth group of 16 dimensions, of all query rows

So every key and value is read by one warp.  A query and a weight are each the sum of two f16, and so is a number of a cache of
integers; of the product of two such sums, that of the second parts, below 2^-22 of it, is left out.

What a query row gets does not depend on the rows beside it, nor on how many TILES there are: rows of an mma are independent;
where a row does not see a slot its weight is 0, which adds nothing; its numbers are added in an order that is the same for any
TILES.  A value that is not finite would make that 0 a NaN: it is read as 0, and weights of rows that see its slot are NaN.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.attention_page import WARPS, dimension, pages_of
from edgeq.targets.cuda.kernels.attention_parts import ask_page, page_of, part_of, parts_of
from edgeq.targets.cuda.kernels.attention_rows import MASKED_SCORE, SCORES, WEIGHTS, first_of, rows_of
from edgeq.targets.cuda.kernels.cached import places
from edgeq.targets.cuda.kernels.rows import NAN_BITS, THREADS
from edgeq.targets.cuda.kernels.shares import arrive, begin_to_read
from edgeq.targets.rows import PAGE

ASKED_HEAD = 128
"""Dimensions of a head up to which the next page is asked for while a block has one."""


def attend(head_dim, kv, PART, packed, CAPPED=False, SLOPED=False):
    """out = softmax(q k^T * scale) v over the slots from firsts[row] up to lasts[row], without it.

    The slots are taken in parts (attention_parts.py), each by sums of its own, which are added in the order of the parts.  A
    block has one token row, or where `packed` as many as fit, and takes one part after the other; with `parts` above 0, where
    not `packed`, blocks take `taken` parts each side by side, and the last of a row and its heads to end adds the sums of all:
    the same bits.  Parts that a row does not see are left out.

    PART            positions of the largest part, pages times a power of two;  level: parts of up to 2^level pages
    firsts, lasts   int32 per token row; with a `window` above 0 the row sees no more than the last that many
    sinks           f32 [heads]: scores of a head whose shares go nowhere, if `has_sinks`
    cap, slopes     f32 [heads]: how scores change (attention_rows.py); what has neither declares them and does not take them
    sums            f32 [rows][heads][parts][padded dimensions];  arrived: int32 [rows][blocks of heads], 0 before and after
    high            dimensions of an int4 cache that have 8 bits
    """
    TILES = 2 if packed and head_dim <= 128 else 1
    M = 16 * TILES
    PER = THREADS // M  # threads that make the weights of a row
    CHUNKS = -(-head_dim // 32)
    PAIRS = -(-head_dim // 64)  # groups of 16 dimensions of a warp
    ACC = TILES * PAIRS * 8
    LEVELS = (PART // PAGE).bit_length()
    head_of = places(kv)
    WORDS, look_at_values, make_scores, add_values = pages_of(kv, head_dim, TILES)
    make_query, make_weights = rows_of(M, head_dim, CAPPED, SLOPED)
    leave, add, put = parts_of(head_dim)

    def together_of(group):
        # Token rows of a block.
        return T.max(M // group, 1) if packed else 1

    def row_tiles(tokens, group):
        return T.ceildiv(tokens, together_of(group)) if packed else tokens

    def part_tiles(parts, taken):
        return 1 if packed else T.max(T.ceildiv(parts, taken), 1)

    def taken_of(parts, taken, count):
        # Parts of a block of threads, of `count` that a row sees.
        return count if packed else T.if_then_else(parts > 0, taken, count)

    @T.prim_func
    def attend_(q_: T.handle, pool_: T.handle, numbers_: T.handle, pages_: T.handle, tables_: T.handle, firsts_: T.handle,
                lasts_: T.handle, sinks_: T.handle, slopes_: T.handle, out_: T.handle, sums_: T.handle, arrived_: T.handle,
                tokens: T.int32, width: T.int32, heads: T.int32, kv_heads: T.int32, layer: T.int32, window: T.int32,
                high: T.int32, level: T.int32, parts: T.int32, taken: T.int32, has_sinks: T.int32, scale: T.float32,
                cap: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        q = T.match_buffer(q_, (T.int32(),), "float32")
        pool = T.match_buffer(pool_, (T.int64(),), "uint32")
        numbers = T.match_buffer(numbers_, (T.int64(),), "float32")
        pages = T.match_buffer(pages_, (T.int32(),), "int64")
        tables = T.match_buffer(tables_, (T.int32(),), "int32")
        firsts = T.match_buffer(firsts_, (T.int32(),), "int32")
        lasts = T.match_buffer(lasts_, (T.int32(),), "int32")
        sinks = T.match_buffer(sinks_, (T.int32(),), "float32")
        slopes = T.match_buffer(slopes_, (T.int32(),), "float32")
        out = T.match_buffer(out_, (T.int32(),), "float32")
        sums = T.match_buffer(sums_, (T.int32(),), "float32")
        arrived = T.match_buffer(arrived_, (T.int32(),), "int32")
        T.device_entry()
        tile, row_tile, at_part = T.cta_id(
            [
                kv_heads * T.ceildiv(T.floordiv(heads, kv_heads), M),
                row_tiles(tokens, T.floordiv(heads, kv_heads)),
                part_tiles(parts, taken),
            ]
        )
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        g: T.let = lane // 4
        t: T.let = lane % 4
        query = T.alloc_shared((2 * M * CHUNKS * 16,), "uint32")
        scores = T.alloc_shared((M * SCORES,), "float32")
        weights = T.alloc_shared((2 * M * WEIGHTS,), "uint32")
        factors = T.alloc_shared((M * 2,), "float32")
        folds = T.alloc_shared((M * 2,), "float32")
        broken = T.alloc_shared((PAGE + 1,), "int32")
        before = T.alloc_shared((1,), "int32")
        acc = T.alloc_local((ACC,), "float32")
        merged = T.alloc_local((ACC,), "float32")
        words = T.alloc_local((WORDS,), "uint32")
        power = T.alloc_local((2 if SLOPED else 1,), "float32")
        most = T.alloc_local((2,), "float32")  # before and with this page
        total = T.alloc_local((1,), "float32")
        all_ = T.alloc_local((2,), "float32")  # the largest score and the total of the parts so far
        new = T.alloc_local((3,), "float32")
        factor = T.alloc_local((2,), "float32")
        inside = T.alloc_local((1,), "int32")
        values = T.alloc_local((1,), "int32")
        scales = T.alloc_local((1,), "int32")
        span = T.alloc_local((3,), "int32")
        own = T.alloc_local((2,), "int32")
        tag = T.alloc_local((1,), "int32")
        group: T.let = heads // kv_heads
        tiles: T.let = T.ceildiv(group, M)
        held: T.let = T.min(group, M)
        together: T.let = together_of(group)
        kv_head: T.let = tile // tiles
        # The query row whose weights this thread makes with PER - 1 others.
        row: T.let = tid // PER
        mine: T.let = tid % PER
        within: T.let = tile % tiles * M + row % held
        head: T.let = kv_head * group + within
        own_token: T.let = row_tile * together + row // held

        @T.inline
        def fold(sees):
            # The sums of a part, with the largest score that they are relative to, added to those of the parts before it.
            # Rounded as written: all that do it have to agree in bits.
            factor[0] = T.float32(1)
            factor[1] = T.float32(0)
            if sees:
                new[0] = T.max(all_[0], most[1])
                factor[0] = T.exp(all_[0] - new[0])
                factor[1] = T.exp(most[1] - new[0])
                all_[0] = new[0]
                T.ptx.mul.rn.f32(all_[1], all_[1], factor[0])
                T.ptx.mul.rn.f32(new[1], total[0], factor[1])
                T.ptx.add.rn.f32(all_[1], all_[1], new[1])
            if mine == 0:
                folds[row * 2] = factor[0]
                folds[row * 2 + 1] = factor[1]
            T.cuda.cta_sync()
            for m in T.unroll(TILES):
                for i in T.unroll(2):
                    for v in T.unroll(2):
                        factor[v] = folds[(m * 16 + i * 8 + g) * 2 + v]
                    for n in T.unroll(PAIRS * 2):
                        for v in T.unroll(2):
                            T.ptx.mul.rn.f32(merged[(m * PAIRS * 2 + n) * 4 + i * 2 + v],
                                             merged[(m * PAIRS * 2 + n) * 4 + i * 2 + v], factor[0])  # fmt: skip
                            T.ptx.mul.rn.f32(new[2], acc[(m * PAIRS * 2 + n) * 4 + i * 2 + v], factor[1])
                            T.ptx.add.rn.f32(merged[(m * PAIRS * 2 + n) * 4 + i * 2 + v],
                                             merged[(m * PAIRS * 2 + n) * 4 + i * 2 + v], new[2])  # fmt: skip

        @T.inline
        def begin():
            all_[0] = T.float32(MASKED_SCORE)
            all_[1] = T.float32(0)
            for i in T.unroll(ACC):
                merged[i] = T.float32(0)

        @T.inline
        def begin_part():
            total[0] = T.float32(0)
            most[1] = T.float32(MASKED_SCORE)
            for i in T.unroll(ACC):
                acc[i] = T.float32(0)

        @T.inline
        def end_rows():
            # A sink is one more score, whose value is nothing: the sum alone has it.  That is relative to the largest of the
            # others, so it is infinite, and the result 0, where a sink is so much larger that they have no share.
            if mine == 0 and has_sinks != 0 and within < group:
                all_[1] = all_[1] + T.exp(sinks[head] - all_[0])
                all_[0] = T.max(all_[0], sinks[head])
            # Where no score is above MASKED_SCORE, the result is NaN, as that of a NaN score is by itself.
            if mine == 0:
                factors[row] = T.if_then_else(
                    all_[0] <= T.float32(MASKED_SCORE), T.reinterpret("float32", T.uint32(NAN_BITS)), all_[1]
                )
            T.cuda.cta_sync()

        @T.inline
        def finish(lead, ends):
            end_rows()
            for m in T.unroll(TILES):
                for i in T.unroll(2):
                    r: T.let = m * 16 + i * 8 + g
                    which: T.let = tile % tiles * M + r % held
                    if r // held >= lead and r // held < ends and which < group:
                        for n in T.unroll(PAIRS * 2):
                            for v in T.unroll(2):
                                d: T.let = dimension(n, v, warp, t)
                                if d < head_dim:
                                    out[
                                        (row_tile * together + r // held) * (heads * head_dim)
                                        + (kv_head * group + which) * head_dim + d
                                    ] = merged[(m * PAIRS * 2 + n) * 4 + i * 2 + v] / factors[r]  # fmt: skip

        @T.inline
        def add_parts(token, count):
            # One token row, so a query row is a head.
            T.cuda.cta_sync()
            arrive(before, arrived, token * (kv_heads * tiles) + tile, tid)
            if before[0] == T.ceildiv(count, taken) - 1:
                begin_to_read(arrived, token * (kv_heads * tiles) + tile, tid)
                begin()
                first_head: T.let = kv_head * group + tile % tiles * M
                in_use: T.let = T.min(held, group - tile % tiles * M)
                add(merged, all_, scores, sums, (token * heads + first_head) * parts, count, parts, in_use, within < group
                    and row < held, row, mine, tid)  # fmt: skip
                end_rows()
                put(out, (token * heads + first_head) * (head_dim // 4), merged, factors, in_use, tid)

        tag[0] = 0
        if tid <= PAGE:
            broken[tid] = 0
        head_of(inside, values, scales, layer, kv_heads, kv_head, head_dim, high)
        for lead in T.serial(together):
            token: T.let = row_tile * together + lead
            # Neighbouring token rows of one session.
            if token < tokens and (lead == 0 or tables[token] != tables[T.max(token - 1, 0)]):
                span[0] = first_of(firsts, lasts, token, window)
                span[1] = lasts[token]
                span[2] = lead + 1
                if packed:
                    for i in T.serial(1, together - lead):
                        if token + i < tokens and span[2] == lead + i and tables[T.min(token + i, tokens - 1)] == tables[token]:
                            span[0] = T.min(span[0], first_of(firsts, lasts, token + i, window))
                            span[1] = T.max(span[1], lasts[token + i])
                            span[2] = lead + i + 1
                active: T.let = row // held >= lead and row // held < span[2] and within < group
                own[0] = 0
                own[1] = 0
                if active:
                    own[0] = first_of(firsts, lasts, own_token, window)
                    own[1] = lasts[own_token]
                first_part: T.let = part_of(span[0] // PAGE, level, LEVELS)
                last_part: T.let = part_of((span[1] - 1) // PAGE, level, LEVELS)
                each: T.let = taken_of(parts, taken, last_part - first_part + 1)
                start: T.let = first_part + at_part * each
                stop: T.let = T.min(last_part, start + each - 1)
                alone: T.let = last_part - first_part < each
                if start <= stop:
                    begins: T.let = T.max(span[0] // PAGE, page_of(start, level, LEVELS))
                    ends: T.let = T.min(T.ceildiv(span[1], PAGE), page_of(stop + 1, level, LEVELS))
                    ask_page(pool, pages[tables[token] + begins] + T.Cast("int64", inside[0]), values[0] // kv_heads, values[0],
                             tid)  # fmt: skip
                    make_query(query, power, q, own_token * width + head * head_dim, active, scale, row, mine)
                    if SLOPED:
                        power[1] = T.if_then_else(active, slopes[head], T.float32(0))
                    T.cuda.cta_sync()
                    begin()
                    begin_part()
                    for number_ in T.serial(begins, ends):
                        page: T.let = pages[tables[token] + number_] + T.Cast("int64", inside[0])
                        tag[0] = tag[0] + 1
                        of_values: T.let = page + T.Cast("int64", values[0])
                        # Of many dimensions a thread has no register left for what it asks for.
                        if head_dim <= ASKED_HEAD and number_ + 1 < ends:
                            ask_page(pool, pages[tables[token] + number_ + 1] + T.Cast("int64", inside[0]),
                                     values[0] // kv_heads, values[0], tid)  # fmt: skip
                        look_at_values(words, broken, tag, pool, numbers, of_values, scales[0], high, warp, g, t, tid)
                        make_scores(scores, query, pool, numbers, page, scales[0], high, warp, g, t)
                        T.cuda.cta_sync()
                        make_weights(weights, factors, most, total, scores, power, cap, broken, tag, own, number_ * PAGE, row,
                                     mine)  # fmt: skip
                        T.cuda.cta_sync()
                        add_values(acc, words, weights, factors, pool, numbers, of_values, scales[0], high, warp, g, t)
                        part: T.let = part_of(number_, level, LEVELS)
                        if number_ + 1 == ends or part_of(number_ + 1, level, LEVELS) != part:
                            if alone:
                                fold(
                                    own[1] > own[0]
                                    and part >= part_of(own[0] // PAGE, level, LEVELS)
                                    and part <= part_of((own[1] - 1) // PAGE, level, LEVELS)
                                )
                            elif not packed:
                                leave(
                                    sums, (token * heads + kv_head * group + tile % tiles * M) * parts + part - first_part, acc,
                                    most, total, parts, T.min(held, group - tile % tiles * M), active and row < held, row, mine,
                                    warp, g, t
                                )  # fmt: skip
                            begin_part()
                    if not packed:
                        if alone:
                            finish(lead, span[2])
                        else:
                            add_parts(token, last_part - first_part + 1)
                    else:
                        finish(lead, span[2])

    return attend_
