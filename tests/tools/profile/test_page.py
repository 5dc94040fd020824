"""The page and its charts: whole, self-contained, and what the numbers say."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgeq.tools.profile.comparison import ProfilePair
from edgeq.tools.profile.output import drawing
from edgeq.tools.profile.output.drawing import Axis, ChartMark, axis, number
from edgeq.tools.profile.output.page import comparison_page, page
from edgeq.tools.profile.output.page_style import STYLE
from edgeq.tools.profile.prediction.what_if import SpeedPrediction
from edgeq.tools.profile.sustained import Pass, Sustained
from tests.tools.profile.conftest import invented

Document = dict[str, Any]
VOID = {"meta", "link"}


class Reader(HTMLParser):
    """Tags that are not closed in order, and addresses that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [value or "" for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture
def full(calm: Document) -> Document:
    """Two depths, memory over time, a sensor."""
    calm["measurements"].append(invented("tg", "tg4 @ d64", 1.2, depth=64, joules_per_token=0.5))
    calm["memory"].append({"seconds": 2.0, "rss": 3_000_000, "cache": 20})
    calm["sensors"] = [{"sensor": "RAPL", "state": "unreadable: no permission"}]
    return calm


def test_the_page_is_whole_and_asks_for_nothing(full: Document) -> None:
    text = page(full)
    reader = read(text)
    assert not reader.open and not reader.wrong
    assert reader.asked == ["data:,"] and "script" not in reader.tags and "url(" not in text and "@import" not in text
    assert reader.tags.count("svg") == 6 and not re.search(
        r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    )
    for words in (
        "Findings",
        "Time per token after other tokens",
        "roofline of decode, 1 thread",
        "time by layer, µs per token",
        "no permission",
        "0.5",
    ):
        assert words in text


def test_every_chart_is_a_picture_with_words(full: Document) -> None:
    for found in re.findall(r"<svg.*?</svg>", page(full), re.DOTALL):
        root = ElementTree.fromstring(found)
        assert root.attrib["role"] == "img" and root.attrib["aria-label"]
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for element in root.iter():
            for name, limit in (("cx", width), ("x", width), ("cy", height), ("y", height)):
                assert -1 <= float(element.attrib.get(name, 0)) <= limit, element.attrib


def test_names_of_a_stranger_are_text(full: Document) -> None:
    for record in full["measurements"]:
        record["model"] = record["processor"] = "</title><script>alert(1)</script>"
    for line in full["operations"][0]["lines"]:
        line["name"] = '"><script>x</script>'
    text = page(full)
    assert "<script" not in text and "&lt;script&gt;" in text and not read(text).wrong


def test_the_page_has_what_was_compared_predicted_and_sustained(full: Document) -> None:
    slower = copy.deepcopy(full)
    for record in slower["measurements"]:
        record.update(samples_s=[2 * x for x in record["samples_s"]], step_s=[2 * x for x in record["step_s"]])
    compared = ProfilePair((Path("<old>.json"), Path("new.json")), (full, slower))
    slower["what_if"] = [asdict(SpeedPrediction("bits=3", "tg4", 1, "a8", "f16", 4.0, 5.0, 4.5, 5.5))]
    slower["sustained"] = Sustained(
        "tg4", 60.0, [Pass(30.0, 0.2, 4, None, None, None), Pass(60.0, 0.3, 4, None, 70.0, 5.0)]
    ).fields()
    for text in (page(slower, compared), comparison_page(compared)):
        reader = read(text)
        assert not reader.open and not reader.wrong and "Compared with" in text or "Two profiles" in text
        assert "2.000, slower: " in text and "&lt;old&gt;.json" in text
    text = page(slower, compared)
    assert read(text).tags.count("svg") == 8 and "bits=3" in text and "tg4 after 60 s: 300.000 ms, 70 °C" in text


def test_whiskers_lie_where_their_values_are() -> None:
    drawn = drawing.whiskers("w", {"a": (1.2, 1.1, 1.3, "slower"), "b": (0.9, None, None, "not separable")}, "x")
    root = ElementTree.fromstring(drawn)
    dots = [float(e.attrib["cx"]) for e in root.iter() if e.tag.endswith("circle")]
    low, high = map(float, re.findall(r'line s0" d="M([\d.]+) \d+H([\d.]+)"', drawn)[0])
    one = float(re.findall(r'roof" d="M([\d.]+) ', drawn)[0])
    assert dots[1] < one < low < dots[0] < high and (dots[0] - low) == pytest.approx(high - dots[0], abs=0.2)


def test_a_page_of_what_an_interrupt_left(calm: Document) -> None:
    calm.update(partial=True, operations=[], limits=[], memory=[])
    assert "PARTIAL" in page(calm)
    assert "nothing was measured" in page({**calm, "measurements": []})


def contrast(a: str, b: str) -> float:
    """Web Content Accessibility Guidelines 2.1, contrast ratio of two colours."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_from_their_background() -> None:
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)]
    assert len(themes) == 3
    for theme in themes:
        assert all(contrast(theme[name], theme["paper"]) >= 7 for name in ("ink", "soft"))
        assert all(contrast(theme[f"c{i}"], theme["paper"]) >= 3 for i in range(drawing.SERIES))


def test_an_axis_puts_values_in_their_order() -> None:
    for logarithmic in (False, True):
        found = axis([2.0, 300.0], 50, 600, logarithmic)
        assert 50 <= found(2.0) < found(20.0) < found(300.0) <= 600
    assert Axis(1, 100, 0, 200, True)(10) == pytest.approx(100)


@pytest.mark.parametrize(("low", "high"), [(0.002, 0.9), (1.0, 1.5), (3.0, 4e12), (0.9, 1.1)])
@pytest.mark.parametrize("logarithmic", [True, False])
def test_ticks_are_on_the_axis_and_few(low: float, high: float, logarithmic: bool) -> None:
    ticks = Axis(low, high, 0, 1, logarithmic).ticks()
    assert len(ticks) <= 12 and ticks == sorted(ticks)
    slack = 0 if logarithmic else 1e-6 * (high - low)
    assert all(low * 0.999 - slack <= tick <= high * 1.001 + slack for tick in ticks)
    assert ticks or logarithmic


@pytest.mark.parametrize("height", [drawing.TOP, 100.0, drawing.HEIGHT - drawing.BOTTOM])
def test_labels_of_neighbours_do_not_overlap_and_stay_above_the_axis(height: float) -> None:
    points = [(100.0, height), (110.0, height + 1), (300.0, height), (120.0, height), (130.0, height + 2)]
    heights = drawing.apart(points)
    near = sorted(found for (x, _), found in zip(points, heights, strict=True) if x < 200)
    assert all(b - a >= drawing.LINE for a, b in pairwise(near))
    assert max(heights) <= drawing.HEIGHT - drawing.BOTTOM and heights[2] == pytest.approx(height, abs=drawing.LINE / 2)


def test_points_lie_under_the_roof_where_they_do_not_exceed_it() -> None:
    marks = {"decode": [ChartMark(2.0, 10.0, "half"), ChartMark(100.0, 400.0, "at the peak")]}
    root = ElementTree.fromstring(drawing.roofline("r", marks, 10.0, 400.0).partition("<ul")[0])
    (roof,) = (e for e in root.iter("polyline") if e.attrib["class"] == "roof")
    corners = [tuple(map(float, pair.split(","))) for pair in roof.attrib["points"].split()]
    half, top = ((float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle"))
    assert top[1] == pytest.approx(corners[1][1], abs=0.11) and corners[1][1] == corners[2][1]
    # Half of what memory gives is log 2 below the slope.
    share = (half[0] - corners[0][0]) / (corners[1][0] - corners[0][0])
    slope = corners[0][1] + share * (corners[1][1] - corners[0][1])
    assert half[1] > slope + 5


def test_a_distribution_rises_to_all_of_them() -> None:
    text = drawing.distribution("d", {"a": [3.0, 1.0, 2.0, 4.0]}, "ms")
    (path,) = re.findall(r'd="(M[^"]*H[^"]*V[^"]*H[^"]*)"', text)
    ups = [float(value) for value in re.findall(r"V([\d.]+)", path)]
    assert ups == sorted(ups, reverse=True) and len(ups) == 4 and ups[-1] == pytest.approx(drawing.TOP, abs=0.1)
    many = drawing.distribution("d", {"a": [1.0] * 99 + [math.e**9]}, "ms")
    assert "1k" not in many and "100 values" in many


def test_bars_are_as_long_as_their_values() -> None:
    text = drawing.stacked("s", {"0": {"a": 1.0, "b": 3.0}, "1": {"a": 2.0, "b": 0.0}}, "µs")
    widths = [float(width) for width in re.findall(r'<rect class="s\d" [^>]*width="([\d.]+)"', text)]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2) and widths[2] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[3] == 0 and "0, b: 3 µs" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.01234, "0.0123"), (999.6, "1,000"), (1234.0, "1,234"), (2.5e9, "2.5G"), (12_345.0, "12.3k")],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown
