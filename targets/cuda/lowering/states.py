"""Layers with a state, which takes the rows of a session in the order of their slots, and norms with a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeq.targets.cuda.arguments.states import (
    GatedNormArguments,
    RowBeforeArguments,
    ShortConvArguments,
    StateRowsArguments,
    StateScanArguments,
)
from edgeq.targets.cuda.lowering.context import Launch, Lowering, refuse
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.family_operations import DeltaRule, GatedNorm, RowBefore, ShortConv, SiluConv, SsdScan, padded_head
from edgeq.targets.state_layout import padded_width
from edgeq.targets.states import LOG

BEGINS, ORDER, STATES, SNAPSHOTS = "begins of states", "order of states", "states", "snapshots"
MAX_KEY = 256
"""Channels of a key: those of a log lie in shared memory."""
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


def row_before(lowering: Lowering, op: RowBefore) -> Sequence[Launch]:
    arguments = RowBeforeArguments(
        x=lowering.buffer(op.x) if op.keeps else 0,
        out=lowering.buffer(op.out),
        rows=state_rows(lowering, op.state),
        stride=lowering.graph.buffers[op.x],
        width=op.width,
        padded=padded_width(op.width),
    )
    return [Launch(op, lowering.stage, Variant("row_before", (op.keeps,)), arguments)]


def delta_rule(lowering: Lowering, op: DeltaRule) -> Sequence[Launch]:
    shared, keys = op.value_heads // op.key_heads, op.key_heads * op.key_dim
    return _scan(
        lowering, op, op.rates,
        heads=op.value_heads, dim=op.key_dim, value_dim=op.value_dim, of_keys=shared, shared=shared,
        q_first=0, k_first=keys, v_first=2 * keys,
        query_scale=op.key_dim**-0.5, beta_scale=op.beta_scale, skip=0, least=0, most=0,
    )  # fmt: skip


def ssd_scan(lowering: Lowering, op: SsdScan) -> Sequence[Launch]:
    inner, (least, most) = op.heads * op.head_dim, op.limits
    return _scan(
        lowering, op, op.dt,
        heads=op.heads, dim=op.state_dim, value_dim=op.head_dim, of_keys=op.heads // op.groups, shared=op.shared,
        q_first=inner + op.groups * op.state_dim, k_first=inner, v_first=0,
        query_scale=1, beta_scale=0, skip=lowering.storage.floats(op.skip), least=least, most=most,
    )  # fmt: skip


def _scan(lowering: Lowering, op: DeltaRule | SsdScan, rates: str, **own: Any) -> Sequence[Launch]:
    """In a run of more rows than a log has, keys are written when every block of threads has read those before.

    rates  the buffer of numbers of each head;  own: arguments that the two compute in ways of their own
    """
    dim: int = own["dim"]
    if dim > MAX_KEY:
        refuse(f"states with keys of {dim} channels, only of up to {MAX_KEY}")
    log_values, log_g = op.log_places
    arguments = StateScanArguments(
        x=lowering.buffer(op.x),
        rates=lowering.buffer(rates),
        decay=lowering.storage.minus_exp(op.decay_log),
        dt_bias=lowering.storage.floats(op.dt_bias),
        out=lowering.buffer(op.out),
        rows=state_rows(lowering, op.state),
        stride=lowering.graph.buffers[op.x],
        rates_stride=lowering.graph.buffers[rates],
        value_row=padded_head(own["value_dim"]),
        log=lowering.state_places[op.state].log,
        log_row=padded_width(lowering.graph.states[op.state].log),
        log_values=log_values,
        log_g=log_g,
        **own,
    )
    of = isinstance(op, DeltaRule), padded_head(dim)
    few, many, keep = Variant("state_scan", (*of, True)), Variant("state_scan", (*of, False)), Variant("state_keep", of)
    return [
        Launch(op, lowering.stage, few, arguments, many, few_rows=LOG),
        Launch(op, lowering.stage, keep, arguments, few_rows=LOG, of_many=True),
    ]


def gated_norm(lowering: Lowering, op: GatedNorm) -> Sequence[Launch]:
    arguments = GatedNormArguments(
        x=lowering.buffer(op.x),
        gate=lowering.buffer(op.gate) + 4 * op.offset,
        gain=lowering.storage.floats(op.gain),
        out=lowering.buffer(op.out),
        gate_stride=lowering.graph.buffers[op.gate],
        heads=op.heads,
        head_dim=op.head_dim,
        gain_step=0 if op.gain.shape[0] == op.head_dim else op.head_dim,
        eps=op.eps,
    )
    return [Launch(op, lowering.stage, Variant("gated_norm", (op.gate_first,)), arguments)]
