"""A chart of divergence over the bytes that a token reads, as a small SVG that is legible on a light and on a dark page.

A panel per text, a line per series; both axes are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM, LEGEND = 76, 50, 36, 56, 18
INK = "#808080"
COLORS = ("#3b82c4", "#d9722b", "#1f9d77", "#c4709f", "#b58a00", "#4aa3c7", "#8a6fc9")
"""Middling in lightness: each has contrast with white and with black, and the colour-blind can tell neighbours apart."""
FACTORS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,))
"""Ticks of a decade, the first of these that are not too many for the axis."""
MAX_TICKS = 10
CHARACTER, ASCENT = 6.3, 9
"""Width and height of a character of a label, about."""


@dataclass(frozen=True)
class QualityPoint:
    """A mark at `megabytes` and `kl` nats; `label` is written beside it, `about` shown where the pointer rests on it."""

    series: str
    label: str
    megabytes: float
    kl: float
    about: str = ""


class _Axis:
    """A logarithmic scale from `low` ... `high` to the places `start` ... `end`, with a little room at both ends."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        room = max((high / low) ** 0.05, 1.02)
        self._low, self._high, self._start, self._end = math.log10(low / room), math.log10(high * room), start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Powers of ten and round multiples of them that lie on the axis; where these are fewer than three, finer ones."""
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        found: list[float] = []
        for factors in FACTORS:
            found = [v for p in powers for f in factors if self._low <= math.log10(v := f * 10.0**p) <= self._high]
            if len(found) <= MAX_TICKS:
                break
        return found if len(found) > 2 else self._fine()

    def _fine(self) -> list[float]:
        first, last = 10**self._low, 10**self._high
        step = 10.0 ** math.floor(math.log10(last - first))
        step *= next(factor for factor in (1, 0.5, 0.2, 0.1) if (last - first) / (step * factor) >= 4)
        return [round(i * step, 12) for i in range(math.ceil(first / step), math.floor(last / step) + 1)]


def chart(panels: Mapping[str, Sequence[QualityPoint]], y_label: str) -> str:
    """An SVG document, a panel per title; points without a positive divergence have no place on it and are left out."""
    shown = {title: [point for point in points if point.kl > 0] for title, points in panels.items()}
    names = list(dict.fromkeys(point.series for points in shown.values() for point in points))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    height = HEIGHT + LEGEND * len(names)
    size = f'width="{WIDTH}" height="{height * len(shown)}" viewBox="0 0 {WIDTH} {height * len(shown)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="{INK}" role="img">'
    body = [f"<title>{escape(', '.join(shown))}</title>"]
    for i, (title, points) in enumerate(shown.items()):
        body += [f'<g transform="translate(0 {i * height})">', *_panel(title, points, colors, y_label), "</g>"]
    return "\n".join([head, *body, "</svg>", ""])


def _panel(title: str, points: Sequence[QualityPoint], colors: Mapping[str, str], y_label: str) -> Iterator[str]:
    yield _text(LEFT, 20, title, "start", 'font-size="14"')
    if not points:
        yield _text(WIDTH / 2, HEIGHT / 2, "nothing to show", "middle")
        return
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    sizes, losses = [p.megabytes for p in points], [p.kl for p in points]
    x, y = _Axis(min(sizes), max(sizes), LEFT, right), _Axis(min(losses), max(losses), bottom, TOP)
    for value in x.ticks():
        yield _line(x(value), TOP, x(value), bottom)
        yield _text(x(value), bottom + 18, f"{value:,g}", "middle")
    for value in y.ticks():
        yield _line(LEFT, y(value), right, y(value))
        yield _text(LEFT - 8, y(value) + 4, f"{value:g}", "end")
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>'
    yield _text((LEFT + right) / 2, HEIGHT - 16, "MB read per token", "middle")
    middle = (TOP + bottom) / 2
    yield _text(18, middle, y_label, "middle", f'transform="rotate(-90 18 {middle:g})"')
    curves = {name: sorted((p for p in points if p.series == name), key=lambda p: p.megabytes) for name in colors}
    marks = {name: [(x(p.megabytes), y(p.kl)) for p in own] for name, own in curves.items()}
    taken = [place for places in marks.values() for place in _along(places)]
    for i, (series, color) in enumerate(colors.items()):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in marks[series])
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        for p, (a, b) in zip(curves[series], marks[series], strict=True):
            about = f"<title>{escape(p.about)}</title>" if p.about else ""
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{color}">{about}</circle>'
            if p.label:
                label = min(_beside(a, b, p.label), key=lambda label: label.covers(taken))
                taken += label.corners()
                yield _text(label.x, label.y, p.label, "start", f'fill="{color}" font-size="11"')
        row = HEIGHT + LEGEND * i
        yield f'<rect x="{LEFT}" y="{row - 8}" width="10" height="8" fill="{color}"/>'
        yield _text(LEFT + 16, row, series, "start")


@dataclass(frozen=True)
class _Label:
    """Where a label may stand: its lower left corner and its width."""

    x: float
    y: float
    width: float

    def covers(self, taken: Sequence[tuple[float, float]]) -> int:
        """How many of these places it covers, or would if it left the picture."""
        if self.x < LEFT or self.x + self.width > WIDTH or self.y > HEIGHT - BOTTOM:
            return len(taken)
        return sum(self.x - 2 < a < self.x + self.width + 2 and self.y - ASCENT - 1 < b < self.y + 3 for a, b in taken)

    def corners(self) -> list[tuple[float, float]]:
        """Places all over it."""
        return [(self.x + self.width * i / 8, self.y - ASCENT * j / 2) for i in range(9) for j in range(3)]


def _beside(x: float, y: float, text: str) -> Iterator[_Label]:
    """Where the label of a mark may stand, the best first."""
    width = CHARACTER * len(text)
    for low in (-7, 15):
        for left in (x + 7, x - 7 - width, x - width / 2):
            yield _Label(left, y + low, width)
    for left in (x + 9, x - 9 - width):
        yield _Label(left, y + 4, width)


def _along(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Marks, and places on the lines between them."""
    yield from places
    for (a, b), (c, d) in pairwise(places):
        steps = max(1, round(math.hypot(c - a, d - b) / 4))
        yield from ((a + (c - a) * i / steps, b + (d - b) * i / steps) for i in range(1, steps))


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-opacity="0.25"/>'
