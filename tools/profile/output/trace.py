"""A profile as a trace for Perfetto or chrome://tracing: what ran when, nested, on a track for each thread.

The format is Chrome's "Trace Event Format" (JSON object form): spans are complete events ("ph": "X") with times in
microseconds, counters are "C", names of tracks "M".  Tests run one after another, so a thread has one track for all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from edgeq.tools.profile.collect import Moment, Profile, Series
from edgeq.tools.profile.document import label
from edgeq.tools.profile.findings import named
from edgeq.tools.profile.operations import DRAW, Breakdown
from edgeq.tools.profile.runs import RunSample
from edgeq.tools.profile.tape import ProgramRun

PROCESS, CALLER = 1, 1
"""Its number in the trace, and that of the track of the thread that calls the target; others follow."""
PYTHON = "Python"
Event = dict[str, Any]


def trace(profile: Profile) -> str:
    """The trace of the runs that the tables of operations are of."""
    breakdowns = profile.breakdowns()
    samples = [sample for _, each in breakdowns for sample in each.samples]
    start = min((sample.started for sample in samples), default=profile.began)
    threads = max((len(call.run.threads) for sample in samples for call in sample.calls), default=1)
    events = [_name("process_name", 0, "edgeq"), _name("thread_name", CALLER, "calling thread: Python, work, waiting")]
    events += [_name("thread_name", CALLER + i, f"thread {i}: work, waiting") for i in range(1, threads)]
    for series, each in breakdowns:
        events += _test(series, each, start)
    events += (event for moment in profile.moments for event in _moment(moment, profile.began - start))
    other = {"partial": profile.partial, "sensors": profile.sensors}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _name(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "pid": PROCESS, "tid": track, "name": kind, "args": {"name": name}}


def _test(series: Series, breakdown: Breakdown, start: float) -> Iterator[Event]:
    position = series.combination.model.position_bytes
    about = named({"test": breakdown.test, **label(series.combination)})
    for sample in sorted(breakdown.samples, key=lambda sample: sample.started):
        yield _span(CALLER, about, "test", sample.started - start, sample.seconds, {"tokens": sample.tokens})
        yield from _python(sample, start)
        for call in sample.calls:
            yield from _call(call, start)
            yield from _counters(call, start, position)


def _python(sample: RunSample, start: float) -> Iterator[Event]:
    """What is between the calls of the target: Python, and in it the draw of a token."""
    draws = sample.draws if sample.steps else []
    taken = [(call.run.began, call.run.ended) for call in sample.calls] + [(began, began + seconds) for began, seconds in draws]
    at = sample.started
    for began, ended in [*sorted(taken), (sample.started + sample.seconds,) * 2]:
        if began > at:
            yield _span(CALLER, PYTHON, "python", at - start, began - at, {"layer": -1})
        at = max(at, ended)
    for began, seconds in draws:
        yield _span(CALLER, DRAW, "operation", began - start, seconds, {"layer": -1})


def _call(call: ProgramRun, start: float) -> Iterator[Event]:
    """A call of the target and its operations, on the tracks of all threads that took part."""
    yield _span(CALLER, call.phase, "call", call.run.began - start, call.run.ended - call.run.began, {"rows": len(call.shape)})
    others = call.run.threads[1:].tolist()
    for i, timed in enumerate(call.operations()):
        facts = {"layer": timed.layer, "kernel": timed.kernel, "bytes": timed.work.bytes, "macs": timed.work.macs}
        times = [(timed.began, timed.worked, timed.waited), *(each[i] for each in others)]
        for track, (began, worked, waited) in enumerate(times, CALLER):
            if not math.isnan(began):
                yield _span(track, timed.name, "operation", began - start, worked, facts)
                if waited:
                    yield _span(
                        track, f"{timed.name}: waiting", "waiting", began - start + worked, waited, {"layer": timed.layer}
                    )


def _counters(call: ProgramRun, start: float, position: int) -> Iterator[Event]:
    read = sum(timed.work.bytes for timed in call.operations())
    yield _counter("GB/s", call.run.began - start, read / (call.run.ended - call.run.began) / 1e9)
    yield _counter("GB/s", call.run.ended - start, 0.0)
    if call.phase != "tower":
        yield _counter("cache MB", call.run.began - start, int(call.shape.ends.max()) * position / 1e6)


def _moment(moment: Moment, offset: float) -> Iterator[Event]:
    """What sensors told after a run; what they did not tell has no counter."""
    for name, value in (("W", moment.watts), ("°C", moment.celsius), ("resident MB", moment.rss / 1e6 or None)):
        if value is not None and offset + moment.seconds >= 0:
            yield _counter(name, offset + moment.seconds, value)


def _counter(name: str, at: float, value: float) -> Event:
    return {"ph": "C", "pid": PROCESS, "tid": 0, "name": name, "ts": 1e6 * at, "args": {name: value}}


def _span(track: int, name: str, category: str, start: float, seconds: float, facts: dict[str, Any]) -> Event:
    times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
    return {"ph": "X", "pid": PROCESS, "tid": track, "name": name, "cat": category, **times, "args": facts}
