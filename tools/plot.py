"""A chart of divergence over bytes per token, as a small SVG that is legible on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 28, 56
INK, LINE, MARK = "#808080", "#3b82c4", "#d9822b"
"""Grey, blue and orange of middling lightness: each has contrast with white and with black."""


def svg(found: Sequence[dict[str, Any]], title: str) -> str:
    """The rows of edgeq.tools.frontier.rows as a chart: both axes logarithmic, the chosen allocation marked."""
    x = [row["bytes_per_token"] / 1e6 for row in found]
    y = [max(row["kl_predicted"], 1e-9) for row in found]
    across, up = _Axis(min(x), max(x), LEFT, WIDTH - RIGHT), _Axis(min(y), max(y), HEIGHT - BOTTOM, TOP)
    return "\n".join(_lines(found, x, y, across, up, title)) + "\n"


class _Axis:
    """A logarithmic scale from `low` ... `high` to the places `start` ... `end`, with a little room at both ends."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        room = max((high / low) ** 0.04, 1.02)
        self._low, self._high, self._start, self._end = math.log(low / room), math.log(high * room), start, end

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Powers of ten and multiples of each that lie on the axis; only the powers where these are many."""
        powers = range(math.floor(self._low / math.log(10)), math.ceil(self._high / math.log(10)) + 1)
        every = [factor * 10.0**power for power in powers for factor in (1, 1.5, 2, 3, 4, 5, 7)]
        inside = [value for value in every if self._low <= math.log(value) <= self._high]
        if len(inside) <= 8:
            return inside
        # Ten to a power has the logarithm of a whole number.
        return [value for value in inside if abs(math.log10(value) - round(math.log10(value))) < 1e-9]


def _lines(
    found: Sequence[dict[str, Any]], x: Sequence[float], y: Sequence[float], across: _Axis, up: _Axis, title: str
) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}" role="img">'
    )
    yield f"<title>{_escaped(title)}</title>"
    yield f'<text x="{LEFT}" y="18" font-size="13">{_escaped(title)}</text>'
    bottom = HEIGHT - BOTTOM
    for value in across.ticks():
        place = f"{across(value):.1f}"
        yield f'<line x1="{place}" y1="{TOP}" x2="{place}" y2="{bottom}" stroke="{INK}" stroke-opacity="0.25"/>'
        yield f'<text x="{place}" y="{bottom + 18}" text-anchor="middle">{value:,g}</text>'
    for value in up.ticks():
        place = f"{up(value):.1f}"
        yield f'<line x1="{LEFT}" y1="{place}" x2="{WIDTH - RIGHT}" y2="{place}" stroke="{INK}" stroke-opacity="0.25"/>'
        yield f'<text x="{LEFT - 8}" y="{place}" text-anchor="end" dominant-baseline="middle">{value:g}</text>'
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="{INK}"/>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 14}" text-anchor="middle">MB read per token</text>'
    middle = (TOP + bottom) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 18 {middle:g})"'
    yield f'<text x="18" y="{middle:g}" {turned}>predicted KL divergence, nats</text>'
    points = [(across(a), up(b)) for a, b in zip(x, y, strict=True)]
    yield f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" fill="none" stroke="{LINE}" stroke-width="2"/>'
    for row, (a, b) in zip(found, points, strict=True):
        about = f"{row['bits_per_weight']:.2f} bits per weight, KL {row['kl_predicted']:.2g}"
        size, color = (6, MARK) if row["chosen"] else (4, LINE)
        yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{size}" fill="{color}"><title>{about}</title></circle>'
        if row["chosen"]:
            label = f"chosen: {row['bits_per_weight']:.2f} bits per weight"
            # On the right half the label would leave the picture.
            side = f'x="{a - 10:.1f}" text-anchor="end"' if a > WIDTH / 2 else f'x="{a + 10:.1f}"'
            yield f'<text {side} y="{b - 10 if a <= WIDTH / 2 else b + 18:.1f}" fill="{MARK}">{label}</text>'
    yield "</svg>"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
