"""The time that is left of work in stages, from how long the last stages took.

A rate over the last seconds, as progress bars usually have it, is false wherever the work advances in bursts: a layer that
takes a minute and is written in its last second.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

LAST = 3
"""Finished stages whose mean counts."""
SMALL = 0.5
"""Stages with less than this share of the work of the largest one finished do not count: they are of another kind."""
FIRST = 1 / 1000
"""Share of all work after which a first estimate is made where no stage is finished."""
NOTICEABLE = 1 / 400
"""Share of all work that a stage needs to count."""


class Eta:
    """Told of progress as a progress callback is; `left` is right from the first finished stage on.

    A stage lasts as long as the label stays the same.  The total may change with what is learned; work that begins at 0 is new.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._finished: list[tuple[float, float]] = []
        self._label: str | None = None
        self._first = self._began = self._done = self._total = 0.0
        self._started = self._opened = clock()

    def report(self, done: float, total: float, label: str) -> None:
        now = self._clock()
        if self._label is None or not self._total or (done == 0 < self._done):
            # Other work, of which nothing is known yet.
            self._finished.clear()
            self._first, self._began, self._opened, self._started = done, done, now, now
        elif label != self._label:
            self._finished.append((done - self._began, now - self._started))
            self._began, self._started = done, now
        self._label, self._done, self._total = label, done, total

    def left(self) -> float | None:
        """Seconds until all work is done; None: not known yet."""
        if not self._total or self._label is None:
            return None
        now = self._clock()
        counted = [stage for stage in self._finished if stage[0] >= NOTICEABLE * self._total]
        largest = max((work for work, _ in counted), default=0.0)
        last = [stage for stage in counted if stage[0] >= SMALL * largest][-LAST:]
        if not last:
            done = self._done - self._first
            known = done >= FIRST * self._total
            return (self._total - self._done) * (now - self._opened) / done if known else None
        rate = sum(seconds for _, seconds in last) / sum(work for work, _ in last)
        ahead = self._total - self._began
        # A stage that takes longer than those before it adds nothing until it ends: then it counts itself.
        least = rate * min(ahead - last[-1][0], self._total - self._done)
        return max(rate * ahead - (now - self._started), least, 0.0)
