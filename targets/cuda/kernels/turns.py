"""Turns of a fused product: a block of threads multiplies a round of input channels by one of its output blocks.

What a turn reads is asked for while others are multiplied: it is in the L2 cache then.
"""

from tvm.script import tirx as T

LINE = 128
"""Bytes that the L2 cache fetches at once."""


def block_of(j, cta, each, most, gated):
    """Which block of output channels is the j-th of a block of threads; what has none of its own repeats the last."""
    if gated:
        inner = T.if_then_else(j < each, j, j - each)
        return T.min(cta * each + inner, most - 1) + T.if_then_else(j < each, 0, most)
    return T.min(cta * each + j, most - 1)


@T.inline
def ask_lines(array, start, count, IN_LINE, nth):
    """Line `nth` of array[start : start + count], if it has so many; arrays begin where a line does."""
    at: T.let = (start & -IN_LINE) + nth * IN_LINE
    if at < start + count:
        T.ptx["prefetch.global.L2"](array.ptr_to([at]))


@T.inline
def ask_turn(code, q, s, z, block, r, groups, chunks, stride, nth):
    """Line `nth` of weights, scales and zero points of round r of an output block."""
    ask_lines(q, block * (chunks * code.bits * 16) + r * code.stored,
              T.min(code.stored, chunks * code.bits * 16 - r * code.stored), LINE // 4, nth)  # fmt: skip
    number: T.let = block * ((groups - 1) * stride + 1) + r * code.groups * stride
    held: T.let = (T.min(code.groups, groups - r * code.groups) - 1) * stride + 1
    ask_lines(s, number * code.weights.scales, held * code.weights.scales, LINE // 2, nth)
    if code.weights.zero:
        ask_lines(z, number * 16, held * 16, LINE, nth)
