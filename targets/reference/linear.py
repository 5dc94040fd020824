"""The reference's linear layers: every part of `LinearSpec` in plain numpy, in the order in which the parts act."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import ROWS
from edgeq.codec import dequantize as dequantize_codec
from edgeq.codec import dequantize_rows as dequantize_codec_rows
from edgeq.container import ModelFile
from edgeq.quantization import quantized_input
from edgeq.records import LinearSpec, Transform, Weight
from edgeq.targets.graph import Linear, Rows, mode_of
from edgeq.targets.requantization import Weights

if TYPE_CHECKING:
    from edgeq.targets.reference.program import ReferenceProgram

ArrayF32 = NDArray[np.float32]
State = dict[str, ArrayF32]

KEEP_BYTES = 1 << 30
"""Dequantized matrices kept between runs; what does not fit is dequantized again, block by block, each time it is used."""
BLOCK_ELEMENTS = 1 << 22


class Matrices:
    """Stored weights as float32, some of them kept."""

    def __init__(self, file: ModelFile | Weights) -> None:
        self._file = file
        self.kept: dict[Weight, list[ArrayF32]] = {}
        self._kept_bytes = 0

    def rows(self, weight: Weight, indices: NDArray[np.int64]) -> ArrayF32:
        """Rows of the matrix by index: [len(indices), columns]."""
        return dequantize_codec_rows(weight.codec, weight.columns, indices, *self._parts(weight))

    def blocks(self, weight: Weight) -> Iterator[ArrayF32]:
        """The matrix as consecutive blocks of rows.  Block sizes never vary, so neither does a row's arithmetic."""
        if weight in self.kept:
            yield from self.kept[weight]
            return
        keep = self._kept_bytes + weight.rows * weight.columns * 4 <= KEEP_BYTES
        kept = []
        step = max(1, BLOCK_ELEMENTS // (weight.columns * ROWS))  # in blocks of 16 rows
        q, scale, zero = self._parts(weight)
        for start in range(0, len(q), step):
            cut = slice(start, start + step)
            rows = min((start + step) * ROWS, weight.rows) - start * ROWS
            parts = [None if a is None else a[cut] for a in (scale, zero)]
            block = dequantize_codec(weight.codec, rows, weight.columns, q[cut], *parts)
            if keep:
                kept.append(block)
            yield block
        if keep:
            self.kept[weight] = kept
            self._kept_bytes += weight.rows * weight.columns * 4

    def product(self, weight: Weight, x: ArrayF32) -> ArrayF32:
        """x [rows, columns] -> [rows, rows of the weight], row by row."""
        y = np.empty((len(x), weight.rows), np.float32)
        at = 0
        for block in self.blocks(weight):
            for r in range(len(x)):
                y[r, at : at + len(block)] = block @ x[r].copy()
            at += len(block)
        return y

    def _parts(self, weight: Weight) -> tuple[Any, Any, Any]:
        return (
            self._file.array(weight.q),
            None if weight.scale is None else self._file.array(weight.scale),
            None if weight.zero is None else self._file.array(weight.zero),
        )


def linear(program: ReferenceProgram, op: Linear, rows: Rows, state: State) -> None:
    raw = state[op.x]
    layer, matrices, scale = program.layer(op.linear, raw, rows)
    x, y, start = prepared(program, layer, raw), np.zeros((len(raw), layer.rows), np.float32), 0
    x = x if scale is None else x * scale
    for index, weight in enumerate(layer.weights):
        block = x[:, start : start + weight.columns]
        y += matrices.product(weight, quantized_input(block, layer, index, mode_of(op, program.mode)))
        start += weight.columns
    if layer.low_rank is not None:
        y += program.matrices.product(layer.low_rank.b, program.matrices.product(layer.low_rank.a, raw))
    if layer.bias is not None:
        y += program.array(layer.bias)
    out = program.out(state, op.out, len(raw))[:, op.offset : op.offset + layer.rows]
    out[:] = out + y if op.add else y


def prepared(program: ReferenceProgram, layer: LinearSpec, x: ArrayF32) -> ArrayF32:
    """x [rows, columns] as the weights read it: ordered, transformed and scaled.

    FormatError: the order names a channel that is not there.
    """
    order = program.file.array(layer.input_order) if layer.input_order else None
    if order is not None:
        x = x[:, order]
    if layer.transform is not None:
        base = None if layer.transform.base is None else program.array(layer.transform.base)
        x = transformed(x, layer.transform, base)
    if layer.input_scale is not None:
        x = x * program.array(layer.input_scale)
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
