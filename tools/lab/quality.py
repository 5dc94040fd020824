"""One checkpoint by many recipes on one table: `python -m edgeq.tools.lab.quality SRC WORK --recipe "..." --text code`.

With --signs a model that sees is also asked about pictures of signs (signs.py).  A recipe is what follows
`edgeq convert SRC -o OUT` on the command line; a list in braces stands for each of its items, so
`--method {rtn,awq} --bits {2,3}` are four recipes.  Each is converted and compared with SRC in processes of their own, several
at a time.  Results are kept in WORK, one file each, and are not computed again.  With `--llama-cpp` the types of llama.cpp are
rows of the same table (edgeq.tools.lab.llama_cpp_types).  `--plot` draws the loss over the bytes that a token reads, and
`--points` keeps what is drawn, for a chart of several models (kl_chart.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

import click

from edgeq import __version__
from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.system.whole_file import write_whole
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import note, progress
from edgeq.tools.lab.kl_chart import UNIT, write
from edgeq.tools.lab.llama_cpp_types import missing
from edgeq.tools.lab.signs import write as write_signs
from edgeq.tools.measure.report import bits_per_weight, in_decoder
from edgeq.tools.measure.statistics import Interval, paired_difference
from edgeq.tools.quality.chart import QualityPoint, chart

Json = dict[str, Any]
COLUMNS = (
    "recipe",
    "bits",
    "head",
    "mode",
    "kv",
    "MB",
    "MB read",
    "perplexity",
    "KL mean (95 %)",
    "KL p99",
    "top-1 %",
    "s",
    "peak MB",
)
"""bits: per weight of the layers without the head; MB read: per token, of all layers and the head; s and peak MB: time and peak
memory of the conversion."""
BUDGETS = ("--size", "--read", "--kl", "--speed")
_LIST = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Job:
    """A command whose result is kept as JSON in `result`; `after` makes that JSON from what the command printed."""

    label: str
    command: tuple[str, ...]
    result: Path
    after: Callable[[str], Json]


def expand(recipe: str) -> list[str]:
    """`--bits {2,3}` -> `--bits 2`, `--bits 3`; several lists give every combination, the last varying fastest."""
    parts = _LIST.split(recipe)
    choices = [[part] if i % 2 == 0 else part.split(",") for i, part in enumerate(parts)]
    return [" ".join("".join(choice).split()) for choice in itertools.product(*choices)]


def run(job: Job) -> Json:
    """Run a job unless its result is there.  InputError: the command failed; the message ends with its last output."""
    if job.result.exists():
        kept: Json = json.loads(job.result.read_text(encoding="utf-8"))
        return kept
    started = perf_counter()
    # Not a pipe: it would block when libraries print a warning for every expert.
    with TemporaryFile("w+") as err:
        process = subprocess.Popen(job.command, stdout=subprocess.PIPE, stderr=err, text=True)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        errors = err.read()
    if process.returncode:
        raise InputError(f"{job.label}: {' '.join(errors.split())[-500:] or f'exit code {process.returncode}'}")
    result = job.after(printed) | {"seconds": perf_counter() - started, "peak_bytes": usage.ru_maxrss << 10}
    write_whole(job.result, json.dumps(result))
    return result


def run_all(jobs: Sequence[Job], at_once: int) -> list[Json]:
    """The results of all jobs, in order; after a failure no further job is started."""
    with progress() as report, ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run, job): job for job in jobs}
        for done, future in enumerate(as_completed(running)):
            if future.exception():
                pool.shutdown(cancel_futures=True)
            future.result()
            report(done + 1, len(jobs), running[future].label)
        return [future.result() for future in running]


def stamps(path: Path) -> list[int]:
    """Sizes and times of a file, or of the files of a folder, which change when they do; nothing for any other name."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return [number for file in files for number in (file.stat().st_size, file.stat().st_mtime_ns)]


def conversion(source: str, recipe: str, file: Path) -> Job:
    """The job that converts `source` into `file`."""

    def after(printed: str) -> Json:
        metadata = ModelFile.open(file).metadata
        sizes = metadata.bytes_per_token()
        return {
            "recipe": recipe,
            "file_bytes": file.stat().st_size,
            "read_bytes": sizes["weights"] + sizes["head"],
            "bits_per_weight": bits_per_weight(metadata, in_decoder),
            "head": metadata.linears["head"].weights[0].codec.name,
            "mode": metadata.default_mode,
            "kv": metadata.kv.name,
        }

    command = (sys.executable, "-m", "edgeq", "convert", source, "-o", str(file), *shlex.split(recipe))
    return Job(f"convert {recipe}", command, file.with_suffix(".json"), after)


def comparison(source: str, recipe: str, file: Path, text: str, window: int, limit: int) -> Job:
    """The job that compares `file` with `source`."""
    options = ("--window", str(window), "--limit", str(limit), "--json", "-t", "1")
    command = (sys.executable, "-m", "edgeq", "compare", str(file), "--against", source, "--text", text, *options)
    # With the columns: what an earlier version kept may not have the numbers for them.
    settings = json.dumps([text, *stamps(Path(text)), window, limit, COLUMNS])
    name = f"{file.stem}.{hashlib.sha256(settings.encode()).hexdigest()[:8]}.json"
    return Job(f"compare {recipe} on {text}", command, file.with_name(name), json.loads)


def of_llama_cpp(
    source: str, work: Path, kinds: Sequence[str], made_of: Sequence[object], *, texts: Sequence[str], window: int, limit: int
) -> Job:
    """The job that makes the rows of all `kinds`."""
    options = [part for text in texts for part in ("--text", text)] + ["--window", str(window), "--limit", str(limit)]
    types = [part for kind in kinds for part in ("--type", kind)]
    settings = json.dumps([*made_of, *types, *options, *(stamps(Path(text)) for text in texts), COLUMNS])
    result = work / f"llama.cpp.{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"
    command = (sys.executable, "-m", "edgeq.tools.lab.llama_cpp_types", source, *types, *options)
    return Job(f"llama.cpp {', '.join(kinds)}", command, result, json.loads)


def reading(recipe: str, file: Path, folder: Path, signs: int) -> Job:
    """The job that asks the model in `file` about the signs of `folder`."""
    command = (sys.executable, "-m", "edgeq.tools.lab.signs", "read", str(file), str(folder), "--json", "-t", "1")
    return Job(f"signs {recipe}", command, file.with_name(f"{file.stem}.signs-{signs}.json"), json.loads)


def measure(
    source: str,
    work: Path,
    recipes: Sequence[str],
    *,
    texts: Sequence[str],
    window: int,
    limit: int,
    jobs: int,
    signs: int = 0,
    llama_cpp: Sequence[str] = (),
) -> Json:
    """Everything that the tables show, as plain values; `llama_cpp`: its types.

    InputError: a recipe given twice, or a job that failed.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{work}: cannot make this folder: {error.strerror}") from None
    every = [part for recipe in recipes for part in expand(recipe)]
    if len(set(every)) != len(every):
        raise InputError("a recipe is there twice; every recipe gives the same file each time")
    made_of = [__version__, source, *stamps(Path(source))]
    files = [work / f"{hashlib.sha256(json.dumps([*made_of, recipe]).encode()).hexdigest()[:16]}.edgeq" for recipe in every]
    made = run_all([conversion(source, recipe, file) for recipe, file in zip(every, files, strict=True)], jobs)
    pairs = [(text, recipe, file) for text in texts for recipe, file in zip(every, files, strict=True)]
    compared = run_all([comparison(source, recipe, file, text, window, limit) for text, recipe, file in pairs], jobs)
    rows = [conversion | {"texts": {}} for conversion in made]
    for (text, recipe, _), result in zip(pairs, compared, strict=True):
        rows[every.index(recipe)]["texts"][text] = result
    if signs:
        folder = work / f"signs-{signs}"
        write_signs(folder, "evaluation", signs)
        asked = run_all([reading(recipe, file, folder, signs) for recipe, file in zip(every, files, strict=True)], jobs)
        for row, result in zip(rows, asked, strict=True):
            gap = paired_difference(result["right"], asked[0]["right"], [1] * signs)
            row["signs"] = {"accuracy": result["accuracy"], "right": result["right"], "difference": vars(gap)}
    if llama_cpp and texts:
        (found,) = run_all([of_llama_cpp(source, work, llama_cpp, made_of, texts=texts, window=window, limit=limit)], 1)
        # Time and memory are those of all types together.
        rows += [row | {"seconds": None, "peak_bytes": None} for row in found["rows"]]
    orders = {text: order(rows, text) for text in texts}
    return {"source": source, "window": window, "signs": signs, "rows": rows, "orders": orders}


def order(rows: Sequence[Json], text: str) -> list[Json]:
    """Recipes from the lowest to the highest perplexity, each with its mean difference in negative log-likelihood to the next.

    Windows are the same for all, so differences are paired.  An interval that contains 0 leaves the order open.
    """
    ranked = sorted(rows, key=lambda row: sum(row["texts"][text]["files"][0]["window_nll"]))
    steps = []
    for better, worse in itertools.pairwise(ranked):
        a, b = better["texts"][text], worse["texts"][text]
        counts = [a["window"] - 1] * a["windows"]
        gap: Interval = paired_difference(b["files"][0]["window_nll"], a["files"][0]["window_nll"], counts)
        steps.append({"better": better["recipe"], "worse": worse["recipe"], "nll": vars(gap), "separable": gap.low > 0})
    return steps


def points(rows: Sequence[Json], text: str) -> list[QualityPoint]:
    """Series by method; files made for a budget are one, with the bits of their layers, those of llama.cpp another."""
    found = []
    for row in rows:
        words = row["recipe"].split()
        method, label = words[words.index("--method") + 1] if "--method" in words else "rtn", ""
        if any(word in BUDGETS for word in words):
            method, label = "budget", f"{row['bits_per_weight']:.2f}"
        series, label = ("llama.cpp", words[1]) if words[0] == "llama.cpp" else (f"edgeq {method}", label)
        found.append(QualityPoint(series, label, row["read_bytes"] / 1e6, row["texts"][text]["files"][0]["kl_mean"]))
    return found


def table(result: Json) -> str:
    """Markdown: for every text a table, and the order of the recipes as far as it is certain."""
    lines: list[str] = []
    for text, steps in result["orders"].items():
        about = result["rows"][0]["texts"][text]
        lines += [
            f"### {text}",
            "",
            f"{about['windows']} windows of {about['window']} tokens (sha256 {about['text_sha256'][:16]}); "
            f"perplexity of the source {about['source']['perplexity']:.3f}.",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
        ]
        for row in result["rows"]:
            f = row["texts"][text]["files"][0]
            top1 = f"{100 * f['top1_agreement']:.1f}"
            numbers = (f"{f['perplexity']:.3f}", mean_divergence(row["texts"][text]), f"{f['kl_p99']:.3f}", top1)
            made = ("", "")
            if row["seconds"] is not None:
                made = (f"{row['seconds']:.0f}", f"{row['peak_bytes'] / 1e6:.0f}")
            codecs = (f"{row['bits_per_weight']:.2f}", row["head"], row["mode"], row["kv"])
            megabytes = (f"{row['file_bytes'] / 1e6:.2f}", f"{row['read_bytes'] / 1e6:.2f}")
            lines.append("| " + " | ".join((f"`{row['recipe']}`", *codecs, *megabytes, *numbers, *made)) + " |")
        lines += ["", "From the lowest perplexity up, each with the next; 95 % interval of the difference per token:", ""]
        for step in steps:
            gap = step["nll"]
            open_order = "" if step["separable"] else " — not separable"
            lines.append(
                f"- `{step['better']}` before `{step['worse']}`: "
                f"{gap['value']:+.4f} nats ({gap['low']:+.4f} to {gap['high']:+.4f}){open_order}"
            )
        lines.append("")
    return "\n".join(lines + (sign_table(result) if result["signs"] else []))


def mean_divergence(divergences: Json, file: int = 0) -> str:
    """`0.0079 (0.0074 to 0.0084)`: the mean of what `edgeq compare` found of a file, with its 95 % interval over windows."""
    sums, tokens = divergences["files"][file]["window_kl"], divergences["window"] - 1
    mean = paired_difference(sums, [0.0] * len(sums), [tokens] * len(sums))
    return f"{mean.value:.4f} ({mean.low:.4f} to {mean.high:.4f})"


def sign_table(result: Json) -> list[str]:
    """Markdown: answers about signs, and how many more or fewer are right than by the first recipe."""
    lines = [
        "### signs",
        "",
        f"{result['signs']} signs that no conversion saw, from PNG files; 95 % interval of the paired difference to the first.",
        "",
        "| recipe | bits | mode | MB | exact % | difference, points |",
        "|" + "---|" * 6,
    ]
    for row in (row for row in result["rows"] if "signs" in row):
        gap, size = row["signs"]["difference"], (f"{row['bits_per_weight']:.2f}", row["mode"], f"{row['file_bytes'] / 1e6:.2f}")
        points = f"{100 * gap['value']:+.2f} ({100 * gap['low']:+.2f} to {100 * gap['high']:+.2f})"
        lines.append("| " + " | ".join((f"`{row['recipe']}`", *size, f"{100 * row['signs']['accuracy']:.2f}", points)) + " |")
    return [*lines, ""]


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--recipe", "recipes", multiple=True, required=True, help="Options of `edgeq convert`; {a,b} stands for each.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=("code", "docs"),
    show_default=True,
    help="Text to compare on, as in edgeq compare; none where only --signs is given.",
)
@click.option("--signs", type=click.IntRange(0), default=0, help="Ask about so many pictures of signs too.")
@click.option("--window", type=click.IntRange(2), default=512, show_default=True, help="Tokens per window.")
@click.option("--limit", type=click.IntRange(2), default=32768, show_default=True, help="Use at most so many tokens of a text.")
@click.option("-j", "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Conversions or comparisons at once.")
@click.option("--llama-cpp", metavar="TYPE,...", help="Types of llama.cpp as further rows, such as Q4_K_M,IQ2_M-folded.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Write a chart (SVG) of the KL over bytes read.")
@click.option(
    "--points", "kept", type=click.Path(path_type=Path), metavar="FILE", help="Write the points of that chart (JSON)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
@click.pass_context
def main(
    ctx: click.Context,
    /,
    source: str,
    work: Path,
    recipes: tuple[str, ...],
    *,
    texts: tuple[str, ...],
    llama_cpp: str | None,
    plot: Path | None,
    kept: Path | None,
    as_json: bool,
    **options: int,
) -> None:
    """Convert SRC by every recipe, measure each against SRC, and print one table per text.  Results are kept in WORK."""
    kinds = llama_cpp.split(",") if llama_cpp else []
    if kinds and (absent := missing()):
        note(f"llama.cpp's types are left out: {' and '.join(absent)} not installed (pip install {' '.join(absent)})")
        kinds = []
    if options["signs"] and ctx.get_parameter_source("texts") is click.core.ParameterSource.DEFAULT:
        texts = ()
    result = measure(source, work, recipes, texts=texts, llama_cpp=kinds, **options)
    panels = {f"KL divergence from {Path(source).name}: {text}": points(result["rows"], text) for text in texts}
    if plot is not None:
        plot.write_text(chart(panels, UNIT), encoding="utf-8")
    if kept is not None:
        write(kept, panels)
    click.echo(json.dumps(result, indent=1) if as_json else table(result))
    note(f"files and results are kept in {work}")


if __name__ == "__main__":
    main()
