"""A program that notes when it was called, for what, and how long each of its operations took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgeq.records import KvCodec, Mode
from edgeq.runtime import Model
from edgeq.targets.graph import Select
from edgeq.targets.requantization import InputSums, Weights
from edgeq.targets.rows import Rows
from edgeq.targets.target import Program, Requantizable, StepTimes
from edgeq.tools.breakdown import Recorder
from edgeq.tools.profile.work import Shape, Work, name_of, work


@dataclass(frozen=True)
class Timed:
    """One operation of a call: seconds that the calling thread worked on it, and then waited for other threads."""

    name: str
    layer: int
    kernel: str
    worked: float
    waited: float
    work: Work


@dataclass(frozen=True)
class Call:
    """One run of a program, from `started` to `ended` by the clock of Python, in seconds."""

    phase: str
    started: float
    ended: float
    times: StepTimes
    shape: Shape
    wanted: NDArray[np.int32]
    kv: KvCodec

    def operations(self) -> Iterator[Timed]:
        """In the order of execution."""
        shape, seen = self.shape, set[tuple[int, str]]()
        for step, (worked, waited) in zip(self.times.steps, self.times.seconds.tolist(), strict=True):
            name = name_of(step)
            # An operation of several steps is done once.
            key = id(step.operation), name
            todo = Work() if key in seen else work(step, shape, self.kv)
            seen.add(key)
            if isinstance(step.operation, Select):
                # The first of every `together` wanted rows stands for them.
                shape = self.shape.of_rows(self.wanted[:: step.operation.together])
            yield Timed(name, step.operation.layer, step.kernel, worked, waited, todo)

    @property
    def measured(self) -> float:
        """Seconds of all operations, waiting included."""
        return float(self.times.seconds.sum())


class Tape(Recorder):
    """Passes on what a program is asked, and while it is `on` records the calls, all of `phase`.

    It stays in place while nothing is recorded, so that a session serves plain and recorded runs: its price then is one
    function call per run.
    """

    def __init__(self, program: Program, phase: str, calls: list[Call]) -> None:
        super().__init__(program)
        self.phase, self.on, self.calls = phase, False, calls

    def run(self, rows: Rows, mode: Mode | None = None) -> NDArray[np.float32]:
        if not self.on:
            return self._program.run(rows, mode)
        started = perf_counter()
        result = super().run(rows, mode)
        self._note(started, rows)
        return result

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> NDArray[np.float32]:
        if not self.on:
            return cast(Requantizable, self._program).run_requantized(rows, weights, mode)
        started = perf_counter()
        result = super().run_requantized(rows, weights, mode)
        self._note(started, rows)
        return result

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> NDArray[np.float32]:
        if not self.on:
            return cast(Requantizable, self._program).run_summing(rows, sums, mode)
        started = perf_counter()
        result = super().run_summing(rows, sums, mode)
        self._note(started, rows)
        return result

    def _note(self, started: float, rows: Rows) -> None:
        ended = perf_counter()
        (times,) = self.taken()
        # What follows from the rows is worked out later: this is within what is timed.
        self.calls.append(Call(self.phase, started, ended, times, Shape.of(rows), rows.wanted, self._program.options.kv))


class Tapes:
    """The tapes of a model: of its decoder, and with `tower` of its vision tower, which is compiled for it.

    calls   of both, in order, while `recording`
    """

    def __init__(self, model: Model, tower: bool) -> None:
        self.calls: list[Call] = []
        self._decoder = Tape(model.program, "", self.calls)
        self._all = [self._decoder]
        model.program = cast(Program, self._decoder)
        if tower:
            assert model.pictures is not None
            seeing = model.pictures.prepare()
            self._all.append(Tape(seeing.program, "tower", self.calls))
            seeing.program = cast(Program, self._all[-1])

    @contextmanager
    def recording(self, phase: str, on: bool) -> Iterator[None]:
        """Record runs of the decoder as of `phase`; with `on` false nothing is recorded."""
        self.calls.clear()
        self._decoder.phase = phase
        for tape in self._all:
            tape.on = on
        try:
            yield
        finally:
            for tape in self._all:
                tape.on = False
