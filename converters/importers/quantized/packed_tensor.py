"""Tensors of a source whose values are integers with scales, read a range of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.source import StoredArrays, StoredTensor
from edgeq.converters.importers.quantized.grouped import Grouped, as_half, codec_group_size, split
from edgeq.converters.importers.safetensors_folder import ShardTensor
from edgeq.errors import CheckpointError
from edgeq.format.codec import AnyArray, ArrayF32, Codec, from_bf16
from edgeq.format.safetensors import FLOATS

Form = Literal["symmetric", "zero", "offset"]
HALVES = ("F16", "BF16")
SCALES = tuple(FLOATS)
"""Types of scales."""
Shards = Mapping[str, ShardTensor]
"""The tensors of a folder as its files have them, by name."""


class PackedWeight(Protocol):
    """One quantized weight of a folder, whatever its layout; see `Grouped` for the fields.

    form    which of zero points and offsets it has
    order   int32 [columns], None: none; column j of the integers belongs to input channel order[j] (GPTQ's act-order)
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def bits(self) -> int: ...

    @property
    def group_size(self) -> int: ...

    @property
    def form(self) -> Form: ...

    @property
    def order(self) -> NDArray[np.int32] | None: ...

    def grouped(self, first: int, rows: int) -> Grouped:
        """`rows` rows after the `first` ones, columns as they are stored.  CheckpointError: they are no longer there."""
        ...


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """The quantized weights of a folder.

    weights   by the names of their modules;  tensors: others, by their own names
    parts     names of the tensors that they are made of, or that are left out
    notes     what the user should know of how they were read
    """

    weights: Mapping[str, PackedWeight]
    parts: frozenset[str]
    notes: tuple[str, ...] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A quantized weight as a tensor of a source."""

    name: str
    weight: PackedWeight
    dtype: ClassVar[str] = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def codec(self) -> Codec:
        weight = self.weight
        size = codec_group_size(weight.group_size, weight.shape[1], self.name)
        if weight.form == "offset":
            return Codec("offset", weight.bits, size)
        return Codec("int", weight.bits, size, weight.form == "symmetric")

    @property
    def order(self) -> NDArray[np.int32] | None:
        return self.weight.order

    def quantized(self, first: int, count: int, name: str) -> StoredArrays:
        """The arrays of `codec` for `count` rows after the `first` ones.

        CheckpointError: they are no longer there, or a scale or an offset is none of the codec's.
        """
        found, codec, columns = self.weight.grouped(first, count), self.codec, self.shape[1]
        zero: AnyArray | int = 1 << (found.bits - 1) if found.zero is None else found.per_channel(found.zero)
        if found.offset is not None:
            zero = 0
        idle = np.add.reduceat(found.q != zero, np.arange(0, columns, found.group_size), axis=1) == 0
        arrays = {"q": found.q, "scale": split(as_half(found.scale, idle, name), found.group_size, columns, codec)}
        if found.zero is not None:
            arrays["zero"] = split(found.zero, found.group_size, columns, codec)
        if found.offset is not None:
            offset = as_half(found.offset, np.zeros_like(idle), name, "offset")
            arrays["offset"] = split(offset, found.group_size, columns, codec)
        return arrays

    def read(self, first: int, count: int, name: str) -> ArrayF32:
        """`count` values after the `first` ones, columns in the order of the input channels."""
        columns = self.shape[1]
        top, bottom = first // columns, -(-(first + count) // columns)
        values = self.weight.grouped(top, bottom - top).dequantized()
        if self.order is not None:
            stored, values = values, np.empty_like(values)
            values[:, self.order] = stored
        return values.reshape(-1)[first - top * columns :][:count]


def modules(shards: Shards, end: str) -> list[str]:
    """The modules that have a tensor whose name ends so, in order."""
    return sorted(name.removesuffix(end) for name in shards if name.endswith(end))


def as_floats(tensor: ShardTensor, values: AnyArray) -> ArrayF32:
    """Values that `ShardTensor.raw` gave, as float32."""
    return from_bf16(values) if tensor.dtype == "BF16" else values.astype(np.float32)


def part(tensors: Shards, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> ShardTensor:
    """A tensor that a quantized weight needs.  CheckpointError: missing, or of another type or shape."""
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"tensor {name} is missing; the checkpoint is incomplete or of another kind")
    if tensor.dtype not in dtypes or (shape is not None and tensor.shape != shape):
        expected = f"{' or '.join(dtypes)} {shape if shape is not None else ''}".rstrip()
        raise CheckpointError(f"tensor {name} is {tensor.dtype} {tensor.shape}; expected {expected}")
    return tensor


def matrix(tensors: Shards, name: str, dtypes: tuple[str, ...]) -> ShardTensor:
    """A tensor with two sizes, none of them zero.  CheckpointError: as `part`."""
    tensor = part(tensors, name, dtypes)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CheckpointError(f"tensor {name} has the shape {tensor.shape}; expected two sizes")
    return tensor


def group_order(shards: Shards, name: str, columns: int, group_size: int) -> NDArray[np.int32] | None:
    """The order in which the groups of a weight lie one after another, of the tensor `name` with the group of each channel.

    None: as the channels do.  CheckpointError: groups that have not `group_size` channels each.
    """
    if name not in shards:
        return None
    tensor = part(shards, name, ("I32", "I64"), (columns,))
    index = tensor.raw(0, columns, name).astype(np.int64)
    trivial = np.arange(columns) // group_size
    # All zero, or -1: it was never set.
    if np.array_equal(index, trivial) or not index.any() or (index == -1).any():
        return None
    if not np.array_equal(np.sort(index), trivial):
        raise CheckpointError(f"tensor {name}: not every group has {group_size} channels; the checkpoint is damaged")
    return np.argsort(index, kind="stable").astype(np.int32)
