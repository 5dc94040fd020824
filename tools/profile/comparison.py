"""Two saved profiles side by side: faster, slower, or not separable by the spread of the runs themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from edgeq.errors import InputError
from edgeq.tools.commands.bench import aligned
from edgeq.tools.measure.measurement import SETTINGS, MeasuredTest, measurement
from edgeq.tools.measure.statistics import percentile

CONFIDENCE = 0.99
"""Each of several tests in a comparison can be wrong: with 95 % one in twenty would be."""
BEST_SHARE = 0.5
"""Share of the difference of the medians, as logarithms."""
BUSY = 1.5
"""Processes that want to run, for each core, from which on a difference can be the neighbours': where the system does not tell
how long threads waited for a core."""
MAX_WAIT = 1 - 1 / BUSY
"""The same, as the share of a test in which its threads waited for a core, on average."""
COMPARED = ("ttft", "pp", "tg", "image")
"""Compilation and loading happen once in a run: they have no spread."""
IDENTITY = ("kind", "test", "mode", "kv", "threads", "threads_prefill", "target", "isa")
"""What two records share to be compared; of the last four, what is the same in all records of a profile may differ."""
OPTIONAL = IDENTITY[4:]
MAX_REPETITIONS = 60
"""Repetitions that are compared; of more every second, third ... counts."""


@dataclass(frozen=True)
class ComparisonLine:
    """One test in both profiles.

    ratio      time of B over time of A, the median of all pairs of repetitions (Hodges and Lehmann 1963);  low, high: its
               interval with at least `confidence`, from the ranks of the pairs (Moses 1965); None: too few repetitions for one
    best       ratio of the fastest repetitions, or tokens.  What else runs on a machine only adds time: where the medians
               differ and these hardly do, it is the neighbours that differ
    busy       in one of them the threads waited for a core, on average for more than MAX_WAIT of the time, or, where that is
               not told, the load was above BUSY times the cores
    verdict    faster or slower where the interval does not hold 1 and `best` is at least half as far from it, and neither was
               busy; else not separable
    """

    test: str
    settings: dict[str, Any]
    changed: dict[str, list[Any]]
    a_s: float
    b_s: float
    ratio: float
    low: float | None
    high: float | None
    best: float
    busy: bool
    verdict: str

    def slower_by(self, share: float) -> bool:
        return self.verdict == "slower" and self.ratio >= 1 + share


def blocks(record: MeasuredTest) -> list[float]:
    """Seconds of each repetition, of a tg the median token: the tokens of one repetition are not independent of each other."""
    return medians(record.seconds, len(record.seconds) // len(record.samples_s))


def medians(values: Sequence[float], length: int) -> list[float]:
    """Medians of every `length` values, which are one repetition."""
    return [percentile(values[i : i + length], 50) for i in range(0, len(values), length)]


@cache
def rank_sums(m: int, n: int) -> tuple[int, ...]:
    """How many orders of m and n values have u pairs in which the first is larger, u = 0 ... mn (Mann and Whitney 1947)."""
    if not m or not n:
        return (1,)
    first, second = rank_sums(m - 1, n), rank_sums(m, n - 1)
    found = [0] * (m * n + 1)
    for u, ways in enumerate(first):
        found[u + n] += ways
    for u, ways in enumerate(second):
        found[u] += ways
    return tuple(found)


def outside(m: int, n: int) -> int | None:
    """How many of the smallest, and of the largest, of the mn sorted ratios lie outside the interval; None: there is none."""
    ways = rank_sums(m, n)
    total, seen, left_out = sum(ways), 0, None
    for u, count in enumerate(ways):
        seen += count
        if 2 * seen > (1 - CONFIDENCE) * total:
            return left_out
        left_out = u
    return left_out


def ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The ratio of b to a, and the bounds of its interval."""
    a, b = a[:: -(-len(a) // MAX_REPETITIONS)], b[:: -(-len(b) // MAX_REPETITIONS)]
    pairs = sorted(y / x for x in a for y in b)
    middle = percentile(pairs, 50)
    left_out = outside(len(a), len(b))
    if left_out is None:
        return middle, None, None
    return middle, pairs[left_out], pairs[-1 - left_out]


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[ComparisonLine]:
    """The tests that both documents have.  InputError: none."""
    first, second = ([measurement(r) for r in each["measurements"] if r.get("kind") in COMPARED] for each in (a, b))
    constant = [name for name in OPTIONAL if all(len({_value(r, name) for r in each}) == 1 for each in (first, second))]
    names = [name for name in IDENTITY if name not in constant]
    others = {tuple(_value(r, name) for name in names): r for r in second}
    found = []
    for record in first:
        other = others.get(tuple(_value(record, name) for name in names))
        if other is not None:
            found.append(_line(record, other))
    if not found:
        raise InputError("the two profiles have no test in common; run both with the same -p, -n, -d, --mode and --kv")
    return found


def _value(record: MeasuredTest, name: str) -> Any:
    return getattr(record, name) if name in MeasuredTest.__dataclass_fields__ else record.facts.get(name)


def _line(a: MeasuredTest, b: MeasuredTest) -> ComparisonLine:
    one, two = blocks(a), blocks(b)
    middle, low, high = ratio(one, two)
    best, verdict, busy = min(b.seconds) / min(a.seconds), "not separable", _busy(a) or _busy(b)
    if (
        not busy
        and low is not None
        and high is not None
        and (low > 1 or high < 1)
        and math.log(best) / math.log(middle) >= BEST_SHARE
    ):
        verdict = "slower" if low > 1 else "faster"
    changed = {n: [_value(a, n), _value(b, n)] for n in (*SETTINGS, "identity", "processor") if _value(a, n) != _value(b, n)}
    settings = {name: _value(a, name) for name in SETTINGS}
    return ComparisonLine(
        a.test, settings, changed, percentile(one, 50), percentile(two, 50), middle, low, high, best, busy, verdict
    )


def _busy(record: MeasuredTest) -> bool:
    if isinstance(record.core_wait, (int, float)):
        threads = record.facts.get("threads" if record.kind == "tg" and record.batch == 1 else "threads_prefill")
        return record.core_wait > MAX_WAIT * (threads if isinstance(threads, int) else 1)
    load, cores = record.facts.get("load"), record.facts.get("cores")
    return isinstance(load, (int, float)) and isinstance(cores, int) and load > BUSY * cores


class ProfilePair:
    """Two profiles, A and B, by their files.  InputError: they have no test in common."""

    def __init__(self, paths: tuple[Path, Path], documents: tuple[dict[str, Any], dict[str, Any]]) -> None:
        self.paths, self.documents = paths, documents
        self.lines = compare(*documents)

    def cells(self) -> list[list[str]]:
        """The cells of a table, its heading first."""
        rows = [
            ["test", "t", "mode", "cache", "A ms", "B ms", "B / A", f"{100 * CONFIDENCE:.0f} % interval", "best", "verdict"]
        ]
        for line in self.lines:
            interval = "" if line.low is None else f"{line.low:.3f} – {line.high:.3f}"
            threads = "→".join(map(str, line.changed.get("threads", [line.settings["threads"]])))
            settings = (threads, str(line.settings["mode"]), str(line.settings["kv"]))
            times = (f"{1000 * line.a_s:,.3f}", f"{1000 * line.b_s:,.3f}", f"{line.ratio:.3f}", interval, f"{line.best:.3f}")
            rows.append([line.test, *settings, *times, line.verdict])
        return rows

    def notes(self) -> list[str]:
        """Which files these are, and what else differs between the two."""
        named = zip("AB", self.paths, self.documents, strict=True)
        notes = [f"{name}: {path}{' (partial)' if made.get('partial') else ''}" for name, path, made in named]
        changed = {name: values for line in self.lines for name, values in line.changed.items()}
        notes += [f"differs: {name}, {old} in A and {new} in B" for name, (old, new) in changed.items()]
        if any(line.busy for line in self.lines):
            notes.append("the machine was busy with something else during a test: it is not separable; run both again")
        if any(line.low is None for line in self.lines):
            notes.append("without an interval nothing is separable: 5 repetitions of each are enough (-r 5)")
        return notes

    def markdown(self) -> str:
        return aligned(self.cells()) + "\n\n" + "\n".join(self.notes())

    def json(self, failed: bool) -> str:
        """`failed`: a test is slower by what was asked for."""
        tests = [asdict(line) for line in self.lines]
        return json.dumps({"confidence": CONFIDENCE, "failed": failed, "tests": tests}, indent=1)
