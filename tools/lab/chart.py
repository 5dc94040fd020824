"""A chart of the loss over the bytes that a token reads, as SVG: a panel per text, a line per series, loss on a log scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 50, 36, 46
LEGEND = 18
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by the colour-blind (Okabe and Ito 2008)."""


@dataclass(frozen=True)
class Point:
    """`label` is written beside the point; megabytes and nats."""

    series: str
    label: str
    megabytes: float
    kl: float


def chart(panels: Mapping[str, Sequence[Point]]) -> str:
    """An SVG document; points without a positive loss have no place on a log scale and are left out."""
    shown = {title: [point for point in points if point.kl > 0] for title, points in panels.items()}
    names = list(dict.fromkeys(point.series for points in shown.values() for point in points))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    height = HEIGHT + LEGEND * (len(names) + 1)
    body = [part for i, (title, points) in enumerate(shown.items()) for part in _panel(title, points, colors, i * height)]
    size = f'width="{WIDTH}" height="{height * len(shown)}" viewBox="0 0 {WIDTH} {height * len(shown)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _panel(title: str, points: Sequence[Point], colors: Mapping[str, str], top: int) -> list[str]:
    parts = [_text(WIDTH / 2, top + 20, f"KL divergence from the source: {title}", "middle", 'font-size="14"')]
    if not points:
        return [*parts, _text(WIDTH / 2, top + HEIGHT / 2, "nothing to show", "middle")]
    sizes, losses = [p.megabytes for p in points], [p.kl for p in points]
    margin = 0.06 * ((max(sizes) - min(sizes)) or max(sizes))
    first, last = min(sizes) - margin, max(sizes) + margin
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)) + 1e-9)

    def x(megabytes: float) -> float:
        return LEFT + (megabytes - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(kl: float) -> float:
        return top + HEIGHT - BOTTOM - (math.log10(kl) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    for exponent in range(low, high + 1):
        for digit in (1, 2, 5) if exponent < high else (1,):
            value = digit * 10.0**exponent
            parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "#bbb" if digit == 1 else "#eee"))
            parts.append(_text(LEFT - 6, y(value) + 4, f"{value:g}", "end"))
    for value in ticks(first, last):
        parts.append(_line(x(value), top + TOP, x(value), top + HEIGHT - BOTTOM, "#eee"))
        parts.append(_text(x(value), top + HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, top + HEIGHT - 10, "MB read per token, weights and head", "middle"))
    middle = top + (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(16, middle, "nats per token", "middle", f'transform="rotate(-90 16 {middle:.1f})"'))
    for place, (series, color) in enumerate(colors.items()):
        own = sorted((p for p in points if p.series == series), key=lambda p: p.megabytes)
        path = " ".join(f"{x(p.megabytes):.1f},{y(p.kl):.1f}" for p in own)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for p in own:
            parts.append(f'<circle cx="{x(p.megabytes):.1f}" cy="{y(p.kl):.1f}" r="3.5" fill="{color}"/>')
            parts.append(_text(x(p.megabytes) + 6, y(p.kl) - 6, p.label, "start", f'fill="{color}" font-size="10"'))
        row = top + HEIGHT + LEGEND * place + 8
        parts.append(f'<circle cx="{LEFT}" cy="{row - 4}" r="3.5" fill="{color}"/>')
        parts.append(_text(LEFT + 10, row, series, "start"))
    return parts


def ticks(first: float, last: float) -> list[float]:
    """Round numbers between two bounds, 4 to 10 of them."""
    step = 10.0 ** math.floor(math.log10(last - first))
    step *= next(factor for factor in (1, 0.5, 0.2, 0.1) if (last - first) / (step * factor) >= 4)
    count = range(math.ceil(first / step), math.floor(last / step) + 1)
    return [round(i * step, 10) for i in count]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
