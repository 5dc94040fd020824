"""The reference's operations of layers with a state, which takes the rows of a run one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.host_states import HostSnapshot, HostState, padded_rows, padded_width
from edgeq.targets.reference.context import RunContext, State
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.state_operations import ShortConv
from edgeq.targets.states import LOG

ArrayF32 = NDArray[np.float32]


class StateRow(NamedTuple):
    """A row of a run as a state takes it.

    row       its index in the run;  slot: in its session
    state     "sum": S before an even and before an odd log, [2, *shape]; "tail": inputs [rows + LOG, channels], that of slot s
              at s modulo their number
    log       [2 LOG, log], the row of slot s at s modulo 2 LOG
    snapshot  [*shape], which this row fills; None: no snapshot is taken after it
    """

    row: int
    slot: int
    state: ArrayF32
    log: ArrayF32
    snapshot: ArrayF32 | None


def rows_of_state(context: RunContext, index: int, rows: Rows) -> Iterator[StateRow]:
    """The rows of a run, session by session and in the order of their slots, for state `index` of the graph."""
    assert context.state_rows is not None
    spec, place = context.graph.states[index], context.state_places[index]
    count, width = padded_rows(spec), spec.shape[-1]
    order, begins = context.state_rows.order.tolist(), context.state_rows.begins.tolist()
    for state, pages, begin, end in zip(rows.states, rows.pages, begins, begins[1:], strict=False):
        assert isinstance(state, HostState)
        held = state.data[place.state : place.log].reshape(-1, *spec.shape[spec.kind == "tail" : -1], padded_width(width))
        log = state.data[place.log : place.log + 2 * LOG * padded_width(spec.log)].reshape(2 * LOG, -1)
        for row in order[begin:end]:
            slot = int(rows.slots[row])
            snapshot = pages[slot // PAGE].snapshot if slot % PAGE == PAGE - 1 else None
            numbers = None
            if snapshot is not None:
                assert isinstance(snapshot, HostSnapshot)
                numbers = snapshot.data[place.snapshot : place.snapshot + count].reshape(*spec.shape[:-1], -1)[..., :width]
            yield StateRow(row, slot, held[..., :width], log[:, : spec.log], numbers)


def short_conv(context: RunContext, op: ShortConv, rows: Rows, buffers: State) -> None:
    b, c, u = np.split(buffers[op.x][:, : 3 * op.width], 3, axis=1)
    inputs, weight, out = b * u, context.array(op.weight), context.out(buffers, op.out, len(rows))
    taps = weight.shape[1]
    for row in rows_of_state(context, op.state, rows):
        ring = len(row.state)
        row.state[row.slot % ring] = inputs[row.row]
        # From the oldest on; before slot 0 a state holds zeros.
        total = np.zeros(op.width, np.float32)
        for j in range(taps):
            total += weight[:, j] * row.state[(row.slot - taps + 1 + j) % ring]
        out[row.row] = c[row.row] * total
        if row.snapshot is not None:
            row.snapshot[:] = row.state[np.arange(row.slot - taps + 2, row.slot + 1) % ring]
