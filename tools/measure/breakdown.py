"""Where the time of a token goes: in each kind of operation, between operations, and outside of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from edgeq.runtime import Model, Sampling
from edgeq.runtime.answers.tokenizer import TextStream
from edgeq.runtime.sampling import Sampler
from edgeq.targets.graph import Linear, Select
from edgeq.targets.target import Program
from edgeq.targets.times import Step, StepTimes

WAITING = "waiting for other threads"
OUTSIDE = "outside: Python, rows, sampling"

Key = tuple[str, str]
"""Name and kind of a `BreakdownLine`."""


@dataclass(frozen=True)
class BreakdownLine:
    """One kind of work.

    name            part of a layer for products ("gate_up"), the kernel for the rest, or one of WAITING and OUTSIDE
    kind            class name of the operation, "" for those two
    share           of the time of a token
    seconds         per token, a mean over the faster half of the tokens (decode) or repetitions (prefill)
    bytes_per_s     weights read by products in decode
    operations_per_s   multiplications and additions of products in prefill, without those that run for the last token only.
                       A product that also computes the SwiGLU after it has the time of both
    """

    name: str
    kind: str
    share: float
    seconds: float
    bytes_per_s: float | None = None
    operations_per_s: float | None = None


@dataclass(frozen=True)
class TimedRun:
    """One sample: its wall time in seconds, its tokens, and what the target ran."""

    seconds: float
    tokens: int
    parts: list[StepTimes]


@contextmanager
def _recording(program: Program) -> Iterator[None]:
    """Record the runs inside this block."""
    program.record(True)
    try:
        yield
    finally:
        program.record(False)


def _times(model: Model) -> list[StepTimes]:
    """Times of the runs since the last call."""
    return [each.times for each in model.program.recorded()]


def decode(model: Model, tokens: Sequence[int], count: int) -> list[BreakdownLine]:
    """Time of `count` tokens after `tokens`, drawn greedily and made text as `generate` does; stop tokens do not end it."""
    runs: list[TimedRun] = []
    with _recording(model.program):
        session, sampler, stream = model.session(), Sampler(Sampling()), TextStream(model.text)
        history = [*tokens, 0]
        if tokens:
            session.prefill(tokens)
        for _ in range(count):
            model.program.recorded()
            started = perf_counter()
            token = sampler.draw(session.decode(history[-1]), history)
            history.append(token)
            stream.push(token)
            runs.append(TimedRun(perf_counter() - started, 1, _times(model)))
    return lines(runs, decoded=True)


def prefill(model: Model, tokens: Sequence[int], depth: int, repetitions: int) -> list[BreakdownLine]:
    """Time of the prompt tokens[depth:] after the tokens before it."""
    runs: list[TimedRun] = []
    with _recording(model.program):
        for _ in range(repetitions):
            session = model.session()
            if depth:
                session.prefill(tokens[:depth])
            model.program.recorded()
            started = perf_counter()
            session.prefill(tokens[depth:])
            runs.append(TimedRun(perf_counter() - started, len(tokens) - depth, _times(model)))
    return lines(runs, decoded=False)


def lines(runs: list[TimedRun], decoded: bool) -> list[BreakdownLine]:
    """The kinds of work in the order of execution, then waiting and the rest.  The slower half of the runs, which
    something else may have disturbed, is left out.
    """
    quick = sorted(runs, key=lambda run: run.seconds / run.tokens)[: (len(runs) + 1) // 2]
    tokens = sum(run.tokens for run in quick)
    whole = sum(run.seconds for run in quick) / tokens
    sums: dict[Key, float] = {}
    waiting = 0.0
    for part in (part for run in quick for part in run.parts):
        for step, (worked, waited) in zip(part.steps, part.seconds.tolist(), strict=True):
            sums[_key(step)] = sums.get(_key(step), 0.0) + worked / tokens
            waiting += waited / tokens
    sums[WAITING, ""] = waiting
    sums[OUTSIDE, ""] = whole - sum(sums.values())
    work = _work(quick[0].parts[0].steps, decoded)
    found = []
    for key, seconds in sums.items():
        rate = work[key] / seconds if key in work and seconds > 0 else None
        found.append(BreakdownLine(*key, seconds / whole, seconds, *((rate, None) if decoded else (None, rate))))
    return found


def _key(step: Step) -> Key:
    operation, kernel, reads_weights = step
    name = operation.linear.name.rpartition(".")[2] if isinstance(operation, Linear) and reads_weights else kernel
    return name, type(operation).__name__


def _work(steps: Sequence[Step], decoded: bool) -> dict[Key, int]:
    """Work of products per token: bytes read in decode, multiplications and additions in prefill.

    A layer of two column blocks takes two steps, and its work is done once.
    """
    work, last = dict[Key, int](), None
    for step in steps:
        if isinstance(step.operation, Select) and not decoded:
            break
        if isinstance(step.operation, Linear) and step.reads_weights and step.operation is not last:
            last, layer = step.operation, step.operation.linear
            work[_key(step)] = work.get(_key(step), 0) + (layer.nbytes if decoded else 2 * layer.rows * layer.columns)
    return work


def cells(lines: list[BreakdownLine], decoded: bool) -> list[list[str]]:
    """The cells of a table, its heading first."""
    heading = ["operation", "% of time", "µs/token", "GB/s" if decoded else "GOPS"]
    rows = [heading]
    for line in lines:
        rate = (line.bytes_per_s if decoded else line.operations_per_s) or 0
        time = (f"{100 * line.share:.1f} %", f"{1e6 * line.seconds:,.1f}")
        rows.append([line.name, *time, f"{rate / 1e9:,.1f}" if rate else ""])
    return rows
