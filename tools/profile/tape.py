"""A program that notes when it was called, for what, and how long each of its operations took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgeq.format.records import KvCodec, Mode
from edgeq.runtime import Model
from edgeq.targets.graph import Select
from edgeq.targets.target import Program
from edgeq.targets.times import RunTimes, StepTimes
from edgeq.tools.profile.work import Shape, Work, name_of, work

WITH_DRAFTS = "with drafts"
"""Phase of recorded runs with drafts: each run says which of the phases it is."""


@dataclass(frozen=True)
class OperationTimes:
    """One operation of a call: when it began, by the clock of Python, seconds that the calling thread worked on it, and then
    waited for other threads."""

    name: str
    layer: int
    kernel: str
    began: float
    worked: float
    waited: float
    work: Work


@dataclass(frozen=True)
class ProgramRun:
    """One run of a program."""

    phase: str
    times: StepTimes
    shape: Shape
    wanted: NDArray[np.int32]
    kv: KvCodec

    @cached_property
    def run(self) -> RunTimes:
        """When it ran."""
        return self.times.run

    @property
    def seconds(self) -> NDArray[np.float64]:
        """float64 [steps, 2]: the seconds that the calling thread worked on each step, and that it waited."""
        return self.run.threads[0, :, 1:]

    def operations(self) -> Iterator[OperationTimes]:
        """In the order of execution."""
        shape, seen = self.shape, set[tuple[int, str]]()
        for step, (began, worked, waited) in zip(self.times.steps, self.run.threads[0].tolist(), strict=True):
            name = name_of(step)
            # An operation of several steps is done once.
            key = id(step.operation), name
            todo = Work() if key in seen else work(step, shape, self.kv)
            seen.add(key)
            if isinstance(step.operation, Select):
                # The first of every `together` wanted rows stands for them.
                shape = self.shape.of_rows(self.wanted[:: step.operation.together])
            yield OperationTimes(name, step.operation.layer, step.kernel, began, worked, waited, todo)

    @property
    def measured(self) -> float:
        """Seconds of all operations, waiting included."""
        return float(self.seconds.sum())


class Tape:
    """A program whose runs are recorded while it is `on`, all of `phase`.

    It stays in place while nothing is recorded, so that a session serves plain and recorded runs.
    """

    def __init__(self, program: Program, phase: str) -> None:
        self._program = program
        self.phase, self.on = phase, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def switch(self, on: bool) -> None:
        """Whether the next runs are recorded."""
        self.on = on
        self._program.record(on)

    @property
    def most_largest(self) -> int:
        """Runs that give the largest logits alone tell no times: while something is recorded there are none."""
        return 0 if self.on else self._program.most_largest

    def calls(self) -> list[ProgramRun]:
        """The runs since the last time."""
        kv = self._program.options.kv
        return [
            ProgramRun(
                self._phase_of(mode, len(rows.slots)), times, Shape(rows.slots, rows.sessions, rows.spans), rows.wanted, kv
            )
            for times, mode, rows in self._program.recorded()
        ]

    def _phase_of(self, mode: Mode, rows: int) -> str:
        """With drafts: "draft" in a cheaper mode, "verify" of several rows, else "decode"."""
        if self.phase != WITH_DRAFTS:
            return self.phase
        if mode != self._program.options.mode:
            return "draft"
        return "verify" if rows > 1 else "decode"


class Tapes:
    """The tapes of a model: of its decoder, and with `tower` of its vision tower, which is compiled for it."""

    def __init__(self, model: Model, tower: bool) -> None:
        self._decoder = Tape(model.program, "")
        self._all = [self._decoder]
        model.program = cast(Program, self._decoder)
        if tower:
            assert model.pictures is not None
            seeing = model.pictures.prepare()
            self._all.append(Tape(seeing.program, "tower"))
            seeing.program = cast(Program, self._all[-1])

    def calls(self) -> list[ProgramRun]:
        """Those of all, in order, since the last time."""
        found = [call for tape in self._all for call in tape.calls()]
        # Those of one tape are in order; when they ran is not worked out before somebody asks, and takes memory.
        return found if len(self._all) == 1 else sorted(found, key=lambda call: call.run.began)

    @contextmanager
    def recording(self, phase: str, on: bool) -> Iterator[None]:
        """Record runs of the decoder as of `phase`; with `on` false nothing is recorded."""
        self.calls()
        self._decoder.phase = phase
        self.switch(on)
        try:
            yield
        finally:
            self.switch(False)

    def switch(self, on: bool) -> None:
        """Within `recording`: whether the next runs are recorded."""
        for tape in self._all:
            tape.switch(on)
