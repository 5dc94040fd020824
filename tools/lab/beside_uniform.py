"""Budgets beside one codec for all layers, at the same bytes per token: `python -m edgeq.tools.lab.beside_uniform SRC WORK`.

Each size is that of a file by GPTQ with the options of `--uniform`.  A budget of exactly its bytes is allocated by measured
divergences, and with `--layer-errors` by squared errors of single layers too (edgeq.tools.lab.layer_errors).  The differences
are paired: the same windows of the same texts.  Files and results are kept in WORK, and are not made again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from edgeq.tools.entry import Command
from edgeq.tools.lab.quality import mean_divergence, measure
from edgeq.tools.statistics import Interval, paired_difference
from edgeq.tools.terminal import note, progress

Json = dict[str, Any]
UNIFORM = (
    "--bits 2 --group-size 32 --head 6",
    "--bits 3 --group-size 128 --head 6",
    "--bits 3 --group-size 32 --head 6",
    "--bits 4 --group-size 128 --head 6",
    "--bits 4 --group-size 32 --head 6",
)


def difference(row: Json, uniform: Json, text: str) -> Interval:
    """Mean KL divergence per token of a file less that of another."""
    a, b = (found["texts"][text] for found in (row, uniform))
    counts = [a["window"] - 1] * a["windows"]
    return paired_difference(a["files"][0]["window_kl"], b["files"][0]["window_kl"], counts)


def plan_by_layer_errors(source: str, work: Path, size: int) -> Path:
    """The file, in `work`, of the allocation by squared errors that reads at most `size` bytes per token."""
    from edgeq.converters.allocation.budget import Budget
    from edgeq.converters.allocation.plan_file import write_plan
    from edgeq.converters.options import ConvertOptions
    from edgeq.converters.preflight import preflight
    from edgeq.tools.lab.layer_errors import by_layer_errors

    path = work / f"by-layer-errors-{size}.json"
    if not path.exists():
        budget = Budget("read", size)
        write_plan(path, by_layer_errors(preflight(source, ConvertOptions(budget=budget)), budget))
    return path


def compared(
    source: str, work: Path, uniform: Sequence[str], layer_errors: bool, texts: Sequence[str], window: int, limit: int
) -> list[Json]:
    """A row for each size: its bytes, and for each text the divergences and the differences to uniform bits."""
    recipes = [f"--method gptq {options}" for options in uniform]
    base = measure(source, work, recipes, texts, window, limit, 1)["rows"]
    others = [f"--read {row['read_bytes']}B" for row in base]
    if layer_errors:
        with progress() as report:
            for done, row in enumerate(base):
                report(done, len(base), "errors of layers")
                others.append(f"--plan {plan_by_layer_errors(source, work, row['read_bytes'])}")
    made = {row["recipe"]: row for row in measure(source, work, others, texts, window, limit, 1)["rows"]}
    found = []
    for index, row in enumerate(base):
        rows = {"measured": made[others[index]]} | ({"layer errors": made[others[len(base) + index]]} if layer_errors else {})
        found.append(
            {
                "uniform": uniform[index],
                "read_bytes": row["read_bytes"],
                "texts": {
                    text: {
                        "uniform": mean_divergence(row["texts"][text]),
                        **{
                            name: {
                                "read_bytes": other["read_bytes"],
                                "kl": mean_divergence(other["texts"][text]),
                                "difference": vars(difference(other, row, text)),
                            }
                            for name, other in rows.items()
                        },
                    }
                    for text in texts
                },
            }
        )
    return found


def table(rows: Sequence[Json], texts: Sequence[str]) -> str:
    """Markdown, a table for each text."""
    lines = []
    for text in texts:
        names = [name for name in rows[0]["texts"][text] if name != "uniform"]
        columns = ["uniform", "MB read", "KL", *(part for name in names for part in (f"KL, {name}", "difference"))]
        lines += [f"### {text}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in rows:
            found = row["texts"][text]
            cells = [f"`{row['uniform']}`", f"{row['read_bytes'] / 1e6:.2f}", found["uniform"]]
            for name in names:
                gap = found[name]["difference"]
                cells += [found[name]["kl"], f"{gap['value']:+.4f} ({gap['low']:+.4f} to {gap['high']:+.4f})"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--uniform", multiple=True, default=UNIFORM, help="Options of `edgeq convert --method gptq`.  [default: five]")
@click.option("--layer-errors", is_flag=True, help="Allocate by squared errors of single layers too.")
@click.option("--text", "texts", multiple=True, default=("code", "docs"), show_default=True, help="As in edgeq compare.")
@click.option("--window", type=click.IntRange(2), default=256, show_default=True, help="Tokens per window.")
@click.option("--limit", type=click.IntRange(2), default=16384, show_default=True, help="Use at most so many tokens of a text.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
def main(
    source: str,
    work: Path,
    uniform: tuple[str, ...],
    layer_errors: bool,
    texts: tuple[str, ...],
    window: int,
    limit: int,
    as_json: bool,
) -> None:
    """Convert SRC with uniform bits and with budgets of the same bytes, and print their KL divergences with 95 % intervals."""
    found = compared(source, work, uniform, layer_errors, texts, window, limit)
    click.echo(json.dumps(found, indent=1) if as_json else table(found, texts))
    note(f"files and results are kept in {work}")


if __name__ == "__main__":
    main()
