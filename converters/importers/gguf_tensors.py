"""Tensors of a GGUF file in the order of rows that transformers has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.source import StoredArrays
from edgeq.converters.importers.gguf_types import BLOCK_TYPES, FLOAT_TYPES, BlockType, stored_bytes
from edgeq.errors import CheckpointError
from edgeq.format.codec import AnyArray, Codec, dequantized
from edgeq.format.safetensors import floats

UNREADABLE = {
    "MXFP4": ", or as MXFP4 a power of two that is no f16",
    "TQ2_0": ", or as TQ2_0 a weight that is none of three",
}
"""Types -> what else makes a scale NaN when it is unpacked."""


@dataclass(frozen=True)
class Tiles:
    """Blocks of `width` rows or columns after the `first` ones, [outer, inner], which lie as [inner, outer]."""

    first: int
    outer: int
    inner: int
    width: int

    @property
    def size(self) -> int:
        """Rows or columns in all."""
        return self.first + self.outer * self.inner * self.width

    @property
    def order(self) -> NDArray[np.int64]:
        """Which one of the file each is."""
        tiles = np.arange(self.outer * self.inner * self.width).reshape(self.inner, self.outer, self.width)
        return np.concatenate([np.arange(self.first), self.first + tiles.swapaxes(0, 1).reshape(-1)])


@dataclass(frozen=True)
class GgufLayout:
    """What llama.cpp's converter does to a tensor beside giving it a name.

    rows, columns   those that it puts in another order
    negative_exp    it stores -exp(w)
    """

    rows: Tiles | None = None
    columns: Tiles | None = None
    negative_exp: bool = False


@dataclass(frozen=True)
class GgufTensor:
    """A tensor, or some whole rows of one.

    type         ggml's number
    offset       bytes from the start of the file to its first row
    head_size    rows of a head that llama.cpp interleaves: row i of half s is row 2i + s of the file; 0: rows are in order
    added        to every value: what llama.cpp adds to a gain is taken out again
    layout       what else is undone
    """

    path: Path
    shape: tuple[int, ...]
    type: int
    offset: int
    head_size: int = 0
    added: float = 0.0
    layout: GgufLayout = GgufLayout()

    @property
    def block(self) -> BlockType | None:
        """Blocks of its type; None: it has floats."""
        return BLOCK_TYPES.get(self.type)

    @property
    def dtype(self) -> str:
        return FLOAT_TYPES.get(self.type, "F32")

    @property
    def codec(self) -> Codec | None:
        return self.block.codec if self.block else None

    @property
    def order(self) -> NDArray[np.int32] | None:
        """Integers stay in the columns of the file, whose blocks may be wider than what was moved."""
        moved = self.layout.columns
        return None if moved is None else np.argsort(moved.order).astype(np.int32)

    @property
    def columns(self) -> int:
        """Values of a row; a vector is a tensor of one-element rows."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def rows(self) -> int:
        """All but the last dimension taken as one."""
        return math.prod(self.shape) // self.columns

    def part(self, row: int, shape: tuple[int, ...]) -> GgufTensor:
        """The tensor of `shape` that begins at `row`."""
        before = stored_bytes(self.type, row, self.columns)
        assert before is not None
        return replace(self, shape=shape, offset=self.offset + before)

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        """Values as ggml computes them in float32, row-major."""
        top, bottom = first // self.columns, -(-(first + count) // self.columns)
        rows = self._rows(top, bottom - top, name)
        # Whoever reads looks for NaN and infinity in what comes out.
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            values = rows if self.block is None else dequantized(self.block.codec, self.columns, self.block.unpack(rows))
            if self.layout.negative_exp:
                values = np.log(-values)
            if self.added:
                values = values + np.float32(self.added)
        if self.layout.columns is not None:
            values = values[:, self.layout.columns.order]
        return values.reshape(-1)[first - top * self.columns :][:count]

    def quantized(self, first: int, count: int, name: str) -> StoredArrays:
        """Rows as the arrays of `codec`."""
        assert self.block is not None
        arrays = self.block.unpack(self._rows(first, count, name))
        for array in arrays.values():
            if array.dtype == np.float16 and not np.isfinite(array).all():
                also = UNREADABLE.get(self.block.name, "")
                raise CheckpointError(f"{name} has a scale or an offset that is NaN or infinite{also}; it is damaged")
        return arrays

    def _rows(self, first: int, count: int, name: str) -> AnyArray:
        """Rows in transformers' order: float32 [count, columns], of a quantized type uint8 [count, blocks, bytes]."""
        if self.layout.rows is not None and count:
            places = self.layout.rows.order[first : first + count]
            runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
            return np.concatenate([self._as_stored(int(run[0]), len(run), name) for run in runs])
        if not self.head_size:
            return self._as_stored(first, count, name)
        size = self.head_size
        top, bottom = first // size * size, -(-(first + count) // size) * size
        rows = self._as_stored(top, bottom - top, name)
        # head, i, half -> head, half, i
        order = np.arange(len(rows)).reshape(-1, size // 2, 2).transpose(0, 2, 1).reshape(-1)
        return rows[order[first - top : first - top + count]]

    def _as_stored(self, first: int, count: int, name: str) -> AnyArray:
        skipped, nbytes = (stored_bytes(self.type, rows, self.columns) for rows in (first, count))
        assert skipped is not None and nbytes is not None
        at = self.offset + skipped
        if self.block is None:
            return floats(self.path, self.dtype, at, count * self.columns, name).reshape(count, self.columns)
        raw = np.fromfile(self.path, np.uint8, nbytes, offset=at)
        if len(raw) != nbytes:
            raise CheckpointError(f"{self.path}: ends inside {name}; it changed while it was read")
        return raw.reshape(count, -1, self.block.nbytes)


@dataclass(frozen=True)
class PatchTensor:
    """A patch embedding [channels out, 3, frames, rows, columns], of which a file has each frame as a tensor of its own.

    It is read in floats, whatever its type: nothing multiplies in its integers.
    """

    frames: tuple[GgufTensor, ...]
    codec: ClassVar[None] = None

    @property
    def dtype(self) -> str:
        kinds = {frame.dtype for frame in self.frames}
        return kinds.pop() if len(kinds) == 1 else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, channels, *pixels = self.frames[0].shape
        # A picture has one frame where the tower knows none.
        return (outputs, channels, *([len(self.frames)] if len(self.frames) > 1 else []), *pixels)

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        """`count` values, row-major, after the `first` ones."""
        pixels = math.prod(self.frames[0].shape[2:])
        of_all = pixels * len(self.frames)
        top, bottom = first // of_all, -(-(first + count) // of_all)
        read = [frame.read(top * pixels, (bottom - top) * pixels, name).reshape(-1, pixels) for frame in self.frames]
        return np.stack(read, 1).reshape(-1)[first - top * of_all :][:count]


@dataclass(frozen=True)
class FlatPatchTensor:
    """A patch embedding [channels out, rows x columns x 3]: the colours of a pixel lie side by side, where a file has the
    pixels of a colour.  Read in floats, as the other.
    """

    stored: GgufTensor
    codec: ClassVar[None] = None

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stored.shape[0], math.prod(self.stored.shape[1:]))

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        """`count` values, row-major, after the `first` ones."""
        width, colours = self.shape[1], self.stored.shape[1]
        top, bottom = first // width, -(-(first + count) // width)
        read = self.stored.read(top * width, (bottom - top) * width, name).reshape(bottom - top, colours, -1)
        return read.swapaxes(1, 2).reshape(-1)[first - top * width :][:count]


def bytes_of(shape: tuple[int, ...], kind: int) -> int | None:
    """Bytes of a tensor in a file; None: its rows are no whole blocks, or it is a vector, which no program quantizes."""
    columns = shape[-1] if len(shape) > 1 else 1
    return stored_bytes(kind, math.prod(shape) // columns, columns)
