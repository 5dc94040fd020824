"""MXFP4 as gpt-oss is published in it: floats of four bits, E2M1, in blocks that share a power of two (OCP Microscaling Formats
1.0).

NAME_blocks   uint8 [..., rows, blocks, 16], two numbers of a row in each, the first in the low half
NAME_scales   uint8 [..., rows, blocks], 127 more than the power of two

They are entries of a table: twice a float of four bits is a whole number, and a block's scale is half its power.  The tensor is
called NAME.weight, with a row for every output channel; the floats of NAME in other checkpoints have a column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.source import StoredArrays, StoredTensor
from edgeq.converters.importers.gguf_types import MXFP4_BIAS, MXFP4_TABLE, powers, with_table
from edgeq.converters.importers.quantized.bit_stream import unpack
from edgeq.converters.importers.quantized.packed_tensor import PackedWeights, Shards, modules, part
from edgeq.converters.importers.quantized.settings import QuantizationSettings
from edgeq.converters.importers.safetensors_folder import ShardTensor
from edgeq.errors import CheckpointError
from edgeq.format.codec import ArrayF32, Codec, dequantized

BLOCK = 32
HALF = BLOCK // 2
ENDS = ("_blocks", "_scales")


@dataclass(frozen=True, eq=False)
class Mxfp4Tensor:
    """Matrices one after another; `blocks` and `scales` with their leading sizes as one."""

    blocks: ShardTensor
    scales: ShardTensor
    shape: tuple[int, ...]
    dtype: ClassVar[str] = "F32"
    codec: ClassVar[Codec] = Codec("table", 4, BLOCK)
    order: ClassVar[NDArray[np.int32] | None] = None

    def quantized(self, first: int, count: int, name: str) -> StoredArrays:
        """The arrays of `codec`.  CheckpointError: a power of two that is no f16, or the shard is no longer there."""
        q = unpack(self.blocks.raw(first, count, name), 4, BLOCK)
        exponents = self.scales.raw(first, count, name).astype(np.int32)
        arrays = with_table(q, powers(q, exponents - MXFP4_BIAS), MXFP4_TABLE)
        if not np.isfinite(arrays["scale"]).all():
            raise CheckpointError(f"{name} has a scale that is a power of two that f16 does not hold; it is damaged")
        return arrays

    def read(self, first: int, count: int, name: str) -> ArrayF32:
        """`count` values after the `first` ones."""
        columns = self.shape[-1]
        top, bottom = first // columns, -(-(first + count) // columns)
        values = dequantized(self.codec, columns, self.quantized(top, bottom - top, name))
        return values.reshape(-1)[first - top * columns :][:count]


def mxfp4_weights(shards: Shards, settings: QuantizationSettings) -> PackedWeights:
    """The weights of a folder in MXFP4.  CheckpointError: tensors that do not belong together."""
    found: dict[str, StoredTensor] = {}
    for module in modules(shards, ENDS[0]):
        found[f"{module}.weight"] = _tensor(shards, module)
    parts = frozenset(f"{module.removesuffix('.weight')}{end}" for module in found for end in ENDS)
    return PackedWeights({}, parts, tensors=found)


def _tensor(shards: Shards, module: str) -> Mxfp4Tensor:
    blocks = part(shards, f"{module}{ENDS[0]}", ("U8",))
    *matrices, rows, count, half = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
    if half != HALF or 0 in blocks.shape:
        raise CheckpointError(
            f"tensor {module}{ENDS[0]} has the shape {blocks.shape}; expected [..., rows, blocks, {HALF}], none of them zero"
        )
    scales, together = part(shards, f"{module}{ENDS[1]}", ("U8",), blocks.shape[:-1]), math.prod((*matrices, rows))
    flat = replace(blocks, shape=(together, count, half)), replace(scales, shape=(together, count))
    return Mxfp4Tensor(*flat, (*matrices, rows, count * BLOCK))
