"""Stored weights as float32 matrices, dequantized block by block, and their products with rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import ROWS, AnyArray
from edgeq.format.codec import dequantize as dequantize_codec
from edgeq.format.codec_rows import dequantize_rows as dequantize_codec_rows
from edgeq.format.container import ModelFile
from edgeq.format.records import Weight
from edgeq.targets.requantization import HostWeights

ArrayF32 = NDArray[np.float32]

KEEP_BYTES = 1 << 30
"""Dequantized matrices kept between runs; what does not fit is dequantized again, block by block, each time it is used."""
BLOCK_ELEMENTS = 1 << 22


class Matrices:
    """Stored weights as float32 matrices, some of them kept."""

    def __init__(self, file: ModelFile | HostWeights) -> None:
        self._file = file
        self.kept: dict[Weight, list[ArrayF32]] = {}
        self._kept_bytes = 0

    def rows(self, weight: Weight, indices: NDArray[np.int64]) -> ArrayF32:
        """Rows of the matrix by index: [len(indices), columns]."""
        return dequantize_codec_rows(weight.codec, weight.columns, indices, self._arrays(weight))

    def blocks(self, weight: Weight) -> Iterator[ArrayF32]:
        """The matrix as consecutive blocks of rows.  Block sizes never vary, so neither does a row's arithmetic."""
        if weight in self.kept:
            yield from self.kept[weight]
            return
        keep = self._kept_bytes + weight.rows * weight.columns * 4 <= KEEP_BYTES
        kept = []
        step = max(1, BLOCK_ELEMENTS // (weight.columns * ROWS))  # in blocks of 16 rows
        arrays = self._arrays(weight)
        for start in range(0, len(arrays["q"]), step):
            cut = slice(start, start + step)
            rows = min((start + step) * ROWS, weight.rows) - start * ROWS
            block = dequantize_codec(weight.codec, rows, weight.columns, {name: a[cut] for name, a in arrays.items()})
            if keep:
                kept.append(block)
            yield block
        if keep:
            self.kept[weight] = kept
            self._kept_bytes += weight.rows * weight.columns * 4

    def product(self, weight: Weight, x: ArrayF32) -> ArrayF32:
        """x [rows, columns] -> [rows, rows of the weight], row by row."""
        y = np.empty((len(x), weight.rows), np.float32)
        at = 0
        for block in self.blocks(weight):
            for r in range(len(x)):
                y[r, at : at + len(block)] = block @ x[r].copy()
            at += len(block)
        return y

    def _arrays(self, weight: Weight) -> dict[str, AnyArray]:
        return {name: self._file.array(ref) for name, ref in weight.arrays.items()}
