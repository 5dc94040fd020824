"""The tensors of a checkpoint under the names that its family gives them, read one slab of rows at a time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.source import CheckpointSource, QuantizedTensor, StoredArrays, StoredTensor
from edgeq.errors import CheckpointError
from edgeq.format.adapter import Adapter, Factors
from edgeq.format.codec import Codec, Kind
from edgeq.format.safetensors import FLOATS

TRANSPOSED_VALUES = 1 << 20
"""Values in memory at a time of a matrix that is read column by column."""


@dataclass(frozen=True)
class NamedTensor:
    """What is read where a tensor is asked for by its name.

    stored  the tensor that it is, or begins in after `skipped` values; of a transposed one after as many columns
    added   to every value when it is read;  name: for messages, where the checkpoint calls it otherwise
    first   a tensor that is added to the first row;  every: a row that is added to all
    merged  factors of an adapter whose product is added, and which of its rows is the first here
    factor, order, transposed, matrix, column, within   as of TensorSource
    rows    a vector with a factor of each row
    parts   of several tensors, whose rows follow one another; `stored` is that of the first
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    skipped: int = 0
    added: float = 0.0
    name: str = ""
    first: NamedTensor | None = None
    every: NamedTensor | None = None
    merged: tuple[Factors, int] | None = None
    factor: float = 1.0
    order: Sequence[int] = ()
    transposed: bool = False
    matrix: int = 0
    parts: tuple[NamedTensor, ...] = ()
    column: int | None = None
    rows: NamedTensor | None = None
    within: Sequence[int] = ()

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def rearranged(self) -> bool:
        """Whether its rows are others than those of one stored tensor: scaled, in another order, columns, or cut."""
        cut = self.column is not None or bool(self.within)
        scaled = self.factor != 1 or self.rows is not None
        return scaled or bool(self.order) or self.transposed or bool(self.parts) or cut


@dataclass(frozen=True)
class Zeros:
    """A tensor that a checkpoint does not have because it is zero: the bias of a LayerNorm without one."""

    shape: tuple[int, ...]
    dtype: ClassVar[str] = "F32"
    codec: ClassVar[None] = None

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        return np.zeros(count, np.float32)


@dataclass(frozen=True)
class TensorSource:
    """Where to find a tensor that the checkpoint has under another name, as rows of a larger one, or less a constant.

    name    of the stored tensor, whose shape is `stored`; "": there is none, all values are zero, or what is `added`
    shape   of the tensor meant: it begins at row `row` of the stored one, whose leading dimensions are taken as one
    added   a constant that is not in the stored values
    first   name of a vector that is added to the first row; "": none
    every   a matrix of one row that is added to all rows
    factor  every stored value is multiplied by it
    order   which rows of the stored tensor are those meant, where they do not follow one another; empty: they do
    transposed   the stored matrix has the rows meant as columns, from column `row` on;  matrix: which it is of several
    column  with which the rows meant begin in those of the stored matrix, which are longer; None: they are whole
    parts   sources of tensors whose rows follow one another, in place of one of these
    rows    name of a vector with a factor of each row; "": there are none
    within  which values of a stored row, a vector, are those of the row meant; empty: they follow one another
    otherwise   where to find it in checkpoints without the stored tensor, or with another of its name
    """

    name: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    row: int = 0
    added: float = 0.0
    first: str = ""
    factor: float = 1.0
    order: Sequence[int] = ()
    transposed: bool = False
    matrix: int = 0
    parts: tuple[TensorSource, ...] = ()
    otherwise: TensorSource | None = None
    every: TensorSource | None = None
    column: int | None = None
    rows: str = ""
    within: Sequence[int] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those of all tensors that are read for it."""
        every = self.every.names if self.every else ()
        return tuple(name for each in self.parts for name in each.names) or (self.name, self.first, self.rows, *every)


class Checkpoint:
    """The weights of a source.

    tensors   by name; those of the source until they are renamed and arranged
    """

    def __init__(self, source: CheckpointSource) -> None:
        """CheckpointError: as `CheckpointSource.tensors`."""
        self.source = source
        self.tensors = {name: NamedTensor(tensor, tensor.shape) for name, tensor in source.tensors().items()}
        self.adapter: Adapter | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def config(self) -> Mapping[str, Any]:
        return self.source.config

    def merge(self, adapter: Adapter) -> None:
        """Add the products of an adapter's factors to the weights that it was trained for, whenever those are read.

        CheckpointError: there is no such weight, or it has another shape.
        """
        for module, factors in adapter.factors.items():
            name = f"{module}.weight"
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != factors.shape:
                found = f"of {tensor.shape}" if tensor else "that is not in the checkpoint"
                raise CheckpointError(
                    f"adapter {adapter.name}: {module} is for a weight of {factors.shape}, and {name} is one {found}; give the "
                    "checkpoint that it was trained for"
                )
            self.tensors[name] = replace(tensor, merged=(factors, 0))
        self.adapter = adapter

    def tensor(self, name: str, shape: tuple[int, ...]) -> NamedTensor:
        """CheckpointError: there is none of this name, or it has another shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.source.place}: tensor {name} is missing; the checkpoint is incomplete or of another kind"
            )
        if tensor.shape != shape:
            raise CheckpointError(f"{self.source.place}: {name} has the shape {tensor.shape}; config.json says {shape}")
        return tensor

    def rename(self, beginnings: Mapping[str, str]) -> None:
        """Replace beginnings of tensor names by others.  CheckpointError: two tensors would have the same name."""
        renamed: dict[str, NamedTensor] = {}
        for name, tensor in self.tensors.items():
            theirs = next((each for each in beginnings if name.startswith(each)), "")
            ours = beginnings[theirs] + name.removeprefix(theirs) if theirs else name
            if ours in renamed:
                raise CheckpointError(f"{self.source.place}: has {name} under two names; one of them is too many")
            renamed[ours] = replace(tensor, name=name) if theirs else tensor
        self.tensors = renamed

    def arrange(self, sources: Mapping[str, TensorSource]) -> None:
        """Replace in `tensors` what `sources` are made of by the tensors that they describe, under the names given.

        CheckpointError: a source is missing or has another shape.
        """
        there = {name: self._there(source) for name, source in sources.items()}
        arranged = {name: self._meant(source) for name, source in there.items()}
        used = {name for source in there.values() for name in source.names}
        rest = {name: tensor for name, tensor in self.tensors.items() if name not in used}
        twice = sorted(set(rest) & set(arranged))
        if twice:
            raise CheckpointError(
                f"{self.source.place}: has both {twice[0]} and {there[twice[0]].names[0]}; one of them is too many"
            )
        self.tensors = rest | arranged

    def _there(self, source: TensorSource) -> TensorSource:
        while source.otherwise:
            parts = source.parts or (source,)
            if all(each.name in self.tensors and self.tensors[each.name].shape == each.stored for each in parts):
                break
            source = source.otherwise
        return source

    def _meant(self, source: TensorSource) -> NamedTensor:
        """The tensor that `source` describes.  CheckpointError: as `arrange`."""
        if source.parts:
            parts = tuple(self._meant(each) for each in source.parts)
            return NamedTensor(parts[0].stored, source.shape, name=parts[0].name, parts=parts)
        if not source.name:
            return NamedTensor(Zeros(source.shape), source.shape, added=source.added)
        tensor = self.tensor(source.name, source.stored)
        if tensor.merged and (source.transposed or source.within):
            raise CheckpointError(f"adapter: {source.name} is stored with columns in another order; supported: others")
        skipped = tensor.skipped + source.row * (1 if source.transposed else math.prod(source.shape[1:]))
        first = replace(self.tensor(source.first, source.shape[1:]), name=source.first) if source.first else None
        merged = (tensor.merged[0], source.row) if tensor.merged else None
        every = self._meant(source.every) if source.every else None
        rows = replace(self.tensor(source.rows, source.shape[:1]), name=source.rows) if source.rows else None
        return NamedTensor(
            tensor.stored, source.shape, skipped, source.added, source.name, first, every, merged,
            source.factor, source.order, source.transposed, source.matrix, column=source.column, rows=rows,
            within=source.within,
        )  # fmt: skip

    def dtype(self, name: str) -> str:
        """How a weight is to be kept: as it is stored, "f32", "f16" or "bf16"; f32 where something is added to it, or where a
        factor is no power of two.
        """
        return _dtype(self.tensors[name], name)

    def codec(self, name: str) -> Codec:
        """How the checkpoint holds a weight: in integers, or in the floats of `dtype`."""
        return _integers(self.tensors[name]) or Codec(cast(Kind, self.dtype(name)))

    def order(self, name: str) -> NDArray[np.int32] | None:
        """The order in which the integers of a weight have its columns, as in `QuantizedTensor`; None: their own."""
        return cast(QuantizedTensor, self.tensors[name].stored).order if self.codec(name).integer else None

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start...stop of a tensor as float32 [stop - start, ...]; a vector is a tensor of one-element rows.

        CheckpointError: NaN or infinity in them, or they are no longer there.
        """
        self.dtype(name)
        return self._rows(self.tensors[name], name, start, stop)

    def _rows(self, tensor: NamedTensor, name: str, start: int, stop: int) -> NDArray[np.float32]:
        if tensor.parts:
            spans = _spans(tensor.parts, start, stop)
            return np.concatenate([self._rows(part, part.name, begin, end) for part, begin, end in spans])
        stored = self._read(tensor, tensor.name or name, start, stop)
        with np.errstate(over="ignore", invalid="ignore"):
            values = self._changed(tensor, stored, start, stop)
        # What is finite where it is stored may not be where it is multiplied or added up; `first` is added in place.
        if (values is not stored or tensor.first is not None) and not np.isfinite(values).all():
            raise CheckpointError(f"{name} is beyond float32 where its factors are applied; the checkpoint is damaged")
        return values

    def _changed(self, tensor: NamedTensor, values: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        """Rows as they are stored, with all that is added to them and that they are multiplied by."""
        if tensor.first is not None and start == 0 < stop:
            values[0] += self._read(tensor.first, tensor.first.name, 0, len(values[0]))
        if tensor.every is not None:
            values = values + self._rows(tensor.every, tensor.every.name, 0, 1)
        if tensor.merged is not None:
            factors, row = tensor.merged
            places = list(tensor.order[start:stop]) if tensor.order else slice(row + start, row + stop)
            values = values + factors.b[places] @ factors.a
        values = values * np.float32(tensor.factor) if tensor.factor != 1 else values
        if tensor.rows is not None:
            factors_of_rows = self._rows(tensor.rows, tensor.rows.name, start, stop)
            values = values * factors_of_rows.reshape(-1, *(1,) * (values.ndim - 1))
        return values + np.float32(tensor.added) if tensor.added else values

    def quantized(self, name: str, start: int, stop: int) -> StoredArrays:
        """The integers of rows start...stop of a matrix whose `codec` has some."""
        return self._quantized(self.tensors[name], name, start, stop)

    def _quantized(self, tensor: NamedTensor, name: str, start: int, stop: int) -> StoredArrays:
        if tensor.parts:
            spans = _spans(tensor.parts, start, stop)
            found = [self._quantized(part, part.name, begin, end) for part, begin, end in spans]
            return {array: np.concatenate([each[array] for each in found]) for array in found[0]}
        skipped, stored = tensor.skipped // tensor.shape[-1], cast(QuantizedTensor, tensor.stored)
        if not tensor.order:
            return stored.quantized(skipped + start, stop - start, tensor.name or name)
        lowest, highest, places = _places(tensor.order[start:stop])
        arrays = stored.quantized(skipped + lowest, highest - lowest, tensor.name or name)
        return {part: array[places] for part, array in arrays.items()}

    def _read(self, tensor: NamedTensor, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows of a tensor as they are stored, float32; `name`: for messages."""
        if tensor.transposed:
            values = self._columns(tensor, name, start, stop)
        elif tensor.order:
            lowest, highest, places = _places(tensor.order[start:stop])
            values = self._span(tensor, name, lowest, highest)[places]
        else:
            values = self._span(tensor, name, start, stop)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{name} has NaN or infinite values; the checkpoint is damaged or its training diverged")
        return values[:, list(tensor.within)] if tensor.within else values

    def _span(self, tensor: NamedTensor, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Neighbouring rows of the stored tensor."""
        row = math.prod(tensor.shape[1:]) if tensor.column is None else tensor.stored.shape[-1]
        values = tensor.stored.read(tensor.skipped + start * row, (stop - start) * row, name)
        if tensor.column is not None:
            return values.reshape(stop - start, row)[:, tensor.column : tensor.column + tensor.shape[1]]
        return values.reshape(stop - start, *tensor.shape[1:])

    def _columns(self, tensor: NamedTensor, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Columns of the stored matrix as rows."""
        (columns, width), first = tensor.stored.shape[-2:], tensor.skipped
        picked = list(tensor.order[start:stop]) if tensor.order else slice(first + start, first + stop)
        begin = tensor.matrix * columns * width
        values = np.empty((stop - start, columns), np.float32)
        height = max(1, TRANSPOSED_VALUES // width)
        for top in range(0, columns, height):
            bottom = min(top + height, columns)
            block = tensor.stored.read(begin + top * width, (bottom - top) * width, name).reshape(bottom - top, width)
            values[:, top:bottom] = block[:, picked].T
        return values

    def whole(self, name: str) -> NDArray[np.float32]:
        """A whole tensor as float32: norm gains, biases, one layer of a calibration."""
        return self.rows(name, 0, self.tensors[name].shape[0])

    @property
    def rearranged(self) -> bool:
        """Whether some matrix has its rows in another order than the checkpoint, or scaled, or as columns."""
        return any(tensor.rearranged and len(tensor.shape) > 1 for tensor in self.tensors.values())

    def files(self) -> Sequence[Path]:
        """The files whose change would change the result."""
        return self.source.files()

    def digest(self) -> str:
        """sha256 of the configuration and of every tensor's name, type and shape; no weight is read for it."""
        headers = sorted((name, t.dtype, t.shape) for name, t in self.tensors.items())
        described = [self.config, headers, *([self.adapter.digest] if self.adapter else [])]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _dtype(tensor: NamedTensor, name: str) -> str:
    """As `Checkpoint.dtype`; of parts of several types f32."""
    if tensor.parts:
        kinds = {_dtype(part, part.name) for part in tensor.parts}
        return kinds.pop() if len(kinds) == 1 else "f32"
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{tensor.name or name} is stored as {tensor.dtype}; supported: {', '.join(FLOATS)}")
    if tensor.first is not None and tensor.first.dtype not in FLOATS:
        raise CheckpointError(f"{tensor.first.name} is stored as {tensor.first.dtype}; supported: {', '.join(FLOATS)}")
    for other in (tensor.every, tensor.rows):
        if other is not None:
            _dtype(other, other.name)
    exact = abs(math.frexp(tensor.factor)[0]) == 0.5
    return "f32" if tensor.added or tensor.first or tensor.every or tensor.rows or not exact else FLOATS[tensor.dtype]


def _integers(tensor: NamedTensor) -> Codec | None:
    """The codec of the integers that can be taken as they are; of parts one that all have, with the columns in one order."""
    if tensor.parts:
        codecs = {_integers(part) for part in tensor.parts}
        codec = codecs.pop()
        if codecs or codec is None:
            return None
        first, *others = (cast(QuantizedTensor, part.stored).order for part in tensor.parts)
        same = all(each is None if first is None else each is not None and np.array_equal(each, first) for each in others)
        return codec if same else None
    added = tensor.added or tensor.first or tensor.every or tensor.merged
    changed = added or tensor.factor != 1 or tensor.rows or tensor.transposed
    return None if changed or tensor.column is not None or tensor.within else tensor.stored.codec


def _spans(parts: tuple[NamedTensor, ...], start: int, stop: int) -> Iterator[tuple[NamedTensor, int, int]]:
    """The parts that rows start...stop lie in, and which of their rows those are; of no rows the first part."""
    top = 0
    for part in parts:
        begin, end = max(start - top, 0), min(stop - top, part.shape[0])
        if begin < end:
            yield part, begin, end
        elif start == stop and not top:
            yield part, 0, 0
        top += part.shape[0]


def _places(rows: Sequence[int]) -> tuple[int, int, NDArray[np.int64]]:
    """The first row of some, the one after the last, and where they are in what lies between."""
    places = np.array(rows, np.int64)
    lowest, highest = (int(places.min()), int(places.max()) + 1) if len(places) else (0, 0)
    return lowest, highest, places - lowest
