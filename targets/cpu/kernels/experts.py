"""Kernels of a layer of experts: which a row goes through, the rows of each side by side, and the sum of what they give.

The products of the experts are the kernels of any linear layer.  Each expert has table rows of its own, one per stage, that say
where in the buffers of all its rows begin; `dispatch` writes that, `each` runs one stage of all experts that have rows.
"""

from __future__ import annotations

import math

from edgeq.targets.cpu.jit.compile import COUNT, Kernel, word
from edgeq.targets.cpu.jit.simd import get_f32, get_i32, get_i64, put_f32, put_i32, put_i64, vfma, vload, vsplat, vstore
from edgeq.targets.cpu.jit.threadpool import invoke


def route(normalized: int) -> Kernel:
    """Row words: 2 x, 3 bytes of its rows, 4 experts, 5 how many are chosen, 6 out, 7 bytes of its rows."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        experts, chosen = word(row, 4), word(row, 5)
        for r in range(part, get_i64(word(row, COUNT)), parts):
            x, out = word(row, 2) + r * word(row, 3), word(row, 6) + r * word(row, 7)
            largest = get_f32(x)
            for e in range(1, experts):
                largest = max(largest, get_f32(x + 4 * e))
            total = 0.0
            for e in range(experts):
                total += math.exp(get_f32(x + 4 * e) - largest)
            last, before, picked = largest, -1, 0.0
            for i in range(chosen):
                # The largest behind the one before, in the order of values and, of equals, of numbers.
                best, index = -math.inf, 0
                for e in range(experts):
                    value = get_f32(x + 4 * e)
                    if (value < last or (value == last and e > before)) and value > best:
                        best, index = value, e
                share = math.exp(best - largest) / total
                put_f32(out + 4 * i, share)
                put_f32(out + 4 * (chosen + i), index)
                last, before, picked = best, index, picked + share
            if normalized:
                for i in range(chosen):
                    put_f32(out + 4 * i, get_f32(out + 4 * i) / picked)

    return kernel


def dispatch() -> Kernel:
    """Row words: 2 routing, 3 bytes of its rows, 4 experts, 5 how many are chosen; results: 6 rows of each expert i64, 7 where
    they end i64, 8 the places i64, every expert's first one a multiple of four, 9 the row of each place i32, 10 the place of
    each row and choice i32; 11 for each expert, and behind the last, the first of its moves i64, 12 moves, each an address, and
    what stands there for place 0 and per place.
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        if part > 0:
            return
        experts, chosen = word(row, 4), word(row, 5)
        rows, ends = word(row, 6), word(row, 7)
        count = get_i64(word(row, COUNT))
        for e in range(experts):
            put_i64(rows + 8 * e, 0)
        for r in range(count):
            names = word(row, 2) + r * word(row, 3) + 4 * chosen
            for i in range(chosen):
                mine = rows + 8 * int(get_f32(names + 4 * i))
                put_i64(mine, get_i64(mine) + 1)
        first = 0
        for e in range(experts):
            put_i64(ends + 8 * e, first)
            if get_i64(rows + 8 * e) > 0:
                for i in range(get_i64(word(row, 11) + 8 * e), get_i64(word(row, 11) + 8 * (e + 1))):
                    move = word(row, 12) + 24 * i
                    put_i64(get_i64(move), get_i64(move + 8) + first * get_i64(move + 16))
            first += (get_i64(rows + 8 * e) + 3) // 4 * 4
        put_i64(word(row, 8), first)
        for r in range(count):
            names = word(row, 2) + r * word(row, 3) + 4 * chosen
            for i in range(chosen):
                end = ends + 8 * int(get_f32(names + 4 * i))
                place = get_i64(end)
                put_i64(end, place + 1)
                put_i32(word(row, 9) + 4 * place, r)
                put_i32(word(row, 10) + 4 * (r * chosen + i), place)

    return kernel


def each() -> Kernel:
    """Row words: 2 the first of the experts' table rows, 3 how many, 4 bytes of one."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        for e in range(word(row, 3)):
            mine = word(row, 2) + e * word(row, 4)
            if get_i64(word(mine, COUNT)) > 0:
                invoke(mine, part, parts, thread)

    return kernel


def gather_add() -> Kernel:
    """out[r] += the chosen experts' results times their shares.  Row words: 2 results by place, 3 bytes of their rows, 4 width,
    5 out, 6 bytes of its rows, 7 routing, 8 bytes of its rows, 9 how many are chosen, 10 the place of each row and choice i32.
    """

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        chosen = word(row, 9)
        for r in range(part, get_i64(word(row, COUNT)), parts):
            out, shares = word(row, 5) + r * word(row, 6), word(row, 7) + r * word(row, 8)
            for i in range(chosen):
                share = vsplat(get_f32(shares + 4 * i))
                x = word(row, 2) + get_i32(word(row, 10) + 4 * (r * chosen + i)) * word(row, 3)
                for c in range(0, word(row, 4), 16):
                    vstore(out + 4 * c, vfma(share, vload(x + 4 * c), vload(out + 4 * c)))

    return kernel


def gated_add() -> Kernel:
    """out[r] += sigmoid(gate[r]) x[r].  Row words: 2 x, 3 bytes of its rows, 4 width, 5 out, 6 bytes of its rows, 7 gate, 8
    bytes of its rows."""

    def kernel(row, part, parts, thread):  # type: ignore[no-untyped-def]
        for r in range(part, get_i64(word(row, COUNT)), parts):
            x, out = word(row, 2) + r * word(row, 3), word(row, 5) + r * word(row, 6)
            share = vsplat(1.0 / (1.0 + math.exp(-get_f32(word(row, 7) + r * word(row, 8)))))
            for c in range(0, word(row, 4), 16):
                vstore(out + 4 * c, vfma(share, vload(x + 4 * c), vload(out + 4 * c)))

    return kernel
