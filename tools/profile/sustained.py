"""Decoding without a pause, for minutes: how much slower the last one is than the first, and how warm the machine becomes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from edgeq.system import machine
from edgeq.tools.cli.terminal import Report
from edgeq.tools.commands.bench import Test
from edgeq.tools.measure import conditions
from edgeq.tools.measure.power import PowerMeter
from edgeq.tools.measure.statistics import percentile
from edgeq.tools.profile.runs import Combination

MINUTE = 60.0
DROP = 0.05
"""A token that takes so much longer than in the first minute is one of a machine that slowed down."""
LASTING = 3
"""So many runs in a row have to be slow: a neighbour can slow a single one."""
FOR_GOOD = 0.5
"""So large a part of what follows has to be slow as well."""


class Pass(NamedTuple):
    """One run of the test: when it ended, in seconds since the beginning; the median of its tokens, in seconds; clock in MHz,
    temperature and mean power, None where the machine does not tell."""

    ended: float
    token_s: float
    tokens: int
    mhz: float | None
    celsius: float | None
    watts: float | None


@dataclass
class Sustained:
    """seconds   that were asked for;  passes: those that were run, over and over until then"""

    test: str
    seconds: float
    passes: list[Pass] = field(default_factory=list)

    @property
    def window(self) -> float:
        """A minute, or half of what was measured where that is shorter."""
        return min(MINUTE, self.passes[-1].ended / 2)

    @property
    def first(self) -> list[Pass]:
        return [each for each in self.passes if each.ended <= self.window] or self.passes[:1]

    @property
    def last(self) -> list[Pass]:
        return [each for each in self.passes if each.ended > self.passes[-1].ended - self.window] or self.passes[-1:]

    @property
    def slow_after(self) -> float | None:
        """Seconds after which tokens were slower by DROP, and mostly stayed so; None: they did not become so."""
        limit = (1 + DROP) * _median(self.first)
        slow = [each.token_s > limit for each in self.passes]
        for i, each in enumerate(self.passes[: 1 - LASTING]):
            if all(slow[i : i + LASTING]) and sum(slow[i:]) > FOR_GOOD * len(slow[i:]):
                return each.ended
        return None

    def fields(self) -> dict[str, Any]:
        """For JSON, with what follows from the passes."""
        own = asdict(self) | {"passes": [each._asdict() for each in self.passes]}
        if not self.passes:
            return own
        first, last = _median(self.first), _median(self.last)
        ends = {
            f"{name}_{when}": getattr(each[-1 if when == "last" else 0], name)
            for name in ("mhz", "celsius")
            for when, each in (("first", self.first), ("last", self.last))
        }
        return own | {
            **{"window_s": self.window, "first_s": first, "last_s": last, "drop": 1 - first / last},
            **{"slow_after": self.slow_after, **ends},
        }


def _median(passes: list[Pass]) -> float:
    return percentile([each.token_s for each in passes], 50)


def sustain(combination: Combination, test: Test, result: Sustained, meter: PowerMeter, report: Report) -> None:
    """Decode until the time is over.  `result` is filled while it runs: an interrupt leaves what was measured until then."""
    began = perf_counter()
    while (passed := perf_counter() - began) < result.seconds:
        report(int(passed), int(result.seconds), f"{test.name} sustained")
        with meter.measuring() as spent:
            sample = combination.run(test, test.count, False)
        ended, token_s = perf_counter() - began, percentile(sample.steps, 50)
        heat = conditions.median_clock(), machine.temperature(), spent.watts
        result.passes.append(Pass(ended, token_s, sample.tokens, *heat))
