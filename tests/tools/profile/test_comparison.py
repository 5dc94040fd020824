"""Two profiles compared: what the spread of the runs can tell apart, and what it cannot."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgeq.errors import InputError
from edgeq.tools.cli.main import main
from edgeq.tools.measure.measurement import measurement
from edgeq.tools.profile.comparison import blocks, compare, outside, rank_sums, ratio
from edgeq.tools.profile.record import write

Document = dict[str, Any]


def scaled(document: Document, factor: float, spread: float, seed: int, repetitions: int = 5, **changes: Any) -> Document:
    """A document whose tests take `factor` times a second, each repetition off by up to `spread`."""
    rng, made = np.random.default_rng(seed), copy.deepcopy(document)
    for record in made["measurements"]:
        each = (factor * (1 + spread * rng.uniform(-1, 1, repetitions))).tolist()
        steps = [second / 4 for second in each for _ in range(4)] if record["step_s"] else []
        record.update(samples_s=each, step_s=steps, **changes)
    return made


def test_orders_are_counted() -> None:
    """Against every order of 3 and 4 values, written out."""
    counts = [0] * 13
    for places in itertools.combinations(range(7), 3):
        others = [i for i in range(7) if i not in places]
        counts[sum(x > y for x in places for y in others)] += 1
    assert rank_sums(3, 4) == tuple(counts)
    assert outside(4, 4) is None and outside(5, 5) == 0 and outside(8, 8) == 7


def test_the_interval_holds_the_ratio_as_often_as_it_says() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        _, low, high = ratio(rng.lognormal(0, 0.1, 7).tolist(), (1.2 * rng.lognormal(0, 0.1, 7)).tolist())
        assert low is not None and high is not None
        held += low <= 1.2 <= high
    assert held >= 0.98 * 400


def test_the_blocks_of_a_decode_are_its_repetitions(calm: Document) -> None:
    record = next(measurement(r) for r in calm["measurements"] if r["kind"] == "tg")
    steps = [float(i) for i in range(1, 21)]
    assert blocks(replace(record, step_s=steps)) == [2.5, 6.5, 10.5, 14.5, 18.5]
    assert blocks(replace(record, step_s=[])) == record.samples_s


def test_what_is_slower_faster_or_neither(calm: Document) -> None:
    same = compare(scaled(calm, 1, 0.05, 1), scaled(calm, 1, 0.05, 2))
    assert len(same) == 3 and {line.verdict for line in same} == {"not separable"}
    slow = compare(scaled(calm, 1, 0.05, 1), scaled(calm, 1.3, 0.05, 2))
    assert {line.verdict for line in slow} == {"slower"} and all(1.2 < line.ratio < 1.4 for line in slow)
    assert all(line.slower_by(0.05) and not line.slower_by(0.5) for line in slow)
    assert {line.verdict for line in compare(scaled(calm, 1, 0.05, 1), scaled(calm, 0.7, 0.05, 2))} == {"faster"}
    # A large difference within a larger spread, or from few repetitions, is none.
    assert {x.verdict for x in compare(scaled(calm, 1, 0.6, 1), scaled(calm, 1.3, 0.6, 2))} == {"not separable"}
    # So is one that the fastest repetitions do not have: neighbours.
    one, crowded = scaled(calm, 1, 0.02, 1), scaled(calm, 1.5, 0.02, 2)
    for record in crowded["measurements"]:
        if record["step_s"]:
            record["step_s"][0] = 0.25
        record["samples_s"][0] = 1.0
    crowded["measurements"] = [r for r in crowded["measurements"] if r["kind"] == "tg"]
    (line,) = compare(one, crowded)
    assert line.low is not None and line.low > 1 and line.best < 1.05 and line.verdict == "not separable"
    few = compare(scaled(calm, 1, 0.01, 1, repetitions=4), scaled(calm, 2, 0.01, 2, repetitions=4))
    assert {(line.verdict, line.low) for line in few} == {("not separable", None)}


def test_a_setting_that_is_constant_may_differ(calm: Document) -> None:
    one = scaled(calm, 1, 0.01, 1)
    for line in compare(one, scaled(calm, 1.5, 0.01, 2, threads=2)):
        assert line.changed["threads"] == [1, 2] and line.verdict == "slower"
    # With several thread counts in a profile each is compared with its own.
    both = copy.deepcopy(one)
    both["measurements"] += scaled(calm, 3, 0.01, 3, threads=2)["measurements"]
    assert {line.verdict for line in compare(both, both)} == {"not separable"}
    assert {line.settings["threads"] for line in compare(both, one)} == {1}
    with pytest.raises(InputError, match="no test in common"):
        compare(one, scaled(calm, 1, 0.01, 2, kv="int8"))


@pytest.mark.parametrize(
    ("core_wait", "load", "busy"),
    [(None, None, False), (None, 2.9, False), (None, 3.1, True), (0.32, 9.0, False), (0.34, 0.1, True), ("", 0.1, False)],
)
def test_nothing_is_separable_on_a_busy_machine(calm: Document, core_wait: object, load: float | None, busy: bool) -> None:
    """By how long threads waited for a core.  A load is of the last minute, and counts where the other is not told."""
    for line in compare(scaled(calm, 1, 0.02, 1), scaled(calm, 2, 0.02, 2, load=load, core_wait=core_wait)):
        assert line.busy == busy and line.verdict == ("not separable" if busy else "slower")
    two = {"threads": 2, "threads_prefill": 2, "core_wait": 0.6}
    assert not any(line.busy for line in compare(scaled(calm, 1, 0.02, 1, **two), scaled(calm, 2, 0.02, 2, **two)))


def edgeq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_exit_code_is_for_scripts(calm: Document, tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write(a, scaled(calm, 1, 0.02, 1))
    write(b, scaled(calm, 1.2, 0.02, 2))
    shown = edgeq("profile", "--compare", a, b)
    assert shown.exit_code == 0 and shown.stdout.count("slower") == 3 and "| B / A |" in shown.stdout
    assert edgeq("profile", "--compare", a, b, "--fail-if-slower", "5%").exit_code == 3
    assert edgeq("profile", "--compare", a, b, "--fail-if-slower", "50%").exit_code == 0
    assert edgeq("profile", "--compare", b, a, "--fail-if-slower", "5").exit_code == 0
    assert edgeq("profile", "--compare", a, b, "-o", "html").stdout.startswith("<!doctype html>")
    found = json.loads(edgeq("profile", "--compare", a, b, "-o", "json").stdout)
    assert found["failed"] is False and {test["verdict"] for test in found["tests"]} == {"slower"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--compare with two saved profiles"),
        (("--compare", "a.json", "b.json"), "a.json: No such file"),
        (("--compare", "a.json", "b.json", "-o", "csv"), "printed as md, json or html"),
        (("x.edgeq", "--fail-if-slower", "5%"), "needs --compare"),
        (("--compare", "a.json", "b.json", "--fail-if-slower", "-5%"), "above 0"),
        (("--compare", "a.json", "b.json", "--mode", "a8"), "--mode is of no use with --compare"),
        (("--compare", "a.json", "b.json", "--save", "c.json"), "--save is of no use with --compare"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = edgeq("profile", *arguments)
    assert result.exit_code in (1, 2) and message in result.stderr and len(result.stderr.splitlines()) == 1
