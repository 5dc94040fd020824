"""What a layer's product reads: its input, its channels perhaps in another order and transformed, then quantized.

Layers of the same parts share what is made.  A transform writes the quantized activations of its result itself, row by row in a
thread's cache; of float32 only the channel that a split row reads is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeq.format.codec import ROWS
from edgeq.format.records import LinearSpec, Transform
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.args import Args
from edgeq.targets.cpu.jit.buffers import row_stride
from edgeq.targets.cpu.kernels.args import TOKEN, TOKEN_ZERO
from edgeq.targets.cpu.kernels.rows import hadamard
from edgeq.targets.cpu.kernels.rows import transform as kernels
from edgeq.targets.cpu.kernels.rows.activate import FUNCTION_CODES
from edgeq.targets.cpu.lowering.activations import layouts, quantized
from edgeq.targets.cpu.lowering.context import BufferRows, Context
from edgeq.targets.cpu.lowering.layout import QuantizedActivation
from edgeq.targets.cpu.threads.optable import Variant, channel_parts, kernel

ROWS_OF_THREADS = "transformed"
"""The threads' memory for a row that is transformed."""
MIN_PRODUCTS = 1 << 16
"""Multiplications with a dense transform's base that are worth a work item of their own."""


@dataclass(frozen=True)
class Prepared:
    """Quantized activations for each block of a layer's weights, and where the channel lies that its split row reads."""

    activations: list[QuantizedActivation]
    split: BufferRows


def prepared(context: Context, layer: LinearSpec, o: op.Linear, activation: op.Activate | None) -> Prepared:
    """The input of a layer, made unless another layer has done so since it was written.

    activation   its transform does this in runs of several rows (`transforms_at_once`)
    """
    indices = context.memory.copied(context.file.array(layer.input_order)) if layer.input_order else 0
    if transforms_at_once(context, layer):
        return _at_once(context, layer, o, indices, activation)
    source = _in_turn(context, layer, o.x, indices)
    (address, stride), wanted = context.place(source), layouts(context, o)
    channel = layer.split_row.index if layer.split_row else 0
    return Prepared([quantized(context, source, layout) for layout in wanted], BufferRows(address + 4 * channel, stride))


def transforms_at_once(context: Context, layer: LinearSpec) -> bool:
    """Whether one operation transforms a row and quantizes it for the layer."""
    return layer.transform is not None and len(layer.weights) == 1 and _sums(context, layer.transform) is not None


def _ordered(context: Context, x: BufferRows, out: BufferRows, columns: int, indices: int) -> None:
    args = hadamard.GatherArgs(
        x=x.address, x_stride=x.stride, out=out.address, out_stride=out.stride, columns=columns, indices=indices
    )
    context.emit(kernel(hadamard.gather), args, parts=channel_parts(columns))


def _sums(context: Context, transform: Transform) -> int | None:
    """The address of which sums of four pieces each piece of the result takes (kernels/rows/transform.py), 0 without a base;
    None: the base is not one of signs, or its pieces are no whole vectors."""
    if not transform.base:
        return 0
    ref, order = transform.base, transform.base_size
    width = transform.size // order * transform.stride

    def made() -> int | None:
        base = context.file.array(ref).reshape(order, order)
        if order % 4 or width % ROWS or not bool((np.abs(base) == 1).all()):
            return None
        fours = order // 4
        place = (base < 0).reshape(order, fours, 4) @ np.array([1, 2, 4, 8]) * kernels.SUM_BYTES
        place = place + kernels.SUMS_BYTES * np.arange(fours)
        return context.memory.copied(place.reshape(fours, 4, fours).transpose(0, 2, 1).astype(np.int32))

    return context.once(("signs", ref, width), made)


def _at_once(context: Context, layer: LinearSpec, o: op.Linear, indices: int, activation: op.Activate | None) -> Prepared:
    """Ordered, then transformed and quantized by one operation."""
    buffer, (layout,), transform, columns = o.x, layouts(context, o), layer.transform, layer.columns
    assert transform
    sums = _sums(context, transform)
    assert sums is not None
    channel = layer.split_row.index if layer.split_row else 0
    key = (indices, sums, transform.size, transform.stride, channel)
    made = context.prepared(buffer, key) or context.add_prepared(buffer, key, 1)
    if known := context.quantized(made, layout):
        return Prepared([known], context.place(made))
    integers, (kept, kept_stride), x = context.add_quantized(made, layout), context.place(made), context.place(buffer)
    if indices:
        ordered = context.temporary("ordered", columns)
        _ordered(context, x, ordered, columns, indices)
        x = ordered
    row, table = row_stride(columns), kernels.SUMS_BYTES * (transform.base_size // 4)
    args: Args = kernels.TransformArgs(
        x=x.address, x_stride=x.stride, power=transform.size // transform.base_size, stride=transform.stride,
        factor=transform.size**-0.5, order=transform.base_size, sums=sums,
        room=context.memory.shared(ROWS_OF_THREADS, context.threads * (2 * row + table)), row_bytes=row, table_bytes=table,
        kept=kept, kept_stride=kept_stride, kept_channel=channel, quantized=integers.args(),
    )  # fmt: skip

    def variant(function: int, with_gate: int) -> Variant:
        if layout.scaling in (TOKEN, TOKEN_ZERO):
            zero = int(layout.scaling == TOKEN_ZERO)
            return kernel(kernels.transform_tokens, context.max_tile, function, with_gate, zero)
        return kernel(kernels.transform, context.max_tile, function, with_gate)

    prefill = decode = variant(kernels.NOTHING, 0)
    if activation:
        function = kernels.SWIGLU if activation.swiglu else FUNCTION_CODES[activation.function]
        prefill, (inner, inner_stride) = variant(function, int(activation.gated)), context.place(activation.x)
        args = args.replaced(inner=inner, inner_stride=inner_stride)
    context.emit(prefill, args, decode=decode)
    return Prepared([integers], context.place(made))


def _in_turn(context: Context, layer: LinearSpec, buffer: str, indices: int) -> str:
    """The buffer that holds the input ordered and transformed as float32."""
    transform, base = layer.transform, 0
    if transform and transform.base:
        base = context.memory.copied(context.file.array(transform.base))
    if not transform and not indices:
        return buffer
    key = (indices, base, transform and (transform.size, transform.stride))
    if made := context.prepared(buffer, key):
        return made
    made = context.add_prepared(buffer, key, layer.columns)
    x, out = context.place(buffer), context.place(made)
    if indices:
        # A transform does not end where it reads.
        ordered = context.temporary("ordered", layer.columns) if transform else out
        _ordered(context, x, ordered, layer.columns, indices)
        x = ordered
    if transform:
        _transform(context, transform, base, x, out, layer.columns)
    return made


def _transform(context: Context, transform: Transform, base: int, x: BufferRows, out: BufferRows, columns: int) -> None:
    power, factor, stride = transform.size // transform.base_size, transform.size**-0.5, transform.stride
    if power > 1 or not base:
        target = context.temporary("butterflies", columns) if base else out
        args = hadamard.HadamardArgs(
            x=x.address, x_stride=x.stride, out=target.address, out_stride=target.stride,
            columns=columns, power=power, stride=stride, factor=1.0 if base else factor,
        )  # fmt: skip
        pieces = columns // (power * stride) * max(1, stride // ROWS)
        context.emit(kernel(hadamard.hadamard), args, parts=min(pieces, channel_parts(columns)))
        x = target
    if base:
        mixed = hadamard.MixArgs(
            x=x.address, x_stride=x.stride, out=out.address, out_stride=out.stride,
            columns=columns, order=transform.base_size, width=power * stride, factor=factor, base=base,
        )  # fmt: skip
        context.emit(kernel(hadamard.mix), mixed, parts=-(-columns * transform.base_size // MIN_PRODUCTS))
