"""A token that is drawn from the largest numbers of its row: temperature, top-k, top-p, min-p, draw."""

from tvm.script import tirx as T


def draw(MOST, NUMBERS):
    """drawn[row]: one of ids [row][count], by the probabilities that their logits, values [row][count] in falling order, have.

    draws [row] has temperature, top_k, top_p, min_p and the number from 0 to 1 that chooses.
    The formulas are those of runtime/sampling.py in its type, f64, with sums in the order of numpy's: alone the last bit of exp
    can be another one.  A row with numbers that are not finite gets one of its ids.

    MOST   `count` at most, a multiple of 32;  NUMBERS: of a draw
    """

    @T.inline
    def divide_by_sum(parts, total, p, n, lane):
        # numpy's sum of up to 128 numbers: eight sums side by side, then what is left.
        for j in T.unroll(8):
            parts[j] = T.float64(0)
        for i in T.serial(n // 8):
            for j in T.unroll(8):
                parts[j] = parts[j] + p[i * 8 + j]
        total[0] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))
        for i in T.serial(n % 8):
            total[0] = total[0] + p[n // 8 * 8 + i]
        T.cuda.cta_sync()
        for i in T.serial(MOST // 32):
            if i * 32 + lane < n:
                p[i * 32 + lane] = p[i * 32 + lane] / total[0]
        T.cuda.cta_sync()

    @T.prim_func
    def draw_(values_: T.handle, ids_: T.handle, draws_: T.handle, drawn_: T.handle, tokens: T.int32, count: T.int32):
        T.func_attr({"tirx.noalias": True})
        values = T.match_buffer(values_, (T.int32(),), "float32")
        ids = T.match_buffer(ids_, (T.int32(),), "int32")
        draws = T.match_buffer(draws_, (T.int32(),), "float64")
        drawn = T.match_buffer(drawn_, (T.int32(),), "int32")
        T.device_entry()
        row = T.cta_id([tokens])
        lane = T.thread_id([32])
        at: T.let = row * NUMBERS
        asked: T.let = T.max(1, T.min(count, T.Cast("int32", draws[at + 1])))
        p = T.alloc_shared((MOST,), "float64")
        parts = T.alloc_local((8,), "float64")
        total = T.alloc_local((1,), "float64")
        seen = T.alloc_local((1,), "float64")
        kept = T.alloc_local((1,), "int32")
        likely = T.alloc_local((1,), "int32")
        for i in T.serial(MOST // 32):
            if i * 32 + lane < asked:
                p[i * 32 + lane] = T.exp(
                    (T.Cast("float64", values[row * count + i * 32 + lane]) - T.Cast("float64", values[row * count]))
                    / draws[at]
                )
        T.cuda.cta_sync()
        divide_by_sum(parts, total, p, asked, lane)
        # All lanes find the same: how many top_p keeps, and min_p, which are the first of them.
        seen[0] = T.float64(0)
        kept[0] = 1
        likely[0] = 0
        for i in T.serial(asked):
            seen[0] = seen[0] + p[i]
            if seen[0] < draws[at + 2]:
                kept[0] = i + 2
            if p[i] >= draws[at + 3] * p[0]:
                likely[0] = i + 1
        if draws[at + 2] >= T.float64(1):
            kept[0] = asked
        kept[0] = T.max(1, T.min(T.min(kept[0], asked), likely[0]))
        divide_by_sum(parts, total, p, kept[0], lane)
        seen[0] = T.float64(0)
        likely[0] = 0
        for i in T.serial(kept[0]):
            seen[0] = seen[0] + p[i]
            if seen[0] <= draws[at + 4]:
                likely[0] = i + 1
        if lane == 0:
            drawn[row] = ids[row * count + T.min(likely[0], kept[0] - 1)]

    return draw_
