"""When runs and their steps ran, as a Program records it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.format.records import Mode
from edgeq.targets.graph import Operation
from edgeq.targets.rows import Rows


class Step(NamedTuple):
    """One executed step: the operation (for fused steps, the main one) and the name of the kernel that ran.

    One operation can take several steps, such as the quantization of what a product reads.  `reads_weights`: this step of a
    Linear reads the layer's weights, or one of its column blocks.
    """

    operation: Operation
    kernel: str
    reads_weights: bool = False


class RunTimes(NamedTuple):
    """When a run and its steps ran; `began`, `ended` and `inside` in seconds of perf_counter.

    threads   float64 [threads, steps, 3]: when each thread came to a step, by perf_counter; the seconds that it worked on it,
              and the seconds that it then waited for work items that others had taken.  NaN: the thread was not there
    began     right before what the target runs was started, threads or kernels;  ended: right after
    inside    seconds of that in which the steps ran: what a target that times them by another clock is checked against
    """

    threads: NDArray[np.float64]
    began: float
    ended: float
    inside: float


class StepTimes(NamedTuple):
    """The steps of a run, in order, and when they ran.

    work_out   gives of `noted` the times; called when they are asked for, since it can take longer than a small run.  Who asks
               more than once keeps them
    """

    steps: Sequence[Step]
    work_out: Callable[[Any], RunTimes]
    noted: Any

    @property
    def run(self) -> RunTimes:
        """The times, worked out."""
        return self.work_out(self.noted)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """float64 [steps, 2]: the seconds that the calling thread worked on each step, and that it waited."""
        return self.run.threads[0, :, 1:]


def in_turn(steps: Sequence[Step], clock: Sequence[float]) -> StepTimes:
    """Times of steps that one thread ran one after another: `clock` has the beginning of each, then the end of the last."""
    return StepTimes(steps, _in_turn, clock)


def _in_turn(clock: Sequence[float]) -> RunTimes:
    began = np.array(clock[:-1])
    threads = np.stack([began, np.diff(clock), np.zeros_like(began)], 1)[None]
    return RunTimes(threads, clock[0], clock[-1], clock[-1] - clock[0])


class RanRows(NamedTuple):
    """The slots, sessions, spans and wanted rows that decide how many bytes a run reads."""

    slots: NDArray[np.int32]
    sessions: NDArray[np.int32]
    spans: NDArray[np.int32] | None
    wanted: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Rows) -> RanRows:
        return cls(rows.slots, rows.sessions, rows.spans, rows.wanted)


class RecordedRun(NamedTuple):
    """A run, the mode that it ran in and its rows."""

    times: StepTimes
    mode: Mode
    rows: RanRows


class RecordsRuns:
    """Mixin of programs: `record` begins to keep the times of runs, `recorded` takes those kept."""

    def __init__(self) -> None:
        self._recording, self._recorded = False, list[RecordedRun]()

    def record(self, on: bool) -> None:
        self._recording = on

    def recorded(self) -> list[RecordedRun]:
        found, self._recorded = self._recorded, []
        return found

    def _note(self, times: StepTimes, mode: Mode, rows: Rows) -> None:
        self._recorded.append(RecordedRun(times, mode, RanRows.of(rows)))
