"""Progress of a conversion in seconds that this run took and will take, so that stages of different cost add up.

What a stage takes is first guessed from counts: of weights to be rounded, of multiplications, of bytes.  Each finished stage
then counts with the time that it took; those of its kind that are left are as fast for their counts, all others as fast as the
finished ones together.  The pass that measures head and mode at the end, which is of another kind than all before it, follows
from the time that reading a stored layer back and running it took, which every finished layer gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from edgeq.converters.calibration.compute import MEASURED_ROWS
from edgeq.converters.planning.items import ArrayItem, Item
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.steps import WriteStep
from edgeq.converters.rounding.linears import LinearItem

OnProgress = Callable[[float, float, str], None]
"""Progress callback: (work done, total work, label).  The label changes when a stage ends: a layer, the head, verification."""
STUDY, TRIAL, MEASURE, DIVERGENCE, VERIFY = "study", "trial of a measurement", "measure", "divergence", "verify"

UNIT = 2e-8
"""Seconds for rounding one weight, in which the guesses count, until a stage is finished; only proportions matter before."""
MULTIPLICATIONS = 400
"""Multiplications of a matrix product in float32 in the time of rounding one weight (340 measured, one thread of an EPYC)."""
COPYING = 0.2
"""Work of a number that is stored as it is."""
HASHING = 0.25
"""Work of verifying a byte."""
ROUNDED_PASS = 1.45
"""Time of a pass with rounded inputs, measured, in that of one without."""
LAST = 3
"""Finished stages of a kind whose speed counts."""
NOTICEABLE = 1 / 400
"""Share of all work that a stage needs to tell how fast stages of other kinds are."""
PREPARED = 0.9
"""Share of a calibrated layer that is done when its weights can be written."""


class Stages:
    """The stages of one run in order; of those that an earlier run finished, what is left of them to do."""

    def __init__(
        self,
        plan: ConversionPlan,
        skip: int,
        studies: bool,
        on_progress: OnProgress,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`skip`: steps finished before; `studies`: statistics of the whole model are still to be made.

        trial_after   the step after which the stage TRIAL comes, where no layer of the run needs a pass; None: it does not come
        """
        method, steps = plan.method, plan.steps
        self.trial_after: int | None = None
        self._steps, self._skip, self._on_progress, self._clock = steps, skip, on_progress, clock
        tokens = 0 if plan.calibration is None else plan.calibration.tokens
        layers = [step for step in steps if step.layer is not None]
        decoder = sum(map(_weights, layers))
        work: dict[int | str, float] = {STUDY: tokens * decoder / MULTIPLICATIONS} if studies else {}
        for index, step in enumerate(steps[:-1]):
            passes = (method.passes if index >= skip else 1) if method.calibrates and step.layer is not None else 0
            rounding = 0 if index < skip else sum(map(_work, step.items)) + (method.effort - 1) * _weights(step)
            work[index] = rounding + passes * tokens * _weights(step) / MULTIPLICATIONS
            if tokens and self.trial_after is None and step.layer is not None and index >= skip and not method.calibrates:
                self.trial_after, work[TRIAL] = index, 0.0
        self._passes = self._head_passes = 0.0
        self._two_runs = not method.mode
        if plan.calibration is not None:
            # In passes through one decoder layer.
            self._passes = len(layers) * (1 if method.mode else 1 + ROUNDED_PASS)
            self._head_passes = _weights(steps[-1]) * (1 + 2 * len(plan.heads())) * len(layers) / decoder
            measured = plan.calibration.few(MEASURED_ROWS).tokens
            pass_work = measured * decoder / len(layers) / MULTIPLICATIONS
            work[MEASURE] = (self._passes + self._head_passes) * pass_work
            if TRIAL in work:
                work[TRIAL] = pass_work
        work[len(steps) - 1] = 0 if skip == len(steps) else sum(map(_work, steps[-1].items))
        if plan.calibration is not None and plan.options.allocation is not None:
            from edgeq.converters.probing.measurements import probe_rows

            work[DIVERGENCE] = 2 * probe_rows(plan).numel() * decoder / MULTIPLICATIONS
        work[VERIFY] = HASHING * plan.output_bytes
        self._work, self._pass_seconds = work, list[float]()
        # Seconds of finished stages, and what each kind of them took, (work, seconds).
        self._finished, self._kinds = dict[int | str, float](), dict[str, list[tuple[float, float]]]()
        self._stage: int | str | None = None
        self._began = self._passes_began = 0.0
        self._expected: dict[int | str, float] = {}
        self._expect()

    def at(self, stage: int | str, share: float = 0.0, label: str | None = None) -> None:
        """Report that `share` of a stage, an index of the plan's steps or a name, is done; `label`: of a part of it.

        Of MEASURE: the share of the passes through the decoder layers.
        """
        now = self._clock()
        if stage != self._stage:
            self._close(now)
            self._stage, self._began = stage, now
        if stage == MEASURE:
            share = self._measured(share, now)
        done = sum(self._finished.values())
        total = done + sum(self._expected.values())
        self._on_progress(done + share * self._expected[stage], total, label or self._label(stage))

    def _measured(self, share: float, now: float) -> float:
        """The share of MEASURE of which `share` of the passes is done, and what is expected of it from their own time."""
        if self._two_runs:
            share = (min(2 * share, 1) + ROUNDED_PASS * max(2 * share - 1, 0)) / (1 + ROUNDED_PASS)
        every = self._passes + self._head_passes
        if not share:
            # Before the first pass the embedding is read.
            self._passes_began = now
        else:
            before, seconds = self._passes_began - self._began, now - self._passes_began
            self._expected[MEASURE] = before + seconds / (share * self._passes) * every
        return share * self._passes / every

    def ended(self, stage: int | str) -> None:
        """Report that the stage after this one begins."""
        order = [*self._work]
        self.at(order[order.index(stage) + 1])

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Time what measuring will do with each layer: read it back and run a few calibration rows through it."""
        began = self._clock()
        yield
        self._pass_seconds.append(self._clock() - began)

    def _close(self, now: float) -> None:
        """The present stage is finished: what it took is what others of its kind will take."""
        if self._stage is None or self._stage in self._finished:
            return
        seconds = now - self._began
        self._finished[self._stage] = seconds
        self._kinds.setdefault(self._kind(self._stage), []).append((self._work[self._stage], seconds))
        self._expect()

    def _expect(self) -> None:
        """Expect seconds of every stage that is not finished."""
        total = sum(self._work.values())
        told = [each for kind in self._kinds.values() for each in kind[-LAST:] if each[0] >= NOTICEABLE * total]
        any_rate = _rate(told) or UNIT
        self._expected = {
            stage: work * (_rate(self._kinds.get(self._kind(stage), [])[-LAST:]) or any_rate)
            for stage, work in self._work.items()
            if stage not in self._finished
        }
        if self._pass_seconds and MEASURE in self._expected:
            last = self._pass_seconds[-LAST:]
            self._expected[MEASURE] = (self._passes + self._head_passes) * sum(last) / len(last)

    def _kind(self, stage: int | str) -> str:
        if isinstance(stage, str):
            return stage
        if self._steps[stage].layer is None:
            return self._steps[stage].label
        return "layer" if stage >= self._skip else "layer again"

    def _label(self, stage: int | str) -> str:
        return stage if isinstance(stage, str) else self._steps[stage].label


def _rate(finished: Sequence[tuple[float, float]]) -> float:
    """Seconds per unit of work; 0 where nothing tells."""
    work, seconds = sum(work for work, _ in finished), sum(seconds for _, seconds in finished)
    return seconds / work if work else 0.0


def _weights(step: WriteStep) -> int:
    return sum(item.rows * item.columns for item in step.items if isinstance(item, LinearItem))


def _work(item: Item) -> float:
    if isinstance(item, LinearItem):
        return item.rows * item.columns
    return COPYING * (math.prod(item.shape) if isinstance(item, ArrayItem) else len(item.data))
