"""A linear layer as op records: its parts in the order in which they act, as few operations as they need.

input_order, transform      operations that write a prepared input, which layers of the same parts share
input_scale                 inside the quantization, whoever does that
activation, mode            the maker of a buffer also writes it quantized; scales per token take their own operation
weights                     a product for each block, the second adds
split_row                   a pass over the result
low_rank                    two thin products
bias, residual              inside the first product
"""

from __future__ import annotations

from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.kernels.products import low_rank
from edgeq.targets.cpu.lowering import requantize
from edgeq.targets.cpu.lowering.activations import layer_read
from edgeq.targets.cpu.lowering.codecs import CODECS
from edgeq.targets.cpu.lowering.context import BufferRows, Context
from edgeq.targets.cpu.lowering.fuse import Fusion
from edgeq.targets.cpu.lowering.prepare import prepared
from edgeq.targets.cpu.lowering.products import LinearProduct, thin_product
from edgeq.targets.cpu.threads.optable import kernel


def linear(context: Context, o: op.Linear, fusion: Fusion) -> None:
    requantize.count_input(context, o)
    layer = layer_read(context, o.linear)
    x = prepared(context, layer, o, fusion.activation)
    out = context.place(o.out)
    y = BufferRows(out.address + 4 * o.offset, out.stride)
    bias = context.memory.floats(layer.bias) if layer.bias else 0
    for index, (weight, activation) in enumerate(zip(layer.weights, x.activations, strict=True)):
        product = LinearProduct(weight, y, 0 if index else bias, o.add or index > 0, fusion.swiglu)
        CODECS[weight.codec.kind].product(context, product, activation)
    if layer.split_row:
        split = low_rank.SplitRowArgs(
            x=x.split.address, x_stride=x.split.stride,
            weights=context.memory.floats(layer.split_row.row), width=layer.rows, y=y.address, y_stride=y.stride,
        )  # fmt: skip
        context.emit(kernel(low_rank.split_row), split)
    if layer.low_rank:
        a, b = layer.low_rank.a, layer.low_rank.b
        width = 4 * padded(a.rows)
        inner = BufferRows(context.memory.shared("low rank", context.max_rows * width), width)
        thin_product(context, LinearProduct(a, inner), context.place(o.x))
        thin_product(context, LinearProduct(b, y, add=True), inner)
    requantize.release_master(context, o)
    context.invalidate(o.out)
