"""Keys and values of a page as operands f16 of an mma, whatever the cache holds them as (cache.py).

A warp has the numbers in pairs of neighbouring dimensions, a word each.  Lane (g = lane / 4, t = lane % 4) has of keys the
eight dimensions 8t ... 8t + 7 of a chunk of 32, of slot g of eight: 16 neighbouring bytes of an f16 cache.  Of values it has
pair `pair` of the slots 4t ... 4t + 3 of sixteen.  What the integers of other caches stand for, offset + scale * code in f32,
is the sum of two f16, of which the second has what the first lacks.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import MAX_F32
from edgeq.targets.rows import PAGE

MAX_F16, MAX_F16_PAIR = 65504.0, 131008.0
"""The largest f16, and sum of two."""
FLOAT_OF_BYTE = 0x4B000000
"""2^23 in f32: its bits | a byte are 2^23 + the byte, without a conversion."""


def places(kv):
    """Inline: where the numbers of a head are in a page."""

    @T.inline
    def head_of(inside, values, scales, layer, kv_heads, head, head_dim, high):
        # From the beginning of a page to the head's keys, and from keys to values, in units of 16 bytes; to the scales in those
        # units too, from the beginning of keys or values.
        if kv == "f16":
            inside[0] = (layer * 2 * kv_heads + head) * (PAGE * head_dim // 8)
            values[0] = kv_heads * (PAGE * head_dim // 8)
        elif kv == "int8":
            inside[0] = (layer * 2 * kv_heads + head) * (PAGE // 16 * (head_dim + 4))
            values[0] = kv_heads * (PAGE // 16 * (head_dim + 4))
            scales[0] = PAGE * head_dim // 16
        else:
            each: T.let = (head_dim - high + 1) // 2 + high
            extra: T.let = T.if_then_else(high < head_dim, 8, 0) + T.if_then_else(high > 0, 8, 0)
            inside[0] = (layer * 2 * kv_heads + head) * (PAGE // 16 * (each + extra))
            values[0] = kv_heads * (PAGE // 16 * (each + extra))
            scales[0] = PAGE // 16 * each

    return head_of


def word_of(a, b):
    """Two f16 in a word."""
    low, high = (T.Cast("uint32", T.reinterpret("uint16", x)) for x in (a, b))
    return low | (high << T.uint32(16))


def two_of(a, b, which):
    """The first or the second halves of two words, as one."""
    first = (a & T.uint32(0xFFFF)) | (b << T.uint32(16))
    second = (a >> T.uint32(16)) | (b & T.uint32(0xFFFF0000))
    return T.if_then_else(which == 0, first, second)


def limited(x):
    return T.max(T.min(x, T.float32(MAX_F16)), T.float32(-MAX_F16))


@T.inline
def split(first, at, rest, at_rest, x):
    """The pair x f32 [2] as the sum of the pairs first[at] and rest[at_rest], of f16; NaN stays NaN."""
    h = T.alloc_local((4,), "float16")
    for i in T.unroll(2):
        # Above the range of f16 the rest has more.
        h[i] = T.Cast("float16", T.if_then_else(T.abs(x[i]) > T.float32(MAX_F16), limited(x[i]), x[i]))
        h[2 + i] = T.Cast("float16", x[i] - T.Cast("float32", h[i]))
    first[at] = word_of(h[0], h[1])
    rest[at_rest] = word_of(h[2], h[3])


def number(code, center):
    """An integer of a byte, less its center, as f32."""
    return T.reinterpret("float32", code | T.uint32(FLOAT_OF_BYTE)) - T.float32((1 << 23) + center)


def byte_of(word, index):
    return (word >> T.Cast("uint32", index * 8)) & T.uint32(255)


def readers(kv, head_dim):
    """Inline: `scaling` of SLOTS slots from `place` on; the words of keys, and the word of a value.

    of      f32 [SLOTS][4]: scale and offset, of int4 of the dimensions in 4 bits and then of those in 8
    whole   whether a scale that is not finite is read as 0, so that nothing is NaN
    keys    to[at : at + 4] and rest[at : at + 4];  value: to[at] and rest[at], of slot `which` of `of`.  f16 has no rest
    """

    @T.inline
    def scaling(of, numbers, page, scales, place, SLOTS, high, whole):
        base: T.let = page + T.Cast("int64", scales)
        for v in T.unroll(SLOTS):
            for i in T.unroll(4):
                of[v, i] = T.float32(0)
            if kv == "int8":
                of[v, 0] = numbers[base * T.int64(4) + T.Cast("int64", place + v)]
            if kv == "int4":
                for i in T.unroll(2):
                    if high < head_dim:
                        of[v, i] = numbers[base * T.int64(4) + T.Cast("int64", i * PAGE + place + v)]
                    if high > 0:
                        after: T.let = T.if_then_else(high < head_dim, 2 * PAGE, 0) + i * PAGE
                        of[v, 2 + i] = numbers[base * T.int64(4) + T.Cast("int64", after + place + v)]
            if whole:
                for i in T.unroll(2):
                    of[v, i * 2] = T.if_then_else(T.abs(of[v, i * 2]) <= T.float32(MAX_F32), of[v, i * 2], T.float32(0))

    @T.inline
    def put_int8(to, rest, at, word, first, scale):
        two = T.alloc_local((2,), "float32")
        for i in T.unroll(2):
            # As an f16 cache limits them; NaN stays so.
            T.ptx.mul.rn.f32(two[i], number(byte_of(word, first + i), 128), scale)
            two[i] = T.if_then_else(two[i] > T.float32(MAX_F16_PAIR), T.float32(MAX_F16_PAIR), two[i])
            two[i] = T.if_then_else(two[i] < T.float32(-MAX_F16_PAIR), T.float32(-MAX_F16_PAIR), two[i])
        split(to, at, rest, at, two)

    @T.inline
    def put_int4(to, rest, at, pool, page, place, dimension, of, which, high):
        # Two neighbouring dimensions.
        low: T.let = head_dim - high
        each: T.let = (low + 1) // 2 + high
        two = T.alloc_local((2,), "float32")
        code = T.alloc_local((1,), "uint32")
        for i in T.unroll(2):
            d: T.let = dimension + i
            byte: T.let = place * each + T.if_then_else(d < low, d // 2, (low + 1) // 2 + d - low)
            code[0] = byte_of(pool[page * T.int64(4) + T.Cast("int64", byte // 4)], byte % 4)
            if d < low:
                code[0] = (code[0] >> T.Cast("uint32", d % 2 * 4)) & T.uint32(15)
                T.ptx.fma.rn.f32(two[i], number(code[0], 0), of[which, 0], of[which, 1])
            else:
                T.ptx.fma.rn.f32(two[i], number(code[0], 0), of[which, 2], of[which, 3])
        split(to, at, rest, at, two)

    @T.inline
    def keys(to, rest, at, pool, page, place, chunk, t, of, high):
        first: T.let = chunk * 32 + t * 8
        for v in T.unroll(4):
            to[at + v] = T.uint32(0)
            if kv != "f16":
                rest[at + v] = T.uint32(0)
        if kv == "f16" and head_dim % 8 == 0:
            if first < head_dim:
                for v in T.vectorized(4):
                    to[at + v] = pool[(page + T.Cast("int64", place * (head_dim // 8) + chunk * 4 + t)) * T.int64(4) + v]
        elif kv == "f16":
            for v in T.unroll(4):
                if first + v * 2 < head_dim:
                    to[at + v] = pool[page * T.int64(4) + T.Cast("int64", place * (head_dim // 2) + chunk * 16 + t * 4 + v)]
        elif kv == "int8":
            word = T.alloc_local((1,), "uint32")
            for w in T.unroll(2):
                if first + w * 4 < head_dim:
                    # From -128 ... 127 to 0 ... 255.
                    word[0] = pool[
                        page * T.int64(4) + T.Cast("int64", place * (head_dim // 4) + chunk * 8 + t * 2 + w)
                    ] ^ T.uint32(0x80808080)
                    for v in T.unroll(2):
                        put_int8(to, rest, at + w * 2 + v, word[0], v * 2, of[0, 0])
        else:
            if head_dim % 8 == 0 and high == 0:
                if first < head_dim:
                    # Eight codes of one word.
                    eight = T.alloc_local((1,), "uint32")
                    two = T.alloc_local((2,), "float32")
                    eight[0] = pool[page * T.int64(4) + T.Cast("int64", place * (head_dim // 8) + chunk * 4 + t)]
                    for v in T.unroll(4):
                        for i in T.unroll(2):
                            code: T.let = (eight[0] >> T.Cast("uint32", v * 8 + i * 4)) & T.uint32(15)
                            T.ptx.fma.rn.f32(two[i], number(code, 0), of[0, 0], of[0, 1])
                        split(to, at + v, rest, at + v, two)
            else:
                for v in T.unroll(4):
                    if first + v * 2 < head_dim:
                        put_int4(to, rest, at + v, pool, page, place, first + v * 2, of, 0, high)

    @T.inline
    def value(to, rest, at, pool, page, place, pair, of, which, high):
        if kv == "f16":
            # Beyond the last pair that one again: its sums belong to no dimension, and a branch takes registers.
            to[at] = pool[page * T.int64(4) + T.Cast("int64", place * (head_dim // 2) + T.min(pair, head_dim // 2 - 1))]
        else:
            to[at] = T.uint32(0)
            rest[at] = T.uint32(0)
        if kv != "f16" and pair * 2 < head_dim:
            if kv == "int8":
                put_int8(to, rest, at,
                         pool[page * T.int64(4) + T.Cast("int64", place * (head_dim // 4) + pair // 2)] ^ T.uint32(0x80808080),
                         pair % 2 * 2, of[which, 0])  # fmt: skip
            else:
                put_int4(to, rest, at, pool, page, place, pair * 2, of, which, high)

    return scaling, keys, value
