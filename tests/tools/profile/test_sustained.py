"""Minutes of decoding: which of them are compared, and when a machine became slower for good."""

from __future__ import annotations

from typing import Any

import pytest

from edgeq.tools.profile.findings import findings
from edgeq.tools.profile.output.tables import sustained
from edgeq.tools.profile.sustained import Pass, Sustained

Document = dict[str, Any]


def passes(*token_s: float, each: float = 10.0) -> Sustained:
    found = [Pass(each * (i + 1), seconds, 8, 2000.0 - i, 50.0 + i, None) for i, seconds in enumerate(token_s)]
    return Sustained("tg8", each * len(token_s), found)


def test_the_first_minute_and_the_last() -> None:
    found = passes(*[0.01] * 6, *[0.5] * 12, *[0.02] * 6).fields()
    assert found["window_s"] == 60 and (found["first_s"], found["last_s"]) == (0.01, 0.02)
    assert found["drop"] == pytest.approx(0.5) and found["slow_after"] == 70
    assert (found["celsius_first"], found["celsius_last"], found["mhz_last"]) == (50, 73, 1977)
    short = passes(0.01, 0.01, 0.02, 0.02).fields()
    assert short["window_s"] == 20 and (short["first_s"], short["last_s"]) == (0.01, 0.02)
    (only,) = (passes(0.01).fields(),)
    assert only["first_s"] == only["last_s"] and only["slow_after"] is None and passes().fields()["passes"] == []


@pytest.mark.parametrize(
    ("token_s", "after"),
    [
        ([0.01] * 12, None),
        ([*[0.01] * 6, 0.02, *[0.01] * 5], None),  # a neighbour, once
        ([*[0.01] * 6, *[0.02] * 3, *[0.01] * 12], None),  # a neighbour for a while
        ([*[0.01] * 6, *[0.011] * 6], 70),
        ([*[0.01] * 6, *[0.0104] * 6], None),
        ([*[0.01] * 11, 0.02], None),  # a neighbour at the end
    ],
)
def test_slow_is_what_stays_slow(token_s: list[float], after: float | None) -> None:
    assert passes(*token_s).slow_after == after


def test_what_is_said_of_it(calm: Document) -> None:
    steady, warm = passes(*[0.01] * 12).fields(), passes(*[0.01] * 6, *[0.012] * 12).fields()
    assert findings({**calm, "sustained": steady}) == [] == findings({**calm, "sustained": None})
    (finding,) = findings({**calm, "sustained": warm})
    assert finding.name == "throttled" and "slower after 70 s without a pause: at the end by 17 % at 67 °C" in finding.text
    assert sustained(warm) == (
        "tg8 for 180 s: first 60 s: 10.000 ms per token, 2,000 MHz, 50 °C; last 60 s: 12.000 ms per token, 1,983 MHz, 67 °C; "
        "speed -16.7 %; slower from 70 s on"
    )
