"""The reference's operations over whole rows, in plain numpy: embeddings, norms, activations, experts, the choice of rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.family_operations import (
    ArrayScale,
    Gate,
    GatedAdd,
    GatedNorm,
    Limit,
    Route,
    RowMean,
    ScaleAdd,
    ScaleShift,
    ShareScale,
    SoftCap,
)
from edgeq.targets.graph import (
    Activate,
    Embed,
    Experts,
    Function,
    InjectVectors,
    LayerNorm,
    Linear,
    NormAdd,
    PositionAdd,
    RmsNorm,
    Scale,
    Select,
)
from edgeq.targets.reference.context import RunContext, State
from edgeq.targets.reference.linear import linear
from edgeq.targets.rows import Rows

ArrayF32 = NDArray[np.float32]


def mean_square(x: NDArray[np.float32 | np.float64]) -> NDArray[np.float64]:
    """Over the channels of x [..., channels]; NaN where float32, in which the other targets sum, does not hold the sum."""
    total = np.square(x, dtype=np.float64).sum(axis=-1, keepdims=True)
    mean: NDArray[np.float64] = np.where(total <= np.finfo(np.float32).max, total, np.nan) / x.shape[-1]
    return mean


def normalized(x: ArrayF32, gain: ArrayF32, eps: float) -> ArrayF32:
    """RMSNorm of x [..., channels]."""
    return np.asarray((x / np.sqrt(mean_square(x) + eps)).astype(np.float32) * gain)


def norm_add(context: RunContext, op: NormAdd, rows: Rows, state: State) -> None:
    state[op.out] += normalized(state[op.x], context.array(op.gain), op.eps)


def layer_norm(context: RunContext, op: LayerNorm, rows: Rows, state: State) -> None:
    x = state[op.x].astype(np.float64)
    centered = x - x.mean(axis=-1, keepdims=True)
    scaled = centered / np.sqrt(mean_square(centered) + op.eps)
    state[op.out] = scaled.astype(np.float32) * context.array(op.gain) + context.array(op.bias)


def scale(context: RunContext, op: Scale, rows: Rows, state: State) -> None:
    state[op.out] = state[op.x] * np.float32(op.factor)


def position_add(context: RunContext, op: PositionAdd, rows: Rows, state: State) -> None:
    state[op.x] = state[op.x] + context.array(op.table)[rows.positions[0]]


def activate(context: RunContext, op: Activate, rows: Rows, state: State) -> None:
    x = state[op.x]
    if op.clamp is not None:
        alpha, limit = map(np.float32, op.clamp)
        g, u = np.minimum(x[:, : op.width], limit), np.clip(x[:, op.width : 2 * op.width], -limit, limit)
        state[op.out] = g * _sigmoid(alpha * g) * (u + np.float32(1))
        return
    active = FUNCTIONS[op.function](x[:, : op.width])
    state[op.out] = active * x[:, op.width : 2 * op.width] if op.gated else active


def _sigmoid(x: ArrayF32) -> ArrayF32:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is infinite, its sigmoid rightly 0
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def silu(x: ArrayF32) -> ArrayF32:
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)), np.float32)


def _gelu(x: ArrayF32) -> ArrayF32:
    erf = np.array([math.erf(v) for v in (x.astype(np.float64) / math.sqrt(2)).flat]).reshape(x.shape)
    return np.asarray(x * 0.5 * (1 + erf), np.float32)


def _gelu_tanh(x: ArrayF32) -> ArrayF32:
    with np.errstate(over="ignore"):  # the cube of a large number is infinite, its tanh rightly 1
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)), np.float32)


def _relu2(x: ArrayF32) -> ArrayF32:
    with np.errstate(over="ignore"):  # the square of a large number is infinite on every target
        return np.asarray(np.square(np.maximum(x, np.float32(0))), np.float32)


FUNCTIONS: dict[Function, Callable[[ArrayF32], ArrayF32]] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(np.float32(1.702) * x),
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "relu2": _relu2,
}


def route(context: RunContext, op: Route, rows: Rows, state: State) -> None:
    logits = state[op.x][:, : op.experts]
    if op.bias is not None:
        state[op.out] = _by_sigmoids(logits, context.array(op.bias), op)
        return
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    sound = np.isfinite(logits).all(axis=1, keepdims=True)
    shares = np.where(sound, shares, np.float32(np.nan))
    # By logits: shares that are too small for a float32 are all 0.
    best = np.argsort(-np.where(sound, logits, 0), axis=1, kind="stable")[:, : op.chosen]
    picked = np.take_along_axis(shares, best, axis=1)
    if op.normalized:
        picked = picked / picked.sum(axis=1, keepdims=True)
    state[op.out] = np.concatenate([picked, best.astype(np.float32)], axis=1)


def _by_sigmoids(logits: ArrayF32, bias: ArrayF32, op: Route) -> ArrayF32:
    """Finite however large a logit is; a row with one that is not takes the first experts, with shares of NaN."""
    sound = np.isfinite(logits).all(axis=1, keepdims=True)
    scores = _sigmoid(np.where(sound, logits, np.float32(0)))
    best = np.argsort(-np.where(sound, scores + bias, 0), axis=1, kind="stable")[:, : op.chosen]
    picked = np.where(sound, np.take_along_axis(scores, best, axis=1), np.float32(np.nan))
    if op.normalized:
        picked = picked / (picked.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return np.concatenate([picked * np.float32(op.factor), best.astype(np.float32)], axis=1, dtype=np.float32)


def experts(context: RunContext, op: Experts, rows: Rows, state: State) -> None:
    x, routing = state[op.x], state[op.routing]
    chosen = routing[:, op.chosen :].astype(np.int64)
    outputs = np.zeros((len(x), op.chosen, op.downs[0].rows), np.float32)
    for expert in np.unique(chosen).tolist():
        r, rank = np.nonzero(chosen == expert)
        inner = {"x": x[r], "gate_up": np.zeros((len(r), 2 * op.width), np.float32)}
        offset = 0
        for layer in op.projections[expert]:
            linear(context, Linear(op.layer, "x", layer, "gate_up", offset), rows, inner)
            offset += layer.rows
        act = Activate(op.layer, "gate_up", op.width, "inner", op.function, op.gated, clamp=op.clamp)
        activate(context, act, rows, inner)
        inner["out"] = np.zeros((len(r), op.downs[expert].rows), np.float32)
        linear(context, Linear(op.layer, "inner", op.downs[expert], "out"), rows, inner)
        outputs[r, rank] = inner["out"]
    # The sum goes by falling share, one row like another.
    for place in range(op.chosen):
        state[op.out] += routing[:, place : place + 1] * outputs[:, place]


def gated_add(context: RunContext, op: GatedAdd, rows: Rows, state: State) -> None:
    state[op.out] += state[op.x] / (1 + np.exp(-state[op.gate][:, :1]))


def gate(context: RunContext, op: Gate, rows: Rows, state: State) -> None:
    by = state[op.gate][:, op.offset : op.offset + op.width]
    state[op.x][:, : op.width] *= _sigmoid(by) if op.function == "sigmoid" else silu(by) if op.function == "silu" else by


def gated_norm(context: RunContext, op: GatedNorm, rows: Rows, state: State) -> None:
    width = op.heads * op.head_dim
    x, gates = state[op.x][:, :width], silu(state[op.gate][:, op.offset : op.offset + width])
    heads = (x * gates if op.gate_first else x).reshape(len(rows), op.heads, op.head_dim)
    normed = normalized(heads, context.array(op.gain).reshape(-1, op.head_dim), op.eps).reshape(len(rows), width)
    context.out(state, op.out, len(rows))[:, :width] = normed if op.gate_first else normed * gates


def array_scale(context: RunContext, op: ArrayScale, rows: Rows, state: State) -> None:
    state[op.x] *= context.array(op.factor)


def scale_add(context: RunContext, op: ScaleAdd, rows: Rows, state: State) -> None:
    state[op.out] += state[op.x] * np.float32(op.factor)


def row_mean(context: RunContext, op: RowMean, rows: Rows, state: State) -> None:
    out = context.out(state, op.out, len(rows))
    out[:] = state[op.x].reshape(len(rows), op.count, -1).mean(axis=1)


def scale_shift(context: RunContext, op: ScaleShift, rows: Rows, state: State) -> None:
    state[op.x] = state[op.x] * context.array(op.scale) + context.array(op.shift)


def share_scale(context: RunContext, op: ShareScale, rows: Rows, state: State) -> None:
    routing, scales = state[op.routing], context.array(op.scales)
    routing[:, : op.chosen] *= scales[routing[:, op.chosen : 2 * op.chosen].astype(np.int64)]


def soft_cap(context: RunContext, op: SoftCap, rows: Rows, state: State) -> None:
    state[op.x] = np.float32(op.cap) * np.tanh(state[op.x] / np.float32(op.cap))


def limit(context: RunContext, op: Limit, rows: Rows, state: State) -> None:
    x, columns = state[op.x], slice(op.offset, op.offset + op.width)
    out = context.out(state, op.out, len(x))
    out[:, columns] = x[:, columns].clip(np.float32(op.least), np.float32(op.most))


def embed(context: RunContext, op: Embed, rows: Rows, state: State) -> None:
    state[op.out] = context.table_rows(op.table, rows.tokens.astype(np.int64))


def rms_norm(context: RunContext, op: RmsNorm, rows: Rows, state: State) -> None:
    state[op.out] = normalized(state[op.x], context.array(op.gain), op.eps)


def select(context: RunContext, op: Select, rows: Rows, state: State) -> None:
    """The selected rows; what other buffers hold is dropped, so that a later read of them fails."""
    taken = {out: state[name][rows.wanted] for name, out in zip(op.reads(), op.writes(), strict=True)}
    state.clear()
    state.update({name: x.reshape(-1, op.together * x.shape[1]) for name, x in taken.items()})


def inject_vectors(context: RunContext, op: InjectVectors, rows: Rows, state: State) -> None:
    out = context.out(state, op.out, len(rows))
    if rows.vectors is None or rows.vector_of is None:
        return
    brought = rows.vector_of >= 0
    vectors = rows.vectors[rows.vector_of[brought], op.offset : op.offset + out.shape[1]]
    out[brought] = out[brought] + vectors if op.add else vectors
