"""Times of operations by the clock of the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgeq.targets.cuda.device.device import Call, Device, Mark, Recording
from edgeq.targets.cuda.lowering.context import Launch
from edgeq.targets.times import RunTimes, Step, StepTimes


@dataclass(frozen=True)
class _Kept:
    """Calls with a mark before the first and after each."""

    calls: list[Call]
    marks: list[Mark]
    recording: Recording


class Timer:
    """Takes times on one device; it keeps the last recording, as tokens come one after another."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: _Kept | None = None

    def one_by_one(self, steps: Iterable[Step]) -> StepTimes:
        """Times of steps that start something each.  What is shorter than the host takes to start it looks as long as that."""
        began, found, marks = perf_counter(), list[Step](), [self._device.mark()]
        self._device.stamp(marks[0])
        for step in steps:
            found.append(step)
            marks.append(self._device.mark())
            self._device.stamp(marks[-1])
        return self._times(found, marks, began)

    def replayed(self, launched: Sequence[tuple[Launch, Call]]) -> StepTimes:
        """Times of launches that the device is given together, without the host.  ResourceError: there is no memory for it."""
        calls = [call for _, call in launched]
        if self._kept is None or self._kept.calls != calls:
            marks = [self._device.mark() for _ in range(len(calls) + 1)]
            steps: list[Call | Mark] = [marks[0]]
            for call, mark in zip(calls, marks[1:], strict=True):
                steps += [call, mark]
            self._kept = _Kept(calls, marks, self._device.record(steps))
        began = perf_counter()
        self._kept.recording.start()
        found = [Step(each.operation, call.kernel.generated.variant.symbol, each.reads_weights) for each, call in launched]
        return self._times(found, self._kept.marks, began)

    def together(self, calls: Sequence[Call], repetitions: int) -> list[float]:
        """Seconds of all calls, started together, each time.  ResourceError: there is no memory for a recording."""
        marks = [self._device.mark(), self._device.mark()]
        recording, seconds = self._device.record([marks[0], *calls, marks[1]]), list[float]()
        for _ in range(repetitions):
            recording.start()
            seconds += self._device.seconds(marks)
        return seconds

    def _times(self, steps: Sequence[Step], marks: Sequence[Mark], began: float) -> StepTimes:
        seconds = self._device.seconds(marks)
        return StepTimes(steps, _of_device, (seconds, began, perf_counter() - began))


def _of_device(noted: tuple[Sequence[float], float, float]) -> RunTimes:
    seconds, began, inside = noted
    taken = np.array(seconds)
    first = began + np.concatenate([[0.0], np.cumsum(taken)[:-1]])
    return RunTimes(np.stack([first, taken, np.zeros_like(taken)], 1)[None], began, began + inside, inside)
