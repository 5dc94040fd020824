"""The record that every layout is read into, and the codec of `edgeq/format/codec.py` that holds it without a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import CheckpointError
from edgeq.format.codec import GROUP_SIZES, AnyArray, ArrayF32, ArrayU8, Codec


@dataclass(frozen=True, eq=False)
class Grouped:
    """Rows of a weight as somebody quantized it: w = scale * (q - zero), or w = scale * q + offset.

    q           uint8 [rows, columns], below 2**bits
    group_size  channels that share a scale, the last group of a row may have fewer; `columns` for one group per row
    scale       float32 [rows, groups], of any sign
    zero        uint8 [rows, groups];  offset: float32 [rows, groups];  neither: zero is 2**(bits - 1) everywhere
    """

    q: ArrayU8
    bits: int
    group_size: int
    scale: ArrayF32
    zero: ArrayU8 | None = None
    offset: ArrayF32 | None = None

    def per_channel(self, values: AnyArray) -> AnyArray:
        """Values of the groups [rows, groups] -> [rows, columns]."""
        wide: AnyArray = np.repeat(values, self.group_size, axis=1)
        return wide[:, : self.q.shape[1]]

    def dequantized(self) -> ArrayF32:
        """float32 [rows, columns]; exact but for the last addition of an offset where scales have at most 16 bits."""
        with np.errstate(invalid="ignore", over="ignore"):
            # Whoever reads them refuses what is not finite, by its name.
            values = self.q.astype(np.float32)
            if self.offset is None:
                zero = np.full_like(self.scale, 1 << (self.bits - 1)) if self.zero is None else self.zero.astype(np.float32)
                values -= self.per_channel(zero)
            values *= self.per_channel(self.scale)
            if self.offset is not None:
                values += self.per_channel(self.offset)
        return values


def codec_group_size(group_size: int, columns: int, name: str) -> int:
    """The group size in which a codec holds groups of `group_size`: finer groups repeat the scale of the one they lie in.

    0: one group per row.  CheckpointError: a group is no multiple of 16 channels.
    """
    if group_size >= columns:
        return 0
    found = next((size for size in reversed(GROUP_SIZES) if group_size % size == 0), None)
    if found is None:
        raise CheckpointError(
            f"{name}: groups of {group_size} channels; supported: multiples of 16, or one group per row; ask for a checkpoint "
            "with such groups"
        )
    return found


def split(values: AnyArray, group_size: int, columns: int, codec: Codec) -> AnyArray:
    """Values of groups of `group_size` [rows, groups] as values of the groups of `codec`: repeated."""
    if not codec.group_size or codec.group_size == group_size:
        return values
    starts = np.arange(codec.groups(columns)) * codec.group_size
    return np.ascontiguousarray(values[:, starts // group_size])


def as_half(
    values: ArrayF32, idle: NDArray[np.bool_], name: str, part: Literal["scale", "offset"] = "scale"
) -> NDArray[np.float16]:
    """Scales, or offsets, as f16 where that is exact.  `idle`: groups in which they change nothing: no integer is scaled.

    CheckpointError: one is not an f16, with the first one.
    """
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    wrong = ((half.astype(np.float32) != values) & ~idle) | ~np.isfinite(values)
    if wrong.any():
        row, group = (int(each[0]) for each in np.nonzero(wrong))
        raise CheckpointError(
            f"{name}: the {part} of row {row}, group {group} is {float(values[row, group]):.9g}, which f16 does not hold "
            f"exactly, like {int(wrong.sum())} in these {len(values)} rows; ask for a checkpoint with f16 {part}s, or "
            "convert the original one"
        )
    return np.where(np.isfinite(half), half, np.float16(0))
