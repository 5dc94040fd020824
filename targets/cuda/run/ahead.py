"""Texts whose next token the device finds too, the largest number of a run or one drawn from the largest: the run after it is
started before the host knows that token.

The device writes the token where the next run reads it, so it goes on while the host draws, writes text and prepares the run
after that.  What the host draws counts: where the device has found another token, what was started is not used.  A state
(states.py) has the next row too, then: at its own place, as any row that may be forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from edgeq.targets.capabilities import Draw
from edgeq.targets.cuda.lowering.context import Lowering
from edgeq.targets.cuda.lowering.largest import Chosen
from edgeq.targets.cuda.run.block import NO_DRAW, Draws
from edgeq.targets.cuda.run.graphs import TURNS, Recorded
from edgeq.targets.cuda.run.recorded import RecordedRuns
from edgeq.targets.cuda.run.requantized import CudaWeights
from edgeq.targets.rows import PAGE, Rows


@dataclass
class NextRun:
    """A run that was started for sessions with these lists of pages, by their ids; `tokens`: what the run before it found.

    count   of its largest numbers that it finds
    """

    recorded: Recorded
    turn: int
    count: int
    lowering: Lowering
    rows: Rows
    sessions: Sequence[int]
    tokens: list[int] = field(default_factory=list)

    def is_of(self, rows: Rows, lowering: Lowering, count: int) -> bool:
        own = self.rows
        return (
            lowering is self.lowering
            and count == self.count
            and rows.tokens.tolist() == self.tokens
            and rows.slots.tobytes() == own.slots.tobytes()
            and rows.positions.tobytes() == own.positions.tobytes()
            and rows.sessions.tobytes() == own.sessions.tobytes()
            and (not rows.states or all(a is b for a, b in zip(rows.states, own.states, strict=True)))
        )


def numbers(draw: Draw, turn: int) -> tuple[float, ...]:
    """What the device is told of a draw; `turn`: 0, or 1 of the one after it."""
    *rules, uniforms = draw
    return (*rules, uniforms[turn]) if draw.temperature else NO_DRAW


def following_rows(rows: Rows) -> Rows:
    """The rows of text that come after these in their sessions, whose tokens nobody knows yet."""
    return rows.changed(positions=rows.positions + 1, slots=rows.slots + 1)


def takes_snapshot(rows: Rows) -> bool:
    """Whether a state comes to the end of a page, where the session has room for a snapshot only when it asks for the run."""
    return bool((rows.slots % PAGE == PAGE - 1).any())


class RunsAhead:
    """A run that was started ahead is used if it is the next run of the program, and of the tokens that were found.

    Else its time is lost and nothing more: what it wrote in the cache, the run that comes in its place writes again, as the
    device does one after the other.
    """

    def __init__(self, runs: RecordedRuns) -> None:
        self._runs = runs
        self._next: NextRun | None = None
        self._last: Sequence[int] = ()

    def drop(self) -> None:
        """Something else runs, or pages change: what was started is not used."""
        self._next, self._last = None, ()

    def run(
        self, rows: Rows, lowering: Lowering, weights: CudaWeights | None, chosen: Chosen, ahead: Sequence[Draw]
    ) -> Sequence[NDArray[Any]] | None:
        """As `Chosen.results`, for the rows of the class; None: there is no memory for it.

        ahead   how the token after each row is drawn, which is the only one of its session, and whose pages have room for it;
                empty: that is not known, or another token is likely
        """
        # By their ids, as the lists keep pages alive: a session that is closed has let go of them.
        sessions, last, started = tuple(map(id, rows.pages)), self._last, self._next
        draws: Sequence[Draws] = ((), ())
        if chosen.draws:
            draws = [[numbers(draw, turn) for draw in ahead] for turn in range(2)]
        self._next, self._last = None, ()
        if (
            started is not None
            and weights is None
            and sessions == started.sessions
            and started.is_of(rows, lowering, chosen.count)
        ):
            recorded: Recorded | None = started.recorded
        else:
            started, recorded = None, self._runs.start(rows, lowering, weights, chosen, draws=draws[0])
        if recorded is None:
            return None
        # Not for sessions that take turns, for each of which the run of another would come in between.
        decodes = rows.wanted.shape[0] == rows.tokens.shape[0]
        if ahead and decodes and weights is None and sessions == last and recorded.block.takes(rows):
            turn = started.turn % TURNS + 1 if started else 1
            after = following_rows(rows)
            following = None
            if not (after.states and takes_snapshot(after)):
                following = self._runs.start(after, lowering, None, chosen, turn, draws[1])
            if following is not None:
                for state in rows.states:
                    state.written = max(state.written, state.slot + 2)
                self._next = NextRun(following, turn, chosen.count, lowering, after, sessions)
        self._last = sessions
        found = self._runs.wait(recorded)
        if self._next is not None:
            self._next.tokens = chosen.tokens(found, rows.tokens.shape[0])
        return found
