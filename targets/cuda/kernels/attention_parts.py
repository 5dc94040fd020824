"""The parts of a context: where each begins, and how a block of threads leaves the sums of one and adds those of all.

Parts grow with their positions: the first eight have a page each, the next four two, four, and so on up to the largest, which
all others have.  So few positions are several parts, and many are not more than bytes for their sums are worth.  Where a part
begins follows from its number alone, not from the run or the device, and parts are added in their order: the bits of a row do
not depend on which blocks of threads take them.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.attention_rows import ALL, MASKED_SCORE, SCORES
from edgeq.targets.cuda.kernels.rows import THREADS

OF_A_SIZE = 4
"""Parts of each size; of the smallest, which is a page, twice as many."""
ASKED = 8
"""Parts whose sums a thread has asked for before it adds the first of them."""
LINE = 32
"""Words of a line of L2."""


def part_of(page, level, levels):
    """The part in which a page is; those of up to 2^level pages, of at most 2^(levels - 1)."""
    found = page
    for size in range(1, levels):
        found = T.min(found, T.if_then_else(level >= size, OF_A_SIZE * size + T.shift_right(page, size), page))
    return found


def page_of(part, level, levels):
    """The first page of a part."""
    found = part
    for size in range(1, levels):
        found = T.max(found, T.if_then_else(level >= size, (part - OF_A_SIZE * size) * (1 << size), part))
    return found


@T.inline
def ask_page(pool, page, units, of_values, tid):
    """Ask for the keys and the values of a head in a page, `units` of 16 bytes each with their scales."""
    for i in T.serial(T.ceildiv(units, THREADS * LINE // 4)):
        line: T.let = i * THREADS + tid
        if line * (LINE // 4) < units:
            T.ptx["prefetch.global.L2"](pool.ptr_to([page * T.int64(4) + T.Cast("int64", line * LINE)]))
            T.ptx["prefetch.global.L2"](
                pool.ptr_to([(page + T.Cast("int64", of_values)) * T.int64(4) + T.Cast("int64", line * LINE)])
            )


def parts_of(head_dim):
    """Inline, for one token row of 16 query rows, of which `held` are heads:

    leave    the sums of a part in `sums` f32 [parts][STRIDE] of each head, the largest score and the total after them
    add      those of all parts, in their order, for out f32 [heads][head_dim]
    """
    M, PER = 16, THREADS // 16
    PAIRS = -(-head_dim // 64)
    FOURS = head_dim // 4
    EACH = -(-M * FOURS // THREADS)  # fours of numbers of the result that a thread has
    STRIDE = -(-head_dim // 32) * 32 + 32  # lines of a cache: no block has read what another one writes
    TOGETHER = SCORES // 3 // PER * PER  # parts of which a row of scores holds two factors and the total

    @T.inline
    def leave(sums, at, acc, most, total, parts, held, active, row, mine, warp, g, t):
        # at: where the sums of this part begin, of the first head
        four = T.alloc_local((4,), "float32")
        for i in T.unroll(2):
            if i * 8 + g < held:
                for j in T.unroll(PAIRS):
                    first: T.let = (j * 4 + warp) * 4 + t
                    if first < FOURS:
                        for v in T.unroll(4):
                            four[v] = acc[(j * 2 + v % 2) * 4 + i * 2 + v // 2]
                        for v in T.vectorized(4):
                            sums[((at + (i * 8 + g) * parts) * (STRIDE // 4) + first) * 4 + v] = four[v]
        if active and mine == 0:
            sums[(at + row * parts) * STRIDE + STRIDE - 32] = most[1]
            sums[(at + row * parts) * STRIDE + STRIDE - 31] = total[0]

    @T.inline
    def add(merged, all_, scores, sums, at, count, parts, held, active, row, mine, tid):
        # all_: the largest score, and in threads with `mine` 0 the total, of all `count` parts from `at` on
        top = T.alloc_local((TOGETHER // PER,), "float32")
        highest = T.alloc_local((2,), "float32")  # up to the parts of this thread, and with them
        other = T.alloc_local((1,), "float32")
        new = T.alloc_local((1,), "float32")
        factor = T.alloc_local((2,), "float32")
        asked = T.alloc_local((ASKED * 4,), "float32")
        for turn in T.serial(T.ceildiv(count, TOGETHER)):
            here: T.let = T.min(TOGETHER, count - turn * TOGETHER)
            # What sums so far and those of each part are times, by the largest scores up to it: those of a sum part by part.
            highest[1] = T.float32(MASKED_SCORE)
            for i in T.unroll(TOGETHER // PER):
                number: T.let = mine * (TOGETHER // PER) + i
                top[i] = T.float32(MASKED_SCORE)
                if active and number < here:
                    of_part: T.let = (at + row * parts + turn * TOGETHER + number) * STRIDE + STRIDE - 32
                    top[i] = sums[of_part]
                    scores[row * SCORES + TOGETHER * 2 + number] = sums[of_part + 1]
                highest[1] = T.max(highest[1], top[i])
            for level in T.unroll(PER.bit_length() - 1):
                other[0] = T.tvm_warp_shuffle(T.uint32(ALL), highest[1], T.max(tid % 32 - (1 << level), 0), 32, 32)
                if mine >= 1 << level:
                    highest[1] = T.max(highest[1], other[0])
            other[0] = T.tvm_warp_shuffle(T.uint32(ALL), highest[1], T.max(tid % 32 - 1, 0), 32, 32)
            highest[0] = T.if_then_else(mine > 0, T.max(all_[0], other[0]), all_[0])
            other[0] = T.tvm_warp_shuffle(T.uint32(ALL), highest[1], tid % 32 // PER * PER + PER - 1, 32, 32)
            all_[0] = T.max(all_[0], other[0])
            for i in T.unroll(TOGETHER // PER):
                new[0] = T.max(highest[0], top[i])
                scores[row * SCORES + (mine * (TOGETHER // PER) + i) * 2] = T.exp(highest[0] - new[0])
                scores[row * SCORES + (mine * (TOGETHER // PER) + i) * 2 + 1] = T.exp(top[i] - new[0])
                highest[0] = new[0]
            T.cuda.cta_sync()
            for k in T.unroll(EACH):
                r: T.let = (k * THREADS + tid) // FOURS
                first: T.let = (k * THREADS + tid) % FOURS
                if r < held:
                    for p in T.serial(T.ceildiv(here, ASKED)):
                        for i in T.unroll(ASKED):
                            number: T.let = T.min(p * ASKED + i, here - 1)
                            for v in T.vectorized(4):
                                asked[i * 4 + v] = sums[
                                    ((at + r * parts + turn * TOGETHER + number) * (STRIDE // 4) + first) * 4 + v
                                ]
                        for i in T.unroll(ASKED):
                            if p * ASKED + i < here:
                                for v in T.unroll(2):
                                    factor[v] = scores[r * SCORES + (p * ASKED + i) * 2 + v]
                                for v in T.unroll(4):
                                    T.ptx.mul.rn.f32(merged[k * 4 + v], merged[k * 4 + v], factor[0])
                                    T.ptx.mul.rn.f32(new[0], asked[i * 4 + v], factor[1])
                                    T.ptx.add.rn.f32(merged[k * 4 + v], merged[k * 4 + v], new[0])
            if active and mine == 0:
                for i in T.serial(here):
                    for v in T.unroll(2):
                        factor[v] = scores[row * SCORES + i * 2 + v]
                    T.ptx.mul.rn.f32(all_[1], all_[1], factor[0])
                    T.ptx.mul.rn.f32(new[0], scores[row * SCORES + TOGETHER * 2 + i], factor[1])
                    T.ptx.add.rn.f32(all_[1], all_[1], new[0])
            T.cuda.cta_sync()

    @T.inline
    def put(out, at, merged, factors, held, tid):
        # at: of the first head, in fours of numbers
        for k in T.unroll(EACH):
            r: T.let = (k * THREADS + tid) // FOURS
            if r < held:
                for v in T.unroll(4):
                    merged[k * 4 + v] = merged[k * 4 + v] / factors[r]
                for v in T.vectorized(4):
                    out[(at + k * THREADS + tid) * 4 + v] = merged[k * 4 + v]

    return leave, add, put
