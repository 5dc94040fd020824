"""What the threads of one query row of attention do by themselves: its query, and the weights of its scores.

Both go to shared memory as sums of two f16, the second ones after the first ones of all M rows:

    query     words [2][M][chunks of 32 dimensions][16]
    weights   words [2][M][WEIGHTS];  scores: f32 [M][SCORES]
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.cached import split
from edgeq.targets.cuda.kernels.rows import NAN_BITS, THREADS
from edgeq.targets.rows import PAGE

MASKED_SCORE = -1e30
SCORES, WEIGHTS = PAGE + 8, PAGE // 2 + 8
"""Words of a query row: 8 more than it has, so that rows that are read together lie in different banks."""
MIN_SLOTS = 8
"""Slots whose weights one thread adds up at least; sums of more are a binary tree of these."""
ALL = 0xFFFFFFFF


def first_of(firsts, lasts, row, window):
    """The first slot that a token row sees."""
    return T.if_then_else(window > 0, T.max(lasts[row] - window, firsts[row]), firsts[row])


def place_in(row, chunk, chunks):
    """Where a chunk of a row is in `query`, in units of 16 words: of an even number, neighbouring rows would lie in the same
    banks."""
    return row * chunks + (chunk ^ (row % 2) if chunks % 2 == 0 else chunk)


def rows_of(M, head_dim, CAPPED, SLOPED):
    """Inline what threads do that are THREADS / M of a row, `mine` among them.

    CAPPED, SLOPED   scores change as Attention of targets/graph.py says of `cap` and of `slopes`
    """
    PER = THREADS // M
    EACH = PAGE // PER  # slots of a thread
    LEVELS = PER.bit_length() - 1
    CHUNKS = -(-head_dim // 32)

    @T.inline
    def make_query(query, power, q, at, active, scale, row, mine):
        # Divided by a power of two that brings the largest number below 2, so that queries of any size fit f16.
        bits = T.alloc_local((1,), "uint32")
        words = T.alloc_local((2,), "uint32")
        two = T.alloc_local((2,), "float32")
        bits[0] = T.uint32(0)
        for i in T.serial(CHUNKS * 16 // PER):
            for v in T.unroll(2):
                if active and (i * PER + mine) * 2 + v < head_dim:
                    bits[0] = T.max(bits[0], T.uint32(0x7FFFFFFF) & T.reinterpret(
                        "uint32", q[at + (i * PER + mine) * 2 + v] * scale))  # fmt: skip
        for level in T.unroll(LEVELS):
            bits[0] = T.max(bits[0], T.tvm_warp_shuffle_xor(T.uint32(ALL), bits[0], 1 << level, 32, 32))
        exponent: T.let = T.min(T.max(bits[0] >> T.uint32(23), T.uint32(1)), T.uint32(253))
        power[0] = T.reinterpret("float32", exponent << T.uint32(23))
        inverse: T.let = T.reinterpret("float32", (T.uint32(254) - exponent) << T.uint32(23))
        for i in T.serial(CHUNKS * 16 // PER):
            word: T.let = i * PER + mine
            for v in T.unroll(2):
                two[v] = T.float32(0)
                if active and word * 2 + v < head_dim:
                    two[v] = q[at + word * 2 + v] * scale * inverse
            split(words, 0, words, 1, two)
            for half in T.unroll(2):
                query[(half * M * CHUNKS + place_in(row, word // 16, CHUNKS)) * 16 + word % 16] = words[half]

    @T.inline
    def make_weights(weights, factors, most, total, scores, power, cap, broken, tag, own, page, row, mine):
        # Online softmax (Milakov and Gimelshein 2018) over the slots `page` ... `page` + 63.
        # power  what scores are to be times, and after it the slope of the row
        # most   the largest score before and with this page;  factors: what sums that are relative to the one before are times
        # own    the slots that the row sees;  broken: `tag` for a slot with a value that is not finite, and at the end
        each = T.alloc_local((EACH,), "float32")
        sums = T.alloc_local((EACH // MIN_SLOTS,), "float32")
        words = T.alloc_local((2,), "uint32")
        two = T.alloc_local((2,), "float32")
        first: T.let = page + mine * EACH
        most[0] = most[1]
        for j in T.unroll(EACH):
            each[j] = T.float32(MASKED_SCORE)
            if first + j >= own[0] and first + j < own[1]:
                each[j] = scores[row * SCORES + mine * EACH + j] * power[0]
                # Rounded as written: a compiler that adds without rounding before does so in some variants alone.
                if CAPPED:
                    T.ptx.mul.rn.f32(each[j], T.tanh(each[j] / cap), cap)
                if SLOPED:
                    T.ptx.mul.rn.f32(two[0], power[1], T.Cast("float32", first + j + 1 - own[1]))
                    T.ptx.add.rn.f32(each[j], each[j], two[0])
            most[1] = T.max(most[1], each[j])
        for level in T.unroll(LEVELS):
            most[1] = T.max(most[1], T.tvm_warp_shuffle_xor(T.uint32(ALL), most[1], 1 << level, 32, 32))
        if broken[PAGE] == tag[0]:
            for j in T.unroll(EACH):
                if broken[mine * EACH + j] == tag[0]:
                    each[j] = T.reinterpret("float32", T.uint32(NAN_BITS))
        for j in T.unroll(EACH // 2):
            for v in T.unroll(2):
                two[v] = T.float32(0)
                if first + j * 2 + v >= own[0] and first + j * 2 + v < own[1]:
                    two[v] = T.exp(each[j * 2 + v] - most[1])
                each[j * 2 + v] = two[v]
            split(words, 0, words, 1, two)
            for half in T.unroll(2):
                weights[(half * M + row) * WEIGHTS + mine * (EACH // 2) + j] = words[half]
        for i in T.unroll(EACH // MIN_SLOTS):
            sums[i] = each[i * MIN_SLOTS]
            for j in T.unroll(MIN_SLOTS - 1):
                sums[i] = sums[i] + each[i * MIN_SLOTS + j + 1]
        if EACH // MIN_SLOTS == 2:
            sums[0] = sums[0] + sums[1]
        for level in T.unroll(LEVELS):
            sums[0] = sums[0] + T.tvm_warp_shuffle_xor(T.uint32(ALL), sums[0], 1 << level, 32, 32)
        two[0] = T.exp(most[0] - most[1])
        # Rounded as written: all that do it have to agree in bits.
        T.ptx.mul.rn.f32(total[0], total[0], two[0])
        T.ptx.add.rn.f32(total[0], total[0], sums[0])
        if mine == 0:
            factors[row] = two[0]

    return make_query, make_weights
