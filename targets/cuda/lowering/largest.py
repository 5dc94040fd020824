"""The launches that find the largest numbers of the rows of a result, and draw from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.arguments.rows import DrawArguments, LargestArguments, LargestResultArguments
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply.pack import Variant

SLICE = 4096
"""Numbers of a row that one block looks through."""
MAX_COUNT = 64
"""Largest numbers that are asked for."""
DRAWS = "draws"
"""The memory of what a run says of its draws, by name."""
DRAW_NUMBERS = 5
"""Numbers of a draw, float64: those of Draw in its order, with one of its uniforms."""


class LeftArray(NamedTuple):
    """An array on the device that a run leaves for the host.

    address   where it begins;  shape: [rows, numbers];  type: of its numbers, of 32 bits
    """

    address: int
    shape: tuple[int, int]
    type: type[np.float32 | np.int32]

    @property
    def nbytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]

    def of(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        """Its numbers in these bytes of the host."""
        return data.view(self.type).reshape(self.shape)


@dataclass(frozen=True)
class Chosen:
    """Where the largest numbers of rows are: values f32 [rows][count], ids i32 [rows][count], finite i32 [rows]; and the
    kernels that bring them there, with their arguments.

    draws   the last of these kernels draws from them, as DRAWS says
    next    where the tokens are that a run can follow with, i32 [rows]: those drawn, else the largest, where `count` is 1
    """

    count: int
    values: int
    ids: int
    finite: int
    launches: tuple[tuple[Variant, LargestArguments | DrawArguments], ...]
    draws: bool
    next: int

    def results(self, rows: int) -> list[LeftArray]:
        """Values, ids, finite and what was drawn, for so many rows."""
        wide, one = (rows, self.count), (rows, 1)
        found = [
            LeftArray(self.values, wide, np.float32),
            LeftArray(self.ids, wide, np.int32),
            LeftArray(self.finite, one, np.int32),
        ]
        return [*found, LeftArray(self.next, one, np.int32)] if self.draws else found

    def tokens(self, left: Sequence[NDArray[Any]], rows: int) -> list[int]:
        """What is at `next`; left: the `results` of a run."""
        tokens: list[int] = left[3 if self.draws else 1][:rows, 0].tolist()
        return tokens


def most(width: int) -> int:
    """How many of `width` numbers can be asked for: those of all slices are one slice for the second kernel."""
    return min(MAX_COUNT, width, SLICE // -(-width // SLICE))


def largest(storage: Storage, x: int, width: int, rows: int, count: int, draws: bool = False) -> Chosen:
    """For x f32 [rows][width], of which `rows` is the most that a run has; `draws`: as of Chosen."""
    parts = -(-width // SLICE)

    def memory(name: str, numbers: int) -> int:
        return storage.named(("largest", name), rows * numbers * 4)

    widest = parts * most(width)
    of_parts = LargestResultArguments(
        values=memory("values of parts", widest), ids=memory("ids of parts", widest), finite=memory("finite parts", parts)
    )
    whole = LargestResultArguments(
        values=memory("values", most(width)), ids=memory("ids", most(width)), finite=memory("finite", 1)
    )
    given, sound = of_parts.ids, of_parts.finite
    result = whole if parts == 1 else of_parts
    first = LargestArguments(x=x, given=given, sound=sound, result=result, width=width, sounds=0, count=count)
    launches: list[tuple[Variant, LargestArguments | DrawArguments]] = [(Variant("largest", (True, SLICE)), first)]
    if parts > 1:
        second = LargestArguments(
            x=of_parts.values, given=given, sound=sound, result=whole, width=parts * count, sounds=parts, count=count
        )
        launches.append((Variant("largest", (False, SLICE)), second))
    if draws:
        sent, drawn = storage.named(DRAWS, rows * DRAW_NUMBERS * 8), memory("drawn", 1)
        each = DrawArguments(values=whole.values, ids=whole.ids, draws=sent, drawn=drawn, count=count)
        launches.append((Variant("draw", (MAX_COUNT, DRAW_NUMBERS)), each))
    return Chosen(count, whole.values, whole.ids, whole.finite, tuple(launches), draws, drawn if draws else whole.ids)
