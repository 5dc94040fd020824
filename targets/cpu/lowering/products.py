"""Products of weights with quantized or plain rows as op records, for each way in which weights are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgeq.format.codec import CHUNK
from edgeq.format.records import Weight
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.kernels.args import A16, A16_PAIRS, BLOCK, CHUNKS, FLOAT_KINDS, HALF_CHUNK, ONE_CHUNK, WHOLE, ProductArgs
from edgeq.targets.cpu.kernels.panels import panel_matmul
from edgeq.targets.cpu.kernels.products import (
    low_rank,
    matmul,
    matrix_matmul,
    matrix_swiglu,
    swiglu_matmul,
    winograd,
)
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.groups import SYMMETRIC, group_args, group_kind
from edgeq.targets.cpu.kernels.products.matrix_groups import CHUNK_BYTES
from edgeq.targets.cpu.kernels.products.microkernel_int import MAX_INT32_CHANNELS
from edgeq.targets.cpu.lowering.context import BufferRows, Context
from edgeq.targets.cpu.lowering.layout import Layout, QuantizedActivation
from edgeq.targets.cpu.threads.optable import channel_parts, kernel

WINOGRAD = "winograd"
"""The threads' memory for the constants of weights that are multiplied by Winograd's method."""
UNPACKED = "unpacked"
"""The threads' memory for weights that are unpacked before they are multiplied."""
GROUP_BYTES = 256 << 10
"""Weights that stay in a core's second-level cache while the tokens of a chunk pass by."""
MATRIX_GROUP_BYTES = 1 << 20
"""The same, unpacked, for a matrix unit, which is faster than the rows of a chunk come from further away."""


@dataclass(frozen=True)
class LinearProduct:
    """y = W x + bias, or with `add` y += W x + bias.  `swiglu`: in runs of several rows also the SwiGLU after it."""

    weight: Weight
    y: BufferRows
    bias: int = 0
    add: bool = False
    swiglu: bool = False


@dataclass(frozen=True)
class ProductScratch:
    """Memory of the threads for a product: the first's address, bytes of each, and of numbers of rows in it."""

    address: int = 0
    nbytes: int = 0
    numbers: int = 0


def integer_product(context: Context, product: LinearProduct, x: QuantizedActivation) -> None:
    """The product with integers, by the fastest kernel that the machine has for the layout of x."""
    weight, codec, block = product.weight, product.weight.codec, x.layout.block
    blocks = weight.arrays["q"].shape[0]
    blocks_per_tile, kind = context.isa.blocks_per_tile, group_kind(codec)
    chunks, extent = -(-weight.columns // CHUNK), _extent(weight, x.layout)
    literals = (context.isa_index, codec.bits, int(x.layout.kind in (A16, A16_PAIRS)), kind, extent)
    factory = swiglu_matmul.gated_matmul if product.swiglu else matmul.integer_matmul
    prefill, room = kernel(factory, *literals), ProductScratch()
    shared = _shared_args(context, product)
    if x.winograd_sums:
        at_once = blocks_per_tile * swiglu_matmul.UNIT if product.swiglu else padded(shared["group_blocks"], blocks_per_tile)
        nbytes = at_once * winograd.CONSTANT_BYTES * x.layout.blocks
        room = ProductScratch(context.memory.shared(WINOGRAD, context.threads * nbytes), nbytes)
        by_winograd = winograd.gated_winograd_matmul if product.swiglu else winograd.winograd_matmul
        prefill = kernel(by_winograd, context.isa_index, kind, extent)
    if context.isa.panels:
        nbytes = panel_matmul.room_bytes(IntegerWeights(*literals), chunks)
        room = ProductScratch(context.memory.shared(UNPACKED, context.threads * nbytes), nbytes)
        prefill = kernel(panel_matmul.gated_panel_matmul if product.swiglu else panel_matmul.panel_matmul, *literals)
    if x.layout.flat_from:
        group, room = _matrix_room(context, product, extent)
        shared["group_blocks"] = group
        by_matrix_unit = matrix_swiglu.gated_matrix_matmul if product.swiglu else matrix_matmul.matrix_matmul
        prefill = kernel(by_matrix_unit, *literals)
    args = ProductArgs(
        **shared, **_activation_args(x),
        **group_args(codec, weight.rows, weight.columns, lambda name: context.memory.stored(weight.arrays[name])),
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
    alone = group_kind(weight.codec) == SYMMETRIC and weight.codec.groups(weight.columns) == 1
    one_scale = layout.scaling != BLOCK and alone
    # Zero points and offsets would be multiplied in float32, which would round sums of whole rows.  Half grids are for few
    # bits, whose rows have groups.
    if one_scale and layout.holds_bytes and weight.columns <= MAX_INT32_CHANNELS:
        return WHOLE
    return ONE_CHUNK if layout.block == CHUNK else CHUNKS


def _matrix_room(context: Context, product: LinearProduct, extent: int) -> tuple[int, ProductScratch]:
    """Blocks whose unpacked weights stay in the cache, whole pairs, and the threads' room for them."""
    bits, chunks = product.weight.codec.bits, -(-product.weight.columns // CHUNK)
    blocks = padded(product.weight.arrays["q"].shape[0], 2)
    group_blocks = max(2, min(MATRIX_GROUP_BYTES // (CHUNK_BYTES * chunks), blocks) // 2 * 2)
    at_once = matrix_swiglu.GROUP_BLOCKS if product.swiglu else group_blocks
    numbers = matrix_matmul.numbers_bytes(extent, context.max_rows)
    nbytes = matrix_matmul.AT_NUMBERS + numbers + at_once * matrix_matmul.weights_bytes(bits, extent, chunks)
    nbytes += product.swiglu * matrix_swiglu.UNIT_BYTES
    return group_blocks, ProductScratch(context.memory.shared(UNPACKED, context.threads * nbytes), nbytes, numbers)


def float_product(context: Context, product: LinearProduct, x: QuantizedActivation) -> None:
    """The product with floats, of inputs as they are."""
    args = ProductArgs(**_shared_args(context, product), **_activation_args(x), chunks=product.weight.columns)
    function = kernel(matmul.float_matmul, FLOAT_KINDS[product.weight.codec.kind], context.max_tile)
    context.emit(function, args, parts=product.weight.arrays["q"].shape[0], reads_weights=True)


def thin_product(context: Context, product: LinearProduct, x: BufferRows) -> None:
    """A product with a matrix of floats that has few rows or few columns, from the rows of x themselves."""
    weight = product.weight
    args = ProductArgs(**_shared_args(context, product), x=x.address, x_stride=x.stride, chunks=weight.columns)
    function = kernel(low_rank.thin_matmul, FLOAT_KINDS[weight.codec.kind])
    context.emit(function, args, parts=min(weight.arrays["q"].shape[0], channel_parts(weight.rows)))


def _activation_args(x: QuantizedActivation) -> dict[str, int]:
    return {
        "x": x.data, "x_stride": x.layout.stride, "x_scales": x.scales, "x_sums": x.sums, "x_blocks": x.layout.blocks
    }  # fmt: skip


def _shared_args(context: Context, product: LinearProduct) -> dict[str, Any]:
    """The arguments of a product that do not depend on the kind of weights."""
    q = product.weight.arrays["q"]
    block = q.nbytes // q.shape[0]
    return {
        "weights": context.memory.stored(q), "weights_block": block, "output_channels": product.weight.rows,
        "group_blocks": max(1, min(GROUP_BYTES // block, q.shape[0])), "y": product.y.address, "y_stride": product.y.stride,
        "bias": product.bias, "add": int(product.add), "scratch": context.scratch,
    }  # fmt: skip
