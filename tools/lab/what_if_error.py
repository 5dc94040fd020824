"""How far off `edgeq profile --what-if bits=N` is: `python -m edgeq.tools.lab.what_if_error FILE [--bits 3,6] [--mode a8]`.

FILE is profiled and its prediction taken.  Then files of its shape with random weights, one with its own bits and one for each
number of bits that was asked for, are decoded in turn.  Compared are the gains, so what else the machine does counts on both
sides; on a busy machine decode is timed in seconds of the processor, which neighbours disturb less.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from edgeq.container import ModelFile
from edgeq.converters.allocation.part_names import HEAD
from edgeq.errors import InputError
from edgeq.records import Mode
from edgeq.runtime import Model
from edgeq.tools.bench import Test
from edgeq.tools.decode_speed import TEXT
from edgeq.tools.entry import Command
from edgeq.tools.lab.decode_prediction import times
from edgeq.tools.options import MODES
from edgeq.tools.params import Count, OneOf, Several
from edgeq.tools.profile.collect import Plan, collect
from edgeq.tools.profile.document import document
from edgeq.tools.profile.options import Change
from edgeq.tools.profile.runs import Setting
from edgeq.tools.random_file import write_random
from edgeq.tools.terminal import progress

TOKENS = 16
REPETITIONS = 5


@dataclass(frozen=True)
class Row:
    """Decode with other bits: how many times as fast it was expected to be, in which range, and how many times it was."""

    bits: int
    expected: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        """Of what was expected, as a share of what was measured."""
        return self.expected / self.measured - 1


def measure(path: Path, bits: tuple[int, ...], threads: int, rounds: int, chosen: Mode | None = None) -> list[Row]:
    """A row for each number of bits.  InputError: the decoder has parts of several codecs, or no integers."""
    metadata = ModelFile.open(path).metadata
    own = {w.codec for name, x in metadata.linears.items() if name.startswith("layers.") for w in x.weights if w.codec.bits}
    if len(own) != 1:
        raise InputError(f"{path}: the decoder has {len(own)} integer codecs; give a file of one")
    (codec,), (head,) = own, metadata.linears["head"].weights
    mode = chosen or metadata.default_mode
    plan = Plan(path, (Setting(threads, mode, "f16"),), (Test("tg", TOKENS, 0),), REPETITIONS, True, {"target": "cpu"})
    with progress() as report:
        predicted = document(collect(plan, report), tuple(Change(bits=n) for n in bits))["what_if"]
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        files = {n: Path(folder) / f"{n}.edgeq" for n in {codec.bits, *bits}}
        for n, file in files.items():
            write_random(file, metadata.config, replace(codec, bits=n), {HEAD: head.codec})
        models = {str(n): Model.load(file, context=TEXT.count, mode=mode, threads=threads) for n, file in files.items()}
        seconds = times(models, rounds)
    gains = {n: seconds[str(codec.bits)] / seconds[str(n)] for n in bits}
    return [
        Row(n, each["expected"] / each["now"], each["low"] / each["now"], each["high"] / each["now"], gains[n])
        for n, each in zip(bits, predicted, strict=True)
    ]


@click.command(cls=Command)
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--bits", type=Several(Count(2)), default="3,6", show_default=True, help="Bits of the decoder.")
@click.option("-t", "--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of decode.")
@click.option("--mode", type=OneOf(*MODES), help="Precision of activations.  [default: the mode that the file records]")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="How often the files take turns.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
def main(file: Path, bits: tuple[int, ...], threads: int, mode: Mode | None, rounds: int, as_json: bool) -> None:
    """Compare what --what-if expects of FILE with other bits with decode of files that have them."""
    found = measure(file, bits, threads, rounds, mode)
    if as_json:
        click.echo(json.dumps([{**asdict(row), "error": row.error} for row in found], indent=1))
        return
    click.echo("| bits | expected | range | measured | error |\n|" + "---|" * 5)
    for row in found:
        numbers = f"{row.expected:.3f} | {row.low:.3f} – {row.high:.3f} | {row.measured:.3f}"
        click.echo(f"| {row.bits} | {numbers} | {100 * row.error:+.1f} % |")


if __name__ == "__main__":
    main()
