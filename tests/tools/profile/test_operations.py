"""Where the time goes: operations and bubble make the wall time, and the work that is counted is that of the network."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from edgeq.format.records import KvCodec
from edgeq.runtime import Model, Sampling
from edgeq.system import machine
from edgeq.targets.capabilities import Draw, Largest
from edgeq.targets.graph import Attention, CacheWrite
from edgeq.targets.rows import Rows
from edgeq.targets.times import Step
from edgeq.tools.commands import bench
from edgeq.tools.profile import findings
from edgeq.tools.profile.collect import Moment, Plan, Profile, collect
from edgeq.tools.profile.document import label
from edgeq.tools.profile.limits import MachineLimits
from edgeq.tools.profile.operations import Breakdown, breakdown
from edgeq.tools.profile.output.tables import layers, operation_cells, summed
from edgeq.tools.profile.output.trace import trace
from edgeq.tools.profile.runs import Setting
from edgeq.tools.profile.tape import Tapes
from edgeq.tools.profile.work import Shape, Work, work


@pytest.fixture(scope="module")
def found(profiled: Profile) -> dict[str, Breakdown]:
    """The breakdowns of the first combination by the name of their test."""
    return {s.test.name: each for s, each in profiled.breakdowns() if s.combination is profiled.combinations[0]}


def test_operations_and_bubble_are_the_wall_time(profiled: Profile) -> None:
    pairs = profiled.breakdowns()
    assert len(pairs) == 6
    for series, each in pairs:
        # Each is measured for itself.
        assert 0.99 < each.closure < 1.001, series.test
        assert each.closure == pytest.approx((each.operations + each.bubble) / each.wall)
        assert each.within > 0 and each.between > 0 and all(line.seconds >= line.waited >= 0 for line in each.lines)
        pieces = [piece.seconds / piece.tokens for sample in series.recorded for piece in sample.pieces()]
        assert min(pieces) <= each.wall <= sorted(pieces)[len(pieces) // 2]


def test_a_decoded_token_reads_every_product_once_and_the_cache(profiled: Profile, found: dict[str, Breakdown]) -> None:
    model = profiled.combinations[0].model
    for name, depth in (("tg8", 0), ("tg8 @ d64", 64)):
        lines = found[name].lines
        products = sum(line.bytes for line in lines if line.macs)
        assert products == pytest.approx(sum(x.nbytes for x in model.file.metadata.linears.values()))
        assert sum(line.macs for line in lines) == pytest.approx(
            sum(x.rows * x.columns for x in model.file.metadata.linears.values())
        )
        positions = (found[name].tokens and np.mean([s.calls[0].shape.ends[0] for s in found[name].samples])) or 0
        assert depth < positions <= depth + 8
        attention = sum(line.bytes for line in lines if line.name == "attention")
        assert attention == pytest.approx(positions * model.position_bytes)


def test_a_prompt_computes_every_row_but_those_that_nobody_asks_for(profiled: Profile, found: dict[str, Breakdown]) -> None:
    model, each = profiled.combinations[0].model, found["pp32"]
    macs: dict[tuple[int, str], float] = {(line.layer, line.name): line.macs * 32 for line in each.lines}
    last = model.config.num_hidden_layers - 1
    for name, linear in model.file.metadata.linears.items():
        owner, _, part = name.rpartition(".")
        layer = int(owner.rpartition(".")[2]) if owner else -1
        rows = 1 if layer == -1 or (layer == last and part != "qkv") else 32
        assert macs[layer, part] == pytest.approx(rows * linear.rows * linear.columns), name
    # Row r sees r + 1 positions; in the last layer one row attends.
    seen = (32 * 33 / 2, 32.0)
    heads = 2 * model.config.num_attention_heads * model.config.head_dim
    floats = {line.layer: line.float_macs * 32 for line in each.lines if line.name == "attention"}
    assert floats[0] == pytest.approx(seen[0] * heads) and floats[last] == pytest.approx(seen[1] * heads)


def shape(ends: list[int], sessions: list[int]) -> Shape:
    return Shape(np.array(ends, np.int32) - 1, np.array(sessions, np.int32), None)


def test_a_window_bounds_what_attention_reads() -> None:
    kv, step = KvCodec("f16"), Step(Attention(0, "x", 0, "y", 4, 2, 8, 1.0, 5, 0), "attend")
    one = shape([12], [0])
    assert work(step, one, kv) == Work(5 * 2 * 2 * 16, 0, 2 * 5 * 4 * 8)
    # Rows 10 ... 12 of a session see positions 6 ... 12 together, two sessions their own.
    three = shape([10, 11, 12], [0, 0, 0])
    assert work(step, three, kv).bytes == 7 * 2 * 2 * 16
    apart = shape([3, 12], [0, 1])
    assert work(step, apart, kv) == Work((3 + 5) * 2 * 2 * 16, 0, 2 * (3 + 5) * 4 * 8)
    # Rows of pictures see patches 2 ... 6 and 0 ... 3.
    patches = Shape(np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.array([[[2, 0], [7, 4]]], np.int32))
    seeing = Step(Attention(0, "x", 0, "y", 4, 2, 8, 1.0, 0, 0, span=0), "attend")
    assert work(seeing, patches, kv) == Work(2 * 2 * 2 * 16, 0, 2 * (5 + 4) * 4 * 8)
    assert work(Step(CacheWrite(0, "x", 0, 0, 2, 8, 0), "kv"), three, kv) == Work(3 * 2 * 2 * 16)


def test_the_roofline_is_the_larger_of_both_bounds() -> None:
    limits = MachineLimits(1, 10.0, 40.0)
    assert limits.least_seconds(Work(100, 10)) == 10 and limits.bound(Work(100, 10)) == "memory"
    assert limits.least_seconds(Work(100, 1000)) == 50 and limits.bound(Work(100, 1000)) == "integers"


def test_shares_of_the_roofline_follow_from_work_and_time(profiled: Profile, found: dict[str, Breakdown]) -> None:
    limits = profiled.limits[profiled.plan.settings[0]]
    for each in found.values():
        for line in each.lines:
            counted = (line.bytes or line.macs) and not (line.float_macs and line.phase == "prefill")
            assert (line.roofline is not None) == bool(counted)
            if line.roofline is not None:
                assert line.roofline * line.seconds == pytest.approx(
                    limits[line.phase].least_seconds(Work(line.bytes, line.macs))
                )
    # Another machine, half as fast: twice the share.
    series = profiled.series[1]
    half = {phase: MachineLimits(1, x.bytes_per_s / 2, x.operations_per_s / 2) for phase, x in limits.items()}
    shares = [
        [line.roofline for line in breakdown("tg8", series.recorded, with_limits).lines if line.roofline]
        for with_limits in (limits, half)
    ]
    assert shares[1] == pytest.approx([2 * share for share in shares[0]])
    assert not any(line.roofline for line in breakdown("tg8", series.recorded, {}).lines)


def test_the_table_has_every_operation_and_layer(written: dict[str, Any]) -> None:
    for operations in written["operations"]:
        cells = operation_cells(operations)
        assert {"qkv", "o", "gate_up", "down", "head", "attention", "between calls", "within calls"} <= {
            row[1] for row in cells
        }
        total = sum(line["seconds"] for line in summed(operations["lines"])) + operations["bubble"]
        assert total == pytest.approx(operations["closure"] * operations["wall"])
        shown = layers(operations)
        assert all(f"{layer} " in shown for layer in ("outside", 0, 1, 2))


# Chrome's "Trace Event Format", as far as it is used: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
TRACK = {"pid": {"type": "integer"}, "tid": {"type": "integer"}, "name": TEXT}
KINDS = {
    "X": {"ts": {"type": "number", "minimum": 0}, "dur": {"type": "number", "minimum": 0}, "cat": TEXT, "args": {}},
    "C": {"ts": {"type": "number", "minimum": 0}, "args": {"additionalProperties": NUMBER, "minProperties": 1}},
    "M": {"name": {"enum": ["process_name", "thread_name"]}, "args": {"required": ["name"], "properties": {"name": TEXT}}},
}
TRACE = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {
                        "properties": {"ph": {"const": kind}, **TRACK, **own},
                        "required": ["ph", *{**TRACK, **own}],
                        "additionalProperties": False,
                    }
                    for kind, own in KINDS.items()
                ]
            },
        },
    },
}


@pytest.fixture(scope="module", params=[1, 2])
def traced(request: pytest.FixtureRequest, profiled: Profile, tiny: Path) -> tuple[Profile, list[dict[str, Any]]]:
    """A profile with so many threads, and the events of its trace."""
    made = profiled
    if request.param > 1:
        tests = (bench.Test("pp", 32, 0), bench.Test("tg", 8, 0))
        made = collect(Plan(tiny, (Setting(2, "a8", "f16"),), tests, 2, True, {"target": "cpu"}), lambda *_: None)
    written = json.loads(trace(made))
    jsonschema.validate(written, TRACE)
    return made, written["traceEvents"]


def test_the_trace_nests_and_sums_to_the_table(traced: tuple[Profile, list[dict[str, Any]]]) -> None:
    profile, events = traced
    spans = [event for event in events if event["ph"] == "X"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    threads = profile.plan.settings[0].threads
    # On a busy machine the second thread can come too late for everything.
    assert 1 in {event["tid"] for event in spans} <= set(tracks) and list(tracks) == list(range(1, threads + 1))
    slack = 0.01  # microseconds: times are floats
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for track in tracks:
        own = sorted((e for e in spans if e["tid"] == track), key=lambda e: (e["ts"], -e["dur"]))
        open_until, test = list[float](), ""
        for event in own:
            while open_until and event["ts"] >= open_until[-1] - slack:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + slack, event
            open_until.append(event["ts"] + event["dur"])
            test = event["name"] if event["cat"] == "test" else test
            if track == 1 and event["cat"] != "call":
                kind = event["cat"] if event["cat"] in ("test", "python") else event["name"].removesuffix(": waiting")
                sums[test][kind] += event["dur"] / 1e6
    assert len(sums) == len(profile.breakdowns())
    for series, each in profile.breakdowns():
        found = sums[findings.named({"test": each.test, **label(series.combination)})]
        table: dict[str, float] = defaultdict(float, test=each.wall, python=each.between)
        for line in each.lines:
            table[line.name] += line.seconds
        assert {kind: seconds / each.tokens for kind, seconds in found.items()} == pytest.approx(dict(table), rel=1e-6)


def test_operations_begin_and_end_within_their_call(traced: tuple[Profile, list[dict[str, Any]]]) -> None:
    for series, _ in traced[0].breakdowns():
        for call in (call for sample in series.recorded for call in sample.calls):
            began, spent = call.run.threads[0, :, 0], call.seconds.sum(1)
            assert call.run.began <= began[0] and began[-1] + spent[-1] <= call.run.ended
            assert (began[1:] >= (began + spent)[:-1] - 1e-9).all()


def test_counters_of_the_trace_are_what_is_known(traced: tuple[Profile, list[dict[str, Any]]]) -> None:
    counters = [event for event in traced[1] if event["ph"] == "C"]
    known = {"W": traced[0].idle_watts, "°C": machine.temperature()}
    assert {event["name"] for event in counters} == {"GB/s", "cache MB", "resident MB"} | {
        name for name, value in known.items() if value is not None
    }
    assert all(value >= 0 for event in counters for value in event["args"].values())


def test_power_and_heat_have_counters_where_sensors_tell(profiled: Profile) -> None:
    moments = [Moment(0.5, 1000, 10, 12.5, 61.0), Moment(0.6, 1000, 10, None, None)]
    events = json.loads(trace(replace(profiled, moments=moments)))["traceEvents"]
    found = [event["args"] for event in events if event["ph"] == "C" and event["name"] in ("W", "°C")]
    assert found == [{"W": 12.5}, {"°C": 61.0}]


def test_a_target_that_finds_the_largest_logits_is_recorded_by_runs_that_tell_times(tiny: Path) -> None:
    model = Model.load(tiny, target="cpu", threads=1, context=64)
    asked: list[int] = []
    program: Any = model.program
    program.most_largest, program.largest_rows = 8, 8

    def run_largest(rows: Rows, count: int, mode: Any = None, weights: Any = None, *, ahead: Sequence[Draw] = ()) -> Largest:
        asked.append(count)
        logits = program.run(rows, mode)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        return Largest(ids.astype(np.int32), np.take_along_axis(logits, ids, 1), np.isfinite(logits).all(1))

    program.run_largest = run_largest
    tapes = Tapes(model, False)
    texts, calls = list[list[int]](), list[int]()
    for on in (False, True):
        asked.clear()
        with tapes.recording("decode", on):
            generation = model.generate([5, 6, 7], max_tokens=9, ignore_eos=True, sampling=Sampling())
            generation.text()
            texts.append(generation.tokens)
            calls.append(len(tapes.calls()))
        assert asked == ([] if on else [1] * 8)
    assert texts[0] == texts[1] and calls == [0, 9]
