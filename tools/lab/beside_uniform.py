"""Budgets beside one codec for all layers, at the same bytes per token: `python -m edgeq.tools.lab.beside_uniform SRC WORK`.

Each size is that of a file by GPTQ with the same codec in all layers.  A budget of exactly its bytes is allocated by measured
divergences, and with `--layer-errors` by squared errors of single layers too (edgeq.tools.lab.layer_errors).  The differences
are paired: the same windows of the same texts.  Files are kept in WORK, and are not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from edgeq.container import ModelFile
from edgeq.errors import InputError
from edgeq.tools.entry import Command
from edgeq.tools.lab.quality import mean_divergence
from edgeq.tools.statistics import Interval, paired_difference
from edgeq.tools.terminal import note, progress

Json = dict[str, Any]
UNIFORM = ((2, 32, 6), (3, 128, 6), (3, 32, 6), (4, 128, 6), (4, 32, 6))
"""Bits, group size and bits of the head."""


def difference(result: Json, file: int, other: int) -> Interval:
    """Mean KL divergence per token of a file less that of another, of those that were compared."""
    a, b = (result["files"][index]["window_kl"] for index in (file, other))
    return paired_difference(a, b, [result["window"] - 1] * len(a))


def converted(source: str, work: Path, name: str, options: Json, rows: int) -> Path:
    """The file of a conversion, in `work`: one that is there already is taken."""
    from edgeq.converters.convert import convert
    from edgeq.converters.options import ConvertOptions

    path = work / f"{name}.edgeq"
    with progress() as report:
        convert(source, path, ConvertOptions(method="gptq", calibration_rows=rows, **options), report)
    return path


def files(source: str, work: Path, uniform: Sequence[Json], layer_errors: bool, rows: int) -> list[dict[str, Path]]:
    """For each size the files of it, by how their bits were chosen."""
    from edgeq.converters.allocation.budget import Budget
    from edgeq.converters.options import ConvertOptions
    from edgeq.converters.preflight import preflight
    from edgeq.tools.lab.layer_errors import by_layer_errors

    found = []
    for codec in uniform:
        name = "-".join(str(value) for value in codec.values())
        path = converted(source, work, f"uniform-{name}", codec, rows)
        budget = Budget("read", read_bytes(path))
        made = {"uniform": path, "measured": converted(source, work, f"measured-{name}", {"budget": budget}, rows)}
        if layer_errors:
            options = ConvertOptions(method="gptq", calibration_rows=rows)
            plan = by_layer_errors(preflight(source, options), budget)
            made["layer errors"] = converted(source, work, f"layer-errors-{name}", {"allocation": plan}, rows)
        found.append(made)
    return found


def read_bytes(file: Path) -> int:
    """Bytes of a file that are read for a token."""
    sizes = ModelFile.open(file).metadata.bytes_per_token()
    return sizes["weights"] + sizes["head"]


def compared(source: str, made: Sequence[Path], text: str, window: int, limit: int) -> Json:
    """What `edgeq compare` finds of these files.  InputError: it failed."""
    options = ("--text", text, "--window", str(window), "--limit", str(limit), "--json", "-t", "1")
    command = (sys.executable, "-m", "edgeq", "compare", *map(str, made), "--against", source, *options)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise InputError(f"edgeq compare failed on {text}")
    found: Json = json.loads(done.stdout)
    return found


def measure(
    source: str,
    work: Path,
    uniform: Sequence[Json],
    layer_errors: bool,
    texts: Sequence[str],
    rows: int,
    window: int,
    limit: int,
) -> list[Json]:
    """A row for each size: its bytes, and for each text the divergences and the differences from uniform bits."""
    made = files(source, work, uniform, layer_errors, rows)
    every = [path for row in made for path in row.values()]
    results = {text: compared(source, every, text, window, limit) for text in texts}
    found = []
    for codec, row in zip(uniform, made, strict=True):
        first = every.index(row["uniform"])
        texts_of_row = {
            text: {
                name: {
                    "kl": mean_divergence(result, first + index),
                    "difference": vars(difference(result, first + index, first)),
                }
                for index, name in enumerate(row)
            }
            for text, result in results.items()
        }
        sizes = {name: read_bytes(path) for name, path in row.items()}
        found.append({"uniform": codec, "read_bytes": sizes, "texts": texts_of_row})
    return found


def table(found: Sequence[Json], texts: Sequence[str]) -> str:
    """Markdown, a table for each text."""
    lines = []
    for text in texts:
        names = [name for name in found[0]["texts"][text] if name != "uniform"]
        columns = ["uniform", "MB read", "KL", *(part for name in names for part in (f"KL, {name}", "difference"))]
        lines += [f"### {text}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in found:
            of_text, codec = row["texts"][text], row["uniform"]
            label = f"{codec['bits']} bits, groups of {codec['group_size']}, head {codec['head']}"
            cells = [label, f"{row['read_bytes']['uniform'] / 1e6:.2f}", of_text["uniform"]["kl"]]
            for name in names:
                gap = of_text[name]["difference"]
                cells += [of_text[name]["kl"], f"{gap['value']:+.4f} ({gap['low']:+.4f} to {gap['high']:+.4f})"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.argument("work", type=click.Path(path_type=Path))
@click.option(
    "--uniform",
    multiple=True,
    type=(click.IntRange(2, 8), click.Choice([16, 32, 64, 128]), click.Choice([4, 6, 8])),
    default=UNIFORM,
    metavar="BITS GROUP HEAD",
    help="Bits and group size of all layers, and bits of the head.  [default: five sizes]",
)
@click.option("--layer-errors", is_flag=True, help="Allocate by squared errors of single layers too.")
@click.option("--text", "texts", multiple=True, default=("code", "docs"), show_default=True, help="As in edgeq compare.")
@click.option("--calibration-rows", "rows", type=click.IntRange(1), default=64, show_default=True, help="As in edgeq convert.")
@click.option("--window", type=click.IntRange(2), default=256, show_default=True, help="Tokens per window.")
@click.option("--limit", type=click.IntRange(2), default=16384, show_default=True, help="Use at most so many tokens of a text.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
def main(
    source: str, work: Path, uniform: tuple[tuple[int, int, int], ...], texts: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Convert SRC with uniform bits and with budgets of the same bytes, and print their KL divergences with 95 % intervals."""
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{work}: cannot make this folder: {error.strerror}") from None
    codecs = [dict(zip(("bits", "group_size", "head"), each, strict=True)) for each in uniform]
    found = measure(source, work, codecs, texts=texts, **options)
    click.echo(json.dumps(found, indent=1) if as_json else table(found, texts))
    note(f"files are kept in {work}")


if __name__ == "__main__":
    main()
