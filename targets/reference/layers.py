"""The reference's operations that not every family has, in plain numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.graph import (
    Experts,
    GatedAdd,
    GeGlu,
    LayerNorm,
    Linear,
    NormAdd,
    PositionAdd,
    Relu,
    Route,
    Rows,
    Scale,
    SwiGlu,
)
from edgeq.targets.reference.linear import linear

if TYPE_CHECKING:
    from edgeq.targets.reference.program import ReferenceProgram

ArrayF32 = NDArray[np.float32]
State = dict[str, ArrayF32]


def normalized(x: ArrayF32, gain: ArrayF32, eps: float) -> ArrayF32:
    """RMSNorm of x [..., channels]."""
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return np.asarray((x / np.sqrt(mean + eps)).astype(np.float32) * gain)


def norm_add(program: ReferenceProgram, op: NormAdd, rows: Rows, state: State) -> None:
    state[op.out] += normalized(state[op.x], program.array(op.gain), op.eps)


def layer_norm(program: ReferenceProgram, op: LayerNorm, rows: Rows, state: State) -> None:
    x = state[op.x].astype(np.float64)
    centered = x - x.mean(axis=-1, keepdims=True)
    scaled = centered / np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + op.eps)
    state[op.out] = scaled.astype(np.float32) * program.array(op.gain) + program.array(op.bias)


def scale(program: ReferenceProgram, op: Scale, rows: Rows, state: State) -> None:
    state[op.x] = state[op.x] * np.float32(op.factor)


def position_add(program: ReferenceProgram, op: PositionAdd, rows: Rows, state: State) -> None:
    state[op.x] = state[op.x] + program.array(op.table)[rows.positions]


def geglu(program: ReferenceProgram, op: GeGlu, rows: Rows, state: State) -> None:
    gate, up = state[op.x][:, : op.width], state[op.x][:, op.width : 2 * op.width]
    with np.errstate(over="ignore"):  # the cube of a large gate is infinite, its tanh rightly 1
        inner = np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate**3)
    state[op.out] = np.float32(0.5) * gate * (1 + np.tanh(inner)) * up


def route(program: ReferenceProgram, op: Route, rows: Rows, state: State) -> None:
    logits = state[op.x][:, : op.experts]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    best = np.argsort(-shares, axis=1, kind="stable")[:, : op.chosen]
    picked = np.take_along_axis(shares, best, axis=1)
    if op.normalized:
        picked = picked / picked.sum(axis=1, keepdims=True)
    state[op.out] = np.concatenate([picked, best.astype(np.float32)], axis=1)


def experts(program: ReferenceProgram, op: Experts, rows: Rows, state: State) -> None:
    x, routing = state[op.x], state[op.routing]
    chosen = routing[:, op.chosen :].astype(np.int64)
    outputs = np.zeros((len(x), op.chosen, op.downs[0].rows), np.float32)
    for expert in np.unique(chosen).tolist():
        r, rank = np.nonzero(chosen == expert)
        inner = {"x": x[r], "gate_up": np.zeros((len(r), 2 * op.width), np.float32)}
        offset = 0
        for layer in op.projections[expert]:
            linear(program, Linear(op.layer, "x", layer, "gate_up", offset), rows, inner)
            offset += layer.rows
        swiglu(program, SwiGlu(op.layer, "gate_up", op.width, "inner"), rows, inner)
        inner["out"] = np.zeros((len(r), op.downs[expert].rows), np.float32)
        linear(program, Linear(op.layer, "inner", op.downs[expert], "out"), rows, inner)
        outputs[r, rank] = inner["out"]
    # The sum goes by falling share, one row like another.
    for place in range(op.chosen):
        state[op.out] += routing[:, place : place + 1] * outputs[:, place]


def gated_add(program: ReferenceProgram, op: GatedAdd, rows: Rows, state: State) -> None:
    state[op.out] += state[op.x] / (1 + np.exp(-state[op.gate][:, :1]))


def swiglu(program: ReferenceProgram, op: SwiGlu, rows: Rows, state: State) -> None:
    gate, up = state[op.x][:, : op.width], state[op.x][:, op.width : 2 * op.width]
    with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is infinite, its silu rightly 0
        state[op.out] = gate / (1 + np.exp(-gate)) * up


def relu(program: ReferenceProgram, op: Relu, rows: Rows, state: State) -> None:
    state[op.out] = np.maximum(state[op.x][:, : op.width], np.float32(0))
