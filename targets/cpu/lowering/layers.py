"""The rows of the tables for the operations of layers.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeq.errors import UnsupportedError
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.optable import FLOAT_KINDS, channel_parts, float_bits, kernel
from edgeq.targets.cpu.kernels import norms
from edgeq.targets.cpu.kernels.quantize import ABSENT

if TYPE_CHECKING:
    from edgeq.targets.cpu.lowering.context import Lowering


def buffer(lowering: Lowering, name: str) -> tuple[int, int]:
    """Address and bytes of a row."""
    return lowering.buffers[name], lowering.row_bytes[name]


def layer_norm(lowering: Lowering, o: op.LayerNorm) -> None:
    memory = lowering.memory
    vectors = (memory.floats(o.gain), memory.floats(o.bias), float_bits(o.eps))
    words = [*buffer(lowering, o.x), lowering.graph.buffers[o.x], *vectors, *buffer(lowering, o.out), *ABSENT.words()]
    lowering.wrote(o.out, (lowering.emit(kernel(norms.layer_norm, lowering.big), *words), 10))


def norm_add(lowering: Lowering, o: op.NormAdd) -> None:
    gain = (lowering.memory.floats(o.gain), float_bits(o.eps))
    width = lowering.graph.buffers[o.x]
    lowering.emit(kernel(norms.norm_add), *buffer(lowering, o.x), width, *gain, *buffer(lowering, o.out))
    lowering.wrote(o.out)


def scale(lowering: Lowering, o: op.Scale) -> None:
    lowering.emit(kernel(norms.scale), *buffer(lowering, o.x), lowering.graph.buffers[o.x], float_bits(o.factor))
    lowering.wrote(o.x)


def position_add(lowering: Lowering, o: op.PositionAdd) -> None:
    table = (o.table.shape[1], lowering.memory.stored(o.table), lowering.arrays.positions)
    lowering.emit(kernel(norms.position_add, FLOAT_KINDS[o.table.dtype]), *buffer(lowering, o.x), *table)
    lowering.wrote(o.x)


def activation(lowering: Lowering, o: op.GeGlu | op.Relu) -> None:
    if o.width % 16:
        raise UnsupportedError(f"intermediate_size {o.width} is not a multiple of 16; run with --target reference")
    factory = norms.geglu if isinstance(o, op.GeGlu) else norms.relu
    words = [*buffer(lowering, o.x), o.width, *buffer(lowering, o.out), *ABSENT.words()]
    row = lowering.emit(kernel(factory, lowering.big), *words, parts=channel_parts(o.width))
    lowering.wrote(o.out, (row, 7))
