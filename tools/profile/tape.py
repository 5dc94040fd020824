"""A program that notes when it was called, for what, and how long each of its operations took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgeq.records import KvCodec, Mode
from edgeq.runtime import Model
from edgeq.targets.graph import Select
from edgeq.targets.requantization import InputSums, Weights
from edgeq.targets.rows import Rows
from edgeq.targets.target import FindsLargest, Largest, Program, Requantizable, RunTimes, StepTimes
from edgeq.tools.profile.work import Shape, Work, name_of, work

WITH_DRAFTS = "with drafts"
"""Of recorded runs: which of the phases a run is of is told by the run."""


@dataclass(frozen=True)
class Timed:
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
class Call:
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

    def operations(self) -> Iterator[Timed]:
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
            yield Timed(name, step.operation.layer, step.kernel, began, worked, waited, todo)

    @property
    def measured(self) -> float:
        """Seconds of all operations, waiting included."""
        return float(self.seconds.sum())


Noted = int | tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32] | None, NDArray[np.int32]]
"""What is kept of the rows of a run: their slots, sessions, spans and the wanted ones; or of a row alone, which is wanted, its
slot.  Of a decoded token one number: arrays that are kept have to be made in new memory, those of a plain run are made where
the last ones were."""


def _shape_of(noted: Noted) -> tuple[Shape, NDArray[np.int32]]:
    """The shape of the rows of a run, and the wanted ones."""
    if isinstance(noted, int):
        first = np.zeros(1, np.int32)
        return Shape(np.array([noted], np.int32), first, None), first
    slots, sessions, spans, wanted = noted
    return Shape(slots, sessions, spans), wanted


class Tape:
    """Passes on what a program is asked, and while it is `on` notes the runs, all of `phase`.

    It stays in place while nothing is recorded, so that a session serves plain and recorded runs: its price then is one
    function call per run.  Of a run two entries are kept, of which `calls` makes a `Call` afterwards: within what is timed
    every object counts, see edgeq.targets.cpu.jit.notes.
    """

    def __init__(self, program: Program, phase: str) -> None:
        self._program = program
        self.phase, self.on = phase, False
        self._noted = list[Any]()

    def switch(self, on: bool) -> None:
        """Whether the next runs are noted."""
        self.on = on
        self._program.record(on)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def run(self, rows: Rows, mode: Mode | None = None) -> NDArray[np.float32]:
        if not self.on:
            return self._program.run(rows, mode)
        result = self._program.run(rows, mode)
        slots, wanted = rows.slots, rows.wanted
        if len(slots) == len(wanted) == 1 and rows.spans is None:
            self._noted += (mode, slots.item())
        else:
            self._noted += (mode, (slots, rows.sessions, rows.spans, wanted))
        return result

    @property
    def most_largest(self) -> int:
        """Runs that give the largest logits alone tell no times: while something is recorded there are none."""
        return 0 if self.on else getattr(self._program, "most_largest", 0)

    def run_largest(self, rows: Rows, count: int, mode: Mode | None = None, weights: Weights | None = None) -> Largest:
        return cast(FindsLargest, self._program).run_largest(rows, count, mode, weights)

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> NDArray[np.float32]:
        run = cast(Requantizable, self._program).run_requantized
        if not self.on:
            return run(rows, weights, mode)
        result = run(rows, weights, mode)
        self._noted += (mode, (rows.slots, rows.sessions, rows.spans, rows.wanted))
        return result

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> NDArray[np.float32]:
        run = cast(Requantizable, self._program).run_summing
        if not self.on:
            return run(rows, sums, mode)
        result = run(rows, sums, mode)
        self._noted += (mode, (rows.slots, rows.sessions, rows.spans, rows.wanted))
        return result

    def calls(self) -> list[Call]:
        """The runs since the last time."""
        noted, self._noted = self._noted, []
        times = self._program.recorded()
        kv = self._program.options.kv
        # Not strict: an interrupt may come between the two entries of a run.
        return [
            Call(self._phase_of(mode, len(shape)), taken, shape, wanted, kv)
            for mode, kept, taken in zip(noted[::2], noted[1::2], times, strict=False)
            for shape, wanted in [_shape_of(kept)]
        ]

    def _phase_of(self, mode: Mode | None, rows: int) -> str:
        """With drafts: "draft" in a cheaper mode, "verify" of several rows, else "decode"."""
        if self.phase != WITH_DRAFTS:
            return self.phase
        if mode is not None and mode != self._program.options.mode:
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

    def calls(self) -> list[Call]:
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
