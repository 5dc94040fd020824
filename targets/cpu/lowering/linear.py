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

from dataclasses import dataclass
from typing import Any

from edgeq.codec import CHUNK, ROWS
from edgeq.records import LinearSpec, Transform, Weight
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.optable import channel_parts, kernel
from edgeq.targets.cpu.kernels import hadamard, low_rank, matmul, matrix_matmul, matrix_swiglu, swiglu_matmul, winograd
from edgeq.targets.cpu.kernels.args import A16, FLOAT_KINDS, ProductArgs
from edgeq.targets.cpu.lowering import requantize
from edgeq.targets.cpu.lowering.activations import layer_read, layouts, quantized
from edgeq.targets.cpu.lowering.context import Context, Place
from edgeq.targets.cpu.lowering.fuse import Fusion
from edgeq.targets.cpu.lowering.layout import QuantizedActivation

WINOGRAD = "winograd"
"""The threads' memory for the constants of weights that are multiplied by Winograd's method."""
UNPACKED = "unpacked"
"""The threads' memory for weights that are unpacked before they are multiplied."""
GROUP_BYTES = 256 << 10
"""Weights that stay in a core's second-level cache while the tokens of a chunk pass by."""
LEAST_PRODUCTS = 1 << 16
"""Multiplications with a dense transform's base that are worth a work item of their own."""


@dataclass(frozen=True)
class Product:
    """y = W x + bias, or with `add` y += W x + bias.  `swiglu`: in runs of several rows also the SwiGLU after it."""

    weight: Weight
    y: Place
    bias: int = 0
    add: bool = False
    swiglu: bool = False


def linear(context: Context, o: op.Linear, fusion: Fusion) -> None:
    requantize.count_input(context, o)
    layer = layer_read(context, o.linear)
    x = _prepared(context, layer, o.x)
    activations = [quantized(context, x, layout) for layout in layouts(context, o)]
    out = context.place(o.out)
    y = Place(out.address + 4 * o.offset, out.stride)
    bias = context.memory.floats(layer.bias) if layer.bias else 0
    for index, (weight, activation) in enumerate(zip(layer.weights, activations, strict=True)):
        product = Product(weight, y, 0 if index else bias, o.add or index > 0, fusion.swiglu)
        if weight.codec.kind == "int":
            _integer_product(context, product, activation)
        else:
            _float_product(context, product, activation)
    if layer.split_row:
        source = context.place(x)
        split = low_rank.SplitRowArgs(
            x=source.address + 4 * layer.split_row.index, x_stride=source.stride,
            weights=context.memory.floats(layer.split_row.row), width=layer.rows, y=y.address, y_stride=y.stride,
        )  # fmt: skip
        context.emit(kernel(low_rank.split_row), split)
    if layer.low_rank:
        a, b = layer.low_rank.a, layer.low_rank.b
        width = 4 * padded(a.rows)
        inner = Place(context.memory.shared("low rank", context.max_rows * width), width)
        _thin_product(context, Product(a, inner), context.place(o.x))
        _thin_product(context, Product(b, y, add=True), inner)
    requantize.release_master(context, o)
    context.invalidate(o.out)


def _prepared(context: Context, layer: LinearSpec, buffer: str) -> str:
    """The buffer that holds x ordered and transformed: made unless another layer has done so since x was written."""
    order = context.file.array(layer.input_order) if layer.input_order else None
    indices = 0 if order is None else context.memory.copied(order)
    transform, base = layer.transform, 0
    if transform and transform.base:
        base = context.memory.copied(context.file.array(transform.base))
    if not transform and order is None:
        return buffer
    key = (indices, base, transform and (transform.size, transform.stride))
    if made := context.prepared(buffer, key):
        return made
    made = context.add_prepared(buffer, key, layer.columns)
    x, out = context.place(buffer), context.place(made)
    if order is not None:
        # A transform does not end where it reads.
        ordered = context.temporary("ordered", layer.columns) if transform else out
        args = hadamard.GatherArgs(
            x=x.address, x_stride=x.stride, out=ordered.address, out_stride=ordered.stride,
            columns=layer.columns, indices=indices,
        )  # fmt: skip
        context.emit(kernel(hadamard.gather), args, parts=channel_parts(layer.columns))
        x = ordered
    if transform:
        _transform(context, transform, base, x, out, layer.columns)
    return made


def _transform(context: Context, transform: Transform, base: int, x: Place, out: Place, columns: int) -> None:
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
        context.emit(kernel(hadamard.mix), mixed, parts=-(-columns * transform.base_size // LEAST_PRODUCTS))


def _integer_product(context: Context, product: Product, x: QuantizedActivation) -> None:
    weight, codec, block = product.weight, product.weight.codec, x.layout.block
    blocks, groups, grouped = weight.q.shape[0], codec.groups(weight.columns), int(codec.group_size > 0)
    blocks_per_tile, zero = context.isa.blocks_per_tile, int(not codec.symmetric)
    literals = (context.isa_index, codec.bits, int(x.layout.kind == A16), zero, int(block < CHUNK))
    factory = swiglu_matmul.gated_matmul if product.swiglu else matmul.integer_matmul
    prefill, room = kernel(factory, *literals), 0
    shared = _shared_args(context, product)
    if x.winograd_sums:
        at_once = blocks_per_tile * swiglu_matmul.UNIT if product.swiglu else padded(shared["group_blocks"], blocks_per_tile)
        nbytes = at_once * winograd.CONSTANT_BYTES * x.layout.blocks
        room = context.memory.shared(WINOGRAD, context.threads * nbytes)
        by_winograd = winograd.gated_winograd_matmul if product.swiglu else winograd.winograd_matmul
        prefill = kernel(by_winograd, context.isa_index, zero)
    if x.layout.flat_from:
        group, room = _matrix_room(context, product, shared["group_blocks"])
        shared["group_blocks"] = group
        by_matrix_unit = matrix_swiglu.gated_matrix_matmul if product.swiglu else matrix_matmul.matrix_matmul
        prefill = kernel(by_matrix_unit, context.isa_index, codec.bits, zero)
    args = ProductArgs(
        **shared, **_activation_args(x),
        scales=context.memory.stored(weight.scale), scales_block=2 * ROWS * groups, scales_step=2 * ROWS * grouped,
        zeros=context.memory.stored(weight.zero), zeros_block=ROWS * groups, zeros_step=ROWS * grouped,
        chunks=-(-weight.columns // CHUNK), chunks_per_block=max(1, block // CHUNK),
        block_step=blocks // 2 if product.swiglu else 1, winograd_sums=x.winograd_sums, room=room,
    )  # fmt: skip
    context.emit(prefill, args, parts=blocks, decode=kernel(matmul.integer_matvec, *literals), reads_weights=True)


def _matrix_room(context: Context, product: Product, group_blocks: int) -> tuple[int, int]:
    """Blocks whose unpacked weights stay in the cache, whole pairs, and the address of the threads' room for them."""
    bits, chunks = product.weight.codec.bits, -(-product.weight.columns // CHUNK)
    group_blocks = max(2, min(GROUP_BYTES // (matrix_matmul.BYTES_OF_CHUNK * chunks), padded(group_blocks, 2)) // 2 * 2)
    nbytes = matrix_matmul.room_bytes(bits, chunks, group_blocks)
    if product.swiglu:
        nbytes = matrix_swiglu.room_bytes(bits, chunks)
    return group_blocks, context.memory.shared(UNPACKED, context.threads * nbytes)


def _float_product(context: Context, product: Product, x: QuantizedActivation) -> None:
    args = ProductArgs(**_shared_args(context, product), **_activation_args(x), chunks=product.weight.columns)
    function = kernel(matmul.float_matmul, FLOAT_KINDS[product.weight.codec.kind], context.max_tile)
    context.emit(function, args, parts=product.weight.q.shape[0], reads_weights=True)


def _thin_product(context: Context, product: Product, x: Place) -> None:
    """A product with a matrix of floats that has few rows or few columns, from the rows of x themselves."""
    weight = product.weight
    args = ProductArgs(**_shared_args(context, product), x=x.address, x_stride=x.stride, chunks=weight.columns)
    function = kernel(low_rank.thin_matmul, FLOAT_KINDS[weight.codec.kind])
    context.emit(function, args, parts=min(weight.q.shape[0], channel_parts(weight.rows)))


def _activation_args(x: QuantizedActivation) -> dict[str, int]:
    return {
        "x": x.data, "x_stride": x.layout.stride, "x_scales": x.scales, "x_sums": x.sums, "x_blocks": x.layout.blocks
    }  # fmt: skip


def _shared_args(context: Context, product: Product) -> dict[str, Any]:
    """The arguments of a product that do not depend on the kind of weights."""
    q = product.weight.q
    block = q.nbytes // q.shape[0]
    return {
        "weights": context.memory.stored(q), "weights_block": block, "output_channels": product.weight.rows,
        "group_blocks": max(1, min(GROUP_BYTES // block, q.shape[0])), "y": product.y.address, "y_stride": product.y.stride,
        "bias": product.bias, "add": int(product.add), "scratch": context.scratch,
    }  # fmt: skip
