"""A toy layer with a state, in the reference and the cpu target: what a state has to live through is tested with it."""

from __future__ import annotations

import inspect
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from edgeq.format.metadata import Metadata
from edgeq.runtime import Model
from edgeq.runtime.network import compiled
from edgeq.runtime.network.decoder import decoder
from edgeq.targets.cpu.jit.args import float32, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.simd import get_i32, get_i64, vadd, vload, vmul, vsplat, vstore
from edgeq.targets.cpu.kernels.args import StateArgs
from edgeq.targets.cpu.kernels.rows.states import snapshot_after
from edgeq.targets.cpu.lowering import dispatch
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.threads.optable import channel_parts, kernel
from edgeq.targets.graph import Graph, Operation, RmsNorm
from edgeq.targets.reference import program
from edgeq.targets.reference.context import RunContext, State
from edgeq.targets.reference.states import rows_of_state
from edgeq.targets.rows import Rows
from edgeq.targets.state_layout import padded_width
from edgeq.targets.states import LOG, StateSpec

FACTOR = 0.0625


@dataclass(frozen=True)
class RunningSum(Operation):
    """out[r] += factor * the sum of x over the rows of the session up to r: S before their log, then the log's rows."""

    x: str
    factor: float
    out: str
    state: int

    READS = ("x", "out")


def running_sum(context: RunContext, op: RunningSum, rows: Rows, buffers: State) -> None:
    for row in rows_of_state(context, op.state, rows):
        row.log[row.slot % (2 * LOG)] = buffers[op.x][row.row]
        total = row.state[row.slot // LOG % 2].copy()
        for slot in range(row.slot // LOG * LOG, row.slot + 1):
            total += row.log[slot % (2 * LOG)]
        buffers[op.out][row.row] += np.float32(op.factor) * total
        if row.slot % LOG == LOG - 1:
            row.state[(row.slot // LOG + 1) % 2] = total
        if row.snapshot is not None:
            row.snapshot[:] = total


class RunningSumArgs(StateArgs):
    x = pointer()
    x_stride = nbytes()
    out = pointer()
    out_stride = nbytes()
    width = number()
    log = nbytes()
    factor = float32()


def running_sum_kernel(version: int) -> Kernel:
    def kernel(record, part, parts, thread):  # type: ignore[no-untyped-def]
        args = RunningSumArgs(record)
        sessions, row_bytes = get_i64(args.sessions), 4 * args.width
        for unit in range(part, sessions * args.width // 16, parts):
            session, c = unit % sessions, 64 * (unit // sessions)
            state = get_i64(args.states + 8 * session) + c
            sums, log = state + args.offset, state + args.log
            for i in range(get_i32(args.begins + 4 * session), get_i32(args.begins + 4 * session + 4)):
                r = get_i32(args.order + 4 * i)
                slot = get_i32(args.slots + 4 * r)
                vstore(log + row_bytes * (slot % (2 * LOG)), vload(args.x + r * args.x_stride + c))
                total = vload(sums + row_bytes * (slot // LOG % 2))
                for s in range(slot // LOG * LOG, slot + 1):
                    total = vadd(total, vload(log + row_bytes * (s % (2 * LOG))))
                out = args.out + r * args.out_stride + c
                vstore(out, vadd(vload(out), vmul(vsplat(args.factor), total)))
                if slot % LOG == LOG - 1:
                    vstore(sums + row_bytes * ((slot // LOG + 1) % 2), total)
                snapshot = snapshot_after(args, session, slot)
                if snapshot != 0:
                    vstore(snapshot + c, total)

    return kernel


VERSION = zlib.crc32(inspect.getsource(running_sum_kernel).encode())
"""Kernels are kept by the sources of edgeq, of which this is none."""


def emit_running_sum(context: Context, op: RunningSum) -> None:
    (x, x_stride), (out, out_stride) = context.place(op.x), context.place(op.out)
    args = RunningSumArgs(
        **context.state_args(op.state), x=x, x_stride=x_stride, out=out, out_stride=out_stride,
        width=padded_width(context.width(op.x)), log=4 * context.state_places[op.state].log, factor=op.factor,
    )  # fmt: skip
    context.emit(kernel(running_sum_kernel, VERSION), args, parts=channel_parts(context.width(op.x)))
    context.invalidate(op.out)


def with_sums(metadata: Metadata, context: int = 0) -> Graph:
    """The decoder with a running sum over the normed input of every block of attention."""
    graph, operations, states = decoder(metadata, context), list[Operation](), list[StateSpec]()
    width = graph.buffers["normed"]
    for operation in graph.operations:
        operations.append(operation)
        # The first norm of each layer.
        if isinstance(operation, RmsNorm) and operation.layer == len(states):
            operations.append(RunningSum(operation.layer, "normed", FACTOR, "x", len(states)))
            states.append(StateSpec("sum", (width,), width))
    return replace(graph, operations=tuple(operations), states=tuple(states))


def load_with_sums(path: Path, **options: Any) -> Model:
    """A model whose layers have a state."""
    with patch.object(compiled, "decoder", with_sums):
        return Model.load(path, **options)


cast(Any, program.OPERATIONS)[RunningSum] = running_sum
dispatch._PLAIN[RunningSum] = emit_running_sum
