"""Round to nearest: no data, every group for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from edgeq.codec import Codec
from edgeq.converters.quantizer import Quantized, quantize


def rtn(slabs: Iterable[Tensor], codec: Codec, name: str) -> Iterator[Quantized]:
    """Slabs float32 [rows, columns] of one matrix -> their stored integers, slab by slab.

    CheckpointError: a group of tensor `name` too large for an f16 scale.
    """
    for slab in slabs:
        yield quantize(slab, codec, name)
