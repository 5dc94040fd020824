"""The launches that find the largest numbers of the rows of a result."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.rows import LargestArguments, LargestResultArguments
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply.pack import Variant

SLICE = 4096
"""Numbers of a row that one block looks through."""
MAX_COUNT = 64
"""Largest numbers that are asked for."""


@dataclass(frozen=True)
class Chosen:
    """Where the largest numbers of rows are: values f32 [rows][count], ids i32 [rows][count], finite i32 [rows]; and the
    kernels that bring them there, with their arguments."""

    count: int
    values: int
    ids: int
    finite: int
    launches: tuple[tuple[Variant, LargestArguments], ...]

    def results(self, rows: int) -> list[tuple[int, int]]:
        """Addresses and bytes of values, ids and finite, for so many rows."""
        return [(self.values, 4 * rows * self.count), (self.ids, 4 * rows * self.count), (self.finite, 4 * rows)]


def most(width: int) -> int:
    """How many of `width` numbers can be asked for: those of all slices are one slice for the second kernel."""
    return min(MAX_COUNT, width, SLICE // -(-width // SLICE))


def largest(storage: Storage, x: int, width: int, rows: int, count: int) -> Chosen:
    """For x f32 [rows][width], of which `rows` is the most that a run has."""
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
    launches = [(Variant("largest", (True, SLICE)), first)]
    if parts > 1:
        second = LargestArguments(
            x=of_parts.values, given=given, sound=sound, result=whole, width=parts * count, sounds=parts, count=count
        )
        launches.append((Variant("largest", (False, SLICE)), second))
    return Chosen(count, whole.values, whole.ids, whole.finite, tuple(launches))
