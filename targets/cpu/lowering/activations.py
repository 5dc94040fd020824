"""Quantized activations: in which layout a layer reads its input, and the operations that write it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgeq.format.codec import CHUNK
from edgeq.format.manifest import MODALITIES
from edgeq.format.quantization import MAX_ACTIVATION_BLOCK, activation_block, activation_limit, input_rule
from edgeq.format.records import ArrayRef, LinearSpec, Mode
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import Buffers
from edgeq.targets.cpu.kernels.args import A8, A16, A16_PAIRS, BLOCK, FLOAT, STATIC, TOKEN, TOKEN_ZERO
from edgeq.targets.cpu.kernels.products import matrix_matmul, winograd
from edgeq.targets.cpu.kernels.rows import quantize
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.lowering.layout import MAX_BYTE, Layout, QuantizedActivation
from edgeq.targets.cpu.threads.optable import channel_parts, kernel

MAX_A16 = 256 * MAX_BYTE + MAX_BYTE
"""The largest integer of an activation block in mode a16: two signed bytes, where the low one is the less by 1 of 256."""
SCALINGS = {"block": BLOCK, "token": TOKEN, "token_zero": TOKEN_ZERO, "static": STATIC}
PLACEHOLDER_BYTES = 64


def layer_read(context: Context, layer: LinearSpec) -> LinearSpec:
    """The layer as the table reads it: perhaps its master for its weights."""
    if context.source != "masters" or context.masters.indices.get(layer.name) is None:
        return layer
    assert layer.master
    return replace(layer, weights=(layer.master,))


def layouts(context: Context, o: op.Linear) -> list[Layout]:
    """The layout in which each block of a layer's weights reads its columns."""
    found, first, layer = list[Layout](), 0, layer_read(context, o.linear)
    for index, weight in enumerate(layer.weights):
        found.append(_layout(context, layer, index, first, context.mode(o)))
        first += weight.columns
    return found


def _layout(context: Context, layer: LinearSpec, index: int, first: int, mode: Mode) -> Layout:
    weight = layer.weights[index]
    factors = context.memory.copied(context.file.array(layer.input_scale)) + 4 * first if layer.input_scale else 0
    factors = factors or input_factors(context, layer)
    if not weight.codec.integer:
        return Layout(FLOAT, weight.columns, MAX_ACTIVATION_BLOCK, factors=factors, first=first)
    codec, bits, block = weight.codec, weight.codec.multiplied_bits, activation_block(weight.codec)
    wide = A16_PAIRS if context.isa.takes_pairs(bits) else A16
    rule = input_rule(layer, index, mode)
    limit, scaling = (rule.limit, SCALINGS[rule.kind]) if rule else (MAX_A16, BLOCK)
    constants = _constants(context, rule.scales) if rule and rule.scales else 0
    # Less their zero point, 8 bits are from -255 to 255.
    kind = wide if limit > MAX_BYTE else A16_PAIRS if context.isa.widens(bits) else A8
    fits = kind == A8 and bits == winograd.BITS and limit <= activation_limit(codec, "a8")
    by_winograd = context.isa.winograd and fits and block >= CHUNK
    flat_from = matrix_matmul.MIN_ROWS[kind] if context.isa.matrix_unit and matrix_matmul.takes(kind, block) else 0
    return Layout(kind, weight.columns, block, limit, scaling, factors, first, by_winograd, constants, flat_from)


def _constants(context: Context, scales: ArrayRef) -> int:
    """The address of inverse and scale of every modality, f32 [modalities, 2]."""

    def stored() -> int:
        values = np.broadcast_to(context.file.array(scales), MODALITIES)
        return context.memory.copied(np.stack([np.float32(1) / values, values], axis=1))

    return context.once(("constants", scales), stored)


def input_factors(context: Context, layer: LinearSpec) -> int:
    """The address of what requantized weights multiply the input of `layer` by, 0 if there is nothing."""
    index = context.masters.indices.get(layer.name) if context.source == "requantized" else None
    return 0 if index is None else factors_of(context.memory, index)


def factors_of(memory: Buffers, index: int) -> int:
    """The address that stands for the factors of shared input `index` until the weights are there."""
    return memory.shared(("factors", index), PLACEHOLDER_BYTES)


def quantized(context: Context, buffer: str, layout: Layout) -> QuantizedActivation:
    """The quantized activations of a buffer: those that its maker has written, or of an operation of their own."""
    if made := context.quantized(buffer, layout):
        return made
    made = context.add_quantized(buffer, layout)
    function = kernel(quantize.quantize, context.max_tile)
    if layout.scaling in (TOKEN, TOKEN_ZERO):
        function = kernel(quantize.quantize_tokens, context.max_tile, int(layout.scaling == TOKEN_ZERO))
    x, stride = context.place(buffer)
    args = quantize.QuantizeArgs(x=x + 4 * layout.first, x_stride=stride, quantized=made.args())
    context.emit(function, args, parts=channel_parts(layout.columns))
    return made
