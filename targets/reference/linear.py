"""The reference's linear layers: every part of `LinearSpec` in plain numpy, in the order in which the parts act."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import A4_LIMIT
from edgeq.records import LinearSpec, Mode, Transform
from edgeq.targets.graph import Linear, mode_of
from edgeq.targets.reference.context import Context, State
from edgeq.targets.rows import Rows

ArrayF32 = NDArray[np.float32]

LEAST_SPAN = 1e-30
"""Of a row's values: a smaller one counts as zero, for its inverse may not be a number."""


def linear(context: Context, op: Linear, rows: Rows, state: State) -> None:
    raw = state[op.x]
    layer, matrices, scale = context.layer(op.linear, raw, rows)
    x, y, start = prepared(context, layer, raw), np.zeros((len(raw), layer.rows), np.float32), 0
    x = x if scale is None else x * scale
    for index, weight in enumerate(layer.weights):
        block = x[:, start : start + weight.columns]
        y += matrices.product(weight, quantized(block, layer, index, mode_of(op, context.mode)))
        start += weight.columns
    if layer.low_rank is not None:
        y += context.matrices.product(layer.low_rank.b, context.matrices.product(layer.low_rank.a, raw))
    if layer.bias is not None:
        y += context.array(layer.bias)
    out = context.out(state, op.out, len(raw))[:, op.offset : op.offset + layer.rows]
    out[:] = out + y if op.add else y


def prepared(context: Context, layer: LinearSpec, x: ArrayF32) -> ArrayF32:
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


def quantized(x: ArrayF32, layer: LinearSpec, index: int, mode: Mode) -> ArrayF32:
    """x [rows, channels], the input of weight block `index`, as a mode sees it: quantized and dequantized again.

    A float block's input stays as it is in every mode, all do in a16.
    """
    codec = layer.weights[index].codec
    if mode == "a16" or codec.kind != "int":
        return x
    if layer.activation is not None:
        bits = layer.activation.high_bits if index else layer.activation.bits
        return quantize_tokens(x, bits, layer.activation.symmetric)
    return quantize_blocks(x, codec.activation_block, codec.activation_limit if mode == "a8" else A4_LIMIT)


def quantize_blocks(x: ArrayF32, size: int, limit: int) -> ArrayF32:
    """x [rows, channels] in integers of at most `limit` per row and block of channels, dequantized again.

    A block is `size` consecutive channels, the last one perhaps shorter.  scale = max|x| / limit,
    q = rint(x / scale), symmetric; a block of zeros has scale 0.
    """
    rows, channels = x.shape
    blocks = np.pad(x, ((0, 0), (0, -channels % size))).reshape(rows, -1, size)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(limit)
    # The limit matters only where the scale is so small that it was itself rounded.
    q = np.rint(blocks / np.where(scale > 0, scale, np.float32(1))).clip(-limit, limit)
    return np.ascontiguousarray((q * scale).reshape(rows, -1)[:, :channels])


def quantize_tokens(x: ArrayF32, bits: int, symmetric: bool) -> ArrayF32:
    """x [rows, channels] in integers of `bits` with one scale per row, dequantized again (arXiv 2412.14363, section 4).

    symmetric   scale = max|x| / (2^(bits-1) - 1), q = rint(x / scale)
    else        over the range that x and 0 span: scale = (max - min) / (2^bits - 1), zero = rint(-min / scale),
                q = clamp(rint(x / scale) + zero, 0, 2^bits - 1), x = scale * (q - zero)

    A row of zeros, or of numbers that are nearly that, has scale 0.
    """
    if symmetric:
        levels = np.float32((1 << (bits - 1)) - 1)
        least, span = -levels, np.abs(x).max(axis=1, keepdims=True)
    else:
        levels = np.float32((1 << bits) - 1)
        low, high = (f(x, axis=1, initial=0, keepdims=True) for f in (np.min, np.max))
        span = high - low
    some = span > LEAST_SPAN
    inverse = np.where(some, levels / np.where(some, span, np.float32(1)), np.float32(0))
    if not symmetric:
        least = -np.rint(-low * inverse)
    greatest = levels if symmetric else levels + least
    q = np.rint(x * inverse).clip(least, greatest)
    return np.asarray(q * np.where(some, span / levels, np.float32(0)), np.float32)
