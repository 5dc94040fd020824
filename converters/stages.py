"""Progress of a conversion in units of work, so that stages of different cost add up to an honest share.

The unit is rounding one weight.  Only the proportions of stages that differ in kind rest on the estimates below; whoever shows
a remaining time measures the decoder layers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from edgeq.converters.allocation.probe import probe_rows
from edgeq.converters.calibration.choose_precision import ROWS
from edgeq.converters.items import ArrayItem, Item
from edgeq.converters.linears import LinearItem
from edgeq.converters.plan import ConversionPlan, WriteStep

OnProgress = Callable[[float, float, str], None]
"""Progress callback: (work done, total work, label).  The label changes when a stage ends: a layer, the head, verification."""
STUDY, MEASURE, DIVERGENCE, VERIFY = "study", "measure", "divergence", "verify"

MULTIPLICATIONS = 400
"""Of a matrix product in float32, in the time that rounding one weight takes (340 measured, one thread of an EPYC)."""
COPYING = 0.2
"""Work of a number that is stored as it is."""
HASHING = 0.25
"""Work of verifying a byte."""
PREPARED = 0.9
"""Share of a calibrated layer that is done when its weights can be written."""


class Stages:
    """The stages of one run in order, each with its work: of those that an earlier run finished, what is left of them to do."""

    def __init__(self, plan: ConversionPlan, skip: int, studies: bool, on_progress: OnProgress) -> None:
        """`skip`: steps finished before; `studies`: the method's statistics are still to be made."""
        method, steps = plan.method, plan.steps
        self._steps, self._on_progress = steps, on_progress
        tokens = 0 if plan.calibration is None else plan.calibration.rows.numel()
        decoder = sum(_weights(step) for step in steps if step.layer is not None)
        work: dict[int | str, float] = {STUDY: tokens * decoder / MULTIPLICATIONS} if studies else {}
        for index, step in enumerate(steps[:-1]):
            passes = (method.passes if index >= skip else 1) if method.calibrates and step.layer is not None else 0
            rounding = 0 if index < skip else sum(map(_work, step.items)) + (method.effort - 1) * _weights(step)
            work[index] = rounding + passes * tokens * _weights(step) / MULTIPLICATIONS
        if plan.calibration is not None:
            measured = min(ROWS, len(plan.calibration.rows)) * plan.calibration.rows.shape[1]
            through = decoder * (1 if method.mode else 2) + _weights(steps[-1]) * (1 + 2 * len(plan.heads()))
            work[MEASURE] = measured * through / MULTIPLICATIONS
        work[len(steps) - 1] = 0 if skip == len(steps) else sum(map(_work, steps[-1].items))
        if plan.calibration is not None and plan.options.allocation is not None:
            work[DIVERGENCE] = 2 * probe_rows(plan).numel() * decoder / MULTIPLICATIONS
        work[VERIFY] = HASHING * plan.output_bytes
        self._work, self._before, self._total = work, dict[int | str, float](), 0.0
        for stage, amount in work.items():
            self._before[stage] = self._total
            self._total += amount

    def at(self, stage: int | str, share: float = 0.0, label: str | None = None) -> None:
        """Report that `share` of a stage, an index of the plan's steps or a name, is done; `label`: of a part of it."""
        self._on_progress(self._before[stage] + share * self._work[stage], self._total, label or self._label(stage))

    def ended(self, stage: int | str) -> None:
        """Report that the stage after this one begins."""
        order = [*self._work]
        self.at(order[order.index(stage) + 1])

    def _label(self, stage: int | str) -> str:
        return stage if isinstance(stage, str) else self._steps[stage].label


def _weights(step: WriteStep) -> int:
    return sum(item.rows * item.columns for item in step.items if isinstance(item, LinearItem))


def _work(item: Item) -> float:
    if isinstance(item, LinearItem):
        return item.rows * item.columns
    return COPYING * (math.prod(item.shape) if isinstance(item, ArrayItem) else len(item.data))
