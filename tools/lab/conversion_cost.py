"""Conversions beside one pass of the calibration text: `python -m edgeq.tools.lab.conversion_cost SRC --recipe "..."`.

F is the time of one pass of the text through the decoder layers in torch, in seconds of the processor, as the layers of a
conversion run it; the head is not in it.  Passes and conversions take turns, and memory is the largest RssAnon of the
conversion in /proc, beside what it promised.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import process_time, sleep
from typing import TYPE_CHECKING, Any

import click

from edgeq.errors import InputError
from edgeq.tools.entry import Command

if TYPE_CHECKING:
    from edgeq.converters.plan import ConversionPlan

EVERY = 0.02
"""Seconds between two looks at the memory."""


def seconds_of_a_pass(plan: ConversionPlan) -> float:
    """F: seconds of the processor for the calibration text through all decoder layers; reading their weights is not counted."""
    from edgeq.converters.calibration.dataset import Calibration
    from edgeq.converters.calibration.forward import BlockForward

    assert isinstance(plan.calibration, Calibration)
    forward = BlockForward(plan.checkpoint, plan.method.family, plan.method.config, plan.calibration.rows)
    taken = 0.0
    for index in range(plan.method.config.num_hidden_layers):
        layer = forward.load(index)
        started = process_time()
        forward.advance(index, layer)
        taken += process_time() - started
        forward.unload(layer)
    return taken


def conversion(source: str, recipe: str, folder: Path) -> dict[str, Any]:
    """Run `edgeq convert` with an empty cache: seconds of the processor, start of the process included, bytes of memory, and
    what was promised.

    InputError: it failed.
    """
    command = [sys.executable, "-m", "edgeq", "convert", source, "-o", str(folder / "o.edgeq"), "--json", *shlex.split(recipe)]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    peak = 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        while not done:
            with suppress(OSError):
                found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
                peak = max(peak, 1024 * int(found[1]) if found else 0)
            sleep(EVERY)
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), errors.seek(0)
        if status:
            raise InputError(f"edgeq convert {recipe}: {errors.read()[-500:]}")
        promised = json.load(out)["memory_bytes"]
    return {"seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": peak, "promised_bytes": promised}


def measure(source: str, recipes: tuple[str, ...], rows: int) -> dict[str, Any]:
    """A pass before and after each conversion; F is their mean there."""
    import torch

    from edgeq.converters.options import ConvertOptions
    from edgeq.converters.preflight import preflight

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or torch.get_num_threads())
    plan = preflight(source, ConvertOptions(method="gptq", calibration_rows=rows))
    assert plan.calibration is not None
    passes, found = [seconds_of_a_pass(plan)], []
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as folder:
            taken = conversion(source, f"{recipe} --calibration-rows {rows}", Path(folder))
        passes.append(seconds_of_a_pass(plan))
        of_a_pass = (passes[-2] + passes[-1]) / 2
        found.append(taken | {"recipe": recipe, "pass_seconds": of_a_pass, "passes": taken["seconds"] / of_a_pass})
    return {"source": source, "tokens": plan.calibration.tokens, "conversions": found}


def table(result: dict[str, Any]) -> str:
    """Markdown, a row for each conversion."""
    lines = [
        f"{result['source']}, {result['tokens']} tokens of calibration text.",
        "",
        "| recipe | F, s | conversion, s | F | peak RssAnon, GB | promised, GB |",
        "|" + "---|" * 6,
    ]
    for row in result["conversions"]:
        memory = f"{row['peak_bytes'] / 1e9:.2f} | {row['promised_bytes'] / 1e9:.2f}"
        lines.append(
            f"| `{row['recipe']}` | {row['pass_seconds']:.1f} | {row['seconds']:.1f} | {row['passes']:.2f} | {memory} |"
        )
    return "\n".join(lines)


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.option(
    "--recipe", "recipes", multiple=True, required=True, help="Options of `edgeq convert`; with --dry-run: the probe."
)
@click.option("--calibration-rows", "rows", type=click.IntRange(1), default=64, show_default=True, help="As in edgeq convert.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
def main(source: str, recipes: tuple[str, ...], rows: int, as_json: bool) -> None:
    """Measure time and memory of conversions of SRC beside passes of the calibration text; set OMP_NUM_THREADS for both."""
    result = measure(source, recipes, rows)
    click.echo(json.dumps(result, indent=1) if as_json else table(result))


if __name__ == "__main__":
    main()
