"""`edgeq bench`: speed of prefill (pp) and decode (tg) at any depth.

pp512 is 512 tokens prefilled, tg128 is 128 tokens decoded one by one; `@ d512` is after 512 tokens already in the cache, which
are run before the clock starts.  With --operations a table of each test shows where its time goes, with --image a table shows
how long pictures take; where nothing else is measured each of them is a test, its prompt's tokens by the time to the first.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from edgeq.runtime.network.embedding import check_continues
from edgeq.runtime.network.vision import vision_of
from edgeq.runtime.session.context_size import DEFAULT_CONTEXT
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.runtime.speculative.speculator import DraftSource, layer_for
from edgeq.runtime.stats import MAX_DRAFT
from edgeq.system import machine
from edgeq.tools.cli.terminal import Report, compilation, progress, write
from edgeq.tools.measure import breakdown, drafting, picture_bench
from edgeq.tools.measure.measurement import MeasuredTest
from edgeq.tools.measure.report import facts, read_bandwidth, step_bytes
from edgeq.tools.measure.statistics import percentile

SEED = 0
WARM_UP_TOKENS = {"pp": 512, "tg": 4}


@dataclass(frozen=True)
class Test:
    """`count` tokens prefilled ("pp"), or decoded ("tg") in `batch` texts at once, after `depth` others; or those of a picture
    prefilled, its tower included ("image")."""

    kind: Literal["pp", "tg", "image"]
    count: int
    depth: int
    batch: int = 1

    @property
    def name(self) -> str:
        batch = f" x{self.batch}" if self.batch > 1 else ""
        return f"{self.kind}{self.count}{batch}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Row:
    """One line of the table: the record of a test, and what only this command has.

    compile_s    seconds of loading in which kernels were compiled
    drafts       what drafts gain on real text, with --draft
    operations   where the time of a token goes, with --operations; measured in separate runs
    pictures     how long pictures take, with --image: in the first row of a number of threads
    """

    record: MeasuredTest
    compile_s: float
    operations: list[breakdown.BreakdownLine] | None = None
    drafts: drafting.Drafting | None = None
    pictures: list[picture_bench.PictureTimes] | None = None


def bench(
    *,
    model: Path,
    prompts: tuple[int, ...],
    tokens: tuple[int, ...],
    depths: tuple[int, ...],
    threads: tuple[int, ...],
    repetitions: int,
    batches: tuple[int, ...],
    draft: DraftSource,
    gamma: int | None,
    images: tuple[tuple[int, int], ...] | None,
    operations: bool,
    output: str,
    **options: Any,
) -> None:
    """The cross product of all lists; the table alone goes to standard output.

    InputError: nothing to measure, or a test with more positions than the model takes.
    """
    tests = [Test("pp", n, d) for d in depths for n in prompts if n]
    tests += [Test("tg", n, d, b) for d in depths for n in tokens for b in batches if n]
    if not tests and not images:
        raise InputError("nothing to measure: give -p or -n a number above 0, or --image")
    context = max((test.count + test.depth for test in tests), default=1)
    generated = max(tokens) if draft != "off" else 0
    if generated:
        context = max(context, drafting.PROMPT + generated)
    file = ModelFile.open(model)
    metadata = file.metadata
    if images or any(test.kind == "tg" for test in tests):
        check_continues(file, "; how fast it reads is measured with -n 0")
    limit = metadata.config.max_position_embeddings
    if images:
        # Refused here and not after the other tests.
        vision_of(metadata)
        context = max(context, min(limit, DEFAULT_CONTEXT))
    if context > limit:
        raise InputError(f"the longest test has {context} positions, this model takes {limit}: choose smaller -p, -n or -d")
    rows: list[Row] = []
    most = max(*batches, MAX_DRAFT + 1)
    for i, count in enumerate(threads):
        with compilation() as report_of_load:
            options |= {"context": context, "max_logits": most, "on_progress": report_of_load}
            options |= {"draft_layer": layer_for(draft)}
            loaded = Model.load(model, threads=count, **options)
            if images:
                loaded.prepare_images(report_of_load)
        # Measured again: on a shared machine an earlier number may be far off.
        bandwidth = read_bandwidth(loaded, refresh=True)
        machine.forget_peak()
        with progress() as report:
            for j, test in enumerate(tests):
                part = _part(report, i * len(tests) + j, len(threads) * len(tests))
                measured = Row(measure(loaded, test, repetitions, bandwidth, part), report_of_load.seconds)
                if operations and test.batch == 1:
                    measured = replace(measured, operations=where_time_goes(loaded, test, repetitions))
                if draft != "off" and test.kind == "tg" and test.batch == 1:
                    gain = drafting.measure(loaded, draft, gamma, test.count, repetitions, part)
                    measured = replace(measured, drafts=gain)
                rows.append(measured)
            if images:
                times = [picture_bench.measure(loaded, size, repetitions, _part(report, 0, 0)) for size in images]
                if tests:
                    rows[-len(tests)] = replace(rows[-len(tests)], pictures=times)
                else:
                    rows += [of_picture(loaded, line, report_of_load.seconds) for line in times]
    shown = {"md": markdown, "json": as_json, "csv": as_csv}[output]
    write(f"{shown(rows)}\n")


def of_picture(model: Model, times: picture_bench.PictureTimes, compile_s: float) -> Row:
    """The line of a picture where nothing else is measured: its tokens, and the one after it, with the tower."""
    found = record(model, Test("image", times.prompt_tokens, 0), times.samples_s, [], None)
    return Row(found, compile_s, pictures=[times])


def _part(report: Report, index: int, total: int) -> Callable[[float, str], None]:
    """Reports the progress of one test as a share of all tests."""
    return lambda share, name: report(index + share, total, name)


def measure(
    model: Model, test: Test, repetitions: int, bandwidth: float | None, report: Callable[[float, str], None]
) -> MeasuredTest:
    """A warm-up, then `repetitions` timed runs."""
    samples: list[float] = []
    steps: list[float] = []
    for i in range(repetitions + 1):
        report(i / (repetitions + 1), test.name)
        warm_up = i == 0
        times = list(run(model, test, min(test.count, WARM_UP_TOKENS[test.kind]) if warm_up else test.count))
        if not warm_up:
            samples.append(sum(times))
            steps += times if test.kind == "tg" else []
    return record(model, test, samples, steps, bandwidth)


def where_time_goes(model: Model, test: Test, repetitions: int) -> list[breakdown.BreakdownLine]:
    """Repeat a test and record the time of every operation."""
    if test.kind == "tg":
        return breakdown.decode(model, random_tokens(model, test.depth), test.count)
    return breakdown.prefill(model, random_tokens(model, test.depth + test.count), test.depth, repetitions)


def random_tokens(model: Model, count: int) -> list[int]:
    """`count` token ids, the same in every call."""
    return list(np.random.default_rng(SEED).integers(0, model.config.vocab_size, count).tolist())


def run(model: Model, test: Test, count: int) -> Iterator[float]:
    """Seconds of each timed run: the whole prompt, or every token."""
    random = random_tokens(model, test.depth + count)
    sessions = [model.session() for _ in range(test.batch)]
    for session in sessions if test.depth else ():
        session.prefill(random[: test.depth])
        session.requantize()
    if test.kind == "pp":
        started = perf_counter()
        sessions[0].prefill(random[test.depth :])
        yield perf_counter() - started
        return
    for token in random[test.depth :]:
        started = perf_counter()
        run_together([BatchItem(session, [token], [0]) for session in sessions])
        yield perf_counter() - started


def record(model: Model, test: Test, samples: list[float], steps: list[float], bandwidth: float | None) -> MeasuredTest:
    """The record of a test, from its timings in seconds."""
    memory = machine.process_memory()
    made = MeasuredTest(
        test.kind, test.name, test.count, test.depth, test.batch, model.context, facts(model), samples, steps,
        rss=memory.get("VmRSS"), peak_rss=memory.get("VmHWM"),
    )  # fmt: skip
    return with_bandwidth(made, model, bandwidth) if test.kind == "tg" else made


def with_bandwidth(made: MeasuredTest, model: Model, bandwidth: float | None) -> MeasuredTest:
    """A tg with the bytes that it read, and their share of what the machine reads."""
    rate = made.tokens_per_s
    assert rate is not None
    # The cache grows by one position per token: its middle length stands for all.
    read = step_bytes(model, made.depth + (made.tokens + 1) // 2, made.batch) * rate / made.batch
    share = read / bandwidth if bandwidth else None
    return replace(made, bytes_per_s=read, read_bandwidth=bandwidth, bandwidth_share=share)


def _ms_per_token(r: MeasuredTest, p: int) -> str:
    each = r.seconds if r.kind == "tg" else [seconds / r.tokens for seconds in r.samples_s]
    return f"{1000 * percentile(each, p):.2f}"


COLUMNS: tuple[tuple[str, Callable[[MeasuredTest], str]], ...] = (
    ("t", lambda r: str(r.facts["threads"])),
    ("test", lambda r: r.test),
    ("tok/s", lambda r: f"{r.tokens_per_s:,.2f}"),
    ("min – max", lambda r: f"{min(r.rates):,.1f} – {max(r.rates):,.1f}"),
    ("ms/token", lambda r: _ms_per_token(r, 50)),
    ("p95", lambda r: _ms_per_token(r, 95)),
    ("GB/s", lambda r: f"{r.bytes_per_s / 1e9:.2f}" if r.bytes_per_s else ""),
    ("of read", lambda r: f"{100 * r.bandwidth_share:.0f} %" if r.bandwidth_share else ""),
    ("peak RSS", lambda r: f"{r.peak_rss / 1e6:,.0f} MB" if r.peak_rss else ""),
    ("°C", lambda r: f"{r.facts['celsius']:.0f}" if r.facts["celsius"] is not None else ""),
)


def heading(rows: list[Row]) -> str:
    """What all rows have in common, in two lines."""
    f = rows[0].record.facts
    held = f"{f['device_bytes'] / 1e6:,.0f} MB on it" if f["device_bytes"] else None
    where = ", ".join(filter(None, (f["target"], f["device"], held, f["isa"], f["mode"])))
    return (
        f"{f['model']}, {f['codec']}, head {f['head_codec']}, {f['file_bytes'] / 1e6:,.1f} MB; {where}; "
        f"cache {f['kv']}, {f['kv_bytes_per_position']:,} bytes per position\n"
        f"edgeq {f['version']}, {f['processor']}, {f['date']}, loaded in {f['load_s']:.2f} s"
        + (f", of which {rows[0].compile_s:.1f} s compiling" if rows[0].compile_s else "")
    )


def markdown(rows: list[Row]) -> str:
    """The heading and a table of all tests, then one for each test whose operations were timed, then one for drafts."""
    records = [row.record for row in rows]
    columns = [(name, show) for name, show in COLUMNS if name != "°C" or any(map(show, records))]
    table = aligned([[name for name, _ in columns]] + [[show(record) for _, show in columns] for record in records])
    parts = [f"{heading(rows)}\n\n{table}"]
    for row in rows:
        if row.operations is not None:
            spent, threads = 1000 * sum(line.seconds for line in row.operations), row.record.facts["threads"]
            named = f"{row.record.test}, {threads} thread{'s' * (threads > 1)}: {spent:.3f} ms per token"
            if row.record.facts["timed_apart"]:
                named += ", of operations one by one: the test above does several in a launch"
            parts.append(f"{named}\n\n{aligned(breakdown.cells(row.operations, row.record.kind == 'tg'))}")
    if pictures := [line for row in rows for line in row.pictures or ()]:
        parts.append(aligned(picture_bench.cells(pictures)))
    if drafts := [row.drafts for row in rows if row.drafts]:
        parts.append(aligned(drafting.cells(drafts)))
    return "\n\n".join(parts)


def aligned(cells: list[list[str]]) -> str:
    """A markdown table with aligned columns; the first line of `cells` is its heading."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def fields(row: Row) -> dict[str, Any]:
    """The fields of the record, then those of this command."""
    own = {name: value for name, value in asdict(row).items() if name != "record"}
    return {**row.record.fields(), **own}


def as_json(rows: list[Row]) -> str:
    """All fields of every row."""
    return json.dumps([fields(row) for row in rows], indent=1)


def as_csv(rows: list[Row]) -> str:
    """The fields that are one number or one text."""
    lists = ("samples_s", "step_s", "instrumented_s", "operations", "drafts", "pictures")
    lines = [{**fields(row), "incomplete": " ".join(row.record.incomplete)} for row in rows]
    return table([{name: value for name, value in line.items() if name not in lists} for line in lines])


def table(lines: list[dict[str, Any]]) -> str:
    """Lines of fields as CSV, with a heading of the names of all."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue().removesuffix("\n")
