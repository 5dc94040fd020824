"""The time left of a conversion, replayed from what runs of each method reported and when, against a clock that the test moves.

`recorded_conversions.json` has, for conversions of the demo model on one thread, the CPU seconds of every report: stages are
indices of the plan's steps or names, "pass" and "passed" enclose the trial passes.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.running.stages import Stages
from edgeq.tools.cli.eta import Eta

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-llama"
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_conversions.json").read_text(encoding="utf-8"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replayed(run: dict[str, Any], slower: float = 1.0) -> list[tuple[int | str, float | None, float]]:
    """(stage, seconds left as told, as they were) of every report; `slower`: the machine, after a half of the time."""
    clock, half = Clock(), run["events"][-1][1] / 2
    eta, found = Eta(clock), list[tuple[int | str, float | None]]()
    plan = preflight(str(TINY), ConvertOptions(**run["options"]))
    stages = Stages(plan, 0, plan.method.studies, eta.report, clock)
    times: list[float] = []
    with ExitStack() as stack:
        for kind, seconds, *more in run["events"]:
            clock.now = seconds if seconds < half else half + slower * (seconds - half)
            if kind == "pass":
                stack.enter_context(stages.passing())
            elif kind == "passed":
                stack.close()
            elif kind == "at":
                stages.at(more[0], more[1], more[2])
                found.append((more[0], eta.left()))
                times.append(clock.now)
    return [(stage, left, clock.now - at) for (stage, left), at in zip(found, times, strict=True)]


@pytest.mark.parametrize("name", RECORDED)
def test_the_time_left_is_right_from_the_first_finished_layer_on(name: str) -> None:
    found = replayed(RECORDED[name])
    total = found[0][2]
    first = next(i for i, (stage, _, _) in enumerate(found) if isinstance(stage, int) and stage > 1)
    told = 0
    for stage, left, true in found[first:]:
        # Of the last twentieth a quarter is less than what a bar shows.
        assert left is not None and abs(left - true) <= max(0.25 * true, 0.05 * total), (stage, left, true)
        told += 1
    assert told > 5


def test_a_machine_that_becomes_half_as_fast_is_noticed() -> None:
    """Within three layers: in the measurement that follows them."""
    found = replayed(RECORDED["gptq"], slower=2.0)
    measured = [(left, true) for stage, left, true in found if stage == "measure"]
    assert len(measured) > 5
    for left, true in measured:
        assert left == pytest.approx(true, rel=0.3, abs=0.05 * found[0][2])
