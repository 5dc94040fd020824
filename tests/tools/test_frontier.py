"""What can be had of a model, as a table and as a chart."""

from __future__ import annotations

import io
import math
from xml.etree import ElementTree

import pytest

from edgeq.converters.allocation.frontier import Point
from edgeq.devices import DEVICES
from edgeq.tools.frontier import SHOWN, devices_shown, rows, show
from edgeq.tools.plot import HEIGHT, WIDTH, svg

POINTS = [Point({}, 0.5 / 4**i, 2 + i, 10**6 * (i + 2), 10**6 * (i + 1)) for i in range(5)]
CHOSEN = Point({}, 0.02, 4.4, 4_400_000, 3_400_000)


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
    assert len(lines) == 7 and "raspberry-pi-5 tok/s" in lines[0] and lines[4].startswith(">") and "4.40" in lines[4]
    show(rows(POINTS, CHOSEN, devices_shown(board)), stream)
    assert "raspberry-pi-4" not in stream.getvalue().splitlines()[7]


@pytest.mark.parametrize("points", [POINTS, POINTS[:1], [Point({}, 0.0, 8, 100, 90), Point({}, 1e-9, 8, 100, 90)]])
def test_the_chart_is_an_svg_with_labels_and_every_point_inside(points: list[Point]) -> None:
    found = rows(points, CHOSEN, devices_shown(None))
    text = svg(found, "a <model> & more")
    root = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    labels = [element.text or "" for element in root.iter(f"{name}text")]
    assert "a <model> & more" in labels and "MB read per token" in labels and "predicted KL divergence, nats" in labels
    assert any(label.startswith("chosen: 4.40 bits") for label in labels)
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{name}circle")]
    assert len(circles) == len(found) and all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in circles)
    # Places rise with the bytes and with the divergence; both axes have numbers.
    assert all(a[0] <= b[0] for a, b in zip(circles, circles[1:], strict=False))
    assert sum(label.replace(",", "").replace(".", "").replace("e-", "").isdigit() for label in labels) >= 2
    assert not math.isnan(sum(x + y for x, y in circles)) and len(text) < 10_000
