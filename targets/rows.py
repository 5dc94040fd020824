"""The rows that a Program runs over, and the pages of the key/value cache.

A *row* is one token, or one vector in place of a token, of one session: decode is one row, a prefill chunk many, a batch of
sessions one row each, an image one row for each of its patches; so there is one loop and not five.  Slot, position and place
among the rows of a run are three things: the rows of a run may come in any order, and all keys and values of a run are in the
cache before any of its rows attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.states import SessionState

PAGE = 64
"""Cache positions in a page."""

TEXT, VISION = 0, 1
"""Modalities."""


class PagePart:
    """Some layers of PAGE cache positions; the program that made it knows what is inside."""

    __slots__ = ("__weakref__",)


class Page:
    """PAGE cache positions of one session.

    full       the layers without a window
    windowed   those with one; None: dropped, as no row that can come sees these positions there
    snapshot   of the session's states (states.py) after the last position; None: none is kept here
    """

    __slots__ = ("full", "snapshot", "windowed")

    def __init__(self, full: PagePart, windowed: PagePart | None, snapshot: PagePart | None = None) -> None:
        self.full, self.windowed, self.snapshot = full, windowed, snapshot

    @property
    def parts(self) -> tuple[PagePart, ...]:
        """Those with keys and values."""
        return (self.full,) if self.windowed is None else (self.full, self.windowed)

    def without_windows(self) -> Page:
        """The page without its part of layers with a window; the other part is shared."""
        return Page(self.full, None, self.snapshot)

    def with_snapshot(self, snapshot: PagePart | None) -> Page:
        """The page with another snapshot, or none; the other parts are shared."""
        return Page(self.full, self.windowed, snapshot)


def parts_of(data: NDArray[np.uint8], sizes: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """The bytes of a page's parts, of `sizes`, in what `Program.save_page` gave.  ValueError: another number of bytes."""
    full, windowed = sizes
    if len(data) == full + windowed:
        return data[:full], data[full:]
    if len(data) != full:
        raise ValueError(f"{len(data)} bytes for a page of {full + windowed}, or {full} without windows")
    return data, None


@dataclass
class Rows:
    """R rows of one or more sessions.

    tokens      int32 [R]
    positions   int32 [axes, R]      for rotary and learned positions; where a graph uses several axes (time, height, width of
                                     M-RoPE), one stands for all: text
    slots       int32 [R]            where the row's keys and values go in its session's cache
    sessions    int32 [R]            index into `pages`
    pages       per session          its cache pages, enough for the largest slot that is written or seen
    states      per session          its state, where the graph has some: the rows of a session are the next ones of it
    in_order    of states            the order in which they take the rows, which a target has checked; None: it has not yet
    wanted      int32 [L * together] the rows of the result, in its order; Select says how many make one row of it
    vectors     float32 [V, width]   what rows bring instead of a token, or beside it
    vector_of   int32 [R]            row of `vectors`; -1: none.  None: no row brings one
    modality    uint8 [R]            TEXT or VISION; None: text
    spans       int32 [kinds, 2, R]  per kind of visible range the first slot that the row sees, and the one after the last;
                                     a row sees at least one.  None: those up to its own, as Attention.window says
    counted     bool [R]             rows whose inputs are added to sums; None: all
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    sessions: NDArray[np.int32]
    pages: Sequence[Sequence[Page]]
    wanted: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    vectors: NDArray[np.float32] | None = None
    vector_of: NDArray[np.int32] | None = None
    modality: NDArray[np.uint8] | None = None
    spans: NDArray[np.int32] | None = None
    counted: NDArray[np.bool_] | None = None
    states: Sequence[SessionState] = ()
    in_order: StateRows | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def changed(self, **fields: Any) -> Rows:
        """The same run but for these fields, as `dataclasses.replace` gives it in several times as long."""
        found = object.__new__(Rows)
        found.__dict__ |= self.__dict__ | fields
        return found

    def ranges(self, windows: Sequence[int]) -> NDArray[np.int32]:
        """int32 [kinds, 2, R]: `spans`, or what rows see without them in layers of these windows, a kind for each."""
        if self.spans is not None:
            return self.spans[: len(windows)]
        ends = self.slots + 1
        return np.array([(np.maximum(ends - window, 0) if window else 0 * ends, ends) for window in windows], np.int32)

    def by_modality(self) -> Rows:
        """The same run with the rows that bring pictures first, else in the same order (arXiv 2502.00425)."""
        if self.modality is None:
            return self
        order = np.argsort(self.modality != VISION, kind="stable")
        places = np.argsort(order).astype(np.int32)
        return Rows(
            tokens=self.tokens[order],
            positions=self.positions[:, order],
            slots=self.slots[order],
            sessions=self.sessions[order],
            pages=self.pages,
            wanted=places[self.wanted],
            vectors=self.vectors,
            vector_of=None if self.vector_of is None else self.vector_of[order],
            modality=self.modality[order],
            spans=None if self.spans is None else self.spans[:, :, order],
            counted=None if self.counted is None else self.counted[order],
            states=self.states,
        )

    def selected(self, together: int = 1) -> Rows:
        """The rows after a Select: the first of every `together` wanted ones stands for them; they want themselves."""
        first = self.wanted[::together]
        return Rows(
            tokens=self.tokens[first],
            positions=self.positions[:, first],
            slots=self.slots[first],
            sessions=self.sessions[first],
            pages=self.pages,
            wanted=np.arange(len(first), dtype=np.int32),
            vectors=self.vectors,
            vector_of=None if self.vector_of is None else self.vector_of[first],
            modality=None if self.modality is None else self.modality[first],
            spans=None if self.spans is None else self.spans[:, :, first],
        )


@dataclass(frozen=True)
class StateRows:
    """The rows of a run in the order in which states take them.

    order    int32 [R]             rows by session and slot
    begins   int32 [sessions + 1]  where in `order` those of each session begin
    """

    order: NDArray[np.int32]
    begins: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Rows) -> StateRows:
        """ValueError: rows without states, or a session's are not the next ones of its state."""
        if len(rows.states) != len(rows.pages):
            raise ValueError(f"{len(rows.states)} states for {len(rows.pages)} sessions")
        order = np.lexsort((rows.slots, rows.sessions))
        counts = np.bincount(rows.sessions, minlength=len(rows.states))
        begins = np.concatenate([[0], np.cumsum(counts)])
        slots = np.array([state.slot for state in rows.states])
        # A row that is skipped, or comes twice, would go unnoticed.
        if (rows.slots[order] - np.arange(len(rows)) != np.repeat(slots - begins[:-1], counts)).any():
            raise ValueError(f"rows that are not the next ones of states at slots {slots.tolist()}")
        return cls(order.astype(np.int32), begins.astype(np.int32))

    def begin(self, states: Sequence[SessionState]) -> None:
        """The rows are about to be written: they cannot be told from rows that were, should the run not end."""
        for state, count in zip(states, np.diff(self.begins).tolist(), strict=True):
            state.written = max(state.written, state.slot + count)

    def end(self, states: Sequence[SessionState]) -> None:
        """The rows are in the states."""
        for state, count in zip(states, np.diff(self.begins).tolist(), strict=True):
            state.slot += count
