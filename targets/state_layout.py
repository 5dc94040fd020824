"""How the numbers of states lie in memory, on every target.

All numbers are float32, one state of the graph after another, rows padded to 16 with zeros:

    "sum"    in a state [2] of S, before an even log and before an odd one, and [2 LOG] rows of logs, that of slot s at s modulo
             2 LOG; in a snapshot S
    "tail"   in a state [rows + LOG] inputs, that of slot s at s modulo their number; in a snapshot [rows], oldest first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

from edgeq.targets.states import LOG, StateSpec

LANES = 16


class StatePlace(NamedTuple):
    """Where a state of the graph begins, in numbers: in the states of a session, its log there, and in a snapshot."""

    state: int
    log: int
    snapshot: int


@dataclass(frozen=True)
class Span:
    """Neighbouring numbers, in a snapshot and in the states of a session."""

    snapshot: int
    state: int
    count: int


def padded_rows(spec: StateSpec) -> int:
    """Numbers of S, or of the inputs, with padding."""
    return prod(spec.shape[:-1]) * padded_width(spec.shape[-1])


def padded_width(width: int) -> int:
    return -(-width // LANES) * LANES


class StateLayout:
    """places   of the states of the graph;  numbers, snapshot_numbers: of all of a session's, and of a snapshot"""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._specs = specs
        held, logs = [], []
        for spec in specs:
            tail = spec.kind == "tail"
            held.append((spec.shape[0] + LOG) * padded_width(spec.shape[1]) if tail else 2 * padded_rows(spec))
            logs.append(2 * LOG * padded_width(spec.log))
        begins = list(accumulate((sum(each) for each in zip(held, logs, strict=True)), initial=0))
        snapshots = list(accumulate(map(padded_rows, specs), initial=0))
        self.places = [StatePlace(*each) for each in zip(begins, map(sum, zip(begins, held)), snapshots)]  # noqa: B905
        self.numbers, self.snapshot_numbers = begins[-1], snapshots[-1]

    def spans(self, slot: int) -> Iterator[Span]:
        """Where what a snapshot holds lies in states that have taken `slot` rows, a whole number of pages."""
        for spec, place in zip(self._specs, self.places, strict=True):
            if spec.kind == "sum":
                count = padded_rows(spec)
                yield Span(place.snapshot, place.state + slot // LOG % 2 * count, count)
            else:
                rows, width = spec.shape[0], padded_width(spec.shape[1])
                for row in range(rows):
                    at = (slot - rows + row) % (rows + LOG)
                    yield Span(place.snapshot + row * width, place.state + at * width, width)
