"""A profile as one HTML page that needs nothing else: legible in light and dark, on a phone, by keyboard and on paper."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from edgeq.tools.profile.comparison import ProfilePair
from edgeq.tools.profile.findings import CODE, named
from edgeq.tools.profile.output import drawing
from edgeq.tools.profile.output.drawing import ChartMark
from edgeq.tools.profile.output.page_style import STYLE
from edgeq.tools.profile.output.tables import (
    COLUMNS,
    MAY_BE_EMPTY,
    closing,
    heading,
    of_bits,
    operation_cells,
    sensors,
    summed,
    sustained,
    what_if,
)

Document = dict[str, Any]


def page(document: Document, compared: ProfilePair | None = None) -> str:
    """The whole page, from the document that `-o json` prints; `compared`: with an older one."""
    records = document["measurements"]
    name = f"{records[0]['model']}: profile" if records else "profile"
    body = [f"<h1>{escape(name)}</h1>", *_sections(document, compared)] if records else ["<p>nothing was measured</p>"]
    return _page(name, body)


def comparison_page(compared: ProfilePair) -> str:
    """A page of the comparison alone."""
    return _page("two profiles", ["<h1>Two profiles</h1>", section("Tests", _comparison(compared))])


def _page(name: str, body: list[str]) -> str:
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            # Without an icon of its own a browser asks the server for one.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>\n</body>\n</html>",
        ]
    )


def _sections(document: Document, compared: ProfilePair | None) -> Iterator[str]:
    yield "".join(f"<p>{escape(line)}</p>" for line in heading(document).splitlines())
    yield section("Findings", _findings(document))
    yield section("Tests", _tests(document))
    if compared is not None:
        yield section("Compared with a saved run", _comparison(compared))
    if document["what_if"]:
        known = "predicted from the operations; error: against what was measured with that setting"
        caption = "; ".join([known, *of_bits(document["what_if"])])
        yield section("What if", table(what_if(document["what_if"]), caption))
    yield section("Time to the first token", _distribution(document, ("ttft",), "ms to the first token"))
    yield section("Time per token", _distribution(document, ("tg",), "ms per token"))
    if depths := _depths(document):
        yield section("Time per token after other tokens", depths)
    for operations in document["operations"]:
        yield section(f"Operations: {named(operations)}", _operations(operations, document))
    if (found := document["sustained"]) and found["passes"]:
        yield section("Without a pause", _sustained(found))
    yield section("Memory", _memory(document))
    yield section("Energy", _energy(document))


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def table(cells: list[list[str]], caption: str) -> str:
    """Scrolls sideways in itself, also by keyboard; numbers are aligned right."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in cells[0])
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells[1:])
    label = escape(caption, quote=True)
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{label}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _findings(document: Document) -> str:
    said = "".join(f"<li>{escape(finding['text'])}</li>" for finding in document["findings"])
    return f"<ul>{said}</ul>" if said else "<p>Nothing stands out.</p>"


def _tests(document: Document) -> str:
    records = document["measurements"]
    shown = [(name, show) for name, show in COLUMNS if name not in MAY_BE_EMPTY or any(map(show, records))]
    cells = [[name for name, _ in shown], *([show(record) for _, show in shown] for record in records)]
    return table(cells, "t: threads; of: how many values the percentiles are of; clocks: what timing every operation added")


def _distribution(document: Document, kinds: tuple[str, ...], label: str) -> str:
    series = {
        named(record): [1000 * value for value in record["step_s"] or record["samples_s"]]
        for record in document["measurements"]
        if record["kind"] in kinds
    }
    return drawing.distribution(label, series, label) if series else "<p>No such test.</p>"


def _depths(document: Document) -> str:
    """A line over the depths for each combination that has several."""
    series: dict[str, list[ChartMark]] = {}
    for record in document["measurements"]:
        if record["kind"] == "tg" and CODE not in record["test"]:
            key = f"{named(record).partition(', ')[2]}, batch {record['batch']}"
            milliseconds = 1000 * record["p50"]
            about = f"{key}, after {record['depth']} tokens: {milliseconds:.3f} ms"
            series.setdefault(key, []).append(ChartMark(record["depth"], milliseconds, about))
    several = {key: sorted(marks, key=lambda m: m.x) for key, marks in series.items() if len({m.x for m in marks}) > 1}
    return drawing.lines("time per token over depth", several, "tokens in the cache", "ms per token") if several else ""


def _operations(operations: Document, document: Document) -> str:
    parts = [f"<p>{escape(closing(operations))}</p>"]
    parts.append("<h3>time by layer, µs per token</h3>")
    parts.append(drawing.stacked("time by layer", _layers(operations), "µs per token"))
    for phase in dict.fromkeys(line["phase"] for line in operations["lines"]):
        limits = _limits(document, operations, phase)
        marks = _marks(operations, phase)
        if limits is not None and marks:
            title = f"roofline of {phase}, {limits['threads']} thread{'s' * (limits['threads'] != 1)}"
            parts.append(f"<h3>{escape(title)}</h3>")
            parts.append(drawing.roofline(title, {phase: marks}, limits["bytes_per_s"], limits["operations_per_s"]))
    # The bars are for a terminal.
    cells = [[cell for i, cell in enumerate(row) if i != 3] for row in operation_cells(operations)]
    caption = f"operations of {named(operations)}; waiting is part of the time"
    parts.append(f"<details><summary>All operations</summary>{table(cells, caption)}</details>")
    return "\n".join(parts)


def _layers(operations: Document) -> dict[str, dict[str, float]]:
    """Microseconds by layer and operation; what is outside of layers and the bubble come last.

    The largest six operations have a colour of their own, the rest is one part.
    """
    sums: dict[str, float] = {}
    for line in operations["lines"]:
        sums[line["name"]] = sums.get(line["name"], 0.0) + line["seconds"]
    large = sorted(sums, key=lambda name: -sums[name])[: drawing.SERIES - 1]
    rows: dict[str, dict[str, float]] = {}
    for line in sorted(operations["lines"], key=lambda line: (line["phase"] != "tower", line["layer"] < 0, line["layer"])):
        tower = "tower " if line["phase"] == "tower" else ""
        row = rows.setdefault(
            f"{tower}{line['layer'] if line['layer'] >= 0 else 'outside'}", dict.fromkeys([*large, "other"], 0.0)
        )
        part = line["name"] if line["name"] in large else "other"
        row[part] += 1e6 * line["seconds"]
    rows["bubble"] = {**dict.fromkeys(large, 0.0), "other": 1e6 * operations["bubble"]}
    return rows


def _limits(document: Document, operations: Document, phase: str) -> Document | None:
    keys = ("threads", "mode", "kv")
    found = (x for x in document["limits"] if x["phase"] == phase and all(x[key] == operations[key] for key in keys[1:]))
    own = [x for x in found if phase != "decode" or x["threads"] == operations["threads"]]
    return own[0] if own else None


def _marks(operations: Document, phase: str) -> list[ChartMark]:
    """Products of integers that read from memory, as points of a roofline."""
    found = []
    for line in summed(operations["lines"]):
        if line["phase"] == phase and line["macs"] and line["bytes"] and line["seconds"] > 0:
            rate = 2 * line["macs"] / line["seconds"]
            about = f"{line['name']}: {rate / 1e9:,.1f} GOPS, {line['bytes'] / line['seconds'] / 1e9:,.1f} GB/s"
            if line["roofline"] is not None:
                about += f", {100 * line['roofline']:.0f} % of the roofline"
            found.append(ChartMark(2 * line["macs"] / line["bytes"], rate, about, line["name"]))
    return found


def _comparison(compared: ProfilePair) -> str:
    """A whisker for each test: the ratio of the times with its interval."""
    rows = {
        named({"test": line.test, **line.settings}): (line.ratio, line.low, line.high, f"{line.ratio:.3f}, {line.verdict}")
        for line in compared.lines
    }
    notes = "".join(f"<p>{escape(note)}</p>" for note in compared.notes())
    shown = drawing.whiskers("time of B over time of A", rows, "B / A: above 1 is slower")
    return shown + table(compared.cells(), "medians of the repetitions; best: ratio of the fastest") + notes


def _sustained(record: Document) -> str:
    series = {"one run of the test": [_pass(each, record) for each in record["passes"]]}
    chart = drawing.lines("time per token without a pause", series, "seconds", "ms per token")
    return f"<p>{escape(sustained(record))}</p>{chart}"


def _pass(decoded: Document, record: Document) -> ChartMark:
    milliseconds = 1000 * decoded["token_s"]
    heat = "" if decoded["celsius"] is None else f", {decoded['celsius']:.0f} °C"
    return ChartMark(
        decoded["ended"], milliseconds, f"{record['test']} after {decoded['ended']:.0f} s: {milliseconds:.3f} ms{heat}"
    )


def _memory(document: Document) -> str:
    points = document["memory"]
    if len(points) < 2:
        return "<p>Not recorded.</p>"
    series = {
        "resident, mapped weights included": [
            ChartMark(p["seconds"], p["rss"] / 1e6, f"{p['rss'] / 1e6:,.1f} MB") for p in points
        ],
        "keys and values that are kept": [
            ChartMark(p["seconds"], p["cache"] / 1e6, f"{p['cache'] / 1e6:,.1f} MB") for p in points
        ],
    }
    return drawing.lines("memory over time", series, "seconds", "MB")


def _energy(document: Document) -> str:
    cells = [
        [named(record), f"{record['joules_per_token']:.4g}"]
        for record in document["measurements"]
        if record["joules_per_token"] is not None
    ]
    shown = table([["test", "J per token above idle"], *cells], "energy") if cells else ""
    return f"<p>{escape(sensors(document))}</p>{shown}"
