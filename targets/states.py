"""What a layer with a state keeps of the rows that were: a number of bytes per session that does not grow.

A state takes rows in the order of their slots, each once.  It holds what it was some rows ago beside a log of the rows since,
at places that follow from their slots: to forget rows is to set a counter, and the bits of a row depend on its slot alone, not
on the run that it comes in.  A state can be begun again from a *snapshot*, which is taken where a page ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

LOG = 16
"""Rows of a log, which begins at a slot that is a multiple of it; and rows that can be forgotten, from the last one written."""


@dataclass(frozen=True)
class StateSpec:
    """The state of one layer, in float32.

    kind    "sum"    S, to which rows are added: what it was before each of two neighbouring logs, and their rows.  A log that
                     is full is added to the S before it, and the result takes the place of the older S
            "tail"   the last inputs, as a convolution reads them
    shape   of S; or of the inputs [rows, channels], without the newest
    log     "sum": numbers that the log holds of a row
    """

    kind: Literal["sum", "tail"]
    shape: tuple[int, ...]
    log: int = 0

    @property
    def snapshot_numbers(self) -> int:
        """Numbers of a snapshot: S, or the inputs."""
        return prod(self.shape)

    @property
    def numbers(self) -> int:
        """Numbers of a state, without padding."""
        if self.kind == "tail":
            return (self.shape[0] + LOG) * self.shape[1]
        return 2 * (self.snapshot_numbers + LOG * self.log)


def state_bytes(states: Sequence[StateSpec]) -> int:
    """Bytes of the states of one session, without padding."""
    return 4 * sum(spec.numbers for spec in states)


def snapshot_bytes(states: Sequence[StateSpec]) -> int:
    """Bytes of a snapshot of them, without padding."""
    return 4 * sum(spec.snapshot_numbers for spec in states)


def snapshot_pages(states: Sequence[StateSpec], page_bytes: int) -> int:
    """How many pages, a power of two, lie between snapshots that together take no more than their pages; 0: no states."""
    found = 1 if states else 0
    while found * page_bytes < snapshot_bytes(states) and found < 1 << 20:
        found *= 2
    return found


class SessionState:
    """The states of one session in all layers that have one (states.py); the program that made it knows what is inside.

    slot      rows that it has taken, which is the slot of the next
    written   rows that were written to it, those that were forgotten and those of a run that did not end too
    """

    __slots__ = ("__weakref__", "slot", "written")

    def __init__(self, slot: int = 0, written: int = 0) -> None:
        self.slot, self.written = slot, max(slot, written)

    def trim(self, slot: int) -> bool:
        """Forget the rows from `slot` on; False: they are more than it can, and it stays as it was."""
        if not max(0, self.written - LOG) <= slot <= self.slot:
            return False
        self.slot = slot
        return True
