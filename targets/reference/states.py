"""The reference's operations of layers with a state, which takes the rows of a run one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.network.delta_net import UNIT_EPS
from edgeq.targets.family_operations import DeltaRule, RowBefore, ShortConv, SiluConv, SsdScan, padded_head
from edgeq.targets.host_states import HostSnapshot, HostState
from edgeq.targets.reference.context import RunContext, State
from edgeq.targets.reference.layers import silu
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.state_layout import padded_rows, padded_width
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
    context.out(buffers, op.out, len(rows))[:] = c * _convolved(context, op, rows, b * u)


def silu_conv(context: RunContext, op: SiluConv, rows: Rows, buffers: State) -> None:
    convolved = _convolved(context, op, rows, buffers[op.x][:, : op.width])
    context.out(buffers, op.out, len(rows))[:] = silu(convolved if op.bias is None else convolved + context.array(op.bias))


def _convolved(context: RunContext, op: ShortConv | SiluConv, rows: Rows, inputs: ArrayF32) -> ArrayF32:
    """sum over j of weight[:, j] * (the inputs of slot t - taps + 1 + j), of every row."""
    weight, out = context.array(op.weight), np.zeros((len(rows), op.width), np.float32)
    taps = weight.shape[1]
    for row in rows_of_state(context, op.state, rows):
        ring = len(row.state)
        row.state[row.slot % ring] = inputs[row.row]
        # From the oldest on; before slot 0 a state holds zeros.
        for j in range(taps):
            out[row.row] += weight[:, j] * row.state[(row.slot - taps + 1 + j) % ring]
        if row.snapshot is not None:
            row.snapshot[:] = row.state[np.arange(row.slot - taps + 2, row.slot + 1) % ring]
    return out


def row_before(context: RunContext, op: RowBefore, rows: Rows, buffers: State) -> None:
    out = context.out(buffers, op.out, len(rows))
    for row in rows_of_state(context, op.state, rows):
        ring = len(row.state)
        out[row.row, : op.width] = row.state[(row.slot - 1) % ring]
        if op.keeps:
            row.state[row.slot % ring] = buffers[op.x][row.row, : op.width]
            if row.snapshot is not None:
                row.snapshot[:] = row.state[row.slot % ring]


def delta_rule(context: RunContext, op: DeltaRule, rows: Rows, buffers: State) -> None:
    keys, shared = op.key_heads * op.key_dim, op.value_heads // op.key_heads
    q, k, v, _ = np.split(buffers[op.x], [keys, 2 * keys, 2 * keys + op.value_heads * op.value_dim], axis=1)
    q, k = (_units(each.reshape(len(rows), op.key_heads, op.key_dim)) for each in (q, k))
    q, v = q * np.float32(op.key_dim**-0.5), v.reshape(len(rows), op.value_heads, op.value_dim)
    b, a = buffers[op.rates][:, : op.value_heads], buffers[op.rates][:, op.value_heads : 2 * op.value_heads]
    decay, bias = context.array(op.decay_log), context.array(op.dt_bias)
    with np.errstate(over="ignore", invalid="ignore"):
        beta = np.float32(op.beta_scale) / (1 + np.exp(-b))
        g = -np.exp(decay) * np.logaddexp(np.float32(0), a + bias)
    out = context.out(buffers, op.out, len(rows))
    of_d, of_g = op.log_places
    for row in rows_of_state(context, op.state, rows):
        r, first = row.row, row.slot // LOG * LOG
        log = row.log[np.arange(first, row.slot + 1) % (2 * LOG)]
        state, after = row.state[row.slot // LOG % 2], row.state[(row.slot // LOG + 1) % 2]
        here = row.log[row.slot % (2 * LOG)]
        here[:of_d].reshape(op.key_heads, -1)[:, : op.key_dim] = k[r]
        here[of_g:] = g[r]
        log[-1] = here
        log_k = log[:, :of_d].reshape(len(log), op.key_heads, padded_head(op.key_dim))[:, :, : op.key_dim]
        log_d = log[:, of_d:of_g].reshape(len(log), op.value_heads, padded_head(op.value_dim))[:, :, : op.value_dim]
        weights, whole = _decays(log[:, of_g:])
        key, query = (np.repeat(each[r], shared, axis=0) for each in (k, q))
        past, asked = (weights * np.repeat((log_k * each[r]).sum(axis=2), shared, axis=1) for each in (k, q))
        d = v[r] - whole[:, None] * np.matmul(key[:, None], state)[:, 0]
        result = whole[:, None] * np.matmul(query[:, None], state)[:, 0]
        for j in range(len(log) - 1):
            d = d - past[j, :, None] * log_d[j]
            result = result + asked[j, :, None] * log_d[j]
        log_d[-1] = beta[r][:, None] * d
        out[r] = (result + asked[-1][:, None] * log_d[-1]).ravel()
        if row.slot % LOG == LOG - 1:
            total = whole[:, None, None] * state
            for j in range(len(log)):
                decayed = weights[j][:, None] * np.repeat(log_k[j], shared, axis=0)
                total = total + decayed[:, :, None] * log_d[j][:, None]
            after[:] = total
        here[of_d:of_g] = log[-1, of_d:of_g]
        if row.snapshot is not None:
            row.snapshot[:] = after


def ssd_scan(context: RunContext, op: SsdScan, rows: Rows, buffers: State) -> None:
    inner, width, of_group = op.heads * op.head_dim, op.groups * op.state_dim, op.heads // op.groups
    u, b, c, _ = np.split(buffers[op.x], [inner, inner + width, inner + 2 * width], axis=1)
    # Of each group as often as it stands in the log, and as it has heads.
    b, c = (each.reshape(len(rows), op.groups, op.state_dim) for each in (b, c))
    b, c = np.repeat(b, of_group // op.shared, axis=1), np.repeat(c, of_group, axis=1)
    u = u.reshape(len(rows), op.heads, op.head_dim)
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.logaddexp(np.float32(0), buffers[op.dt][:, : op.heads] + context.array(op.dt_bias))
        shortest, longest = op.limits
        step = np.clip(step, np.float32(shortest), np.float32(longest))
        g = -np.exp(context.array(op.decay_log)) * step
    skipped = context.array(op.skip)[:, None] * u
    out = context.out(buffers, op.out, len(rows))
    of_u, of_g = op.log_places
    for row in rows_of_state(context, op.state, rows):
        r, first = row.row, row.slot // LOG * LOG
        state, after = row.state[row.slot // LOG % 2], row.state[(row.slot // LOG + 1) % 2]
        here = row.log[row.slot % (2 * LOG)]
        here[:of_u].reshape(-1, padded_head(op.state_dim))[:, : op.state_dim] = b[r]
        here[of_u:of_g].reshape(op.heads, -1)[:, : op.head_dim] = step[r][:, None] * u[r]
        here[of_g:] = g[r]
        log = row.log[np.arange(first, row.slot + 1) % (2 * LOG)]
        log_b = log[:, :of_u].reshape(len(log), -1, padded_head(op.state_dim))[:, :, : op.state_dim]
        log_b = np.repeat(log_b, op.shared, axis=1)
        log_u = log[:, of_u:of_g].reshape(len(log), op.heads, padded_head(op.head_dim))[:, :, : op.head_dim]
        weights, whole = _decays(log[:, of_g:])
        asked = weights * (log_b * c[r]).sum(axis=2)
        result = whole[:, None] * np.matmul(c[r][:, None], state)[:, 0]
        for j in range(len(log)):
            result = result + asked[j, :, None] * log_u[j]
        out[r] = (result + skipped[r]).ravel()
        if row.slot % LOG == LOG - 1:
            total = whole[:, None, None] * state
            for j in range(len(log)):
                total = total + (weights[j][:, None] * log_b[j])[:, :, None] * log_u[j][:, None]
            after[:] = total
        if row.snapshot is not None:
            row.snapshot[:] = after


def _decays(g: ArrayF32) -> tuple[ArrayF32, ArrayF32]:
    """exp of the sums of g [rows, heads] of the rows after each one, [rows, heads], and of all, [heads].

    From the newest row back, one exponential each: a sum that is taken apart again would lose digits.
    """
    back = np.cumsum(g[::-1], axis=0, dtype=np.float32)[::-1]
    return np.exp(np.concatenate([back[1:], np.zeros_like(back[:1])])), np.exp(back[0])


def _units(x: ArrayF32) -> ArrayF32:
    """x [rows, heads, channels] with heads of length 1."""
    return np.asarray(x / np.sqrt(np.square(x).sum(axis=2, keepdims=True) + np.float32(UNIT_EPS)), np.float32)
