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
from edgeq.records import Weight
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.optable import channel_parts, kernel
from edgeq.targets.cpu.kernels import low_rank, matmul, matrix_matmul, matrix_swiglu, swiglu_matmul, winograd
from edgeq.targets.cpu.kernels.args import A8, A16, A16_PAIRS, BLOCK, CHUNKS, FLOAT_KINDS, HALF_CHUNK, WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.microkernel_int import MOST_WHOLE
from edgeq.targets.cpu.lowering import requantize
from edgeq.targets.cpu.lowering.activations import layer_read
from edgeq.targets.cpu.lowering.context import Context, Place
from edgeq.targets.cpu.lowering.fuse import Fusion
from edgeq.targets.cpu.lowering.layout import Layout, QuantizedActivation
from edgeq.targets.cpu.lowering.prepare import prepared

WINOGRAD = "winograd"
"""The threads' memory for the constants of weights that are multiplied by Winograd's method."""
UNPACKED = "unpacked"
"""The threads' memory for weights that are unpacked before they are multiplied."""
GROUP_BYTES = 256 << 10
"""Weights that stay in a core's second-level cache while the tokens of a chunk pass by."""
MATRIX_GROUP_BYTES = 1 << 20
"""The same, unpacked, for a matrix unit, which is faster than the rows of a chunk come from further away."""


@dataclass(frozen=True)
class Product:
    """y = W x + bias, or with `add` y += W x + bias.  `swiglu`: in runs of several rows also the SwiGLU after it."""

    weight: Weight
    y: Place
    bias: int = 0
    add: bool = False
    swiglu: bool = False


@dataclass(frozen=True)
class Room:
    """Memory of the threads for a product: the first's address, bytes of each, and of numbers of rows in it."""

    address: int = 0
    nbytes: int = 0
    numbers: int = 0


def linear(context: Context, o: op.Linear, fusion: Fusion) -> None:
    requantize.count_input(context, o)
    layer = layer_read(context, o.linear)
    x = prepared(context, layer, o, fusion.activation)
    out = context.place(o.out)
    y = Place(out.address + 4 * o.offset, out.stride)
    bias = context.memory.floats(layer.bias) if layer.bias else 0
    for index, (weight, activation) in enumerate(zip(layer.weights, x.activations, strict=True)):
        product = Product(weight, y, 0 if index else bias, o.add or index > 0, fusion.swiglu)
        if weight.codec.kind == "int":
            _integer_product(context, product, activation)
        else:
            _float_product(context, product, activation)
    if layer.split_row:
        split = low_rank.SplitRowArgs(
            x=x.split.address, x_stride=x.split.stride,
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


def _integer_product(context: Context, product: Product, x: QuantizedActivation) -> None:
    weight, codec, block = product.weight, product.weight.codec, x.layout.block
    blocks, groups, grouped = weight.q.shape[0], codec.groups(weight.columns), int(codec.group_size > 0)
    blocks_per_tile, zero = context.isa.blocks_per_tile, int(not codec.symmetric)
    chunks, extent = -(-weight.columns // CHUNK), _extent(weight, x.layout)
    literals = (context.isa_index, codec.bits, int(x.layout.kind in (A16, A16_PAIRS)), zero, extent)
    factory = swiglu_matmul.gated_matmul if product.swiglu else matmul.integer_matmul
    prefill, room = kernel(factory, *literals), Room()
    shared = _shared_args(context, product)
    if x.winograd_sums:
        at_once = blocks_per_tile * swiglu_matmul.UNIT if product.swiglu else padded(shared["group_blocks"], blocks_per_tile)
        nbytes = at_once * winograd.CONSTANT_BYTES * x.layout.blocks
        room = Room(context.memory.shared(WINOGRAD, context.threads * nbytes), nbytes)
        by_winograd = winograd.gated_winograd_matmul if product.swiglu else winograd.winograd_matmul
        prefill = kernel(by_winograd, context.isa_index, zero, extent)
    if x.layout.flat_from:
        group, room = _matrix_room(context, product, extent)
        shared["group_blocks"] = group
        by_matrix_unit = matrix_swiglu.gated_matrix_matmul if product.swiglu else matrix_matmul.matrix_matmul
        prefill = kernel(by_matrix_unit, context.isa_index, codec.bits, zero, extent)
    args = ProductArgs(
        **shared, **_activation_args(x),
        scales=context.memory.stored(weight.scale), scales_block=2 * ROWS * groups, scales_step=2 * ROWS * grouped,
        zeros=context.memory.stored(weight.zero), zeros_block=ROWS * groups, zeros_step=ROWS * grouped,
        chunks=chunks, chunks_per_block=chunks if extent == WHOLE else max(1, block // CHUNK),
        block_step=blocks // 2 if product.swiglu else 1, winograd_sums=x.winograd_sums,
        room=room.address, room_bytes=room.nbytes, numbers_bytes=room.numbers,
        prefetch_bytes=context.prefetch_bytes.get(codec, 0),
    )  # fmt: skip
    context.emit(prefill, args, parts=blocks, decode=kernel(matmul.integer_matvec, *literals), reads_weights=True)


def _extent(weight: Weight, layout: Layout) -> int:
    """What products add up before they multiply with scales (args.py)."""
    if layout.block < CHUNK:
        return HALF_CHUNK
    one_scale = layout.scaling != BLOCK and weight.codec.groups(weight.columns) == 1 and weight.codec.symmetric
    # Zero points would be multiplied in float32, which would round sums of whole rows.
    return WHOLE if one_scale and layout.kind == A8 and weight.columns <= MOST_WHOLE else CHUNKS


def _matrix_room(context: Context, product: Product, extent: int) -> tuple[int, Room]:
    """Blocks whose unpacked weights stay in the cache, whole pairs, and the threads' room for them."""
    bits, chunks = product.weight.codec.bits, -(-product.weight.columns // CHUNK)
    blocks = padded(product.weight.q.shape[0], 2)
    group_blocks = max(2, min(MATRIX_GROUP_BYTES // (matrix_matmul.BYTES_OF_CHUNK * chunks), blocks) // 2 * 2)
    rows = context.max_rows if extent == WHOLE else 0
    at_once = matrix_swiglu.GROUP_BLOCKS if product.swiglu else group_blocks
    nbytes = matrix_matmul.room_bytes(bits, chunks, at_once, rows) + product.swiglu * matrix_swiglu.RESULTS_BYTES
    numbers = padded(matrix_matmul.NUMBERS_BYTES * rows, matrix_matmul.ROW_BYTES)
    return group_blocks, Room(context.memory.shared(UNPACKED, context.threads * nbytes), nbytes, numbers)


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
