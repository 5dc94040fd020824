"""A profile as a trace for Perfetto or chrome://tracing: what ran when, nested.

The format is Chrome's "Trace Event Format" (JSON object form): spans are complete events ("ph": "X") with times in
microseconds, counters are "C", names of tracks "M".  Only the calling thread notes its times, so each test has one track.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from edgeq.tools.profile.collect import Profile, Series
from edgeq.tools.profile.document import label
from edgeq.tools.profile.operations import DRAW, Breakdown
from edgeq.tools.profile.tape import Call

PROCESS = 1
Event = dict[str, Any]


def trace(found: Profile) -> str:
    """The trace of the runs that the tables of operations are of."""
    breakdowns = found.breakdowns()
    start = min((sample.started for _, each in breakdowns for sample in each.samples), default=0.0)
    events: list[Event] = [{"ph": "M", "pid": PROCESS, "tid": 0, "name": "process_name", "args": {"name": "edgeq"}}]
    for track, (series, each) in enumerate(breakdowns, 1):
        events += _track(track, series, each, start)
    other = {"partial": found.partial, "sensors": found.sensors}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _track(track: int, series: Series, each: Breakdown, start: float) -> Iterator[Event]:
    settings = label(series.combination)
    named = ", ".join((each.test, f"{settings['threads']} threads", settings["mode"], f"cache {settings['kv']}"))
    yield {"ph": "M", "pid": PROCESS, "tid": track, "name": "thread_name", "args": {"name": f"calling thread: {named}"}}
    position = series.combination.model.position_bytes
    for sample in sorted(each.samples, key=lambda sample: sample.started):
        yield _span(track, each.test, "test", sample.started - start, sample.seconds, {"tokens": sample.tokens})
        for call in sample.calls:
            yield from _call(track, call, start)
            yield from _counters(named, call, start, position)
        for drawn, seconds in sample.draws if sample.steps else ():
            yield _span(track, DRAW, "operation", drawn - start, seconds, {"layer": -1})


def _call(track: int, call: Call, start: float) -> Iterator[Event]:
    """A call of the target and its operations.

    The target tells how long each took and not when it began; they follow on each other, so they are placed such that the last
    ends with the call.
    """
    yield _span(track, call.phase, "call", call.started - start, call.ended - call.started, {"rows": len(call.shape)})
    at = call.ended - min(call.measured, call.ended - call.started) - start
    for timed in call.operations():
        facts = {"layer": timed.layer, "kernel": timed.kernel, "bytes": timed.work.bytes, "macs": timed.work.macs}
        yield _span(track, timed.name, "operation", at, timed.worked, facts)
        at += timed.worked
        if timed.waited:
            yield _span(track, f"{timed.name}: waiting", "waiting", at, timed.waited, {"layer": timed.layer})
            at += timed.waited


def _counters(named: str, call: Call, start: float, position: int) -> Iterator[Event]:
    read = sum(timed.work.bytes for timed in call.operations())
    values = {"GB/s": read / (call.ended - call.started) / 1e9}
    if call.phase != "tower":
        values["cache MB"] = int(call.shape.ends.max()) * position / 1e6
    for name, value in values.items():
        at = 1e6 * (call.started - start)
        yield {"ph": "C", "pid": PROCESS, "tid": 0, "name": f"{name}: {named}", "ts": at, "args": {name: value}}


def _span(track: int, name: str, category: str, start: float, seconds: float, facts: dict[str, Any]) -> Event:
    times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
    return {"ph": "X", "pid": PROCESS, "tid": track, "name": name, "cat": category, **times, "args": facts}
