"""The launches that find the largest numbers of the rows of a result."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.lowering.context import Value
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply.pack import Variant

SLICE = 4096
"""Numbers of a row that one block looks through."""
MAX_COUNT = 64
"""Largest numbers that are asked for."""


@dataclass(frozen=True)
class Chosen:
    """Where the largest numbers of rows are: values f32 [rows][count], ids i32 [rows][count], finite i32 [rows]; and the
    kernels that bring them there, with their scalars."""

    count: int
    values: int
    ids: int
    finite: int
    launches: tuple[tuple[Variant, dict[str, Value]], ...]

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
    values, ids, finite = memory("values of parts", widest), memory("ids of parts", widest), memory("finite parts", parts)
    first: dict[str, Value] = {
        "x": x, "given": ids, "sound": finite, "values": values, "ids": ids, "finite": finite,
        "width": width, "sounds": 0, "count": count,
    }  # fmt: skip
    result = memory("values", most(width)), memory("ids", most(width)), memory("finite", 1)
    second: dict[str, Value] = {
        "x": values, "given": ids, "sound": finite, "values": result[0], "ids": result[1], "finite": result[2],
        "width": parts * count, "sounds": parts, "count": count,
    }  # fmt: skip
    if parts == 1:
        first |= {name: second[name] for name in ("values", "ids", "finite")}
        return Chosen(count, *result, ((Variant("largest", (True, SLICE)), first),))
    return Chosen(count, *result, ((Variant("largest", (True, SLICE)), first), (Variant("largest", (False, SLICE)), second)))
