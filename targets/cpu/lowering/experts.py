"""A layer of experts as op records: dispatch, then stage by stage of all experts that have rows, then the sum.

The operations of one expert are lowered like those of any layer, over buffers that hold the rows of all experts one after
another.  Every address in its op records that lies in such a buffer then moves, at run time, to where the expert's rows begin.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import UnsupportedError
from edgeq.format.records import ArrayRef
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.args import RECORD_BYTES, RECORD_SLOTS, SLOT_BYTES
from edgeq.targets.cpu.jit.buffers import Buffers, padded
from edgeq.targets.cpu.kernels.rows import elementwise
from edgeq.targets.cpu.kernels.rows import experts as kernels
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.lowering.layout import SMALL_TILE
from edgeq.targets.cpu.lowering.lifetimes import Buffer
from edgeq.targets.cpu.lowering.prepare import ROWS_OF_THREADS
from edgeq.targets.cpu.lowering.products import UNPACKED, WINOGRAD
from edgeq.targets.cpu.threads.optable import ExpertStage, kernel
from edgeq.targets.family_operations import GatedAdd, Route, ShareScale

X, INNER, Y = "expert x", "expert inner", "expert y"
OF_THREADS = ("scratch", WINOGRAD, UNPACKED, ROWS_OF_THREADS)
"""What belongs to threads, not to rows, in the memory of a lowering."""


@dataclass
class ExpertBuffers(Buffers):
    """Buffers of the experts: all shared arrays but the threads' have `rows` rows; areas: address -> bytes, and of a row."""

    memory: Buffers
    rows: int
    areas: dict[int, tuple[int, int]] = field(default_factory=dict)

    def shared(self, name: Hashable, nbytes: int) -> int:
        if name in OF_THREADS:
            return self.memory.shared(name, nbytes)
        address = self.memory.shared(("experts", name), nbytes)
        self.areas[address] = (nbytes, nbytes // self.rows)
        return address

    def copied(self, values: NDArray[Any]) -> int:
        return self.memory.copied(values)

    def array(self, shape: int | tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], int]:
        return self.memory.array(shape, dtype)

    def stored(self, ref: ArrayRef | None) -> int:
        return self.memory.stored(ref)

    def floats(self, ref: ArrayRef) -> int:
        return self.memory.floats(ref)

    def stride_at(self, address: int) -> int:
        """Bytes from one row to the next of the array in which `address` lies; 0 if it is none of these."""
        return next((stride for start, (size, stride) in self.areas.items() if start <= address < start + size), 0)


class Move(NamedTuple):
    """An argument that moves with the rows of its expert: its address, its value for place 0 and what it grows by per place."""

    argument: int
    value: int
    step: int


@dataclass
class ExpertStages:
    """The op records of all experts; parts: work items of each stage for one row; moves: of each expert."""

    stages: list[ExpertStage]
    parts: list[int]
    moves: list[list[Move]]


def route(context: Context, o: Route) -> None:
    (x, x_stride), (out, out_stride) = context.place(o.x), context.place(o.out)
    bias = 0 if o.bias is None else context.memory.floats(o.bias)
    args = kernels.RouteArgs(
        x=x, x_stride=x_stride, experts=o.experts, chosen=o.chosen, out=out, out_stride=out_stride, bias=bias, factor=o.factor
    )
    by = kernels.route if o.bias is None else kernels.route_by_sigmoids
    context.emit(kernel(by, int(o.normalized)), args)
    context.invalidate(o.out)


def share_scale(context: Context, o: ShareScale) -> None:
    routing, stride = context.place(o.routing)
    args = kernels.ShareScaleArgs(
        routing=routing, routing_stride=stride, chosen=o.chosen, scales=context.memory.floats(o.scales)
    )
    context.emit(kernel(kernels.share_scale), args)
    context.invalidate(o.routing)


def experts(context: Context, o: op.Experts, lower: Callable[[Context], None]) -> None:
    """`lower` fills the context of one expert from its graph."""
    memory, count = context.memory, len(o.downs)
    # The rows of every expert begin at a multiple of a small tile: its last ones may have one to themselves.
    places = padded(context.max_rows * o.chosen + (SMALL_TILE - 1) * count, SMALL_TILE)
    buffers = ExpertBuffers(memory, places)
    sizes = {"rows": 8 * count, "ends": 8 * count, "sum": 8, "rows of places": 4 * places, "places of rows": 4 * places}
    rows, ends, total, row_of, place_of = (memory.shared(("experts", name), size) for name, size in sizes.items())
    lowered = _lowered(context, o, buffers, rows, lower)
    context.expert_stages.extend(lowered.stages)
    firsts, first_address = memory.array(count + 1, np.int64)
    firsts[1:] = np.cumsum([len(moves) for moves in lowered.moves])
    flat, move_address = memory.array(len(Move._fields) * int(firsts[-1]), np.int64)
    flat[:] = np.array([move for moves in lowered.moves for move in moves], np.int64).ravel()

    (routing, routing_stride), (x, x_stride), (out, out_stride) = (context.place(name) for name in (o.routing, o.x, o.out))
    dispatched = kernels.DispatchArgs(
        routing=routing, routing_stride=routing_stride, experts=count, chosen=o.chosen, expert_rows=rows, expert_ends=ends,
        places=total, row_of_place=row_of, place_of_choice=place_of, first_moves=first_address, moves=move_address,
    )  # fmt: skip
    context.emit(kernel(kernels.dispatch), dispatched)
    copied = elementwise.SelectArgs(
        rows=total, x=x, x_stride=x_stride, width=context.width(o.x),
        out=buffers.shared(("buffer", *Buffer(X)), places * x_stride), out_stride=x_stride, indices=row_of,
    )  # fmt: skip
    context.emit(kernel(elementwise.select), copied)
    for stage, parts in zip(lowered.stages, lowered.parts, strict=True):
        args = kernels.StageArgs(records=int(stage.table.ctypes.data), experts=count, record_bytes=RECORD_BYTES)
        context.emit(kernel(kernels.every_expert), args, parts=parts)
    added = kernels.GatherAddArgs(
        x=buffers.shared(("buffer", *Buffer(Y)), places * out_stride), x_stride=out_stride, width=context.width(o.out),
        out=out, out_stride=out_stride, routing=routing, routing_stride=routing_stride,
        chosen=o.chosen, place_of_choice=place_of,
    )  # fmt: skip
    context.emit(kernel(kernels.gather_add), added)
    context.invalidate(o.out)


def _lowered(
    context: Context, o: op.Experts, memory: ExpertBuffers, rows: int, lower: Callable[[Context], None]
) -> ExpertStages:
    """The op records of every expert; `rows`: where the numbers of their rows will be.

    UnsupportedError: the experts' layers do not have the same parts.
    """
    widths = {X: context.width(o.x), "gate_up": 2 * o.width, INNER: o.width, Y: context.width(o.out)}
    lowered, count = ExpertStages([], [], []), len(o.downs)
    for expert in range(count):
        graph = replace(context.graph, buffers=widths, operations=tuple(_operations(o, expert)), result=Y)
        one = context.of_expert(graph, memory, rows + 8 * expert, memory.rows)
        lower(one)
        if not lowered.stages:
            for _ in one.records:
                table = memory.array(count * RECORD_SLOTS, np.int64)[0].reshape(count, RECORD_SLOTS)
                lowered.stages.append(ExpertStage(table, []))
                lowered.parts.append(1)
        if len(one.records) != len(lowered.stages):
            raise UnsupportedError(
                f"{o.downs[expert].name}: its expert has other parts than the first one; run with --target reference"
            )
        moves = []
        for index, (stage, record) in enumerate(zip(lowered.stages, one.records, strict=True)):
            stage.table[expert] = values = record.args.record()
            stage.functions.append(record.prefill)
            lowered.parts[index] = max(lowered.parts[index], record.decode_parts)
            address = int(stage.table[expert].ctypes.data)
            steps = [memory.stride_at(value) for value in values]
            moves += [Move(address + SLOT_BYTES * i, values[i], step) for i, step in enumerate(steps) if step]
        lowered.moves.append(moves)
    return lowered


def _operations(o: op.Experts, expert: int) -> Iterator[op.Operation]:
    """down(f(gate x) * up x) of one expert, or down(f(up x)), over its own buffers."""
    offset = 0
    for layer in o.projections[expert]:
        yield op.Linear(o.layer, X, layer, "gate_up", offset)
        offset += layer.rows
    yield op.Activate(o.layer, "gate_up", o.width, INNER, o.function, o.gated, clamp=o.clamp)
    yield op.Linear(o.layer, INNER, o.downs[expert], Y)


def gated_add(context: Context, o: GatedAdd) -> None:
    (x, x_stride), (out, out_stride), (gate, gate_stride) = (context.place(name) for name in (o.x, o.out, o.gate))
    args = kernels.GatedAddArgs(
        x=x, x_stride=x_stride, width=context.width(o.out),
        out=out, out_stride=out_stride, gate=gate, gate_stride=gate_stride,
    )  # fmt: skip
    context.emit(kernel(kernels.gated_add), args)
    context.invalidate(o.out)
