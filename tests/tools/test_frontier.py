"""What can be had of a model, as a table and as a chart."""

from __future__ import annotations

import io

import pytest

from edgeq.converters.probing.frontier import FrontierPoint
from edgeq.system.devices import DEVICES
from edgeq.tools.quality.frontier import SHOWN, beside, devices_shown, marks, rows, show, show_beside

POINTS = [FrontierPoint({}, 0.5 / 4**i, 2 + i, 10**6 * (i + 2), 10**6 * (i + 1)) for i in range(5)]
CHOSEN = FrontierPoint({}, 0.02, 4.4, 4_400_000, 3_400_000)


def test_the_table_has_every_point_the_chosen_one_marked_and_the_speed_of_every_device() -> None:
    found = rows(POINTS, CHOSEN, devices_shown(None))
    assert [row["bytes_per_token"] for row in found] == sorted(row["bytes_per_token"] for row in found)
    assert [row["chosen"] for row in found] == [False, False, False, True, False, False]
    board = DEVICES["raspberry-pi-5"]
    assert found[3]["tokens_per_second"]["raspberry-pi-5"] == pytest.approx(board.decode_bandwidth / 3.4e6)
    assert tuple(found[0]["tokens_per_second"]) == SHOWN and all(DEVICES[name].supported for name in SHOWN)
    stream = io.StringIO()
    show(found, stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 8 and "raspberry-pi-5" in lines[0] and lines[5].startswith(">") and "4.40" in lines[5]
    assert lines[1].count("tok/s") == len(SHOWN) and max(map(len, lines)) <= 100
    show(rows(POINTS, CHOSEN, devices_shown(board)), stream)
    assert "raspberry-pi-4" not in stream.getvalue().splitlines()[8]


def test_neighbours_are_shown_in_times_the_chosen_one() -> None:
    more = FrontierPoint({}, 0.005, 5.5, 5_500_000, 4_250_000)
    found = beside([CHOSEN, more], CHOSEN)
    assert [row["chosen"] for row in found] == [True, False]
    assert found[1]["relative_file_bytes"] == 1.25 and found[1]["relative_kl"] == 0.25
    assert found[1]["relative_bytes_per_token"] == 1.25 and found[1]["relative_speed"] == 0.8
    assert {found[0][key] for key in found[0] if key.startswith("relative")} == {1.0}
    stream = io.StringIO()
    show_beside(found, stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and lines[2].startswith(">") and lines[3].split()[-4:] == ["1.25", "1.25", "0.25", "0.80"]
    # Seconds that were measured say more than bytes; what loses nothing has no share.
    slow, fast = FrontierPoint({}, 0.0, 4, 100, 90, 0.5), FrontierPoint({}, 0.1, 2, 50, 45, 0.4)
    rows = beside([fast, slow], slow)
    assert rows[0]["relative_speed"] == 1.25 and rows[0]["relative_kl"] is None
    show_beside(rows, stream)


def test_the_chosen_allocation_is_a_series_of_its_own() -> None:
    found = rows([*POINTS, FrontierPoint({}, 0.0, 8, 100, 90)], CHOSEN, devices_shown(None))
    points = marks(found)
    assert [(p.megabytes, p.about.split()[0]) for p in points] == [
        (r["bytes_per_token"] / 1e6, f"{r['bits_per_weight']:.2f}") for r in found
    ]
    assert [p.label for p in points if p.series == "chosen"] == ["chosen: 4.40 bits per weight"]
    assert all(p.kl > 0 for p in points)
