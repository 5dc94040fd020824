"""Each sentence appears when it is true, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from edgeq.tools.profile.findings import findings
from tests.tools.profile.conftest import invented

Document = dict[str, Any]


def found(document: Document) -> dict[str, dict[str, float]]:
    """The figures of each rule that speaks."""
    return {finding.name: finding.figures for finding in findings(document)}


def tg(document: Document) -> Document:
    (record,) = (record for record in document["measurements"] if record["kind"] == "tg")
    return record  # type: ignore[no-any-return]


def test_nothing_is_said_where_nothing_stands_out(calm: Document) -> None:
    assert found(calm) == {}


@pytest.mark.parametrize(
    ("share", "name"),
    [
        (None, None),
        (0.49, "below bandwidth"),
        (0.5, None),
        (0.84, None),
        (0.85, "bandwidth"),
        (1.0, "bandwidth"),
        (1.01, "cached"),
    ],
)
def test_how_far_decode_is_from_the_bandwidth(calm: Document, share: float | None, name: str | None) -> None:
    tg(calm).update(bandwidth_share=share, bytes_per_s=1e10 * (share or 0))
    assert list(found(calm)) == ([name] if name else [])
    if name:
        (finding,) = findings(calm)
        assert finding.figures["bandwidth_share"] == share and f"{10 * (share or 0):.1f} of 10.0 GB/s" in finding.text
    # Several texts at once are not bounded by it.
    tg(calm).update(batch=2)
    assert found(calm) == {}


SPREAD = (0.9, 0.98, 1.0, 1.02, 1.1)
"""Repetitions of which a tenth more or less cannot be told."""


def at_rate(record: Document, rate: float, spread: tuple[float, ...] = (1.0,) * 5) -> Document:
    """The same test so many times as fast, with repetitions that differ from the median by the factors of `spread`."""
    samples = [1 / rate * each for each in spread]
    steps = [sample / 4 for sample in samples for _ in range(4)]
    return {**record, "samples_s": samples, "step_s": steps, "tokens_per_s": 4 * rate, "p50": 0.25 / rate}


@pytest.mark.parametrize(("rate", "said"), [(1.06, True), (1.04, False), (0.96, False), (0.9, True)])
def test_what_drafts_gain(calm: Document, rate: float, said: bool) -> None:
    plain = {**tg(calm), "test": "tg4 of code @ d256", "depth": 256, "draft": "off"}
    drafted = {**at_rate(plain, rate), "test": "tg4 of code, draft auto @ d256", "draft": "auto", "tokens_per_run": 2.5}
    calm["measurements"] += [drafted]
    assert found(calm) == {}
    calm["measurements"] += [plain]
    gains = {"gain": pytest.approx(rate), "gain_low": pytest.approx(rate), "gain_high": pytest.approx(rate)}
    assert found(calm) == ({"drafts": {**gains, "tokens_per_run": 2.5}} if said else {})
    # Of one repetition, or of such that differ more from each other, nothing follows.
    for few in ({"samples_s": drafted["samples_s"][:1]}, {"samples_s": at_rate(plain, rate, SPREAD)["samples_s"]}):
        calm["measurements"][-2] = {**drafted, **few}
        assert found(calm) == {}


@pytest.mark.parametrize(
    ("two", "four", "enough"), [(1.04, 1.04, 1), (1.5, 1.5, 2), (1.5, 1.4, 2), (1.5, 2.0, None), (0.5, 0.4, 1)]
)
def test_fewer_threads_are_enough(calm: Document, two: float, four: float, enough: int | None) -> None:
    others = [{**at_rate(tg(calm), rate), "threads": n} for n, rate in ((2, two), (4, four))]
    calm["measurements"] += others
    told = found(calm)
    assert ("threads" in told) == (enough is not None)
    if enough:
        assert told["threads"]["threads"] == enough and told["threads"]["most_threads"] == 4
    # Another mode is another matter.
    others[0]["mode"] = others[1]["mode"] = "a16"
    assert found(calm).get("threads", {"threads": 2})["threads"] == 2


def test_threads_whose_times_spread_are_not_said_to_be_enough(calm: Document) -> None:
    calm["measurements"].append({**at_rate(tg(calm), 1.0, SPREAD), "threads": 2})
    assert found(calm) == {}


@pytest.mark.parametrize(("deep", "said"), [(1.09, False), (1.11, True)])
def test_a_token_takes_longer_after_many(calm: Document, deep: float, said: bool) -> None:
    longer = invented("tg", "tg4 @ d512", deep, depth=512, bandwidth_share=None)
    calm["measurements"].append({**longer, "step_s": [deep / 4 * SPREAD[i // 4] / SPREAD[3] for i in range(20)]})
    assert found(calm) == {}
    calm["measurements"][-1] = longer
    assert ("depth" in found(calm)) == said
    if said:
        figures = found(calm)["depth"]
        assert figures == {"p50": pytest.approx(deep / 4), "p50_at_least_depth": 0.25, "depth": 512}


@pytest.mark.parametrize(("p99", "said"), [(None, False), (0.49, False), (0.51, True)])
def test_some_tokens_take_much_longer(calm: Document, p99: float | None, said: bool) -> None:
    tg(calm).update(p99=p99)
    assert ("unsteady" in found(calm)) == said


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([1.0] * 6 + [1.1] * 3, True),
        ([1.0] * 6 + [1.04] * 3, False),
        ([1.0] * 6 + [1.1, 1.0, 1.1], False),
        ([1.0, 1.0, 1.2], False),  # too few to tell
        ([1.1] * 3 + [1.0] * 6, False),
    ],
)
def test_a_machine_that_slows_down(calm: Document, samples: list[float], said: bool) -> None:
    tg(calm).update(samples_s=samples, step_s=samples, celsius=81.0)
    assert ("slowing" in found(calm)) == said
    if said:
        (finding,) = findings(calm)
        assert finding.figures["drop"] == pytest.approx(1 - 1 / 1.1) and "81 °C" in finding.text


@pytest.mark.parametrize(("head", "bits", "said"), [(149, 8.2, False), (150, 8.2, True), (150, 4.3, False), (400, 16.0, True)])
def test_a_head_that_is_a_large_part_of_a_token(calm: Document, head: int, bits: float, said: bool) -> None:
    calm["weights"].update(head=head, head_bits=bits)
    assert ("head" in found(calm)) == said
    if said:
        assert found(calm)["head"]["gain"] == pytest.approx(1000 / (1000 - head + head * 4 / bits))


@pytest.mark.parametrize(("overhead", "said"), [(None, False), (0.019, False), (0.021, True)])
def test_clocks_that_cost_much(calm: Document, overhead: float | None, said: bool) -> None:
    plain = tg(calm)["step_s"]
    tg(calm).update(instrumented_s=[] if overhead is None else [second * (1 + overhead) for second in plain])
    assert ("overhead" in found(calm)) == said
    # The same medians, of repetitions that differ from each other.
    spread = [second * (1 + (overhead or 0)) * SPREAD[i // 4] for i, second in enumerate(plain)]
    tg(calm).update(instrumented_s=spread)
    assert found(calm) == {}


@pytest.mark.parametrize(("bubble", "within", "said"), [(0.02, 0.01, False), (0.022, 0.02, True), (0.1, 0.01, True)])
def test_time_in_no_operation(calm: Document, bubble: float, within: float, said: bool) -> None:
    calm["operations"][0].update(bubble=bubble, within=within, between=bubble - within)
    assert ("bubble" in found(calm)) == said
    if said:
        (finding,) = findings(calm)
        assert ("within calls" in finding.text) == (within > bubble - within)


def test_tests_of_the_same_kind_are_counted_and_not_repeated(calm: Document) -> None:
    slow = {**tg(calm), "bandwidth_share": 0.2}
    calm["measurements"] += [{**slow, "test": "tg5"}, {**slow, "test": "tg6"}, {**slow, "test": "tg7"}]
    (finding,) = findings(calm)
    assert finding.text.startswith("tg5, 1 thread") and finding.text.endswith("; so it is in 2 other tests")


@pytest.mark.parametrize(("waited", "said"), [(0.02, False), (0.022, True)])
def test_time_spent_waiting(calm: Document, waited: float, said: bool) -> None:
    calm["operations"][0].update(waited=waited)
    assert ("waiting" in found(calm)) == said
