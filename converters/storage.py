"""What goes into the file, as records, and how each is written.

All of it follows from the configuration and the options: the records, the segment each will fill and so the metadata and the
size of the file are known before a weight is read.  A resumed conversion therefore needs only the segments already written.

A matrix is read, quantized, packed and appended one slab of rows at a time; fused layers (q,k,v and gate,up) are read as one
matrix whose rows are those of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgeq.codec import ROWS, AnyArray, Codec, pack_floats, pack_groups, pack_integers, to_bf16
from edgeq.container import aligned
from edgeq.converters.methods.rtn import rtn
from edgeq.errors import CheckpointError
from edgeq.linear import DTYPES, ArrayRef, LinearSpec, Weight
from edgeq.writer import Writer

SLAB_BYTES = 32 << 20
"""Float32 bytes of the rows in memory at a time: the promise is 64 MB, and the quantizer holds a second array of this size."""

RowReader = Callable[[str, int, int], NDArray[np.float32]]
"""(tensor name, first row, last row + 1) -> float32 [rows, ...]"""


@dataclass(frozen=True)
class BlobItem:
    name: str
    data: bytes

    @property
    def nbytes(self) -> tuple[int, ...]:
        return (len(self.data),)


@dataclass(frozen=True)
class ArrayItem:
    """A plain array of `dtype` made of whole tensor `tensor`."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> tuple[int, ...]:
        return (ArrayRef(self.dtype, self.shape, 0).nbytes,)


@dataclass(frozen=True)
class LinearItem:
    """A linear layer of the rows of `tensors` (name, rows) one after another; `biases` likewise, stored as `bias_dtype`."""

    name: str
    tensors: tuple[tuple[str, int], ...]
    columns: int
    codec: Codec
    biases: tuple[tuple[str, int], ...] = ()
    bias_dtype: str = "f32"

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.tensors)

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Of each segment, in the order in which `write` appends them."""
        sizes = tuple(part.nbytes for part in self.codec.parts(self.rows, self.columns).values())
        bias = ArrayRef(self.bias_dtype, (self.rows,), 0).nbytes
        return (*sizes, bias) if self.biases else sizes

    def spec(self, segment: int) -> LinearSpec:
        """The record of this layer when its first segment is `segment`."""
        refs: dict[str, ArrayRef] = {}
        for name, part in self.codec.parts(self.rows, self.columns).items():
            dtype = {"float32": "f32", "float16": "f16", "uint8": "u8", "uint16": self.codec.kind}[part.dtype]
            refs[name] = ArrayRef(dtype, part.shape, segment + len(refs))
        weight = Weight(self.codec, self.rows, self.columns, refs["q"], refs.get("scale"), refs.get("zero"))
        bias = ArrayRef(self.bias_dtype, (self.rows,), segment + len(refs)) if self.biases else None
        return LinearSpec(self.name, (weight,), bias)


Item = BlobItem | ArrayItem | LinearItem


@dataclass(frozen=True)
class Contents:
    """The records of a file made of `items` in this order."""

    linears: dict[str, LinearSpec]
    arrays: dict[str, ArrayRef]
    blobs: dict[str, int]
    segments: int
    nbytes: int

    @classmethod
    def of(cls, items: list[Item]) -> Contents:
        linears: dict[str, LinearSpec] = {}
        arrays: dict[str, ArrayRef] = {}
        blobs: dict[str, int] = {}
        segment = nbytes = 0
        for item in items:
            if isinstance(item, BlobItem):
                blobs[item.name] = segment
            elif isinstance(item, ArrayItem):
                arrays[item.name] = ArrayRef(item.dtype, item.shape, segment)
            else:
                linears[item.name] = item.spec(segment)
            segment += len(item.nbytes)
            nbytes += sum(aligned(n) for n in item.nbytes)
        return cls(linears, arrays, blobs, segment, nbytes)


def write(writer: Writer, item: Item, read: RowReader, written: Callable[[int], None]) -> None:
    """Append the segments of `item`; `written` hears of every chunk's bytes as it goes.

    CheckpointError: a value that the item's type cannot hold, by tensor name.
    """

    def counted(chunks: Iterator[AnyArray]) -> Iterator[AnyArray]:
        for chunk in chunks:
            yield chunk
            written(chunk.nbytes)

    if isinstance(item, BlobItem):
        writer.append([item.data])
        written(len(item.data))
    elif isinstance(item, ArrayItem):
        width = math.prod(item.shape[1:])
        tensors = ((item.tensor, item.shape[0]),)
        chunks = (_stored(a, item.dtype, item.tensor) for a in slabs(tensors, width, read))
        writer.stream(counted(chunks), item.dtype, item.shape)
    else:
        _write_linear(writer, item, read, counted)


def _write_linear(
    writer: Writer, item: LinearItem, read: RowReader, counted: Callable[[Iterator[AnyArray]], Iterator[AnyArray]]
) -> None:
    matrix = slabs(item.tensors, item.columns, _fitting_f16(read) if item.codec.kind == "f16" else read)
    if item.codec.kind == "int":
        # One pass over the weights fills q; its scales, a hundredth of the matrix, wait for their own segments.
        scales: list[AnyArray] = []
        zeros: list[AnyArray] = []

        def packed() -> Iterator[AnyArray]:
            for part in rtn((torch.from_numpy(a) for a in matrix), item.codec, ", ".join(name for name, _ in item.tensors)):
                scales.append(pack_groups(part.scale.numpy()))
                if part.zero is not None:
                    zeros.append(pack_groups(part.zero.numpy()))
                yield pack_integers(part.q.numpy(), item.codec.bits)

        writer.append(counted(packed()))
        writer.append(counted(iter(scales)))
        if zeros:
            writer.append(counted(iter(zeros)))
    else:
        writer.append(counted(pack_floats(a, item.codec.kind) for a in matrix))
    if item.biases:
        bias = np.concatenate([read(name, 0, rows) for name, rows in item.biases])
        writer.append(counted(iter([_stored(bias, item.bias_dtype, item.biases[0][0])])))


def slabs(tensors: tuple[tuple[str, int], ...], width: int, read: RowReader) -> Iterator[NDArray[np.float32]]:
    """The rows of `tensors`, one below the other, in slabs of whole 16-row blocks and at most SLAB_BYTES."""
    height = max(ROWS, SLAB_BYTES // (4 * width) // ROWS * ROWS)
    ends = np.cumsum([rows for _, rows in tensors]).tolist()
    starts = [0, *ends[:-1]]
    for top in range(0, ends[-1], height):
        bottom = min(top + height, ends[-1])
        pieces = [
            read(name, max(top, start) - start, min(bottom, end) - start)
            for (name, _), start, end in zip(tensors, starts, ends, strict=True)
            if start < bottom and top < end
        ]
        yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _stored(a: NDArray[np.float32], dtype: str, name: str) -> AnyArray:
    if dtype == "bf16":
        return to_bf16(a)
    return (_fits_f16(a, name) if dtype == "f16" else a).astype(DTYPES[dtype])


def _fitting_f16(read: RowReader) -> RowReader:
    return lambda name, start, stop: _fits_f16(read(name, start, stop), name)


def _fits_f16(a: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    # Half-way between the largest f16 and the next power of two: from there on f16 rounds to infinity.
    largest = float(np.abs(a).max(initial=0))
    if largest >= 65520:
        raise CheckpointError(f"{name} has a weight of {largest:.4g}, too large for f16; choose --dtype bf16 or f32")
    return a
