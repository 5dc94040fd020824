"""Things measured side by side: all of them once, then all of them again, and how their numbers are shown.

A neighbour on the machine, or a processor that has become warm, then meets all of them alike.  Only Python's own library is
needed, because processes of other runtimes import this too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Competitor(Protocol):
    """name      for people, with the settings that it is measured under
    failure   why it dropped out; what was measured before stays
    """

    failure: str | None

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Competitor)


def rounds(
    competitors: Sequence[C],
    repetitions: int,
    measure: Callable[[C], None],
    failures: type[Exception],
    *,
    report: Callable[[float, float, str], None] = lambda done, total, label: None,
    before_round: Callable[[], None] = lambda: None,
    reason: Callable[[Exception], str] = str,
) -> None:
    """`measure` every competitor in turn, so many times.

    failures   one of them makes a competitor drop out;  reason: what is said of it
    """
    for i in range(repetitions):
        before_round()
        for j, each in enumerate(competitors):
            report(i * len(competitors) + j, repetitions * len(competitors), f"{each.name}, round {i + 1}")
            if each.failure is None:
                try:
                    measure(each)
                except failures as error:
                    each.failure = reason(error)


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, unit: float = 1, places: int = 1, name: str = "") -> str:
        """Median and range, in units of `unit`, which are called `name`."""
        median, low, high = (f"{value / unit:,.{places}f}" for value in (self.median, self.low, self.high))
        return f"{median}{name} [{low}–{high}]"


def shown(values: Sequence[float], unit: float = 1, places: int = 1, name: str = "") -> str:
    """Median and range of measurements; nothing where there is none."""
    return Spread.of(values).shown(unit, places, name) if values else ""


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """A markdown table of cells, its heading first."""
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def listed(title: str, lines: Mapping[str, str]) -> list[str]:
    """A list of names and what there is to say of each, as a part of a page; nothing where it is empty."""
    return ["\n".join([f"{title}:", *(f"- {name}: {text}" for name, text in lines.items())])] if lines else []
