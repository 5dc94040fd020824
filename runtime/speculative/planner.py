"""How long drafts should be: from what runs cost and how many drafts are accepted, measured while decoding."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Source = Literal["mode", "lookup", "mtp"]
"""Sources of drafts: the model in a cheaper mode, the text, the layer that drafts (multi-token prediction)."""
Run = Literal["exact", "mode", "mtp"]
"""A run of the model that verifies, or one of a source that drafts."""

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
        self.acceptance: dict[Source, Acceptance] = {source: Acceptance() for source in get_args(Source)}
        self._gamma, self._longest = gamma, longest
        self._times: dict[tuple[Run, int], deque[float]] = {}
        self._medians: dict[Run, dict[int, float]] = {run: {} for run in get_args(Run)}
        self._cycle = 0
        # The cycle of the next trial of each source, and how many come after that.
        self._probes: dict[Source, tuple[int, int]] = {source: (0, FIRST_PROBE) for source in get_args(Source)}

    def record(self, run: Run, rows: int, seconds: float) -> None:
        """Record the time of a run.

        The first of a kind does not count: its code and its buffers are cold.
        """
        if (run, rows) not in self._times:
            self._times[run, rows] = deque(maxlen=REMEMBERED)
            return
        times = self._times[run, rows]
        times.append(seconds)
        self._medians[run][rows] = statistics.median(times)

    def cost(self, run: Run, rows: int) -> float | None:
        """Seconds of a run, from runs with the nearest numbers of rows; None if there was none of this kind."""
        known = sorted(self._medians[run].items())
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
        return streams in self._medians["exact"]

    def draft_cost(self, source: Source, streams: int) -> float | None:
        """c: the cost of a step that drafts, relative to an exact one; of the text it is 0."""
        if source == "lookup":
            return 0.0
        draft, exact = self.cost(source, streams), self.cost("exact", streams)
        return draft / exact if draft and exact else None

    def verify_cost(self, streams: int, gamma: float) -> float:
        """v: the cost of verifying gamma drafts of a stream, mean over the streams, relative to an exact step."""
        exact, verify = self.cost("exact", streams), self.cost("exact", max(1, round(streams * (gamma + 1))))
        return verify / exact if exact and verify else 1.0 + ROW_COST * gamma

    def plan(self, streams: int, limit: int, lookup: Callable[[], float] | None, made: Sequence[Source]) -> DraftPlan:
        """The plan of the next cycle.

        limit    drafts that there is room for
        lookup   gives the share of the streams for which the text offers drafts; None: not enabled
        made     sources whose drafts are made for every stream; the first is used where the length is fixed
        """
        self._cycle += 1
        none = DraftPlan(made[0] if made else "lookup", 0)
        limit = min(limit, self._longest if self._gamma is None else self._gamma)
        if limit < 1 or not (made or lookup):
            return none
        offered = lookup() if lookup else 0.0
        if self._gamma is not None:
            return DraftPlan("lookup" if offered else made[0], limit) if offered or made else none
        if self.cost("exact", streams) is None:
            return none
        plans = [none]
        offers: list[tuple[Source, float]] = [("lookup", offered)] if offered else []
        for source, share in (*offers, *((each, 1.0) for each in made)):
            if (c := self.draft_cost(source, streams)) is not None:
                plans += [self._predicted(source, g, streams, share, c) for g in range(1, limit + 1)]
        best = max(plans, key=lambda plan: plan.speedup)
        if best.speedup >= GAIN:
            return best
        for source in (*(source for source, _ in offers), *made):
            if self._is_time_to_try(source, streams, limit):
                return DraftPlan(source, min(TRIED, limit))
        return none

    def _predicted(self, source: Source, gamma: int, streams: int, offered: float, c: float) -> DraftPlan:
        """`offered`: the share of streams that have drafts; the others run one row each."""
        tokens = offered * expected_tokens(self.acceptance[source].beta, gamma) + 1 - offered
        return DraftPlan(source, gamma, tokens / (gamma * c + self.verify_cost(streams, offered * gamma)))

    def _is_time_to_try(self, source: Source, streams: int, limit: int) -> bool:
        """Whether to try a source again: until its cost is known, then seldom, and never if even drafts that are all accepted
        would not pay."""
        c = self.draft_cost(source, streams)
        if c is None:
            return True
        hope = max((g + 1) / (g * c + self.verify_cost(streams, g)) for g in range(1, limit + 1))
        at, interval = self._probes[source]
        if hope < GAIN or self._cycle < at:
            return False
        self._probes[source] = self._cycle + interval, min(2 * interval, LAST_PROBE)
        return True
