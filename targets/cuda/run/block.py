"""What a recorded run of plain text sends, written into its pinned memory in place.

The same numbers as those of `Feed.of` for the padded run, without an array for each: between two tokens the GPU waits for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.lowering.cache import CacheKind
from edgeq.targets.cuda.lowering.context import Angles, Gather
from edgeq.targets.cuda.lowering.largest import DRAWS
from edgeq.targets.cuda.lowering.states import OF_STATES
from edgeq.targets.cuda.run.states import sent_of_states
from edgeq.targets.cuda.run.storage import POOL_UNIT, CudaPart
from edgeq.targets.rows import PAGE, Page, Rows

Sent = Mapping[object, NDArray[Any]]
Draws = Sequence[Sequence[float]]
"""The numbers of each row's draw, in the order that the kernel reads."""
NO_DRAW = (1.0, 1, 1.0, 0.0, 0.0)
"""The numbers of one that gives the largest."""
OF_ROWS = ("tokens", "slots", "last of causal", "positions", "tables")
"""What differs between the rows of plain text, by its name in `Feed.of`."""
NEIGHBOURS = 256
"""Positions whose angles are computed at once, as a text comes to them one by one."""
MAX_TABLES = 64
"""Such tables that are kept: 16 MiB for heads of 128 dimensions."""


def padded_draws(draws: Draws, count: int) -> Draws:
    """Those of the rows of a class."""
    return [*draws, *[NO_DRAW] * (count - len(draws))]


class AngleRows:
    """Cosines and sines of positions, kept for those that come next."""

    def __init__(self, angles: Angles) -> None:
        self._angles = angles
        self._kept: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    def fill(self, cos: NDArray[np.float32], sin: NDArray[np.float32], positions: Sequence[int]) -> None:
        """Rows of both [rows, pairs], one for each position."""
        for row, position in enumerate(positions):
            first = position // NEIGHBOURS
            if first not in self._kept:
                self._make(first)
            cosines, sines = self._kept[first]
            cos[row], sin[row] = cosines[position % NEIGHBOURS], sines[position % NEIGHBOURS]

    def _make(self, first: int) -> None:
        if len(self._kept) == MAX_TABLES:
            self._kept.clear()
        self._kept[first] = self._angles.of(np.arange(first * NEIGHBOURS, (first + 1) * NEIGHBOURS, dtype=np.int32)[None])


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
        kinds: Sequence[CacheKind],
        base: int,
        angles: Mapping[Angles, AngleRows],
    ) -> None:
        """sent   of the first run: types and shapes, and the values of what is the same in all runs of plain text

        rows    of the class;  base: the address from which page tables and states count
        """
        self.array, self._places, self._count, self._base = array, places, rows, base
        # The host brings rows of a table that stays in the file.
        self._plain = not any(isinstance(name, Gather) for name in places)
        views = {name: self._view(name, sent[name]) for name in places}
        stages = range(2)
        self._rows = {name: [views[key] for i in stages if (key := (name, "sent", i)) in views] for name in OF_ROWS}
        self._states = {name: views[key] for name in OF_STATES if (key := (name, "sent", 0)) in views}
        self._tables = [(kind.windowed, views[kind], kind.start // POOL_UNIT) for kind in kinds if kind in views]
        self._draws = views.get(DRAWS)
        self._angles = [(kept, views[each, "cos"], views[each, "sin"]) for each, kept in angles.items()]
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

    def takes(self, rows: Rows) -> bool:
        """Whether `fill` can write a run: text, with the logits of every row in their order."""
        if not self._plain or rows.positions.shape[0] > 1 or rows.counted is not None:
            return False
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
        for name, views in self._rows.items():
            for view in views:
                view[:] = values[name]
        if rows.states:
            for name, numbers in sent_of_states(rows, self._count, self._base).items():
                self._states[name][:] = numbers
        if self._draws is not None:
            self._draws[:] = padded_draws(draws, self._count)
        for kept, cos, sin in self._angles:
            kept.fill(cos, sin, values["positions"])

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
        for table, (windowed, view, start) in enumerate(self._tables):
            parts = [page.windowed if windowed else page.full for page in every]
            # A part that was dropped no row sees.
            found = [part.address if type(part) is CudaPart else self._base for part in parts]
            # Of most tokens the pages are those of the one before.
            if found != self._written[table]:
                self._written[table] = found
                view[: len(parts)] = (np.array(found, np.int64) - self._base) // POOL_UNIT + start
                view[len(parts) :] = 0
        return firsts
