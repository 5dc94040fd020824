"""Reads dequantized tensors back from the partial file, under their checkpoint names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.calibration.forward import WholeReader
from edgeq.converters.checkpoint.slabs import RowReader
from edgeq.converters.planning.items import ArrayItem, Item
from edgeq.converters.rounding.linears import LinearItem
from edgeq.format.codec import ROWS, dequantize, from_bf16
from edgeq.format.metadata import Segment
from edgeq.format.records import DTYPES, ArrayRef, Weight


def stored_tensors(path: Path, segments: list[Segment], items: Iterable[Item]) -> WholeReader:
    """Reads the tensors of `items`, written in this order from the first of `segments` on; those not yet written are absent.

    Weights are as a module of the model takes them: columns in the matrix's own order and times the input scale, the low-rank
    part added; a transform of the input is left to whatever runs them.
    """
    data = np.memmap(path, np.uint8, "r")
    places: dict[str, tuple[Item, int, slice]] = {}
    first = 0
    for item in items:
        if first + len(item.nbytes) > len(segments):
            break
        if isinstance(item, ArrayItem):
            places[item.tensor] = (item, first, slice(None))
        elif isinstance(item, LinearItem):
            for parts in (item.tensors, item.biases):
                row = 0
                for name, rows in parts:
                    places[name] = (item, first, slice(row, row + rows))
                    row += rows
        first += len(item.nbytes)

    def bits(ref: ArrayRef) -> NDArray[Any]:
        segment = segments[ref.segment]
        return data[segment.offset : segment.offset + segment.length].view(DTYPES[ref.dtype]).reshape(ref.shape)

    def array(ref: ArrayRef) -> NDArray[Any]:
        return from_bf16(bits(ref)) if ref.dtype == "bf16" else bits(ref)

    def read(name: str) -> NDArray[np.float32]:
        item, segment, rows = places[name]
        if isinstance(item, ArrayItem):
            return np.array(array(ArrayRef(item.dtype, item.shape, segment)), np.float32)
        assert isinstance(item, LinearItem)
        spec = item.spec(segment)
        if spec.bias is not None and any(name == bias for bias, _ in item.biases):
            return np.array(array(spec.bias)[rows], np.float32)
        return matrix(item, segment)[rows]

    def weights(weight: Weight) -> NDArray[np.float32]:
        arrays = {name: bits(ref) for name, ref in weight.arrays.items()}
        return dequantize(weight.codec, weight.rows, weight.columns, arrays)

    def matrix(item: LinearItem, segment: int) -> NDArray[np.float32]:
        spec = item.spec(segment)
        blocks = [weights(weight) for weight in spec.weights]
        found = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
        if spec.split_row:
            found = found.copy()
            found[:, spec.split_row.index] = array(spec.split_row.row)
        if item.recipe.order is not None:
            in_file, found = found, np.empty_like(found)
            found[:, item.recipe.order] = in_file
        if spec.low_rank:
            found = found + weights(spec.low_rank.b) @ weights(spec.low_rank.a)
        return found

    return read


def stored_rows(path: Path, segments: list[Segment], items: Iterable[Item], layer: str) -> RowReader:
    """Reads rows of linear layer `layer`, of one weight block, as `stored_tensors` reads it whole; it has no other name."""
    data, first = np.memmap(path, np.uint8, "r"), 0
    for item in items:
        if isinstance(item, LinearItem) and item.name == layer:
            break
        first += len(item.nbytes)
    assert isinstance(item, LinearItem)
    (weight,) = item.spec(first).weights

    def blocks(ref: ArrayRef, rows: slice) -> NDArray[Any]:
        segment = segments[ref.segment]
        return data[segment.offset : segment.offset + segment.length].view(DTYPES[ref.dtype]).reshape(ref.shape)[rows]

    def read(name: str, start: int, stop: int) -> NDArray[np.float32]:
        # Whole blocks of rows, of which the first and the last may hold others too.
        span = slice(start // ROWS, -(-stop // ROWS))
        count = min(span.stop * ROWS, weight.rows) - span.start * ROWS
        found = dequantize(
            weight.codec, count, weight.columns, {name: blocks(ref, span) for name, ref in weight.arrays.items()}
        )
        return found[start - span.start * ROWS :][: stop - start]

    return read
