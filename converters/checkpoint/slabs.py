"""Reads tensors in slabs of rows, so that no matrix is ever whole in memory, and converts plain values to the types stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.source import StoredArrays
from edgeq.errors import CheckpointError
from edgeq.format.codec import ROWS, AnyArray, to_bf16
from edgeq.format.records import DTYPES

SLAB_BYTES = 32 << 20
"""Float32 bytes of the rows in memory at a time: the promise is 64 MB, and the quantizer holds a second array of this size."""
BASELINE = 500 << 20
"""Anonymous memory of Python, torch and transformers with their thread pools."""

RowReader = Callable[[str, int, int], NDArray[np.float32]]
"""(tensor name, first row, last row + 1) -> float32 [rows, ...]"""

IntegerReader = Callable[[str, int, int], StoredArrays]
"""The same of the integers of a weight that is quantized already."""


class Tensors(Protocol):
    """The tensors of a model by name: a checkpoint, or a checkpoint as a method changes it."""

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]: ...

    def whole(self, name: str) -> NDArray[np.float32]: ...


def slabs(
    tensors: tuple[tuple[str, int], ...], width: int, read: RowReader, most: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """The rows of `tensors`, one below the other, in slabs of whole 16-row blocks, at most SLAB_BYTES and `most` rows."""
    for spans in _spans(tensors, width, most):
        pieces = [read(*span) for span in spans]
        yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def quantized_slabs(tensors: tuple[tuple[str, int], ...], width: int, read: IntegerReader) -> Iterator[StoredArrays]:
    """The same of integers: slabs of whole blocks, every array of a codec by itself."""
    for spans in _spans(tensors, width):
        pieces = [read(*span) for span in spans]
        yield {part: np.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}


def _spans(tensors: tuple[tuple[str, int], ...], width: int, most: int | None = None) -> Iterator[list[tuple[str, int, int]]]:
    """The tensors that each slab is made of, with first row and last row + 1."""
    height = min(SLAB_BYTES // (4 * width), most or SLAB_BYTES)
    height = max(ROWS, height // ROWS * ROWS)
    ends = np.cumsum([rows for _, rows in tensors]).tolist()
    starts = [0, *ends[:-1]]
    for top in range(0, ends[-1], height):
        bottom = min(top + height, ends[-1])
        yield [
            (name, max(top, start) - start, min(bottom, end) - start)
            for (name, _), start, end in zip(tensors, starts, ends, strict=True)
            if start < bottom and top < end
        ]


def stored(a: NDArray[np.float32], dtype: str, name: str) -> AnyArray:
    """Plain values as `dtype`; CheckpointError: one of tensor `name` does not fit f16."""
    if dtype == "bf16":
        return to_bf16(a)
    return (fits_f16(a, name) if dtype == "f16" else a).astype(DTYPES[dtype])


def fitting_f16(read: RowReader) -> RowReader:
    return lambda name, start, stop: fits_f16(read(name, start, stop), name)


def fits_f16(a: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    # Half-way between the largest f16 and the next power of two: from there on f16 rounds to infinity.
    largest = float(np.abs(a).max(initial=0))
    if largest >= 65520:
        raise CheckpointError(f"{name} has a weight of {largest:.4g}, too large for f16; choose --dtype bf16 or f32")
    return a
