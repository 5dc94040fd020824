"""The reference's linear layers: every part of `LinearSpec` in plain numpy, in the order in which the parts act."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeq.format.quantization import quantized_input
from edgeq.format.records import LinearSpec, Transform
from edgeq.targets.graph import Linear
from edgeq.targets.layers import mode_of
from edgeq.targets.reference.context import RunContext, State
from edgeq.targets.rows import Rows

ArrayF32 = NDArray[np.float32]


def linear(context: RunContext, op: Linear, rows: Rows, state: State) -> None:
    raw = state[op.x]
    layer, matrices, scale = context.layer(op.linear, raw, rows)
    x, y, start = prepared(context, layer, raw), np.zeros((len(raw), layer.rows), np.float32), 0
    x = x if scale is None else x * scale
    scales = row_scales(context, layer, rows)
    for index, weight in enumerate(layer.weights):
        block = x[:, start : start + weight.columns]
        y += matrices.product(weight, quantized_input(block, layer, index, mode_of(op, context.mode), scales))
        start += weight.columns
    if layer.split_row is not None:
        y += x[:, layer.split_row.index, None] * context.array(layer.split_row.row)
    if layer.low_rank is not None:
        y += context.matrices.product(layer.low_rank.b, context.matrices.product(layer.low_rank.a, raw))
    if layer.bias is not None:
        y += context.array(layer.bias)
    out = context.out(state, op.out, len(raw))[:, op.offset : op.offset + layer.rows]
    out[:] = out + y if op.add else y


def row_scales(context: RunContext, layer: LinearSpec, rows: Rows) -> ArrayF32 | None:
    """The constant activation scale of every row, float32 [rows]; None: the layer has none."""
    if layer.activation is None or layer.activation.scales is None:
        return None
    scales = context.array(layer.activation.scales)
    modality = np.zeros(len(rows), np.uint8) if rows.modality is None else rows.modality
    return np.asarray(scales[np.minimum(modality, len(scales) - 1)], np.float32)


def prepared(context: RunContext, layer: LinearSpec, x: ArrayF32) -> ArrayF32:
    """x [rows, columns] as the weights read it: ordered, transformed and scaled.

    FormatError: the order names a channel that is not there.
    """
    order = context.file.array(layer.input_order) if layer.input_order else None
    if order is not None:
        x = x[:, order]
    if layer.transform is not None:
        base = None if layer.transform.base is None else context.array(layer.transform.base)
        x = transformed(x, layer.transform, base)
    if layer.input_scale is not None:
        x = x * context.array(layer.input_scale)
    return np.asarray(x)


def transformed(x: ArrayF32, transform: Transform, base: ArrayF32 | None) -> ArrayF32:
    """(base (x) H_2^m) v / sqrt(size) for every run v of x [rows, channels]; sums in float64."""
    power = transform.size // transform.base_size
    v = x.astype(np.float64).reshape(len(x), -1, transform.base_size, power, transform.stride)
    half = 1
    while half < power:
        pairs = v.reshape(*v.shape[:3], -1, 2, half, transform.stride)
        a, b = pairs[..., 0, :, :], pairs[..., 1, :, :]
        v = np.stack([a + b, a - b], axis=-3).reshape(v.shape)
        half *= 2
    if base is not None:
        columns = v.reshape(*v.shape[:3], -1)  # [rows, runs, K, 2^m * stride]
        v = np.matmul(base.astype(np.float64), columns)
    return v.reshape(x.shape).astype(np.float32) * np.float32(transform.size**-0.5)
