"""A linear layer as it will be stored: which parts, in which codecs, of which size; and how they are written.

A `Recipe` follows from the method, its options and the configuration, so that every segment is known before a weight is read.
What has to be computed from the weights comes as a `Delivery` when the layer is written.  torch is imported when something is
rounded: what is stored as it is needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.slabs import (
    IntegerReader,
    RowReader,
    fits_f16,
    fitting_f16,
    quantized_slabs,
    slabs,
    stored,
)
from edgeq.converters.checkpoint.source import StoredArrays
from edgeq.converters.rounding.presets import MIN_MAX, Preset
from edgeq.errors import CheckpointError
from edgeq.format.codec import CHUNK, ROWS, AnyArray, Codec, pack_beside, pack_floats, pack_integers
from edgeq.format.records import Activation, ArrayRef, LinearSpec, LowRank, SplitRow, Transform, Weight
from edgeq.format.writer import Writer

if TYPE_CHECKING:
    from torch import Tensor

    from edgeq.converters.rounding.quantizer import Quantized

Counted = Callable[[Iterator[AnyArray]], Iterator[AnyArray]]
Rounded = Callable[["Tensor", "Quantized", Codec], None]
"""Takes rows of a weight, float32 [rows, columns], what they were rounded to, and in which codec."""
RoundRows = Callable[["Tensor", Codec, str], "Quantized"]
"""Rounds rows of a weight, float32 [rows, columns], to a codec; with the name of the tensor, for messages."""


FACTOR = Codec("f16")
"""Codec of both low-rank factors."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """The parts of a linear layer (see edgeq.format.records.LinearSpec), all but its name and its bias.

    codec         of the weight, or of its first block
    preset        how the integers of all blocks and of the master are chosen where a delivery does not bring them
    high          codec of the second block: the last `high_columns` columns, in stored order
    order         i32 [columns], a constant: column j of the stored weight is column order[j] of the matrix
    transform     size, stride and the constant base f32 [K, K] or None, of edgeq.format.records.Transform; the matrix is
                  already multiplied by its inverse
    activation    how the input is quantized
    scales        how many constant scales `activation` has, delivered; 0: none
    split         the first column in stored order is kept apart as f16 (SplitRow)
    rank          of the low-rank part, delivered, stored in f16; 0: none
    master        codec of the master: the rows that the weight is rounded from, at higher precision
    """

    codec: Codec
    preset: Preset = MIN_MAX
    high: Codec | None = None
    high_columns: int = 0
    order: NDArray[np.int32] | None = None
    transform: tuple[int, int, NDArray[np.float32] | None] | None = None
    activation: Activation | None = None
    scales: int = 0
    split: bool = False
    rank: int = 0
    master: Codec | None = None

    def blocks(self, columns: int) -> tuple[tuple[Codec, slice], ...]:
        """Codec and columns, in stored order, of each weight block."""
        if self.high is None:
            return ((self.codec, slice(0, columns)),)
        split = columns - self.high_columns
        return ((self.codec, slice(0, split)), (self.high, slice(split, columns)))


@dataclass(frozen=True, eq=False)
class Delivery:
    """What a method worked out for one linear layer.

    read          rows of its tensors; fused layers are read as one matrix whose rows are those of its parts
    quantized     integers of each weight block, columns in stored order; empty: rows are rounded by the recipe's preset
    integers      rows of its tensors in the recipe's one codec, of a source that has them; None: they are rounded
    low_rank      b float32 [rows, rank] and a float32 [rank, columns]; `read` gives the weight less b a
    round_rows    how rows are rounded instead of by the recipe's preset
    scales        constant scales of the input, float32 [scales of the recipe]
    provenance    what is said of the layer in the provenance, as JSON
    """

    read: RowReader
    quantized: tuple[Quantized, ...] = ()
    integers: IntegerReader | None = None
    low_rank: tuple[Tensor, Tensor] | None = None
    round_rows: RoundRows | None = None
    scales: NDArray[np.float32] | None = None
    provenance: object = None


@dataclass(frozen=True)
class LinearItem:
    """A linear layer of the rows of `tensors` (name, rows) one after another; `biases` likewise, stored as `bias_dtype`."""

    name: str
    tensors: tuple[tuple[str, int], ...]
    columns: int
    recipe: Recipe
    biases: tuple[tuple[str, int], ...] = ()
    bias_dtype: str = "f32"

    def __post_init__(self) -> None:
        # Methods round tensors one after another, and their rows lie in blocks together.
        odd = [f"{name} with {rows}" for name, rows in self.tensors[:-1] if rows % ROWS]
        if self.recipe.codec.coupled and odd:
            raise CheckpointError(
                f"{self.name}: codec {self.recipe.codec.name} rounds {ROWS} output channels together; it needs tensors of "
                f"multiples of {ROWS}, found {odd[0]}: use --table or --half"
            )

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.tensors)

    @property
    def title(self) -> str:
        """The names of its tensors, for messages."""
        return ", ".join(name for name, _ in self.tensors)

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each segment, in the order in which `write_linear` appends them."""
        return _lay(self, 0)[1]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and zero points that wait in memory while the integers are written."""
        weights = [*self.spec(0).weights, *([master] if (master := self.spec(0).master) else [])]
        return max(w.nbytes - w.arrays["q"].nbytes for w in weights)

    def spec(self, segment: int) -> LinearSpec:
        """The record of this layer when its first segment is `segment`."""
        return _lay(self, segment)[0]


@dataclass
class _Layout:
    """Hands out segments from `first` on."""

    first: int
    nbytes: list[int] = field(default_factory=list)

    def array(self, dtype: str, shape: tuple[int, ...]) -> ArrayRef:
        ref = ArrayRef(dtype, shape, self.first + len(self.nbytes))
        self.nbytes.append(ref.nbytes)
        return ref

    def weight(self, codec: Codec, rows: int, columns: int) -> Weight:
        parts = codec.parts(rows, columns)
        return Weight(codec, rows, columns, {name: self.array(part.stored, part.shape) for name, part in parts.items()})


def _lay(item: LinearItem, segment: int) -> tuple[LinearSpec, tuple[int, ...]]:
    """The record of `item` and the bytes of its segments, which lie in this order."""
    recipe, rows, columns, out = item.recipe, item.rows, item.columns, _Layout(segment)
    weights = tuple(out.weight(codec, rows, block.stop - block.start) for codec, block in recipe.blocks(columns))
    bias = out.array(item.bias_dtype, (rows,)) if item.biases else None
    order = out.array("i32", (columns,)) if recipe.order is not None else None
    transform = None
    if recipe.transform:
        size, stride, base = recipe.transform
        transform = Transform(size, stride, None if base is None else out.array("f32", (len(base), len(base))))
    activation = recipe.activation
    if activation and recipe.scales:
        activation = replace(activation, scales=out.array("f32", (recipe.scales,)))
    split = SplitRow(0, out.array("f16", (rows,))) if recipe.split else None
    low_rank = None
    if recipe.rank:
        low_rank = LowRank(out.weight(FACTOR, rows, recipe.rank), out.weight(FACTOR, recipe.rank, columns))
    master = out.weight(recipe.master, rows, columns) if recipe.master else None
    spec = LinearSpec(item.name, weights, bias, order, transform, None, activation, split, low_rank, master)
    return spec, tuple(out.nbytes)


def write_linear(writer: Writer, item: LinearItem, delivery: Delivery, counted: Counted, rounded: Rounded) -> None:
    """Append the segments of `item`: one pass over its rows for every weight block, and one for the master.

    `rounded` is called with every slab of a weight block that is rounded here.
    """
    recipe = item.recipe

    def by_preset(weight: Tensor, codec: Codec, title: str) -> Quantized:
        from edgeq.converters.rounding.quantizer import quantize

        return quantize(weight, codec, title, recipe.preset)

    def rows(codec: Codec, block: slice) -> Iterator[NDArray[np.float32]]:
        read = fitting_f16(delivery.read) if codec.kind == "f16" else delivery.read
        for slab in slabs(item.tensors, item.columns, read):
            found = slab[:, block] if recipe.order is None else slab[:, recipe.order[block]]
            if recipe.split and block.start == 0:
                found = found.copy()
                found[:, 0] = 0
            yield found

    for index, (codec, block) in enumerate(recipe.blocks(item.columns)):
        if delivery.integers:
            _write_integers(writer, codec, quantized_slabs(item.tensors, item.columns, delivery.integers), counted)
        elif delivery.quantized:
            slabs_of = (part.arrays for part in delivery.quantized[index].slabs())
            _write_integers(writer, codec, slabs_of, counted)
        else:
            _write_weight(
                writer,
                codec,
                rows(codec, block),
                delivery.round_rows or by_preset,
                item.title,
                counted=counted,
                rounded=rounded,
            )
    if item.biases:
        bias = np.concatenate([delivery.read(name, 0, count) for name, count in item.biases])
        writer.append(counted(iter([stored(bias, item.bias_dtype, item.biases[0][0])])))
    if recipe.order is not None:
        writer.append(counted(iter([np.ascontiguousarray(recipe.order, np.int32)])))
    if recipe.transform and recipe.transform[2] is not None:
        writer.append(counted(iter([np.ascontiguousarray(recipe.transform[2], np.float32)])))
    if recipe.scales:
        assert delivery.scales is not None
        writer.append(counted(iter([np.ascontiguousarray(delivery.scales, np.float32)])))
    if recipe.split:
        first = 0 if recipe.order is None else int(recipe.order[0])
        column = [fits_f16(slab[:, first], item.title) for slab in slabs(item.tensors, item.columns, delivery.read)]
        writer.append(counted(iter([np.concatenate(column).astype(np.float16)])))
    if recipe.rank:
        assert delivery.low_rank is not None
        for factor in delivery.low_rank:
            _write_weight(writer, FACTOR, iter([factor.numpy()]), by_preset, item.title, counted=counted)
    if recipe.master:
        from edgeq.converters.rounding.quantizer import quantize

        # A master serves other input scales: its own rounding is the plain one.
        _write_weight(writer, recipe.master, rows(recipe.master, slice(0, item.columns)), quantize, item.title, counted=counted)


def _write_weight(
    writer: Writer,
    codec: Codec,
    matrix: Iterator[NDArray[np.float32]],
    round_rows: RoundRows,
    title: str,
    *,
    counted: Counted,
    rounded: Rounded | None = None,
) -> None:
    """Rows, slab by slab, rounded or packed as floats."""

    def integers() -> Iterator[StoredArrays]:
        import torch

        for slab in matrix:
            weight = torch.from_numpy(np.ascontiguousarray(slab))
            found = round_rows(weight, codec, title)
            if rounded:
                rounded(weight, found, codec)
            yield found.arrays

    if codec.integer:
        _write_integers(writer, codec, integers(), counted)
    else:
        writer.append(counted(pack_floats(a, codec.kind) for a in matrix))


def _write_integers(writer: Writer, codec: Codec, parts: Iterator[StoredArrays], counted: Counted) -> None:
    # One pass over the weights fills q; its scales, a hundredth of the matrix, wait for their own segments.
    others: dict[str, list[AnyArray]] = {name: [] for name in codec.parts(ROWS, CHUNK) if name != "q"}

    def packed() -> Iterator[AnyArray]:
        for part in parts:
            for name, found in others.items():
                found.append(pack_beside(codec, name, part[name]))
            yield pack_integers(part["q"], codec.bits)

    writer.append(counted(packed()))
    for found in others.values():
        writer.append(counted(iter(found)))
