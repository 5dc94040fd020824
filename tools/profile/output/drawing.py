"""Charts of a profile's page as inline SVG: no script, no font, no network.

Colours are classes, which the page gives values for light, dark and print.  Every chart has a description for those who do not
see it, and each mark says its numbers where the pointer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 14, 46
LABEL, LINE = 50, 15
"""Width and height that a label of a mark takes."""
SERIES = 7
"""Classes s0 ... s6 of colours; more series repeat them."""
Scale = Callable[[float], float]


@dataclass(frozen=True)
class ChartMark:
    """A point of a chart: `about` is shown where the pointer rests on it, `label` beside it."""

    x: float
    y: float
    about: str
    label: str = ""


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, drawn from `start` to `end`; logarithmic or not."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values on the axis, at most a dozen."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [factor * 10.0**p for p in powers for factor in (1, 2, 5) if self.low <= factor * 10.0**p <= self.high]
            return every if len(every) <= 9 else [v for v in every if f"{v:e}"[0] == "1"][:: max(1, len(powers) // 9)]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10.0 ** math.floor(math.log10(span))
        step *= next(f for f in (1, 0.5, 0.2, 0.1) if span / (step * f) >= 3)
        return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def axis(values: Sequence[float], start: float, end: float, logarithmic: bool = False) -> Axis:
    """An axis for all values, with a little room; one that is not logarithmic begins at 0."""
    if logarithmic:
        return Axis(min(values) / 1.3, max(values) * 1.3, start, end, True)
    return Axis(0.0, max(values) * 1.05 or 1.0, start, end)


def figure(name: str, description: str, body: Sequence[str], height: float = HEIGHT) -> str:
    """An SVG that scales with the page."""
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(f"{name}: {description}", quote=True)}">'
    return "\n".join([head, *body, "</svg>"])


def frame(x: Axis, y: Axis, x_label: str, y_label: str) -> Iterator[str]:
    """Grid, ticks and names of both axes."""
    bottom = HEIGHT - BOTTOM
    for value in x.ticks():
        yield f'<path class="grid" d="M{x(value):.1f} {TOP}V{bottom}"/>'
        yield text(x(value), bottom + 16, number(value), "middle")
    for value in y.ticks():
        yield f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>'
        yield text(LEFT - 6, y(value) + 4, number(value), "end")
    yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>'
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, "middle")
    middle = (TOP + bottom) / 2
    yield text(14, middle, y_label, "middle", f' transform="rotate(-90 14 {middle:g})"')


def lines(name: str, series: Mapping[str, Sequence[ChartMark]], x_label: str, y_label: str) -> str:
    """A line for each series, both axes from 0."""
    marks = [mark for each in series.values() for mark in each]
    x, y = axis([m.x for m in marks], LEFT, WIDTH - RIGHT), axis([m.y for m in marks], HEIGHT - BOTTOM, TOP)
    body = list(frame(x, y, x_label, y_label))
    for i, each in enumerate(series.values()):
        path = " ".join(f"{x(m.x):.1f},{y(m.y):.1f}" for m in each)
        body.append(f'<polyline class="line s{i % SERIES}" points="{path}"/>')
        if len(each) <= 60:
            body += [dot(x(m.x), y(m.y), i, m.about) for m in each]
    return figure(name, f"{len(series)} series", body) + legend(list(series))


def distribution(name: str, series: Mapping[str, Sequence[float]], x_label: str) -> str:
    """What share of the values is at most so large; the largest hundredth is left out where there are many."""
    cut = {
        key: sorted(values)[: max(1, math.ceil(len(values) * (0.99 if len(values) >= 100 else 1)))]
        for key, values in series.items()
    }
    everything = [value for values in cut.values() for value in values]
    x, y = axis(everything, LEFT, WIDTH - RIGHT, True), Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP)
    body = list(frame(x, y, x_label, "% of them"))
    for i, (key, values) in enumerate(cut.items()):
        # A few hundred corners are as many as can be seen.
        step, count = max(1, len(values) // 200), len(series[key])
        corners = [(values[j], 100 * (j + 1) / count) for j in range(0, len(values), step)]
        path = f"M{x(corners[0][0]):.1f} {y(0):.1f}" + "".join(f"V{y(share):.1f}H{x(v):.1f}" for v, share in corners)
        body.append(f'<path class="line s{i % SERIES}" d="{path}"><title>{escape(key)}: {count} values</title></path>')
    return figure(name, ", ".join(series), body) + legend(list(series))


def roofline(name: str, marks: Mapping[str, Sequence[ChartMark]], bytes_per_s: float, operations_per_s: float) -> str:
    """Operations per second over operations per byte, both logarithmic; the roof is the lesser of the two limits.

    Marks are in operations per byte and operations per second.
    """
    points = [mark for each in marks.values() for mark in each]
    ridge = operations_per_s / bytes_per_s
    # Below the lowest mark there is room for labels.
    lowest = min(m.y for m in points) / 3
    xs, ys = [*(m.x for m in points), ridge], [lowest, *(m.y for m in points), operations_per_s]
    x, y = axis(xs, LEFT, WIDTH - RIGHT, True), axis(ys, HEIGHT - BOTTOM, TOP, True)
    # The slope begins where it enters the picture.
    left = max(x.low, y.low / bytes_per_s)
    roof = [(left, left * bytes_per_s), (ridge, operations_per_s), (x.high, operations_per_s)]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)
    body = [*frame(x, y, "integer operations per byte", "operations per second"), f'<polyline class="roof" points="{path}"/>']
    heights = apart([(x(mark.x), y(mark.y)) for mark in points])
    for (i, mark), height in zip(((i, mark) for i, each in enumerate(marks.values()) for mark in each), heights, strict=True):
        body.append(dot(x(mark.x), y(mark.y), i, mark.about))
        right = x(mark.x) > 0.7 * WIDTH
        body.append(text(x(mark.x) + (-8 if right else 8), height + 4, mark.label, "end" if right else "start"))
    return figure(
        name, f"roof at {number(operations_per_s)} operations and {number(bytes_per_s)} bytes per second", body
    ) + legend(list(marks))


def apart(points: Sequence[tuple[float, float]]) -> list[float]:
    """Heights for the labels of points: their own, but of neighbours a line apart, and above the lower axis."""
    heights = [y for _, y in points]
    order = sorted(range(len(points)), key=lambda i: points[i][1])
    for place, i in enumerate(order):
        above = [heights[j] for j in order[:place] if abs(points[i][0] - points[j][0]) < LABEL]
        heights[i] = max([heights[i], *(height + LINE for height in above)])
    lowest = HEIGHT - BOTTOM - LINE / 2
    for place, i in reversed(list(enumerate(order))):
        below = [heights[j] for j in order[place + 1 :] if abs(points[i][0] - points[j][0]) < LABEL]
        heights[i] = min([heights[i], lowest, *(height - LINE for height in below)])
    return heights


def stacked(name: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A bar for each row, made of its parts."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    most = max(sum(row.values()) for row in rows.values()) or 1.0
    step, body = 20, []
    for i, (label, row) in enumerate(rows.items()):
        at, top = float(LEFT), TOP + i * step
        body.append(text(LEFT - 6, top + 12, label, "end"))
        for part, value in row.items():
            width = value / most * (WIDTH - RIGHT - LEFT - 60)
            about = escape(f"{label}, {part}: {number(value)} {unit}")
            color = parts.index(part) % SERIES
            body.append(
                f'<rect class="s{color}" x="{at:.1f}" y="{top}" width="{width:.1f}" height="15"><title>{about}</title></rect>'
            )
            at += width
        body.append(text(at + 5, top + 12, number(sum(row.values())), "start"))
    return figure(name, f"{len(rows)} bars in {unit}", body, TOP + len(rows) * step + 8) + legend(parts)


def whiskers(name: str, rows: Mapping[str, tuple[float, float | None, float | None, str]], x_label: str) -> str:
    """For each row its name and a note, under them a value with the bounds of its interval where there is one; a line at 1."""
    values = [value for row in rows.values() for value in row[:3] if value is not None]
    step, top = 40, TOP + 4
    bottom = top + step * len(rows) + 4
    x = Axis(min(*values, 1.0) / 1.02, max(*values, 1.0) * 1.02, RIGHT, WIDTH - RIGHT)
    body = [f'<path class="axis" d="M{RIGHT} {bottom}H{WIDTH - RIGHT}"/>']
    body.append(text(WIDTH / 2, bottom + 36, x_label, "middle"))
    body += [text(x(value), bottom + 18, number(value), "middle") for value in x.ticks()]
    body.append(f'<path class="roof" d="M{x(1.0):.1f} {TOP}V{bottom}"/>')
    for i, (label, (value, low, high, note)) in enumerate(rows.items()):
        y = top + i * step
        body.append(text(RIGHT, y + 8, f"{note}: {label}", "start"))
        if low is not None and high is not None:
            body.append(f'<path class="line s0" d="M{x(low):.1f} {y + 24}H{x(high):.1f}"/>')
        body.append(dot(x(value), y + 24, 0, f"{label}: {note}"))
    return figure(name, "; ".join(f"{label} {row[3]}" for label, row in rows.items()), body, bottom + 46)


def legend(names: Sequence[str]) -> str:
    """The names of the series with their colours."""
    items = "".join(f'<li><span class="key s{i % SERIES}"></span>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def dot(x: float, y: float, series: int, about: str) -> str:
    return f'<circle class="s{series % SERIES}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(about)}</title></circle>'


def text(x: float, y: float, content: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def number(value: float) -> str:
    """Three digits, with k, M, G or T for thousands."""
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:.3g}" if size < 999.5 else f"{value:,.0f}"
