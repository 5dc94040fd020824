"""The contents of the file as items: the record and the segments of each, and how it is written.

All of it follows from the configuration, the method and its options: the records, the segment each will fill and so the
metadata and the size of the file are known before a weight is read.  A resumed conversion therefore needs only the segments
already written.  A matrix is read, quantized, packed and appended one slab of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgeq.converters.checkpoint.slabs import RowReader, slabs, stored
from edgeq.converters.rounding.linears import Delivery, LinearItem, Rounded, write_linear
from edgeq.format.codec import AnyArray
from edgeq.format.container import aligned
from edgeq.format.records import ArrayRef, LinearSpec
from edgeq.format.writer import Writer

Deliver = Callable[[LinearItem], Delivery]


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


def write(
    writer: Writer, item: Item, read: RowReader, deliver: Deliver, written: Callable[[int], None], rounded: Rounded
) -> None:
    """Append the segments of `item`; `written` is called with the bytes of every chunk, `rounded` as by `write_linear`.

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
        chunks = (stored(a, item.dtype, item.tensor) for a in slabs(tensors, width, read))
        writer.stream(counted(chunks), item.dtype, item.shape)
    else:
        write_linear(writer, item, deliver(item), counted, rounded)
