"""A profile: every combination of settings and tests, alternating, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from edgeq.runtime.network.embedding import check_continues
from edgeq.runtime.session.context_size import DEFAULT_CONTEXT
from edgeq.runtime.speculative.speculator import layer_for
from edgeq.runtime.stats import MAX_DRAFT
from edgeq.system import machine
from edgeq.tools.cli.terminal import Report, compilation
from edgeq.tools.commands.bench import WARM_UP_TOKENS, Test, with_bandwidth
from edgeq.tools.measure import conditions
from edgeq.tools.measure.measurement import MeasuredTest
from edgeq.tools.measure.power import PowerMeter
from edgeq.tools.measure.report import facts, identification
from edgeq.tools.profile.limits import MachineLimits, limits
from edgeq.tools.profile.operations import Breakdown, breakdown
from edgeq.tools.profile.runs import AnyTest, Combination, Continuation, PictureTest, RunSample, Setting
from edgeq.tools.profile.sustained import Sustained, sustain


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    operations   record the time of every operation, in runs that alternate with plain ones
    sustained    seconds for which the first combination then decodes without a pause
    options      of Model.load, the same for all settings
    """

    path: Path
    settings: tuple[Setting, ...]
    tests: tuple[AnyTest, ...]
    repetitions: int
    operations: bool
    options: dict[str, Any]
    sustained: float = 0.0


@dataclass
class Series:
    """The runs of one test in one combination so far; `joules` above idle of each plain run, and the mean power of
    the last one, where a sensor tells.

    core_waits   seconds that threads waited for a core in each plain run, where the system tells
    """

    combination: Combination
    test: AnyTest
    plain: list[RunSample] = field(default_factory=list)
    recorded: list[RunSample] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    core_waits: list[float] = field(default_factory=list)
    watts: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Moment(NamedTuple):
    """After a run: seconds since the rounds began, resident bytes of the process, bytes of keys and values that are kept; mean
    power of the run and temperature, where sensors tell."""

    seconds: float
    rss: int
    cache: int
    watts: float | None
    celsius: float | None


@dataclass
class Profile:
    """What was measured so far.

    limits    by threads for decode and for prompts, and mode: the limits of the machine by phase
    began     the rounds, by perf_counter
    partial   it was interrupted before its end
    """

    plan: Plan
    context: int
    combinations: list[Combination] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    limits: dict[Setting, dict[str, MachineLimits]] = field(default_factory=dict)
    began: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    sensors: list[dict[str, str]] = field(default_factory=list)
    idle_watts: float | None = None
    sustained: Sustained | None = None
    partial: bool = True

    def measurements(self) -> list[MeasuredTest]:
        """Compilation and load of every combination, then its tests."""
        return [record for c in self.combinations for record in (*_loading(c, self.context), *self._tests_of(c))]

    def _tests_of(self, combination: Combination) -> Iterator[MeasuredTest]:
        for series in self.series:
            if series.combination is combination and series.plain:
                yield from _records(series, self.context, self.limits.get(combination.setting, {}))

    def breakdowns(self) -> list[tuple[Series, Breakdown]]:
        """Breakdowns of every series that has recorded runs."""
        return [
            (series, breakdown(series.test.name, series.recorded, self.limits.get(series.combination.setting, {})))
            for series in self.series
            if series.recorded
        ]


def context_of(tests: tuple[AnyTest, ...], limit: int) -> int:
    """Positions that the longest test takes.  InputError: more than `limit`, which the model was made for."""
    lengths = [test.count + test.depth for test in tests if isinstance(test, (Test, Continuation))]
    context = max(lengths, default=1)
    if any(isinstance(test, PictureTest) for test in tests):
        context = max(context, min(limit, DEFAULT_CONTEXT))
    if context > limit:
        raise InputError(f"the longest test has {context} positions, this model takes {limit}: choose smaller -p, -n or -d")
    return context


def collect(plan: Plan, report: Report, on_round: Callable[[Profile], None] = lambda profile: None) -> Profile:
    """Measure.  An interrupt ends it early: the profile is marked as partial.

    on_round   called with what is there after every round of all tests

    InputError: a test that the model does not take.  ResourceError: it does not fit in memory.
    """
    file = ModelFile.open(plan.path)
    check_continues(file)
    found = Profile(plan, context_of(plan.tests, file.metadata.config.max_position_embeddings))
    images = any(isinstance(test, PictureTest) for test in plan.tests)
    try:
        for setting in plan.settings:
            found.combinations.append(_loaded(plan, setting, found.context, images))
        found.combinations = _distinct(found.combinations)
        for i, combination in enumerate(found.combinations):
            report(0, 0, "measuring what this machine can do")
            # On a shared machine an earlier number may be far off; what is compared alone needs none.
            found.limits[combination.setting] = limits(combination.model, refresh=i == 0 and plan.operations)
        found.series = [Series(c, test) for c, test in itertools.product(found.combinations, plan.tests)]
        machine.forget_peak()
        meter = PowerMeter.of_this_machine(found.combinations[0].model.target == "cuda")
        found.sensors, found.idle_watts = meter.described, meter.idle_watts
        _rounds(found, meter, report, on_round)
        if plan.sustained:
            found.sustained = Sustained(longest_decode(plan.tests).name, plan.sustained)
            sustain(found.combinations[0], longest_decode(plan.tests), found.sustained, meter, report)
        found.partial = False
    except KeyboardInterrupt:
        if not any(series.plain for series in found.series):
            raise
    return found


def longest_decode(tests: tuple[AnyTest, ...]) -> Test:
    """The test that decodes most tokens of one text.  InputError: there is none."""
    found = [test for test in tests if isinstance(test, Test) and test.kind == "tg" and test.batch == 1]
    if not found:
        raise InputError("--sustained decodes tokens of one text: give -n a number above 0 and --batch 1")
    return max(found, key=lambda test: test.count)


def _distinct(combinations: list[Combination]) -> list[Combination]:
    """Without those that another was loaded like, under another name for the same number of threads or cache."""
    found: dict[tuple[Any, ...], Combination] = {}
    for combination in combinations:
        options = combination.model.program.options
        found.setdefault((options.threads, options.threads_prefill, options.mode, options.kv), combination)
    return list(found.values())


def _loaded(plan: Plan, setting: Setting, context: int, images: bool) -> Combination:
    with compilation() as report_of_load:
        chosen = {"threads": setting.threads, "mode": setting.mode, "kv": setting.kv}
        options = {**plan.options, **chosen, "context": context, "on_progress": report_of_load}
        # A draft is checked with the token after it.
        most = max(MAX_DRAFT + 1 if isinstance(test, Continuation) else test.batch for test in plan.tests)
        layer = layer_for(*(test.draft for test in plan.tests if isinstance(test, Continuation)))
        model = Model.load(plan.path, max_logits=most, draft_layer=layer, **options)
    load_s = max(0.0, model.load_s - report_of_load.seconds)
    with compilation() as report_of_tower:
        if images:
            model.prepare_images(report_of_tower)
    return Combination(setting, model, report_of_load.seconds + report_of_tower.seconds, load_s, images)


def _rounds(profile: Profile, meter: PowerMeter, report: Report, on_round: Callable[[Profile], None]) -> None:
    profile.began, rounds = perf_counter(), profile.plan.repetitions + 1
    for i in range(rounds):
        for j, series in enumerate(profile.series):
            report(i * len(profile.series) + j, rounds * len(profile.series), series.test.name)
            if i:
                _once(series, profile.plan.operations, meter, recorded_first=i % 2 == 0)
            else:
                _warm_up(series, profile.plan.operations)
            kept = sum(c.cache_bytes() for c in profile.combinations)
            rss, celsius = machine.process_memory().get("VmRSS", 0), machine.temperature()
            profile.moments.append(Moment(perf_counter() - profile.began, rss, kept, series.watts, celsius))
        if i:
            on_round(profile)


def _warm_up(series: Series, operations: bool) -> None:
    test = series.test
    # What drafts gain is measured while they run: a few tokens would not tell.
    count = min(test.count, WARM_UP_TOKENS[test.kind]) if isinstance(test, Test) else 0
    for record in (False, True)[: 1 + operations]:
        series.combination.run(test, count, record)


def _once(series: Series, operations: bool, meter: PowerMeter, recorded_first: bool) -> None:
    """A plain run and a recorded one, in turn the one or the other first."""
    count = series.test.count if isinstance(series.test, Test) else 0
    for record in (True, False) if recorded_first else (False, True):
        if record:
            if operations:
                series.recorded.append(series.combination.run(series.test, count, True))
            continue
        sample = series.combination.run(series.test, count, False, partial(_watched, meter, series))
        memory = machine.process_memory()
        device = series.combination.model.program.facts().device
        series.facts = {**conditions.facts(device), "rss": memory.get("VmRSS"), "peak_rss": memory.get("VmHWM")}
        # Last: after an interrupt a series that has a run has its facts too.
        series.plain.append(sample)


@contextmanager
def _watched(meter: PowerMeter, series: Series) -> Iterator[None]:
    """Keep what a plain run waited for a core, and its energy."""
    before = conditions.core_wait_s()
    with meter.measuring() as spent:
        yield
    after = conditions.core_wait_s()
    if before is not None and after is not None:
        # Less than before: a thread has ended.
        series.core_waits.append(max(0.0, after - before))
    series.watts = spent.watts
    if spent.joules is not None:
        series.joules.append(spent.joules)


def _loading(combination: Combination, context: int) -> Iterator[MeasuredTest]:
    """What happened once, before the first token; kernels that were kept from an earlier run took no compiling."""
    about = facts(combination.model)
    seconds = {"compile": combination.compile_s, "load": combination.load_s}
    for kind, taken in seconds.items():
        if taken > 0:
            yield MeasuredTest(kind, kind, 0, 0, 1, context, about, [taken])


def _records(series: Series, context: int, limits_by_phase: dict[str, MachineLimits]) -> Iterator[MeasuredTest]:
    model, test = series.combination.model, series.test
    now = dict(series.facts)
    memory = {"rss": now.pop("rss"), "peak_rss": now.pop("peak_rss")}
    about = {**identification(model), **now}
    tokens = series.plain[0].tokens
    # After an interrupt there can be one more wait than runs.
    samples_s, waits = [sample.seconds for sample in series.plain], series.core_waits[: len(series.plain)]
    common: dict[str, Any] = {"tokens": tokens, "depth": test.depth, "batch": test.batch, "context": context, "facts": about}
    common["core_wait"] = sum(waits) / sum(samples_s) if waits else None
    instrumented = [seconds for sample in series.recorded for seconds in sample.steps or [sample.seconds]]
    draft = test.draft if isinstance(test, Continuation) else "off"
    joules = sum(series.joules) / len(series.joules) / (tokens * test.batch) if series.joules else None
    if test.kind != "tg":
        # The draw of the first token is all that tells them apart.
        firsts = [sample.ttft for sample in series.plain if sample.ttft is not None]
        yield MeasuredTest("ttft", f"ttft {test.name}", samples_s=firsts, **common, **memory)
    made = MeasuredTest(
        kind=test.kind,
        test=test.name,
        samples_s=samples_s,
        step_s=[second for sample in series.plain for second in sample.steps],
        instrumented_s=instrumented,
        joules_per_token=joules,
        draft=draft,
        tokens_per_run=series.plain[-1].tokens_per_run,
        **common,
        **memory,
    )
    bandwidth = limits_by_phase["decode"].bytes_per_s if "decode" in limits_by_phase else None
    # Drafted tokens are not read for one by one.
    yield with_bandwidth(made, model, bandwidth) if test.kind == "tg" and draft == "off" else made
