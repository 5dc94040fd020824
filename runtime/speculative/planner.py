"""How long drafts should be: from what runs cost and how many drafts are accepted, measured while decoding."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Source = Literal["mode", "lookup"]

REMEMBERED = 9
"""Last times of a kind of run, whose median is used: enough to ignore an outlier, few enough to follow a growing cache."""
FADING = 0.95
"""Factor of the earlier counts of acceptance at each cycle: about the last twenty cycles matter."""
GAIN = 1.03
"""Predicted speed-up below which drafting is not worth its risk."""
TRIED = 2
"""Length of a draft that is made to measure acceptance."""
FIRST_PROBE, LAST_PROBE = 64, 1024
"""Cycles between trials of a source that did not pay when it was last tried; twice as many after each."""
ROW_COST = 0.1
"""Cost of a further row of a run as a share of the first, until it is measured."""


@dataclass(frozen=True)
class DraftPlan:
    """Draft `gamma` tokens from `source`; 0: none.  `speedup` is what the measurements predict, against not drafting."""

    source: Source
    gamma: int
    speedup: float = 1.0


def expected_tokens(beta: float, gamma: int) -> float:
    """Tokens of a cycle, when each draft is accepted with probability beta (Leviathan et al. 2023, arXiv 2211.17192, eq. 1)."""
    return gamma + 1.0 if beta >= 1 else float((1 - beta ** (gamma + 1)) / (1 - beta))


class Acceptance:
    """The probability that a draft is accepted, given that those before it were; old counts fade; it begins at one half."""

    def __init__(self) -> None:
        self._accepted, self._rejected = 1.0, 1.0

    def count(self, accepted: int, drafted: int) -> None:
        """Count a cycle: of `drafted` tokens the first `accepted` were accepted."""
        if drafted:
            self._accepted = FADING * self._accepted + accepted
            self._rejected = FADING * self._rejected + (accepted < drafted)

    @property
    def beta(self) -> float:
        return self._accepted / (self._accepted + self._rejected)


class DraftPlanner:
    """Costs of runs by their number of rows, acceptance by source, and the plan that follows from them (QSpec, section 5 of
    arXiv 2410.11305: speed-up = E(gamma) / (gamma c + v)).

    gamma   draft length that the user fixed; None: the one with the best predicted speed-up
    """

    def __init__(self, gamma: int | None, longest: int) -> None:
        self.acceptance: dict[Source, Acceptance] = {"mode": Acceptance(), "lookup": Acceptance()}
        self._gamma, self._longest = gamma, longest
        self._times: dict[tuple[bool, int], deque[float]] = {}
        self._medians: dict[bool, dict[int, float]] = {True: {}, False: {}}
        self._cycle, self._probe, self._interval = 0, 0, FIRST_PROBE

    def record(self, exact: bool, rows: int, seconds: float) -> None:
        """Record the time of a run in the exact mode or in the draft's.

        The first of a kind does not count: its code and its buffers are cold.
        """
        if (exact, rows) not in self._times:
            self._times[exact, rows] = deque(maxlen=REMEMBERED)
            return
        times = self._times[exact, rows]
        times.append(seconds)
        self._medians[exact][rows] = statistics.median(times)

    def cost(self, exact: bool, rows: int) -> float | None:
        """Seconds of a run, from runs with the nearest numbers of rows; None if there was none of this kind."""
        known = sorted(self._medians[exact].items())
        if not known:
            return None
        below = [pair for pair in known if pair[0] <= rows]
        above = [pair for pair in known if pair[0] >= rows]
        if below and above:
            (n, a), (m, b) = below[-1], above[0]
            return a if n == m else a + (b - a) * (rows - n) / (m - n)
        if below:
            n, a = below[-1]
            slope = max(0.0, (a - known[0][1]) / (n - known[0][0])) if len(known) > 1 else ROW_COST * a / n
            return a + slope * (rows - n)
        return above[0][1]

    def has_plain_steps(self, streams: int) -> bool:
        """Whether a step without drafts was measured, which is the unit of c and v."""
        return streams in self._medians[True]

    def draft_cost(self, streams: int) -> float | None:
        """c: the cost of a step in the draft's mode, relative to an exact one."""
        draft, exact = self.cost(False, streams), self.cost(True, streams)
        return draft / exact if draft and exact else None

    def verify_cost(self, streams: int, gamma: float) -> float:
        """v: the cost of verifying gamma drafts of a stream, mean over the streams, relative to an exact step."""
        exact, verify = self.cost(True, streams), self.cost(True, max(1, round(streams * (gamma + 1))))
        return verify / exact if exact and verify else 1.0 + ROW_COST * gamma

    def plan(self, streams: int, limit: int, lookup: Callable[[], float] | None, mode: bool) -> DraftPlan:
        """The plan of the next cycle.

        limit    drafts that there is room for
        lookup   gives the share of the streams for which the text offers drafts; None: not enabled
        mode     whether drafts in another mode are enabled
        """
        self._cycle += 1
        none = DraftPlan("mode" if mode else "lookup", 0)
        limit = min(limit, self._longest if self._gamma is None else self._gamma)
        if limit < 1 or not (mode or lookup):
            return none
        offered = lookup() if lookup else 0.0
        if self._gamma is not None:
            return DraftPlan("lookup" if offered else "mode", limit) if offered or mode else none
        if self.cost(True, streams) is None:
            return none
        plans = [none]
        if offered:
            plans += [self._predicted("lookup", g, streams, offered, 0.0) for g in range(1, limit + 1)]
        c = self.draft_cost(streams)
        if mode and c is not None:
            plans += [self._predicted("mode", g, streams, 1.0, c) for g in range(1, limit + 1)]
        best = max(plans, key=lambda plan: plan.speedup)
        if best.speedup >= GAIN:
            return best
        if offered and self._is_time_to_try(streams, limit, 0.0):
            return DraftPlan("lookup", min(TRIED, limit))
        return DraftPlan("mode", min(TRIED, limit)) if mode and self._is_time_to_try(streams, limit, c) else none

    def _predicted(self, source: Source, gamma: int, streams: int, offered: float, c: float) -> DraftPlan:
        """`offered`: the share of streams that have drafts; the others run one row each."""
        tokens = offered * expected_tokens(self.acceptance[source].beta, gamma) + 1 - offered
        return DraftPlan(source, gamma, tokens / (gamma * c + self.verify_cost(streams, offered * gamma)))

    def _is_time_to_try(self, streams: int, limit: int, c: float | None) -> bool:
        """Whether to try a source again: seldom, and never if even drafts that are all accepted would not pay."""
        if c is not None:
            hope = max((g + 1) / (g * c + self.verify_cost(streams, g)) for g in range(1, limit + 1))
            if hope < GAIN:
                return False
        if self._cycle < self._probe:
            return False
        self._probe, self._interval = self._cycle + self._interval, min(2 * self._interval, LAST_PROBE)
        return True
