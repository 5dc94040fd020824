"""What the warps of a block of threads do with a page of keys and values: scores, and sums of values, by tensor cores.

Query rows are 16 * TILES.  A warp has 16 slots of the scores, and every fourth group of 16 dimensions of the sums.  In heads of
up to KEPT_HEAD dimensions, values of an f16 cache stay in registers from when they are looked at until they are added, and
those of other caches are made for 16 slots at once.  Wider heads have no registers for that: they are read again, pair by pair.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.attention_rows import SCORES, WEIGHTS, place_in
from edgeq.targets.cuda.kernels.cached import readers, two_of
from edgeq.targets.cuda.kernels.rows import INFINITY_BITS, THREADS
from edgeq.targets.rows import PAGE

WARPS = THREADS // 32
KEPT_HEAD = 256
"""Dimensions of a head up to which a thread has registers for its values of a page."""
EXPONENTS, ONE_MORE, SIGNS = 0x7C007C00, 0x04000400, 0x80008000
"""Bits of two f16: a number that is not finite has an exponent of ones, and one more reaches the bit of its sign."""


def dimension(n, v, warp, t):
    """Dimension of a head in column 2t + v of tile `n` of the values of a warp."""
    return ((n // 2 * WARPS + warp) * 8 + t * 2 + v) * 2 + n % 2


def not_finite(word):
    """Bits of those of two f16 that are not finite."""
    return ((word & T.uint32(EXPONENTS)) + T.uint32(ONE_MORE)) & T.uint32(SIGNS)


@T.inline
def multiply(to, at, a0, a1, a2, a3, b0, b1):
    T.ptx.mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32(
        to[at], to[at + 1], to[at + 2], to[at + 3], a0, a1, a2, a3, b0, b1, to[at], to[at + 1], to[at + 2], to[at + 3]
    )


def pages_of(kv, head_dim, TILES):
    """Words of values that a thread needs, and inline what a block does with a page, in this order: it looks at the values,
    makes the scores, and once they are weights it adds the values.

    words    u32, of values;  broken: `tag` for a slot with a value that is not finite, and at the end
    page     i64, where the keys, or the values, of the page begin;  scales: after them
    acc      f32 [TILES][groups of 16 dimensions of the warp][2][4], the sums;  factors: of each row, what sums so far are times
    """
    EXACT = kv == "f16"  # a number is one f16, else the sum of two
    WIDE = head_dim > KEPT_HEAD
    KEPT = EXACT and not WIDE
    M = 16 * TILES
    CHUNKS = -(-head_dim // 32)
    PAIRS = -(-head_dim // 64)  # groups of 16 dimensions of a warp
    WORDS = PAIRS * 16 if KEPT else PAIRS * 4
    scaling, keys, value = readers(kv, head_dim)

    def sixteens():
        # Of the slots of a page.  What is not kept would take too many registers for all at once.
        return T.unroll(4) if KEPT else T.serial(4)

    @T.inline
    def look_at_values(words, broken, tag, pool, numbers, page, scales, high, warp, g, t, tid):
        rest = T.alloc_local((1,), "uint32")
        of_values = T.alloc_local((1, 4), "float32")
        odd = T.alloc_local((1,), "uint32")
        if KEPT:
            for i in T.unroll(16):
                for j in T.unroll(PAIRS):
                    value(words, rest, i * PAIRS + j, pool, page, i // 4 * 16 + t * 4 + i % 4, (j * WARPS + warp) * 8 + g,
                          of_values, 0, high)  # fmt: skip
            odd[0] = T.uint32(0)
            for i in T.unroll(PAIRS * 16):
                odd[0] = odd[0] | not_finite(words[i])
            if odd[0] != T.uint32(0):
                for i in T.unroll(PAIRS * 16):
                    if not_finite(words[i]) != T.uint32(0):
                        words[i] = T.uint32(0)
                        broken[i // PAIRS // 4 * 16 + t * 4 + i // PAIRS % 4] = tag[0]
                        broken[PAGE] = tag[0]
        elif EXACT:
            for i in T.serial(16):
                odd[0] = T.uint32(0)
                for j in T.unroll(PAIRS):
                    value(words, rest, j, pool, page, i // 4 * 16 + t * 4 + i % 4, (j * WARPS + warp) * 8 + g, of_values, 0,
                          high)  # fmt: skip
                    odd[0] = odd[0] | not_finite(words[j])
                if odd[0] != T.uint32(0):
                    broken[i // 4 * 16 + t * 4 + i % 4] = tag[0]
                    broken[PAGE] = tag[0]
        elif tid < PAGE:
            scaling(of_values, numbers, page, scales, tid, 1, high, False)
            odd[0] = T.uint32(0)
            for i in T.unroll(2):
                odd[0] = T.max(odd[0], T.reinterpret("uint32", of_values[0, i * 2]) & T.uint32(0x7FFFFFFF))
            if odd[0] >= T.uint32(INFINITY_BITS):
                broken[tid] = tag[0]
                broken[PAGE] = tag[0]

    @T.inline
    def make_scores(scores, query, pool, numbers, page, scales, high, warp, g, t):
        found = T.alloc_local((TILES * 8,), "float32")
        a = T.alloc_local((8,), "uint32")
        b = T.alloc_local((8,), "uint32")
        rest = T.alloc_local((1 if EXACT else 8,), "uint32")
        of_keys = T.alloc_local((1, 4), "float32")
        of_keys_after = T.alloc_local((1, 4), "float32")
        scaling(of_keys, numbers, page, scales, warp * 16 + g, 1, high, False)
        scaling(of_keys_after, numbers, page, scales, warp * 16 + 8 + g, 1, high, False)
        for i in T.unroll(TILES * 8):
            found[i] = T.float32(0)
        for c in T.serial(CHUNKS):
            keys(b, rest, 0, pool, page, warp * 16 + g, c, t, of_keys, high)
            keys(b, rest, 4, pool, page, warp * 16 + 8 + g, c, t, of_keys_after, high)
            for m in T.unroll(TILES):
                for half in T.unroll(2):
                    for i in T.unroll(2):
                        for v in T.vectorized(4):
                            a[i * 4 + v] = query[
                                ((half * M * CHUNKS + place_in(m * 16 + i * 8 + g, c, CHUNKS)) * 4 + t) * 4 + v
                            ]
                    for n in T.unroll(2):
                        for k in T.unroll(2):
                            multiply(found, (m * 2 + n) * 4, a[k * 2], a[4 + k * 2], a[k * 2 + 1], a[4 + k * 2 + 1],
                                     b[n * 4 + k * 2], b[n * 4 + k * 2 + 1])  # fmt: skip
                            if not EXACT and half == 0:
                                multiply(found, (m * 2 + n) * 4, a[k * 2], a[4 + k * 2], a[k * 2 + 1], a[4 + k * 2 + 1],
                                         rest[n * 4 + k * 2], rest[n * 4 + k * 2 + 1])  # fmt: skip
        for m in T.unroll(TILES):
            for n in T.unroll(2):
                for i in T.unroll(2):
                    for v in T.vectorized(2):
                        scores[((m * 16 + i * 8 + g) * (SCORES // 2) + warp * 8 + n * 4 + t) * 2 + v] = found[
                            (m * 2 + n) * 4 + i * 2 + v
                        ]

    @T.inline
    def take(words, rest, at, pool, page, k, j, of_values, high, warp, g, t):
        # Pair j of this warp, of the four slots of this thread among sixteen.
        for i in T.unroll(4):
            value(words, rest, at + i * PAIRS, pool, page, k * 16 + t * 4 + i, (j * WARPS + warp) * 8 + g, of_values, i, high)
            if EXACT and not_finite(words[at + i * PAIRS]) != T.uint32(0):
                words[at + i * PAIRS] = T.uint32(0)

    @T.inline
    def add_pair(acc, m, j, half, a, words, rest, first, second):
        b = T.alloc_local((2,), "uint32")
        for n in T.unroll(2):
            # The first or the second dimension of every pair.
            for i in T.unroll(2):
                b[i] = two_of(words[first + i * 2 * PAIRS], words[first + (i * 2 + 1) * PAIRS], n)
            multiply(acc, ((m * PAIRS + j) * 2 + n) * 4, a[half * 4], a[half * 4 + 2], a[half * 4 + 1], a[half * 4 + 3],
                     b[0], b[1])  # fmt: skip
            if not EXACT and half == 0:
                for i in T.unroll(2):
                    b[i] = two_of(rest[second + i * 2 * PAIRS], rest[second + (i * 2 + 1) * PAIRS], n)
                multiply(acc, ((m * PAIRS + j) * 2 + n) * 4, a[0], a[2], a[1], a[3], b[0], b[1])

    @T.inline
    def read_weights(a, at, weights, m, half, k, g, t):
        for i in T.unroll(2):
            for v in T.vectorized(2):
                a[at + i * 2 + v] = weights[((half * M + m * 16 + i * 8 + g) * (WEIGHTS // 2) + k * 4 + t) * 2 + v]

    @T.inline
    def add_values(acc, words, weights, factors, pool, numbers, page, scales, high, warp, g, t):
        a = T.alloc_local((8,), "uint32")
        rest = T.alloc_local((1 if EXACT else PAIRS * 4,), "uint32")
        of_values = T.alloc_local((4, 4), "float32")
        factor = T.alloc_local((2,), "float32")
        for m in T.unroll(TILES):
            for i in T.unroll(2):
                factor[i] = factors[m * 16 + i * 8 + g]
            for n in T.unroll(PAIRS * 2):
                for i in T.unroll(4):
                    acc[(m * PAIRS * 2 + n) * 4 + i] = acc[(m * PAIRS * 2 + n) * 4 + i] * factor[i // 2]
        for k in sixteens():
            if not EXACT:
                scaling(of_values, numbers, page, scales, k * 16 + t * 4, 4, high, True)
            if not KEPT and not WIDE:
                for j in T.unroll(PAIRS):
                    take(words, rest, j, pool, page, k, j, of_values, high, warp, g, t)
            for m in T.unroll(TILES):
                if WIDE:
                    for half in T.unroll(2):
                        read_weights(a, half * 4, weights, m, half, k, g, t)
                    for j in T.unroll(PAIRS):
                        take(words, rest, 0, pool, page, k, j, of_values, high, warp, g, t)
                        for half in T.unroll(2):
                            add_pair(acc, m, j, half, a, words, rest, 0, 0)
                else:
                    for half in T.unroll(2):
                        read_weights(a, half * 4, weights, m, half, k, g, t)
                        for j in T.unroll(PAIRS):
                            add_pair(acc, m, j, half, a, words, rest, (k * 4 if KEPT else 0) * PAIRS + j, j)

    return WORDS, look_at_values, make_scores, add_values
