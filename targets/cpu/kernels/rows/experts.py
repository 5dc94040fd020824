"""Kernels of a layer of experts: which a row goes through, the rows of each side by side, and the sum of what they give.

The products of the experts are the kernels of any linear layer.  Each expert has op records of its own, one per stage, that say
where in the buffers of all its rows begin; `dispatch` writes that, `each` runs one stage of all experts that have rows.
"""

from __future__ import annotations

import math

import numpy as np

from edgeq.targets.cpu.jit.args import Args, float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_f32, get_i32, get_i64, put_f32, put_i32, put_i64, vfma, vload, vsplat, vstore
from edgeq.targets.cpu.kernels.rows.elementwise import clear_padding, zero_if_finite
from edgeq.targets.cpu.threads.threadpool import invoke


class RouteArgs(Args):
    """bias   f32 [experts], and the factor of all shares: of `route_by_sigmoids` alone"""

    x = pointer()
    x_stride = nbytes()
    experts = number()
    chosen = number()
    out = pointer()
    out_stride = nbytes()
    bias = pointer()
    factor = float32()


def route(normalized: int) -> Kernel:
    """The chosen experts of every row and their shares; literal `normalized`: the shares of a row add up to 1.

    A row with a logit that is NaN or infinite takes the first experts, with shares of NaN.
    """

    def kernel(record, part, parts, thread):
        args = RouteArgs(record)
        experts, chosen = args.experts, args.chosen
        for r in range(part, get_i64(args.rows), parts):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            if routed_without_order(x, out, experts, chosen):
                continue
            largest = get_f32(x)
            for e in range(1, experts):
                largest = max(largest, get_f32(x + 4 * e))
            total = 0.0
            for e in range(experts):
                total += math.exp(get_f32(x + 4 * e) - largest)
            last, before, picked = largest, -1, 0.0
            for i in range(chosen):
                # The largest after the one before, in the order of values and, among equals, of numbers.
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


def route_by_sigmoids(normalized: int) -> Kernel:
    """The same with sigmoids for shares, of the experts whose sigmoid and bias add up to most."""

    def kernel(record, part, parts, thread):
        args = RouteArgs(record)
        experts, chosen, bias = args.experts, args.chosen, args.bias
        for r in range(part, get_i64(args.rows), parts):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            if routed_without_order(x, out, experts, chosen):
                continue
            last, before, picked = math.inf, -1, 0.0
            for i in range(chosen):
                best, index = -math.inf, 0
                for e in range(experts):
                    value = sigmoid(get_f32(x + 4 * e)) + get_f32(bias + 4 * e)
                    if (value < last or (value == last and e > before)) and value > best:
                        best, index = value, e
                share = sigmoid(get_f32(x + 4 * index))
                put_f32(out + 4 * i, share)
                put_f32(out + 4 * (chosen + i), index)
                last, before, picked = best, index, picked + share
            whole = picked + 1e-20 if normalized else 1.0
            for i in range(chosen):
                put_f32(out + 4 * i, get_f32(out + 4 * i) / whole * args.factor)

    return kernel


@inline
def routed_without_order(x, out, experts, chosen):
    """Whether a logit of the row is NaN or infinite: no order holds among these, so it has the first experts."""
    mark = zero_if_finite(x, experts)
    if mark == mark:
        return False
    for i in range(chosen):
        put_f32(out + 4 * i, mark)
        put_f32(out + 4 * (chosen + i), i)
    return True


@inline
def sigmoid(x):
    """In float32, as the sums are that rank the experts: two that saturate are equal on every target."""
    return np.float32(1 / (1 + math.exp(-x)))


class ShareScaleArgs(Args):
    """scales f32 [experts]; shares of a row come before the numbers of their experts."""

    routing = pointer()
    routing_stride = nbytes()
    chosen = number()
    scales = pointer()


def share_scale() -> Kernel:
    """Each share times the factor of its expert, in place."""

    def kernel(record, part, parts, thread):
        args = ShareScaleArgs(record)
        chosen = args.chosen
        for r in range(part, get_i64(args.rows), parts):
            shares = args.routing + r * args.routing_stride
            for i in range(chosen):
                expert = int(get_f32(shares + 4 * (chosen + i)))
                put_f32(shares + 4 * i, get_f32(shares + 4 * i) * get_f32(args.scales + 4 * expert))

    return kernel


class DispatchArgs(Args):
    """Results, i64 but for the last two of i32:

    expert_rows      rows of each expert
    expert_ends      where they end
    places           how many places there are; every expert's first one is a multiple of four
    row_of_place     the row of each place
    place_of_choice  the place of each row and choice

    first_moves      for each expert, and after the last, the first of its moves
    moves            each an address, and what belongs there for place 0 and per place
    """

    routing = pointer()
    routing_stride = nbytes()
    experts = number()
    chosen = number()
    expert_rows = pointer()
    expert_ends = pointer()
    places = pointer()
    row_of_place = pointer()
    place_of_choice = pointer()
    first_moves = pointer()
    moves = pointer()


def dispatch() -> Kernel:
    """Gives every row and choice a place among the rows of its expert, and the experts' op records their addresses."""

    def kernel(record, part, parts, thread):
        args = DispatchArgs(record)
        if part > 0:
            return
        experts, chosen = args.experts, args.chosen
        rows, ends = args.expert_rows, args.expert_ends
        count = get_i64(args.rows)
        for e in range(experts):
            put_i64(rows + 8 * e, 0)
        for r in range(count):
            names = args.routing + r * args.routing_stride + 4 * chosen
            for i in range(chosen):
                mine = rows + 8 * int(get_f32(names + 4 * i))
                put_i64(mine, get_i64(mine) + 1)
        first = 0
        for e in range(experts):
            put_i64(ends + 8 * e, first)
            if get_i64(rows + 8 * e) > 0:
                for i in range(get_i64(args.first_moves + 8 * e), get_i64(args.first_moves + 8 * (e + 1))):
                    move = args.moves + 24 * i
                    put_i64(get_i64(move), get_i64(move + 8) + first * get_i64(move + 16))
            first += (get_i64(rows + 8 * e) + 3) // 4 * 4
        put_i64(args.places, first)
        for r in range(count):
            names = args.routing + r * args.routing_stride + 4 * chosen
            for i in range(chosen):
                end = ends + 8 * int(get_f32(names + 4 * i))
                place = get_i64(end)
                put_i64(end, place + 1)
                put_i32(args.row_of_place + 4 * place, r)
                put_i32(args.place_of_choice + 4 * (r * chosen + i), place)

    return kernel


class StageArgs(Args):
    """records: the experts' op records of one stage, one after another."""

    records = pointer()
    experts = number()
    record_bytes = nbytes()


def every_expert() -> Kernel:
    """Runs one stage of all experts that have rows."""

    def kernel(record, part, parts, thread):
        args = StageArgs(record)
        for e in range(args.experts):
            mine = args.records + e * args.record_bytes
            if get_i64(Args(mine).rows) > 0:
                invoke(mine, part, parts, thread)

    return kernel


class GatherAddArgs(Args):
    """x: results by place; place_of_choice: as of `DispatchArgs`."""

    x = pointer()
    x_stride = nbytes()
    width = number()
    out = pointer()
    out_stride = nbytes()
    routing = pointer()
    routing_stride = nbytes()
    chosen = number()
    place_of_choice = pointer()


def gather_add() -> Kernel:
    """out[r] += the chosen experts' results times their shares."""

    def kernel(record, part, parts, thread):
        args = GatherAddArgs(record)
        chosen = args.chosen
        for r in range(part, get_i64(args.rows), parts):
            out, shares = args.out + r * args.out_stride, args.routing + r * args.routing_stride
            for i in range(chosen):
                share = vsplat(get_f32(shares + 4 * i))
                x = args.x + get_i32(args.place_of_choice + 4 * (r * chosen + i)) * args.x_stride
                for c in range(0, args.width, 16):
                    vstore(out + 4 * c, vfma(share, vload(x + 4 * c), vload(out + 4 * c)))
            clear_padding(out, args.width)

    return kernel


class GatedAddArgs(Args):
    x = pointer()
    x_stride = nbytes()
    width = number()
    out = pointer()
    out_stride = nbytes()
    gate = pointer()
    gate_stride = nbytes()


def gated_add() -> Kernel:
    """out[r] += sigmoid(gate[r]) x[r]."""

    def kernel(record, part, parts, thread):
        args = GatedAddArgs(record)
        for r in range(part, get_i64(args.rows), parts):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride
            share = vsplat(1.0 / (1.0 + math.exp(-get_f32(args.gate + r * args.gate_stride))))
            for c in range(0, args.width, 16):
                vstore(out + 4 * c, vfma(share, vload(x + 4 * c), vload(out + 4 * c)))
            clear_padding(out, args.width)

    return kernel
