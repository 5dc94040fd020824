"""What a layer does to its input before products read it: order, scale, transform; and a channel whose weights are kept apart.

A transform of runs of K * 2^m channels is `butterflies` over its powers of two; the first begins with its base, if K is not 1.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import THREADS

TILE = 4096
"""Numbers that a block of threads has in shared memory: the largest power of two of one pass."""


def arrange():
    """out[row][c] = x[row][order[c]] * scale[c]; x where not `ordered`, as it is where not `scaled`.

    width   of rows of x; those of out have `columns`
    """

    @T.prim_func
    def arrange_(x_: T.handle, order_: T.handle, scale_: T.handle, out_: T.handle,
                 tokens: T.int32, columns: T.int32, width: T.int32, ordered: T.int32, scaled: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nr, ns, no = T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        order = T.match_buffer(order_, (nr,), "int32")
        scale = T.match_buffer(scale_, (ns,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(columns, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        source = T.alloc_local((1,), "int32")
        value = T.alloc_local((1,), "float32")
        if channel < columns:
            source[0] = channel
            if ordered != 0:
                source[0] = order[channel]
            value[0] = x[row * width + source[0]]
            if scaled != 0:
                value[0] = value[0] * scale[channel]
            out[row * columns + channel] = value[0]

    return arrange_


def butterflies():
    """out = H v * factor for every vector v of `power` channels, `stride` apart, of rows of x; H_1 = 1, H_2n = (H H; H -H).

    A block of threads has `vectors` of them, together at most TILE numbers.  Where `order` is not 1, v is of rows of x times a
    base [order][order]: runs of `order` pieces, of `piece` channels each, become sums of these; out is other memory than x.
    """

    @T.prim_func
    def butterflies_(x_: T.handle, base_: T.handle, out_: T.handle, tokens: T.int32, columns: T.int32, width: T.int32,
                     power: T.int32, stride: T.int32, vectors: T.int32, order: T.int32, piece: T.int32,
                     factor: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nb, no = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        base = T.match_buffer(base_, (nb,), "float32")
        out = T.match_buffer(out_, (no,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(columns, power * vectors), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        v = T.alloc_shared((TILE,), "float32")
        half = T.alloc_local((1,), "int32")
        pair = T.alloc_local((2,), "float32")
        total = T.alloc_local((1,), "float32")
        count: T.let = columns // power  # vectors of a row

        # Neighbouring threads have neighbouring channels: of one vector where they lie together, else of neighbouring vectors.
        @T.inline
        def place(at, unit, vector, element):
            vector[0] = T.if_then_else(stride == 1, unit // power, unit % vectors)
            element[0] = T.if_then_else(stride == 1, unit % power, unit // vectors)
            at[0] = ((part * vectors + vector[0]) // stride * power + element[0]) * stride + (
                part * vectors + vector[0]
            ) % stride

        at = T.alloc_local((1,), "int32")
        vector = T.alloc_local((1,), "int32")
        element = T.alloc_local((1,), "int32")
        for i in T.serial(T.ceildiv(power * vectors, THREADS)):
            if i * THREADS + tid < power * vectors:
                place(at, i * THREADS + tid, vector, element)
                if part * vectors + vector[0] < count:
                    total[0] = T.float32(0)
                    if order == 1:
                        total[0] = x[row * width + at[0]]
                    else:
                        run: T.let = at[0] // (order * piece)
                        k: T.let = at[0] // piece % order
                        for j in T.serial(order):
                            total[0] = total[0] + base[k * order + j] * x[
                                row * width + (run * order + j) * piece + at[0] % piece]  # fmt: skip
                    v[element[0] * vectors + vector[0]] = total[0]
        T.cuda.cta_sync()
        half[0] = 1
        while half[0] < power:
            for i in T.serial(T.ceildiv(power * vectors // 2, THREADS)):
                if i * THREADS + tid < power * vectors // 2:
                    unit: T.let = i * THREADS + tid
                    group: T.let = unit // vectors
                    first: T.let = (group // half[0] * 2 * half[0] + group % half[0]) * vectors + unit % vectors
                    if part * vectors + unit % vectors < count:
                        pair[0] = v[first]
                        pair[1] = v[first + half[0] * vectors]
                        v[first] = pair[0] + pair[1]
                        v[first + half[0] * vectors] = pair[0] - pair[1]
            T.cuda.cta_sync()
            half[0] = half[0] * 2
        for i in T.serial(T.ceildiv(power * vectors, THREADS)):
            if i * THREADS + tid < power * vectors:
                place(at, i * THREADS + tid, vector, element)
                if part * vectors + vector[0] < count:
                    out[row * columns + at[0]] = v[element[0] * vectors + vector[0]] * factor

    return butterflies_


def split_row():
    """y[row][c] += x[row][index] * weights[c] for `rows` output channels."""

    @T.prim_func
    def split_row_(x_: T.handle, weights_: T.handle, y_: T.handle,
                   tokens: T.int32, rows: T.int32, columns: T.int32, width: T.int32, index: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, nw, ny = T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        weights = T.match_buffer(weights_, (nw,), "float32")
        y = T.match_buffer(y_, (ny,), "float32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(rows, THREADS), tokens])
        warp = T.warp_id([THREADS // 32])
        lane = T.lane_id([32])
        channel: T.let = part * THREADS + warp * 32 + lane
        if channel < rows:
            y[row * width + channel] = y[row * width + channel] + x[row * columns + index] * weights[channel]

    return split_row_
