"""Divergence over bytes, drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from edgeq.tools.quality.chart import ASCENT, BOTTOM, CHARACTER, HEIGHT, LEFT, MAX_TICKS, WIDTH, QualityPoint, _Axis, chart

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [
    QualityPoint("edgeq gptq", "", 2.0, 0.06),
    QualityPoint("edgeq gptq", "", 3.2, 0.003, "about <it>"),
    QualityPoint("llama.cpp", "Q2_K <1>", 2.2, 0.04),
]


def test_every_point_is_in_its_place() -> None:
    text = chart({"code": [*POINTS, QualityPoint("lossless", "", 9.0, 0.0)], "a <model> & more": POINTS[:1]}, "nats per token")
    root = ElementTree.fromstring(text)
    panels = root.findall(f"{SVG}g")
    width, height = float(root.attrib["width"]), float(root.attrib["height"]) / 2
    spots = [[(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in panel.iter(f"{SVG}circle")] for panel in panels]
    assert [len(found) for found in spots] == [3, 1]
    assert all(0 < x < width and 0 < y < height for found in spots for x, y in found)
    # Places go right with the bytes, and up with the divergence.
    (first, last, between) = spots[0]
    assert first[0] < between[0] < last[0] and first[1] < between[1] < last[1]
    labels = [element.text or "" for element in root.iter(f"{SVG}text")]
    wanted = ("Q2_K <1>", "llama.cpp", "edgeq gptq", "MB read per token", "nats per token", "code", "a <model> & more", "0.01")
    assert all(word in labels for word in wanted) and "about <it>" in [e.text for e in root.iter(f"{SVG}title")]
    assert "lossless" not in text and not re.search(r"nan|inf", text)


@pytest.mark.parametrize(("low", "high"), [(1.9, 3.3), (0.9, 1.1), (630, 800), (1e-9, 4.0), (2.0, 2.0), (0.0004, 0.11)])
def test_ticks_are_round_and_few(low: float, high: float) -> None:
    ticks = _Axis(low, high, 0, 1).ticks()
    assert 2 <= len(ticks) <= MAX_TICKS + 1 and ticks == sorted(ticks)
    assert all(len(f"{tick:g}") <= 6 for tick in ticks)


def test_a_panel_without_points_says_so() -> None:
    assert "nothing to show" in chart({"code": []}, "nats")


def test_labels_keep_off_each_other_and_inside() -> None:
    """Marks so close that labels on one side of all of them would lie on one another."""
    series = {"a": [(59.9, 0.224), (61.7, 0.207), (90, 0.02)], "b": [(59.9, 0.75), (62.2, 0.9), (89, 0.021)]}
    points = [QualityPoint(name, f"IQ3_{i}XS", *spot) for name, spots in series.items() for i, spot in enumerate(spots)]
    root = ElementTree.fromstring(chart({"code": points}, "nats"))
    labels = [e for e in root.iter(f"{SVG}text") if e.attrib.get("font-size") == "11"]
    boxes = [(float(e.attrib["x"]), float(e.attrib["y"]), CHARACTER * len(e.text or "")) for e in labels]
    assert len(boxes) == 6
    for x, y, width in boxes:
        assert x >= LEFT and x + width <= WIDTH and y <= HEIGHT - BOTTOM
        others = [box for box in boxes if box != (x, y, width)]
        assert all(x + width <= a or a + other <= x or abs(y - b) >= ASCENT for a, b, other in others)
