"""Layers with a state, which takes the rows of a session in the order of their slots."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.targets.cuda.arguments.states import ShortConvArguments, StateRowsArguments
from edgeq.targets.cuda.lowering.context import Launch, Lowering
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.family_operations import ShortConv, SiluConv
from edgeq.targets.state_layout import padded_width

BEGINS, ORDER, STATES, SNAPSHOTS = "begins of states", "order of states", "states", "snapshots"
OF_STATES = (BEGINS, ORDER, STATES, SNAPSHOTS)
"""What a run sends of states, by name."""


def state_rows(lowering: Lowering, index: int) -> StateRowsArguments:
    """The rows of a run for state `index` of the graph."""
    place, rows = lowering.state_places[index], lowering.rows(0)
    return StateRowsArguments(
        order=lowering.sent(ORDER),
        begins=lowering.storage.named((BEGINS, "sent", 0), 4 * (rows + 1)),
        slots=lowering.sent("slots"),
        states=lowering.sent(STATES, 8),
        snapshots=lowering.sent(SNAPSHOTS, 8),
        state=place.state,
        snapshot=place.snapshot,
    )


def short_conv(lowering: Lowering, op: ShortConv | SiluConv) -> Sequence[Launch]:
    bias = op.bias if isinstance(op, SiluConv) else None
    arguments = ShortConvArguments(
        x=lowering.buffer(op.x),
        weight=lowering.storage.floats(op.weight),
        bias=lowering.storage.floats(bias) if bias is not None else 0,
        out=lowering.buffer(op.out),
        rows=state_rows(lowering, op.state),
        stride=lowering.graph.buffers[op.x],
        width=op.width,
        padded=padded_width(op.width),
        taps=op.weight.shape[1],
        has_bias=int(bias is not None),
    )
    return [Launch(op, lowering.stage, Variant("short_conv", (isinstance(op, ShortConv),)), arguments)]
