"""Where the time of a test goes: operations by name and layer, waiting for other threads, and the bubble.

The bubble is what no operation accounts for: the time between two calls of the target, and within each call what is before and
after its operations, both by the clock of Python.  Operations are timed by the processor's own counter, the wall by a pair of
readings around all.  So each is measured for itself, and that they add up is a finding, not an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgeq.tools.profile.limits import MachineLimits
from edgeq.tools.profile.runs import RunSample
from edgeq.tools.profile.work import Work

DRAW = "draw a token"
SINGLE_ROWS = ("decode", "draft")
"""Phases in which a session runs one row at a time."""


@dataclass(frozen=True)
class OperationLine:
    """One kind of operation in one layer; times per token, in seconds.

    phase     prefill, decode or tower
    layer     -1: before and after the layers
    kernels   that ran for it
    seconds   of the calling thread: at work, and then waiting for others, which `waited` is the part of
    bytes     from memory per token;  macs, float_macs: multiplications of integers and of floats; at least so many
    roofline  the least time that the machine needs for that over the time taken; None: nothing that is counted, or it computes
              with floats, for which no limit is measured
    bound     what that least time is spent on: memory or integers
    """

    phase: str
    name: str
    layer: int
    kernels: tuple[str, ...]
    seconds: float
    waited: float
    bytes: float
    macs: float
    float_macs: float = 0.0
    roofline: float | None = None
    bound: str | None = None

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes / self.seconds if self.bytes and self.seconds > 0 else None

    @property
    def operations_per_s(self) -> float | None:
        """A multiplication and an addition are two."""
        macs = self.macs + self.float_macs
        return 2 * macs / self.seconds if macs and self.seconds > 0 else None


@dataclass(frozen=True)
class Breakdown:
    """Seconds per token of one test.

    wall        around the whole test, by one pair of clock readings
    lines       by name and layer, in the order of execution
    between     bubble between calls of the target: Python, rows, caches, filling buffers
    within      bubble inside calls: waking threads, Python between the pieces of a run
    samples     whose operations these are: the faster half of the recorded tokens, or prompts
    """

    test: str
    tokens: int
    wall: float
    lines: tuple[OperationLine, ...]
    between: float
    within: float
    samples: tuple[RunSample, ...]

    @property
    def operations(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def waited(self) -> float:
        return sum(line.waited for line in self.lines)

    @property
    def bubble(self) -> float:
        return self.between + self.within

    @property
    def closure(self) -> float:
        """Operations plus bubble over the wall time: 1 but for what the clocks themselves take."""
        return (self.operations + self.bubble) / self.wall

    def fields(self) -> dict[str, Any]:
        """For JSON: without the samples, with rates."""
        own = {name: value for name, value in vars(self).items() if name not in ("samples", "lines")}
        rates = [
            {**asdict(line), "bytes_per_s": line.bytes_per_s, "operations_per_s": line.operations_per_s} for line in self.lines
        ]
        sums = {"operations": self.operations, "waited": self.waited, "bubble": self.bubble, "closure": self.closure}
        return {**own, **sums, "lines": rates}


def quick_half(samples: Sequence[RunSample]) -> tuple[RunSample, ...]:
    """The faster half: something else may have disturbed the others."""
    return tuple(sorted(samples, key=lambda sample: sample.seconds)[: (len(samples) + 1) // 2])


def breakdown(test: str, samples: Sequence[RunSample], limits_by_phase: dict[str, MachineLimits]) -> Breakdown:
    """The operations of recorded samples of a test; `limits_by_phase`: the limits of the machine by phase."""
    quick = quick_half([piece for sample in samples for piece in sample.pieces()])
    tokens = sum(sample.tokens for sample in quick)
    lines, between, within, wall = list[OperationLine](), 0.0, 0.0, 0.0
    for sample in quick:
        # The draw of a prompt's first token is not part of reading it.
        drawn = sum(seconds for _, seconds in sample.draws) if sample.steps else 0.0
        if drawn:
            lines.append(OperationLine("decode", DRAW, -1, (), drawn / tokens, 0.0, 0.0, 0.0))
        last = sample.started
        for call in sample.calls:
            run = call.run
            between += run.began - last
            within += run.ended - run.began - run.inside
            last = run.ended
            for timed in call.operations():
                time, waited = (timed.worked + timed.waited) / tokens, timed.waited / tokens
                todo = timed.work.bytes / tokens, timed.work.macs / tokens, timed.work.float_macs / tokens
                lines.append(OperationLine(call.phase, timed.name, timed.layer, (timed.kernel,), time, waited, *todo))
        between += sample.started + sample.seconds - last - drawn
        wall += sample.seconds
    drawing = [line for line in lines if line.name == DRAW]
    rest = [line for line in lines if line.name != DRAW]
    every = tuple(merged([*rest, *drawing], limits_by_phase))
    return Breakdown(test, tokens, wall / tokens, every, between / tokens, within / tokens, quick)


def merged(lines: Iterable[OperationLine], limits_by_phase: dict[str, MachineLimits]) -> list[OperationLine]:
    """Lines of the same phase, name and layer as one, where the first of them was.

    limits_by_phase   limits by phase, for the share of the roofline
    """
    sums: dict[tuple[str, str, int], OperationLine] = {}
    for line in lines:
        key = line.phase, line.name, line.layer
        if key not in sums:
            sums[key] = line
            continue
        old = sums[key]
        sums[key] = replace(
            old,
            kernels=tuple(dict.fromkeys((*old.kernels, *line.kernels))),
            seconds=old.seconds + line.seconds,
            waited=old.waited + line.waited,
            bytes=old.bytes + line.bytes,
            macs=old.macs + line.macs,
            float_macs=old.float_macs + line.float_macs,
        )
    return [_bounded(line, limits_by_phase) for line in sums.values()]


def _bounded(line: OperationLine, limits_by_phase: dict[str, MachineLimits]) -> OperationLine:
    todo = Work(line.bytes, line.macs)
    # Of a single row attention computes so little that reading the cache bounds it.
    computes = line.float_macs and line.phase not in SINGLE_ROWS
    if line.phase not in limits_by_phase or line.seconds <= 0 or todo == Work() or computes:
        return line
    limits = limits_by_phase[line.phase]
    return replace(line, roofline=limits.least_seconds(todo) / line.seconds, bound=limits.bound(todo))
