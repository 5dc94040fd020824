"""A profile as a table for a terminal, and as one for a spreadsheet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgeq.tools.commands.bench import aligned, table
from edgeq.tools.profile.findings import named

BAR = 12
Cell = Callable[[dict[str, Any]], str]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{1000 * value:,.2f}"


def _giga(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:,.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("t", lambda r: str(r["threads"])),
    ("mode", lambda r: str(r["mode"])),
    ("cache", lambda r: str(r["kv"])),
    ("test", lambda r: str(r["test"])),
    ("tok/s", lambda r: "" if r["tokens_per_s"] is None else f"{r['tokens_per_s']:,.1f}"),
    ("p50 ms", lambda r: _ms(r["p50"])),
    ("p95", lambda r: _ms(r["p95"])),
    ("p99", lambda r: _ms(r["p99"])),
    ("of", lambda r: str(r["values"])),
    ("GB/s", lambda r: _giga(r["bytes_per_s"])),
    ("of read", lambda r: _percent(r["bandwidth_share"])),
    ("J/token", lambda r: "" if r["joules_per_token"] is None else f"{r['joules_per_token']:.3g}"),
    ("clocks", lambda r: "" if r["overhead"] is None else f"{100 * r['overhead']:+.1f} %"),
    ("RSS", lambda r: "" if not r["rss"] else f"{r['rss'] / 1e6:,.0f} MB"),
)
MAY_BE_EMPTY = ("J/token", "clocks", "GB/s", "of read", "RSS")


def markdown(document: dict[str, Any]) -> str:
    """Heading, tests, operations of each test, findings, sensors."""
    records = document["measurements"]
    if not records:
        return "nothing was measured before the interrupt"
    shown = [(name, show) for name, show in COLUMNS if name not in MAY_BE_EMPTY or any(map(show, records))]
    parts = [heading(document), aligned([[name for name, _ in shown], *([show(r) for _, show in shown] for r in records)])]
    for operations in document["operations"]:
        parts += [closing(operations), aligned(operation_cells(operations)), layers(operations)]
    if document["sustained"] and document["sustained"]["passes"]:
        parts.append(sustained(document["sustained"]))
    if document["what_if"]:
        parts += [aligned(what_if(document["what_if"])), *of_bits(document["what_if"])]
    parts.append("\n".join(f"- {finding['text']}" for finding in document["findings"]) or "Nothing stands out.")
    parts.append(sensors(document))
    return "\n\n".join(parts)


def heading(document: dict[str, Any]) -> str:
    """What all records have in common, and what is missing."""
    r = document["measurements"][0]
    power = f", {r['power_mode']}" if r["power_mode"] else ""
    lines = [
        f"{r['model']}, {r['codec']}, head {r['head_codec']}, {r['file_bytes'] / 1e6:,.1f} MB, {r['identity'][:16]}; "
        f"{', '.join(x for x in (r['target'], r['isa']) if x)}; context {r['context']}",
        f"edgeq {r['version']}, {r['processor']}, {clock(r['mhz'])}{power}, {r['date']}",
    ]
    if document["partial"]:
        lines.append("PARTIAL: it was interrupted; repetitions are missing")
    if missing := sorted({name for record in document["measurements"] for name in record["incomplete"]}):
        lines.append(f"INCOMPLETE: without {', '.join(missing)}, which this system does not tell")
    if r.get("timed_apart") and document["operations"]:
        lines.append("operations were timed one by one; the tests themselves do several in a launch")
    return "\n".join(lines)


def sustained(record: dict[str, Any]) -> str:
    """One line: the first and the last minute of decoding without a pause."""
    ends = []
    for when in ("first", "last"):
        told = [f"{1000 * record[f'{when}_s']:.3f} ms per token"]
        if record[f"mhz_{when}"] is not None:
            told.append(clock(record[f"mhz_{when}"]))
        if record[f"celsius_{when}"] is not None:
            told.append(f"{record[f'celsius_{when}']:.0f} °C")
        ends.append(f"{when} {record['window_s']:.0f} s: {', '.join(told)}")
    slow = "" if record["slow_after"] is None else f"; slower from {record['slow_after']:.0f} s on"
    took = f"{record['test']} for {record['passes'][-1]['ended']:.0f} s"
    return f"{took}: {'; '.join(ends)}; speed {-100 * record['drop']:+.1f} %{slow}"


def what_if(lines: list[dict[str, Any]]) -> list[list[str]]:
    """The cells of a table, its heading first."""
    rows = [["what if", "test", "t", "mode", "cache", "tok/s now", "then", "range", "measured", "error"]]
    for line in lines:
        measured = "" if line["measured"] is None else f"{line['measured']:,.1f}"
        error = "" if line["error"] is None else f"{100 * line['error']:+.1f} %"
        settings = (line["test"], str(line["threads"]), line["mode"], line["kv"])
        rates = (f"{line['now']:,.1f}", f"{line['expected']:,.1f}", f"{line['low']:,.1f} – {line['high']:,.1f}")
        rows.append([line["change"], *settings, *rates, measured, error])
    return rows


def of_bits(lines: list[dict[str, Any]]) -> list[str]:
    """How other bits were predicted, a sentence, where they were."""
    changes = [line["change"] for line in lines if "bits=" in line["change"]]
    here = "bits: products of that width were timed here, with random weights; at the 1B shape decode differed by up to 8 % "
    here += "with one thread, 20 % with two"
    board = "bits on a board: by the bytes alone; what it takes to unpack that width is not counted"
    said = [(here, any("board=" not in change for change in changes)), (board, any("board=" in change for change in changes))]
    return [sentence for sentence, holds in said if holds]


def clock(mhz: float | None) -> str:
    return "clocks unknown" if mhz is None else f"{mhz:,.0f} MHz"


def closing(operations: dict[str, Any]) -> str:
    """One line: operations and bubble make the wall time."""
    wall = operations["wall"]
    return (
        f"{named(operations)}: {1000 * wall:.3f} ms per token = operations {1000 * operations['operations']:.3f} "
        f"+ bubble {1000 * operations['bubble']:.3f} ({100 * operations['bubble'] / wall:.1f} %), "
        f"{100 * operations['closure']:.1f} % of the wall time"
    )


SUMS = ("seconds", "waited", "bytes", "macs", "float_macs")


def summed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of all layers as one, by phase and name, in the order of execution."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        key = line["phase"], line["name"]
        found = sums.setdefault(key, {**line, **dict.fromkeys(SUMS, 0.0), "least": None})
        for name in SUMS:
            found[name] += line[name]
        if line["roofline"] is not None:
            found["least"] = (found["least"] or 0.0) + line["roofline"] * line["seconds"]
    for found in sums.values():
        seconds, least = found["seconds"], found.pop("least")
        found["roofline"] = least / seconds if least is not None and seconds > 0 else None
        found["bytes_per_s"] = found["bytes"] / seconds if found["bytes"] and seconds > 0 else None
        macs = found["macs"] + found["float_macs"]
        found["operations_per_s"] = 2 * macs / seconds if macs and seconds > 0 else None
    return list(sums.values())


def operation_cells(operations: dict[str, Any]) -> list[list[str]]:
    """The cells of a table, its heading first; waiting is part of the operations' times."""
    rows = [
        ["phase", "operation", "share", "", "µs/token", "waiting", "KB/token", "kMAC/token", "GB/s", "GOPS", "roofline", "by"]
    ]
    for line in summed(operations["lines"]):
        share = line["seconds"] / operations["wall"]
        rows.append(
            [
                line["phase"],
                line["name"],
                f"{100 * share:.1f} %",
                "█" * round(BAR * share),
                f"{1e6 * line['seconds']:,.1f}",
                f"{1e6 * line['waited']:,.1f}",
                f"{line['bytes'] / 1e3:,.1f}" if line["bytes"] else "",
                f"{(line['macs'] + line['float_macs']) / 1e3:,.0f}" if line["macs"] + line["float_macs"] else "",
                _giga(line["bytes_per_s"]),
                _giga(line["operations_per_s"]),
                _percent(line["roofline"]),
                line["bound"] or "",
            ]
        )
    for name, seconds in (("between calls", operations["between"]), ("within calls", operations["within"])):
        share = seconds / operations["wall"]
        rows.append(["bubble", name, f"{100 * share:.1f} %", "█" * round(BAR * share), f"{1e6 * seconds:,.1f}", *[""] * 7])
    return rows


def layers(operations: dict[str, Any]) -> str:
    """One line for each phase: the time of every layer."""
    sums: dict[str, dict[int, float]] = {}
    for line in operations["lines"]:
        phase = sums.setdefault(line["phase"], {})
        phase[line["layer"]] = phase.get(line["layer"], 0.0) + line["seconds"]
    named = {-1: "outside"}
    return "\n".join(
        f"{phase}, µs/token by layer: " + ", ".join(f"{named.get(i, i)} {1e6 * s:,.1f}" for i, s in sorted(found.items()))
        for phase, found in sums.items()
    )


def sensors(document: dict[str, Any]) -> str:
    """One line: what could be read and what not."""
    line = "Energy: " + "; ".join(f"{sensor['sensor']} {sensor['state']}" for sensor in document["sensors"])
    return line + (f"; idle {document['idle_watts']:.2f} W" if document["idle_watts"] is not None else "")


LISTS = ("samples_s", "step_s", "instrumented_s")


def as_csv(document: dict[str, Any]) -> str:
    """The fields of the records that are one number or one text, and whether the profile is partial."""
    records = [{**record, "incomplete": " ".join(record["incomplete"])} for record in document["measurements"]]
    lines = [
        {"partial": document["partial"], **{name: value for name, value in record.items() if name not in LISTS}}
        for record in records
    ]
    if not lines:
        return ""
    return table(lines)
