"""The gated delta rule and the scan of a state space over the rows of a session (targets/family_operations.py).

A block of threads has 32 columns of the S of one head, and takes up to ROWS rows of a log together: it multiplies S with their
keys and queries, each warp some of its channels, and then goes through the rows, a lane for each column.  What is computed of a
row is the same whether others are in the same run or not: products with S are sums over the channels of a warp in their order,
then over the warps; sums over a log go from its first row on, and those of its decays from the newest row back.

The scan of a state space has B for keys, C for queries, and step u for what a row adds.  Beside parameters of short_conv.py:

x          f32 per token row [stride]: from q_first and k_first on queries and keys of `dim` channels, each for of_keys heads;
           from v_first on values [heads][value_dim]
rates      f32 per token row [rates_stride]: of a delta rule b and a [heads], of a state space dt [heads]
log        numbers before the log of this layer in the states of a session, and log_row those of its rows: keys, each for
           `shared` heads, from log_values on what rows added [heads][value_row], and from log_g on logarithms of decays [heads]
value_row  value_dim, padded: a row of S of one channel
"""

from tvm.script import tirx as T

from edgeq.network.delta_net import UNIT_EPS
from edgeq.targets.cuda.kernels.norms import add_over_warp
from edgeq.targets.cuda.kernels.rows import THREADS
from edgeq.targets.states import LOG

WARPS = THREADS // 32
ROWS = WARPS
"""Rows that are taken together: a warp prepares one of them."""


@T.inline
def softplus(result, x):
    """result[0] = log(1 + exp(x)) = max(x, 0) + 2 artanh(u / (2 + u)) with u = exp(-|x|), by seven terms of the series: an
    argument of at most 1/3 leaves 2e-8 of the result."""
    s = T.alloc_local((1,), "float32")
    z = T.alloc_local((1,), "float32")
    p = T.alloc_local((1,), "float32")
    s[0] = T.exp(T.float32(0) - T.abs(x))
    s[0] = s[0] / (s[0] + T.float32(2))
    z[0] = s[0] * s[0]
    T.ptx.fma.rn.f32(p[0], T.float32(0.07692307692307693), z[0], T.float32(0.09090909090909091))
    T.ptx.fma.rn.f32(p[0], p[0], z[0], T.float32(0.1111111111111111))
    T.ptx.fma.rn.f32(p[0], p[0], z[0], T.float32(0.14285714285714285))
    T.ptx.fma.rn.f32(p[0], p[0], z[0], T.float32(0.2))
    T.ptx.fma.rn.f32(p[0], p[0], z[0], T.float32(0.3333333333333333))
    T.ptx.fma.rn.f32(p[0], p[0], z[0], T.float32(1))
    T.ptx.fma.rn.f32(result[0], s[0] + s[0], p[0], T.if_then_else(x < T.float32(0), T.float32(0), x))


def row_numbers(delta):
    """Inline: of one head in one token row g, and what its values are multiplied by, beta or the step."""

    @T.inline
    def numbers_of(g, factor, rates, at, head, heads, decay, dt_bias, beta_scale, least, most):
        if delta:
            softplus(g, rates[at + heads + head] + dt_bias[head])
            factor[0] = beta_scale / (T.float32(1) + T.exp(T.float32(0) - rates[at + head]))
        else:
            softplus(g, rates[at + head] + dt_bias[head])
            # In this order what is not a number stays so.
            g[0] = T.if_then_else(g[0] < least, least, T.if_then_else(g[0] > most, most, g[0]))
            factor[0] = g[0]
        g[0] = decay[head] * g[0]

    return numbers_of


def unit_reader(delta):
    """Inline, by one warp: the factor that a key or a query of `dim` channels, from x[at] on, is multiplied by: in a delta rule
    both have the length 1."""

    @T.inline
    def factor_of(factor, x, at, dim, lane):
        factor[0] = T.float32(1)
        if delta:
            total = T.alloc_local((1,), "float32")
            total[0] = T.float32(0)
            for i in T.serial(T.ceildiv(dim, 32)):
                if i * 32 + lane < dim:
                    T.ptx.fma.rn.f32(total[0], x[at + i * 32 + lane], x[at + i * 32 + lane], total[0])
            add_over_warp(total)
            factor[0] = T.float32(1) / T.sqrt(total[0] + T.float32(UNIT_EPS))

    return factor_of


def state_scan(delta, channels, keeps):
    """out = the delta rule or the scan, and in the state what rows added, and S where a log ends.

    channels   of a key, padded
    keeps      keys and logarithms of decays are written to the log too: of a session come at most LOG rows, so that no block of
               threads writes where another reads
    """
    numbers_of, factor_of = row_numbers(delta), unit_reader(delta)

    @T.prim_func
    def state_scan_(x_: T.handle, rates_: T.handle, decay_: T.handle, dt_bias_: T.handle, skip_: T.handle, out_: T.handle,
                    order_: T.handle, begins_: T.handle, slots_: T.handle, states_: T.handle, snapshots_: T.handle,
                    numbers_: T.handle, sessions: T.int32, state: T.int32, snapshot: T.int32, stride: T.int32,
                    rates_stride: T.int32, heads: T.int32, dim: T.int32, value_dim: T.int32, value_row: T.int32,
                    of_keys: T.int32, shared: T.int32, q_first: T.int32, k_first: T.int32, v_first: T.int32, log: T.int32,
                    log_row: T.int32, log_values: T.int32, log_g: T.int32, query_scale: T.float32, beta_scale: T.float32,
                    least: T.float32, most: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "float32")
        rates = T.match_buffer(rates_, (T.int32(),), "float32")
        decay = T.match_buffer(decay_, (T.int32(),), "float32")
        dt_bias = T.match_buffer(dt_bias_, (T.int32(),), "float32")
        skip = T.match_buffer(skip_, (T.int32(),), "float32")
        out = T.match_buffer(out_, (T.int32(),), "float32")
        order = T.match_buffer(order_, (T.int32(),), "int32")
        begins = T.match_buffer(begins_, (T.int32(),), "int32")
        slots = T.match_buffer(slots_, (T.int32(),), "int32")
        states = T.match_buffer(states_, (T.int32(),), "int64")
        snapshots = T.match_buffer(snapshots_, (T.int32(),), "int64")
        numbers = T.match_buffer(numbers_, (T.int64(),), "float32")
        T.device_entry()
        unit, session = T.cta_id([heads * T.ceildiv(value_dim, 32), sessions])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        head: T.let = unit // T.ceildiv(value_dim, 32)
        first_column: T.let = unit % T.ceildiv(value_dim, 32) * 32
        column: T.let = first_column + lane
        begin: T.let = begins[session]
        count: T.let = begins[session + 1] - begin
        held: T.let = states[session]
        keys = T.alloc_shared((LOG * channels,), "float32")
        units = T.alloc_shared((2 * ROWS * channels,), "float32")
        added = T.alloc_shared((LOG * 32,), "float32")
        parts = T.alloc_shared((WARPS * 2 * ROWS * 32,), "float32")
        dots = T.alloc_shared((2 * ROWS * LOG,), "float32")
        weights = T.alloc_shared((ROWS * LOG,), "float32")
        wholes = T.alloc_shared((ROWS,), "float32")
        gs = T.alloc_shared((LOG,), "float32")
        factors = T.alloc_shared((ROWS,), "float32")
        done = T.alloc_local((1,), "int32")
        slot = T.alloc_local((1,), "int32")
        taken = T.alloc_local((1,), "int32")
        factor = T.alloc_local((1,), "float32")
        g = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        change = T.alloc_local((1,), "float32")
        past = T.alloc_local((1,), "float32")
        acc = T.alloc_local((2 * ROWS,), "float32")
        slot[0] = 0
        if count > 0:
            slot[0] = slots[order[begin]]
        # What the log has before the first row.
        before: T.let = held + T.Cast("int64", log + slot[0] // LOG % 2 * (LOG * log_row))
        for j in T.serial(slot[0] % LOG):
            row_of_log: T.let = before + T.Cast("int64", j * log_row)
            for i in T.serial(T.ceildiv(dim, THREADS)):
                if i * THREADS + tid < dim:
                    keys[j * channels + i * THREADS + tid] = numbers[
                        row_of_log + T.Cast("int64", head // shared * channels + i * THREADS + tid)
                    ]
            if warp == 0 and column < value_dim:
                added[j * 32 + lane] = numbers[row_of_log + T.Cast("int64", log_values + head * value_row + column)]
            if tid == 32:
                gs[j] = numbers[row_of_log + T.Cast("int64", log_g + head)]
        done[0] = 0
        while done[0] < count:
            first: T.let = slot[0] % LOG
            odd: T.let = slot[0] // LOG % 2
            taken[0] = T.min(T.min(count - done[0], LOG - first), ROWS)
            of_log: T.let = held + T.Cast("int64", log + (odd * LOG + first) * log_row)
            of_head: T.let = held + T.Cast("int64", state + (odd * heads + head) * (dim * value_row) + column)
            # Keys, queries and rates, a warp for each row.
            if warp < taken[0]:
                row: T.let = order[begin + done[0] + warp]
                key: T.let = row * stride + k_first + head // of_keys * dim
                query: T.let = row * stride + q_first + head // of_keys * dim
                factor_of(factor, x, key, dim, lane)
                for i in T.serial(T.ceildiv(dim, 32)):
                    if i * 32 + lane < dim:
                        units[2 * warp * channels + i * 32 + lane] = x[key + i * 32 + lane] * factor[0]
                        keys[(first + warp) * channels + i * 32 + lane] = x[key + i * 32 + lane] * factor[0]
                if keeps and head % shared == 0 and first_column == 0:
                    for i in T.serial(T.ceildiv(dim, 32)):
                        if i * 32 + lane < dim:
                            numbers[of_log + T.Cast("int64", warp * log_row + head // shared * channels + i * 32 + lane)] = (
                                x[key + i * 32 + lane] * factor[0]
                            )
                factor_of(factor, x, query, dim, lane)
                factor[0] = factor[0] * query_scale
                for i in T.serial(T.ceildiv(dim, 32)):
                    if i * 32 + lane < dim:
                        units[(2 * warp + 1) * channels + i * 32 + lane] = x[query + i * 32 + lane] * factor[0]
                numbers_of(g, factor, rates, row * rates_stride, head, heads, decay, dt_bias, beta_scale, least, most)
                if lane == 0:
                    gs[first + warp] = g[0]
                    factors[warp] = factor[0]
                    if keeps and first_column == 0:
                        numbers[of_log + T.Cast("int64", warp * log_row + log_g + head)] = g[0]
            T.cuda.cta_sync()
            # Products with S of a warp's channels.
            for n in T.unroll(2 * ROWS):
                acc[n] = T.float32(0)
            if column < value_dim:
                for i in T.serial(T.ceildiv(dim, WARPS)):
                    c: T.let = warp * T.ceildiv(dim, WARPS) + i
                    if c < dim:
                        total[0] = numbers[of_head + T.Cast("int64", c * value_row)]
                        for n in T.unroll(2 * ROWS):
                            T.ptx.fma.rn.f32(acc[n], units[n * channels + c], total[0], acc[n])
            for n in T.unroll(2 * ROWS):
                parts[(warp * 2 * ROWS + n) * 32 + lane] = acc[n]
            # Dots with the keys of the log up to each row, of its query and in a delta rule of its key.
            for i in T.serial(taken[0] * LOG // WARPS):
                t: T.let = (i * WARPS + warp) // LOG
                j: T.let = (i * WARPS + warp) % LOG
                if j <= first + t:
                    total[0] = T.float32(0)
                    past[0] = T.float32(0)
                    for k in T.serial(T.ceildiv(dim, 32)):
                        if k * 32 + lane < dim:
                            T.ptx.fma.rn.f32(
                                total[0], keys[j * channels + k * 32 + lane], units[(2 * t + 1) * channels + k * 32 + lane],
                                total[0],
                            )  # fmt: skip
                            if delta:
                                T.ptx.fma.rn.f32(
                                    past[0], keys[j * channels + k * 32 + lane], units[2 * t * channels + k * 32 + lane],
                                    past[0],
                                )  # fmt: skip
                    add_over_warp(total)
                    if delta:
                        add_over_warp(past)
                    if lane == 0:
                        dots[(2 * t + 1) * LOG + j] = total[0]
                        dots[2 * t * LOG + j] = past[0]
            # Decays since each row of the log, and since S: from the newest row back, as a sum that is taken apart again would
            # lose digits.
            if tid < taken[0] * LOG and tid % LOG <= first + tid // LOG:
                total[0] = T.float32(0)
                for j in T.serial(first + tid // LOG - tid % LOG):
                    total[0] = total[0] + gs[first + tid // LOG - j]
                weights[tid] = T.exp(total[0])
                if tid % LOG == 0:
                    wholes[tid // LOG] = T.exp(total[0] + gs[0])
            T.cuda.cta_sync()
            # Row by row what is added, and the result.
            if warp == 0 and column < value_dim:
                for t in T.serial(taken[0]):
                    row: T.let = order[begin + done[0] + t]
                    value: T.let = x[row * stride + v_first + head * value_dim + column]
                    total[0] = T.float32(0)
                    past[0] = T.float32(0)
                    for w in T.unroll(WARPS):
                        total[0] = total[0] + parts[(w * 2 * ROWS + 2 * t + 1) * 32 + lane]
                        past[0] = past[0] + parts[(w * 2 * ROWS + 2 * t) * 32 + lane]
                    total[0] = wholes[t] * total[0]
                    change[0] = value
                    if delta:
                        T.ptx.fma.rn.f32(change[0], T.float32(0) - wholes[t], past[0], value)
                    for j in T.serial(first + t):
                        if delta:
                            T.ptx.fma.rn.f32(
                                change[0], T.float32(0) - weights[t * LOG + j] * dots[2 * t * LOG + j], added[j * 32 + lane],
                                change[0],
                            )  # fmt: skip
                        T.ptx.fma.rn.f32(
                            total[0], weights[t * LOG + j] * dots[(2 * t + 1) * LOG + j], added[j * 32 + lane], total[0]
                        )
                    change[0] = change[0] * factors[t]
                    T.ptx.fma.rn.f32(total[0], dots[(2 * t + 1) * LOG + first + t], change[0], total[0])
                    if not delta:
                        T.ptx.fma.rn.f32(total[0], skip[head], value, total[0])
                    added[(first + t) * 32 + lane] = change[0]
                    numbers[of_log + T.Cast("int64", t * log_row + log_values + head * value_row + column)] = change[0]
                    out[row * (heads * value_dim) + head * value_dim + column] = total[0]
            if first + taken[0] == LOG:
                T.cuda.cta_sync()
                last: T.let = taken[0] - 1
                after: T.let = held + T.Cast("int64", state + ((1 - odd) * heads + head) * (dim * value_row) + column)
                kept: T.let = snapshots[order[begin + done[0] + last]]
                copied: T.let = kept + T.Cast("int64", snapshot + head * (dim * value_row) + column)
                if column < value_dim:
                    for i in T.serial(T.ceildiv(dim, WARPS)):
                        c: T.let = warp * T.ceildiv(dim, WARPS) + i
                        if c < dim:
                            total[0] = wholes[last] * numbers[of_head + T.Cast("int64", c * value_row)]
                            for j in T.serial(LOG):
                                T.ptx.fma.rn.f32(
                                    total[0], weights[last * LOG + j] * keys[j * channels + c], added[j * 32 + lane], total[0]
                                )
                            numbers[after + T.Cast("int64", c * value_row)] = total[0]
                            if kept != T.int64(0):
                                numbers[copied + T.Cast("int64", c * value_row)] = total[0]
            slot[0] = slot[0] + taken[0]
            done[0] = done[0] + taken[0]
            T.cuda.cta_sync()

    return state_scan_


def state_keep(delta, channels):
    """Keys and logarithms of decays of the last rows of a session in its log, after all blocks of threads of `state_scan` have
    read it: the bits that it computes with.  A warp has a head of a row."""
    numbers_of, factor_of = row_numbers(delta), unit_reader(delta)
    KEPT = 2 * LOG

    @T.prim_func
    def state_keep_(x_: T.handle, rates_: T.handle, decay_: T.handle, dt_bias_: T.handle, order_: T.handle, begins_: T.handle,
                    slots_: T.handle, states_: T.handle, numbers_: T.handle, sessions: T.int32, stride: T.int32,
                    rates_stride: T.int32, heads: T.int32, dim: T.int32, of_keys: T.int32, shared: T.int32, k_first: T.int32,
                    log: T.int32, log_row: T.int32, log_g: T.int32, beta_scale: T.float32, least: T.float32,
                    most: T.float32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_, (T.int32(),), "float32")
        rates = T.match_buffer(rates_, (T.int32(),), "float32")
        decay = T.match_buffer(decay_, (T.int32(),), "float32")
        dt_bias = T.match_buffer(dt_bias_, (T.int32(),), "float32")
        order = T.match_buffer(order_, (T.int32(),), "int32")
        begins = T.match_buffer(begins_, (T.int32(),), "int32")
        slots = T.match_buffer(slots_, (T.int32(),), "int32")
        states = T.match_buffer(states_, (T.int32(),), "int64")
        numbers = T.match_buffer(numbers_, (T.int64(),), "float32")
        T.device_entry()
        part, session = T.cta_id([T.ceildiv(heads, WARPS) * KEPT, sessions])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        factor = T.alloc_local((1,), "float32")
        g = T.alloc_local((1,), "float32")
        head: T.let = part // KEPT * WARPS + warp
        begin: T.let = begins[session]
        at: T.let = begins[session + 1] - 1 - part % KEPT
        if at >= begin and head < heads:
            row: T.let = order[at]
            of_log: T.let = states[session] + T.Cast("int64", log + slots[row] % (2 * LOG) * log_row)
            if head % shared == 0:
                key: T.let = row * stride + k_first + head // of_keys * dim
                factor_of(factor, x, key, dim, lane)
                for i in T.serial(T.ceildiv(dim, 32)):
                    if i * 32 + lane < dim:
                        numbers[of_log + T.Cast("int64", head // shared * channels + i * 32 + lane)] = (
                            x[key + i * 32 + lane] * factor[0]
                        )
            numbers_of(g, factor, rates, row * rates_stride, head, heads, decay, dt_bias, beta_scale, least, most)
            if lane == 0:
                numbers[of_log + T.Cast("int64", log_g + head)] = g[0]

    return state_keep_
