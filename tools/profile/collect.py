"""A profile: every combination of settings and tests, alternating, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from edgeq import machine
from edgeq.container import ModelFile
from edgeq.errors import InputError
from edgeq.runtime import Model
from edgeq.runtime.context_size import DEFAULT_CONTEXT
from edgeq.tools.bench import WARM_UP_TOKENS, Test
from edgeq.tools.profile import conditions
from edgeq.tools.profile.limits import Limits, limits
from edgeq.tools.profile.operations import Breakdown, breakdown
from edgeq.tools.profile.power import Meter
from edgeq.tools.profile.record import Measurement
from edgeq.tools.profile.runs import AnyTest, Combination, Picture, Sample, Setting
from edgeq.tools.report import identification, step_bytes
from edgeq.tools.terminal import Report, compilation


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    operations   record the time of every operation, in runs that alternate with plain ones
    options      of Model.load, the same for all settings
    """

    path: Path
    settings: tuple[Setting, ...]
    tests: tuple[AnyTest, ...]
    repetitions: int
    operations: bool
    options: dict[str, Any]


@dataclass
class Series:
    """The runs of one test in one combination so far; `joules` above idle of each plain run, where a sensor tells."""

    combination: Combination
    test: AnyTest
    plain: list[Sample] = field(default_factory=list)
    recorded: list[Sample] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Profile:
    """What was measured so far.

    limits    by threads for decode and for prompts, and mode: the limits of the machine by phase
    memory    seconds since the start, resident bytes of the process, bytes of keys and values that are kept
    partial   it was interrupted before its end
    """

    plan: Plan
    context: int
    combinations: list[Combination] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    limits: dict[Setting, dict[str, Limits]] = field(default_factory=dict)
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    sensors: list[dict[str, str]] = field(default_factory=list)
    idle_watts: float | None = None
    partial: bool = True

    def measurements(self) -> list[Measurement]:
        """Compilation and load of every combination, then its tests."""
        return [record for c in self.combinations for record in (*_loading(c, self.context), *self._tests_of(c))]

    def _tests_of(self, combination: Combination) -> Iterator[Measurement]:
        for series in self.series:
            if series.combination is combination and series.plain:
                yield from _records(series, self.context, self.limits.get(combination.setting, {}))

    def breakdowns(self) -> list[tuple[Series, Breakdown]]:
        """Of every series that has recorded runs."""
        return [
            (series, breakdown(series.test.name, series.recorded, self.limits.get(series.combination.setting, {})))
            for series in self.series
            if series.recorded
        ]


def context_of(tests: tuple[AnyTest, ...], limit: int) -> int:
    """Positions that the longest test takes.  InputError: more than `limit`, which the model was made for."""
    lengths = [test.count + test.depth for test in tests if isinstance(test, Test)]
    context = max(lengths, default=1)
    if any(isinstance(test, Picture) for test in tests):
        context = max(context, min(limit, DEFAULT_CONTEXT))
    if context > limit:
        raise InputError(f"the longest test has {context} positions, this model takes {limit}: choose smaller -p, -n or -d")
    return context


def collect(plan: Plan, report: Report, on_round: Callable[[Profile], None] = lambda found: None) -> Profile:
    """Measure.  An interrupt ends it early: the profile is marked as partial.

    on_round   called with what is there after every round of all tests

    InputError: a test that the model does not take.  ResourceError: it does not fit in memory.
    """
    file = ModelFile.open(plan.path)
    found = Profile(plan, context_of(plan.tests, file.metadata.config.max_position_embeddings))
    images = any(isinstance(test, Picture) for test in plan.tests)
    try:
        for setting in plan.settings:
            found.combinations.append(_loaded(plan, setting, found.context, images))
        for i, combination in enumerate(found.combinations):
            report(0, 0, "measuring what this machine can do")
            # On a shared machine an earlier number may be far off.
            found.limits[combination.setting] = limits(combination.model, refresh=i == 0)
        found.series = [Series(c, test) for c, test in itertools.product(found.combinations, plan.tests)]
        machine.forget_peak()
        meter = Meter.of_this_machine()
        found.sensors, found.idle_watts = meter.described, meter.idle_watts
        _rounds(found, meter, report, on_round)
        found.partial = False
    except KeyboardInterrupt:
        if not any(series.plain for series in found.series):
            raise
    return found


def _loaded(plan: Plan, setting: Setting, context: int, images: bool) -> Combination:
    with compilation() as report_of_load:
        chosen = {"threads": setting.threads, "mode": setting.mode, "kv": setting.kv}
        options = {**plan.options, **chosen, "context": context, "on_progress": report_of_load}
        most = max((test.batch for test in plan.tests), default=1)
        model = Model.load(plan.path, max_logits=most, **options)
    load_s = max(0.0, model.load_s - report_of_load.seconds)
    with compilation() as report_of_tower:
        if images:
            model.prepare_images(report_of_tower)
    return Combination(setting, model, report_of_load.seconds + report_of_tower.seconds, load_s, images)


def _rounds(found: Profile, meter: Meter, report: Report, on_round: Callable[[Profile], None]) -> None:
    began, rounds = perf_counter(), found.plan.repetitions + 1
    for i in range(rounds):
        for j, series in enumerate(found.series):
            report(i * len(found.series) + j, rounds * len(found.series), series.test.name)
            if i:
                _once(series, found.plan.operations, meter, recorded_first=i % 2 == 0)
            else:
                _warm_up(series, found.plan.operations)
            kept = sum(c.cache_bytes() for c in found.combinations)
            found.memory.append((perf_counter() - began, machine.process_memory().get("VmRSS", 0), kept))
        if i:
            on_round(found)


def _warm_up(series: Series, operations: bool) -> None:
    test = series.test
    count = min(test.count, WARM_UP_TOKENS[test.kind]) if isinstance(test, Test) else 0
    for record in (False, True)[: 1 + operations]:
        series.combination.run(test, count, record)


def _once(series: Series, operations: bool, meter: Meter, recorded_first: bool) -> None:
    """A plain run and a recorded one, in turn the one or the other first."""
    count = series.test.count if isinstance(series.test, Test) else 0
    for record in (True, False) if recorded_first else (False, True):
        if record:
            if operations:
                series.recorded.append(series.combination.run(series.test, count, True))
            continue
        with _energy(meter, series):
            sample = series.combination.run(series.test, count, False)
        memory = machine.process_memory()
        series.facts = {**conditions.facts(), "rss": memory.get("VmRSS"), "peak_rss": memory.get("VmHWM")}
        # Last: after an interrupt a series that has a run has its facts too.
        series.plain.append(sample)


@contextmanager
def _energy(meter: Meter, series: Series) -> Iterator[None]:
    with meter.measuring() as spent:
        yield
    if spent.joules is not None:
        series.joules.append(spent.joules)


def _loading(combination: Combination, context: int) -> Iterator[Measurement]:
    """What happened once, before the first token; kernels that were kept from an earlier run took no compiling."""
    facts = {**identification(combination.model), **conditions.facts()}
    seconds = {"compile": combination.compile_s, "load": combination.load_s}
    for kind, taken in seconds.items():
        if taken > 0:
            yield Measurement(kind, kind, 0, 0, 1, context, facts, [taken])


def _records(series: Series, context: int, found: dict[str, Limits]) -> Iterator[Measurement]:
    model, test = series.combination.model, series.test
    now = dict(series.facts)
    memory = {"rss": now.pop("rss"), "peak_rss": now.pop("peak_rss")}
    facts = {**identification(model), **now}
    tokens = series.plain[0].tokens
    common: dict[str, Any] = {"tokens": tokens, "depth": test.depth, "batch": test.batch, "context": context, "facts": facts}
    instrumented = [piece.seconds for sample in series.recorded for piece in sample.pieces()]
    joules = sum(series.joules) / len(series.joules) / (tokens * test.batch) if series.joules else None
    if test.kind != "tg":
        # The draw of the first token is all that tells them apart.
        firsts = [sample.ttft for sample in series.plain if sample.ttft is not None]
        yield Measurement("ttft", f"ttft {test.name}", samples_s=firsts, **common, **memory)
    made = Measurement(
        kind=test.kind,
        test=test.name,
        samples_s=[sample.seconds for sample in series.plain],
        step_s=[second for sample in series.plain for second in sample.steps],
        instrumented_s=instrumented,
        joules_per_token=joules,
        **common,
        **memory,
    )
    yield made if test.kind != "tg" else _with_bandwidth(made, model, found)


def _with_bandwidth(made: Measurement, model: Model, found: dict[str, Limits]) -> Measurement:
    rate = made.tokens_per_s
    assert rate is not None
    # The cache grows by one position per token: its middle length stands for all.
    read = step_bytes(model, made.depth + (made.tokens + 1) // 2, made.batch) * rate / made.batch
    bandwidth = found["decode"].bytes_per_s if "decode" in found else None
    share = read / bandwidth if bandwidth else None
    return replace(made, bytes_per_s=read, read_bandwidth=bandwidth, bandwidth_share=share)
