"""Sentences that follow from the numbers of a profile, each with the figures that it rests on.

A sentence is said when its condition holds and only then; where what it needs was not measured, it is not said.  One that
compares two tests is said when all of the interval of their ratio (comparison.py) agrees, which takes five repetitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from edgeq.tools.measure.measurement import measurement
from edgeq.tools.profile.comparison import blocks, medians, ratio

NEAR_BANDWIDTH = 0.85
"""Share of the read bandwidth above which nothing but fewer bytes helps decode."""
FAR_FROM_BANDWIDTH = 0.5
MIN_THREAD_GAIN = 1.05
"""More threads that gain less than this are not worth their cores."""
LARGE_BUBBLE = 0.1
LARGE_WAIT = 0.1
LARGE_HEAD = 0.15
HEAD_BITS = 4
DEAR_CLOCKS = 0.02
"""Share that clocks around operations may add before it is said."""
DEEP = 1.1
"""Ratio of the time per token at the largest depth to that at the smallest from which the cache is worth a word."""
WARM_DROP = 0.95
"""The last third of the repetitions is this much slower than the first third, or the processor's clock fell so far."""
UNSTEADY = 2.0
"""Ratio of the 99th percentile of a token to its median."""


CODE = " of code"
"""In the name of a test that continues code."""


@dataclass(frozen=True)
class Finding:
    """name    which rule;  text: the sentence;  figures: the numbers that it rests on, by name"""

    name: str
    text: str
    figures: dict[str, float]


def findings(document: dict[str, Any]) -> list[Finding]:
    """Findings of a document (document.py).  Where a rule holds of several tests, the first is named, others are counted."""
    records = document["measurements"]
    found = [
        *_bandwidth(records),
        *_threads(records),
        *_depth(records),
        *_unsteady(records),
        *_slowing(records),
        *_head(document),
        *_overhead(records),
        *_drafts(records),
        *_throttled(document.get("sustained")),
    ]
    for operations in document["operations"]:
        found += [*_bubble(operations), *_waiting(operations)]
    counts = Counter(finding.name for finding in found)
    firsts = {finding.name: finding for finding in reversed(found)}
    return [_counted(firsts[name], count - 1) for name, count in counts.items()]


def _counted(finding: Finding, others: int) -> Finding:
    if not others:
        return finding
    return replace(finding, text=f"{finding.text}; so it is in {others} other test{'s' * (others > 1)}")


def named(record: dict[str, Any]) -> str:
    """The settings of a record in words."""
    threads = record["threads"]
    return f"{record['test']}, {threads} thread{'s' * (threads != 1)}, {record['mode']}, cache {record['kv']}"


def _tg(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (record for record in records if record["kind"] == "tg")


def _bandwidth(records: list[dict[str, Any]]) -> Iterator[Finding]:
    for record in _tg(records):
        share = record["bandwidth_share"]
        if share is None or record["batch"] > 1:
            continue
        figures = {
            "bandwidth_share": share,
            "bytes_per_s": record["bytes_per_s"],
            "read_bandwidth": record["read_bandwidth"],
        }
        rate = f"{record['bytes_per_s'] / 1e9:.1f} of {record['read_bandwidth'] / 1e9:.1f} GB/s"
        if share > 1:
            text = f"decode reads faster than memory ({rate}): the model fits a cache of the processor"
            yield Finding("cached", f"{named(record)}: {text}", figures)
        elif share >= NEAR_BANDWIDTH:
            text = f"decode is at {100 * share:.0f} % of the read bandwidth ({rate}): only fewer bits or drafts help"
            yield Finding("bandwidth", f"{named(record)}: {text}", figures)
        elif share < FAR_FROM_BANDWIDTH:
            text = f"decode reads at {100 * share:.0f} % of the read bandwidth ({rate}): something else bounds it"
            yield Finding("below bandwidth", f"{named(record)}: {text}", figures)


def _threads(records: list[dict[str, Any]]) -> Iterator[Finding]:
    """The fewest threads that decode as fast as the fastest, where more were tried."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in _tg(records):
        groups.setdefault((record["test"], record["mode"], record["kv"]), []).append(record)
    for group in groups.values():
        most = max(record["threads"] for record in group)
        # The most threads are always enough.
        enough = min((r for r in group if all(_no_slower(r, other) for other in group)), key=lambda r: r["threads"])
        if enough["threads"] < most:
            largest = next(r for r in group if r["threads"] == most)
            text = f"{enough['threads']} of {most} threads are enough: {enough['tokens_per_s']:,.1f} tok/s"
            text += f", with {most} it is {largest['tokens_per_s']:,.1f}"
            figures = {
                "threads": enough["threads"],
                "tokens_per_s": enough["tokens_per_s"],
                "most_threads": most,
                "tokens_per_s_of_most": largest["tokens_per_s"],
            }
            yield Finding("threads", f"{enough['test']}, {enough['mode']}: {text}", figures)


def _no_slower(record: dict[str, Any], other: dict[str, Any]) -> bool:
    """Than with more threads, but for a few percent."""
    if other["threads"] <= record["threads"]:
        return True
    _, _, high = ratio(_seconds_of_repetitions(other), _seconds_of_repetitions(record))
    return high is not None and high <= MIN_THREAD_GAIN


def _seconds_of_repetitions(record: dict[str, Any]) -> list[float]:
    """Seconds of every repetition."""
    return blocks(measurement(record))


def _depth(records: list[dict[str, Any]]) -> Iterator[Finding]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in _tg(records):
        key = record["test"].partition(" @ ")[0], record["threads"], record["mode"], record["kv"]
        groups.setdefault(key, []).append(record)
    for group in groups.values():
        low, high = min(group, key=lambda r: r["depth"]), max(group, key=lambda r: r["depth"])
        least = ratio(_seconds_of_repetitions(low), _seconds_of_repetitions(high))[1]
        if high["depth"] > low["depth"] and high["p50"] >= DEEP * low["p50"] and least is not None and least > 1:
            text = f"a token takes {high['p50'] / low['p50']:.2f} times as long as after {low['depth']} tokens "
            text += f"({1000 * high['p50']:.2f} against {1000 * low['p50']:.2f} ms)"
            figures = {"p50": high["p50"], "p50_at_least_depth": low["p50"], "depth": high["depth"]}
            yield Finding("depth", f"{named(high)}: {text}", figures)


def _unsteady(records: list[dict[str, Any]]) -> Iterator[Finding]:
    for record in _tg(records):
        if record["p99"] is not None and record["p99"] >= UNSTEADY * record["p50"]:
            times = record["p99"] / record["p50"]
            text = f"1 token in 100 takes {1000 * record['p99']:.2f} ms or more, {times:.1f} times the median"
            figures = {"p99": record["p99"], "p50": record["p50"]}
            yield Finding("unsteady", f"{named(record)}: {text}", figures)


def _slowing(records: list[dict[str, Any]]) -> Iterator[Finding]:
    """Heat: every repetition of the last third is slower than every one of the first, of at least nine."""
    for record in records:
        samples = record["samples_s"]
        third = len(samples) // 3
        if record["kind"] not in ("pp", "tg") or third < 3:
            continue
        first, last = samples[:third], samples[-third:]
        if max(first) < WARM_DROP * min(last):
            drop = 1 - (sum(first) / len(first)) / (sum(last) / len(last))
            heat = f" at {record['celsius']:.0f} °C" if record["celsius"] is not None else ""
            text = f"the last repetitions are {100 * drop:.0f} % slower than the first{heat}: the machine slows down"
            yield Finding("slowing", f"{named(record)}: {text}", {"drop": drop, "repetitions": len(samples)})


def _head(document: dict[str, Any]) -> Iterator[Finding]:
    sizes = document["weights"]
    share = sizes["head"] / sizes["bytes_per_token"]
    bits = sizes["head_bits"]
    if share >= LARGE_HEAD and bits > HEAD_BITS + 1:
        less = sizes["bytes_per_token"] - sizes["head"] * (1 - HEAD_BITS / bits)
        gain = sizes["bytes_per_token"] / less
        text = f"the head is {100 * share:.0f} % of the bytes of a token, with {bits:.1f} bits per weight: "
        text += f"convert --head {HEAD_BITS} would read {gain:.2f} times fewer"
        yield Finding("head", text, {"head_share": share, "head_bits": bits, "gain": gain})


def _overhead(records: list[dict[str, Any]]) -> Iterator[Finding]:
    dear = [(record, least) for record in records if (least := _least_overhead(record)) is not None and least > DEAR_CLOCKS]
    if dear:
        record, least = max(dear, key=lambda found: found[1])
        text = f"the clocks around operations add {100 * least:.1f} % or more: take the speed from the plain runs"
        others = f"; in {len(dear)} tests they add more than {100 * DEAR_CLOCKS:.0f} %" if len(dear) > 1 else ""
        yield Finding("overhead", f"{named(record)}: {text}{others}", {"least_overhead": least, "tests": len(dear)})


def _least_overhead(record: dict[str, Any]) -> float | None:
    """The lower bound of what the clocks add, as a share; None: there is none."""
    instrumented = record["instrumented_s"]
    if not instrumented:
        return None
    plain = measurement(record)
    least = ratio(blocks(plain), medians(instrumented, len(plain.seconds) // len(plain.samples_s)))[1]
    return None if least is None else least - 1


def _drafts(records: list[dict[str, Any]]) -> Iterator[Finding]:
    """What drafts change on the same text with the same settings, where it is more than a few percent."""
    texts = [record for record in _tg(records) if CODE in record["test"]]
    for record in texts:
        plain = [
            other
            for other in texts
            if other["draft"] == "off" and all(other[key] == record[key] for key in ("tokens", "threads", "mode", "kv"))
        ]
        if record["draft"] == "off" or not plain:
            continue
        # A token that was drafted takes no time of its own: repetitions are compared, and not tokens.
        gain, low, high = ratio(record["samples_s"], plain[0]["samples_s"])
        if (
            low is not None
            and high is not None
            and (low > 1 and gain >= MIN_THREAD_GAIN or high < 1 and gain * MIN_THREAD_GAIN <= 1)
        ):
            how = f"{gain:.2f} times as fast" if gain > 1 else f"slower, {gain:.2f} times as fast"
            text = f"drafts make this text {how}, {low:.2f} to {high:.2f} "
            text += f"({record['tokens_per_s']:,.1f} against {plain[0]['tokens_per_s']:,.1f} tok/s)"
            figures = {"gain": gain, "gain_low": low, "gain_high": high, "tokens_per_run": record["tokens_per_run"]}
            yield Finding("drafts", f"{named(record)}: {text}", figures)


def _throttled(sustained: dict[str, Any] | None) -> Iterator[Finding]:
    """A machine that became slower while it decoded without a pause."""
    if sustained and sustained.get("slow_after") is not None and sustained["drop"] >= 1 - WARM_DROP:
        heat = f" at {sustained['celsius_last']:.0f} °C" if sustained["celsius_last"] is not None else ""
        text = f"slower after {sustained['slow_after']:.0f} s without a pause"
        text += f": at the end by {100 * sustained['drop']:.0f} %{heat}"
        figures = {name: sustained[name] for name in ("slow_after", "drop", "first_s", "last_s")}
        yield Finding("throttled", f"{sustained['test']}: {text}", figures)


def _bubble(operations: dict[str, Any]) -> Iterator[Finding]:
    share = operations["bubble"] / operations["wall"]
    if share >= LARGE_BUBBLE:
        where = "between calls of the target" if operations["between"] >= operations["within"] else "within calls of the target"
        text = f"{100 * share:.0f} % of the time is in no operation ({1e6 * operations['bubble']:,.0f} of "
        text += f"{1e6 * operations['wall']:,.0f} µs per token), most of it {where}"
        figures = {"bubble": operations["bubble"], "wall": operations["wall"]}
        yield Finding("bubble", f"{named(operations)}: {text}", figures)


def _waiting(operations: dict[str, Any]) -> Iterator[Finding]:
    share = operations["waited"] / operations["wall"]
    if share >= LARGE_WAIT:
        text = f"{100 * share:.0f} % of the time is waiting for other threads: cores are slow or busy with something else"
        figures = {"waited": operations["waited"], "wall": operations["wall"]}
        yield Finding("waiting", f"{named(operations)}: {text}", figures)
