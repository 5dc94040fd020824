"""What a recorded run of plain text sends, written into its pinned memory in place.

The same numbers as those of `Feed.of` for the padded run, without an array for each: between two tokens the GPU waits for this.
Page tables stay on the device, as those of most tokens are those of the token before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.lowering.cache import CacheKind
from edgeq.targets.cuda.lowering.context import Gather
from edgeq.targets.cuda.lowering.largest import DRAWS
from edgeq.targets.cuda.lowering.states import OF_STATES
from edgeq.targets.cuda.run.angles import AngleTables
from edgeq.targets.cuda.run.states import sent_of_states
from edgeq.targets.cuda.run.storage import POOL_UNIT, CudaPart
from edgeq.targets.rows import PAGE, Page, Rows

Sent = Mapping[object, NDArray[Any]]
Draws = Sequence[Sequence[float]]
"""The numbers of each row's draw, in the order that the kernel reads."""
NO_DRAW = (1.0, 1, 1.0, 0.0, 0.0)
"""The numbers of one that gives the largest."""
OF_ROWS = ("tokens", "slots", "last of causal", "positions", "places", "tables")
"""What differs between the rows of plain text, by its name in `Feed.of`; so do both ends of a span."""
OF_SPANS = re.compile(r"(first|last) of span \d+")
Write = Callable[[int, NDArray[Any]], None]
"""Writes numbers to the device's memory of a block, so many bytes after where that begins."""


def of_rows(name: object) -> str:
    """Which of OF_ROWS that is of a stage of a run; empty: none."""
    found = str(name[0]) if isinstance(name, tuple) else ""
    return found if found in OF_ROWS or OF_SPANS.fullmatch(found) else ""


def stage_of(name: object) -> int:
    """The stage in a name that `of_rows` knows."""
    return int(name[2]) if isinstance(name, tuple) and of_rows(name) else 0


def padded_draws(draws: Draws, count: int) -> Draws:
    """Those of the rows of a class."""
    return [*draws, *[NO_DRAW] * (count - len(draws))]


class SentBlock:
    """What recordings of one key send.

    array   the pinned memory, uint8;  places: of everything in it, where it begins and its bytes
    """

    def __init__(
        self,
        array: NDArray[np.uint8],
        places: Mapping[object, tuple[int, int]],
        sent: Sent,
        *,
        rows: int,
        results: int,
        kinds: Sequence[CacheKind],
        base: int,
        angles: AngleTables,
        windows: Sequence[int],
        write: Write,
    ) -> None:
        """sent   of the first run: types and shapes, and the values of what is the same in all runs of plain text
        places   what differs between rows comes first, that of all rows before that of some

        rows    of the class;  results: of these, that have logits;  base: the address from which page tables and states count
        windows   as `Graph.span_windows`
        write   a page table, which the recording does not copy
        """
        self.array, self._places, self._count, self._results = array, places, rows, results
        self._base, self._angles, self._windows, self._write = base, angles, windows, write
        # The host brings rows of a table that stays in the file.
        self._plain = not any(isinstance(name, Gather) for name in places)
        views = {name: self._view(name, sent[name]) for name in places}
        # Where not all rows have logits, those that have are other ones in every run.
        some = {name for name in views if results < rows and stage_of(name)}
        self._selected = {of_rows(name): views[name] for name in some}
        self._chosen = views.get("wanted") if results < rows else None
        whole = [name for name in views if of_rows(name) and name not in some]
        self._names = [of_rows(name) for name in whole]
        # One of them after another, so that all are one array; a graph that only layers are tried with has none.
        first = places[whole[0]][0] if whole else 0
        stride = places[whole[1]][0] - first if len(whole) > 1 else 0
        assert all(places[name] == (first + i * stride, 4 * rows) for i, name in enumerate(whole))
        self._rows: NDArray[np.int32] = np.ndarray((len(whole), rows), np.int32, array, first, (stride, 4))
        self._turned = "places" in self._names or "places" in self._selected
        self._states = {name: views[key] for name in OF_STATES if (key := (name, "sent", 0)) in views}
        self._tables = [
            (kind.windowed, views[kind], kind.start // POOL_UNIT, places[kind][0]) for kind in kinds if kind in views
        ]
        self._draws = views.get(DRAWS)
        self._wanted = np.arange(rows, dtype=np.int32).tobytes()
        self._written: list[list[int]] = [[] for _ in self._tables]

    def _view(self, name: object, like: NDArray[Any]) -> NDArray[Any]:
        start, nbytes = self._places[name]
        return self.array[start : start + nbytes].view(like.dtype).reshape(like.shape)

    def copy(self, sent: Sent) -> None:
        """Write any run.  A mode that was lowered after this was recorded can send more: what has no place is not read."""
        self._written = [[] for _ in self._tables]
        for name, (start, nbytes) in self._places.items():
            self.array[start : start + nbytes] = np.ascontiguousarray(sent[name]).reshape(-1).view(np.uint8)
        for _, view, _, start in self._tables:
            self._write(start, view)

    def takes(self, rows: Rows) -> bool:
        """Whether `fill` can write a run of its key: text, and if all rows have logits, in their order."""
        if not self._plain or rows.positions.shape[0] > 1 or rows.counted is not None:
            return False
        if self._results < self._count:
            return len(rows.wanted) == self._results
        return self._wanted.startswith(rows.wanted.tobytes())

    def fill(self, rows: Rows, padding: Page, draws: Draws = ()) -> None:
        """Write a run that it `takes`; rows that the run does not have are of a session with that page, and the first in it."""
        slots, sessions, positions = rows.slots.tolist(), rows.sessions.tolist(), rows.positions[0].tolist()
        extra = self._count - len(slots)
        firsts = self._page_tables(rows.pages, slots, sessions, [padding] if extra else [])
        values = {
            "tokens": rows.tokens.tolist() + [0] * extra,
            "slots": slots + [0] * extra,
            "last of causal": [slot + 1 for slot in slots] + [1] * extra,
            "positions": positions + [0] * extra,
            "tables": [firsts[session] for session in sessions] + firsts[-1:] * extra,
        }
        for kind, window in enumerate(self._windows):
            lasts = values[f"last of span {kind}"] = values["last of causal"]
            values[f"first of span {kind}"] = [max(last - window, 0) if window else 0 for last in lasts]
        if self._turned:
            values["places"] = self._angles.places_of_text(values["positions"])
        if self._names:
            self._rows[:] = [values[name] for name in self._names]
        if self._chosen is not None:
            self._chosen[:] = rows.wanted
            for name, view in self._selected.items():
                view[:] = [values[name][row] for row in rows.wanted.tolist()]
        if rows.states:
            for name, numbers in sent_of_states(rows, self._count, self._base).items():
                self._states[name][:] = numbers
        if self._draws is not None:
            self._draws[:] = padded_draws(draws, self._results)

    def _page_tables(
        self, pages: Sequence[Sequence[Page]], slots: Sequence[int], sessions: Sequence[int], padding: list[Page]
    ) -> list[int]:
        """Write the page tables; where those of each session begin in them, and then that of the padding."""
        ends = [0] * len(pages)
        for slot, session in zip(slots, sessions, strict=True):
            if slot >= ends[session]:
                ends[session] = slot + 1
        firsts, every = list[int](), list[Page]()
        for held, end in zip(pages, ends, strict=True):
            firsts.append(len(every))
            # No more than the rows see: a session can hold others for what comes next.
            every += held[: -(-end // PAGE)]
        firsts.append(len(every))
        every += padding
        for table, (windowed, view, start, place) in enumerate(self._tables):
            # A part that was dropped no row sees.
            found = [
                part.address if type(part := page.windowed if windowed else page.full) is CudaPart else self._base
                for page in every
            ]
            # Of most tokens the pages are those of the one before.
            if found != self._written[table]:
                self._written[table] = found
                view[: len(found)] = (np.array(found, np.int64) - self._base) // POOL_UNIT + start
                view[len(found) :] = 0
                self._write(place, view[: len(found)])
        return firsts
