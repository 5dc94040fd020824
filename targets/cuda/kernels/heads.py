"""Operations on the heads of a row, in place: rotary positions and a rotation by a matrix."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.quantize_input import widen, widen_over_warp
from edgeq.targets.cuda.kernels.rows import INFINITY_BITS, NAN_BITS, THREADS


@T.inline
def rotate_pair(x, at, apart, c, s):
    """(a, b) = (x[at], x[at + apart]) become (a c - b s, b c + a s); every operation is rounded."""
    old = T.alloc_local((2,), "float32")
    product = T.alloc_local((2,), "float32")
    old[0] = x[at]
    old[1] = x[at + apart]
    T.ptx.mul.rn.f32(product[0], old[0], c)
    T.ptx.mul.rn.f32(product[1], old[1], s)
    T.ptx.sub.rn.f32(product[0], product[0], product[1])
    x[at] = product[0]
    T.ptx.mul.rn.f32(product[0], old[1], c)
    T.ptx.mul.rn.f32(product[1], old[0], s)
    T.ptx.add.rn.f32(product[0], product[0], product[1])
    x[at + apart] = product[0]


def rope():
    """In place, the pairs of every head, which are halves of it.

    angles, places   as RotaryArguments
    """

    @T.prim_func
    def rope_(x_: T.handle, angles_: T.handle, places_: T.handle,
              tokens: T.int32, width: T.int32, heads: T.int32, head_dim: T.int32, pairs: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, na, np = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        angles = T.match_buffer(angles_, (na,), "float32")
        places = T.match_buffer(places_, (np,), "int32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(heads * pairs, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        unit: T.let = part * THREADS + warp * 32 + lane
        if unit < heads * pairs:
            at: T.let = row * width + unit // pairs * head_dim + unit % pairs
            angle: T.let = places[row] * (2 * pairs) + unit % pairs
            rotate_pair(x, at, pairs, angles[angle], angles[angle + pairs])

    return rope_


LEVELS = 255.0


@T.inline
def rotate_head(x, at, whole, first, matrix, scale, head_dim, lane):
    """By one warp: x[at : at + head_dim], rounded to 8 bits over a range that has 0 in it, times a matrix and its scale.

    matrix  i8 [head_dim][head_dim]
    whole   shared i32: from `first` on there is room for the head

    The sums are of whole numbers below 2^24, so their order does not matter.
    """
    span = T.alloc_local((2,), "float32")
    bits = T.alloc_local((1,), "uint32")
    unit = T.alloc_local((2,), "float32")
    zero = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "int32")
    span[0] = T.float32(0)
    span[1] = T.float32(0)
    bits[0] = T.uint32(0)
    for i in T.serial(T.ceildiv(head_dim, 32)):
        if i * 32 + lane < head_dim:
            widen(span, bits, x[at + i * 32 + lane])
    widen_over_warp(span, bits)
    unit[0] = (span[1] - span[0]) / T.float32(LEVELS)
    unit[1] = T.if_then_else(unit[0] > T.float32(0), unit[0], T.float32(1))
    zero[0] = T.nearbyint((T.float32(0) - span[0]) / unit[1])
    if bits[0] >= T.uint32(INFINITY_BITS):
        unit[0] = T.reinterpret("float32", T.uint32(NAN_BITS))
    for i in T.serial(T.ceildiv(head_dim, 32)):
        if i * 32 + lane < head_dim:
            whole[first + i * 32 + lane] = 0
            if bits[0] < T.uint32(INFINITY_BITS):
                level: T.let = T.nearbyint(x[at + i * 32 + lane] / unit[1]) + zero[0]
                whole[first + i * 32 + lane] = T.Cast("int32", T.max(T.min(level, T.float32(LEVELS)), T.float32(0)) - zero[0])
    T.cuda.warp_sync()
    for i in T.serial(T.ceildiv(head_dim, 32)):
        if i * 32 + lane < head_dim:
            total[0] = 0
            for k in T.serial(head_dim):
                total[0] = total[0] + whole[first + k] * T.Cast("int32", matrix[k * head_dim + i * 32 + lane])
            x[at + i * 32 + lane] = T.Cast("float32", total[0]) * (unit[0] * scale[0])


def head_rotate(head_dim, WARPS=4):
    """In place, every head of a row; a warp has one head."""

    @T.prim_func
    def head_rotate_(x_: T.handle, matrix_: T.handle, scale_: T.handle, tokens: T.int32, width: T.int32, heads: T.int32):
        T.func_attr({"tirx.noalias": True})
        nx, nm, ns = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        matrix = T.match_buffer(matrix_, (nm,), "int8")
        scale = T.match_buffer(scale_, (ns,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(heads, WARPS), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        head: T.let = part * WARPS + warp
        whole = T.alloc_shared((WARPS * head_dim,), "int32")
        if head < heads:
            rotate_head(x, row * width + head * head_dim, whole, warp * head_dim, matrix, scale, head_dim, lane)

    return head_rotate_
