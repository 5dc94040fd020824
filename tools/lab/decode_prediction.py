"""Files beside what is predicted of them: `python -m edgeq.tools.lab.decode_prediction FILE... [-t 1]`.

The predictions are those of `edgeq convert --speed` and of its frontier, from models of the files' shape with random weights;
they and the files take turns, so that what else the machine does meanwhile slows both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click

from edgeq.container import ModelFile
from edgeq.converters.allocation.decode_times import MEASURED, DecodeTimes
from edgeq.errors import InputError
from edgeq.records import Weight
from edgeq.runtime import Model
from edgeq.tools.decode_speed import TEXT, in_turn
from edgeq.tools.entry import Command
from edgeq.tools.random_file import bytes_per_token, with_layers, write_random

SPAN = 0.05
"""Seconds that a model is decoded in its turn."""


def read_bytes(path: Path) -> int:
    """Bytes of weights that a token of a file reads."""
    sizes = ModelFile.open(path).metadata.bytes_per_token()
    return sizes["weights"] + sizes["head"]


def seconds_of(path: Path, here: DecodeTimes) -> float:
    """Those that a token of a file is predicted to take."""
    metadata = ModelFile.open(path).metadata
    used = metadata.config.num_experts_per_tok / (metadata.config.num_experts or 1)

    def of_weight(weight: Weight, share: float) -> float:
        return here.seconds(weight.codec, lambda codec: share * codec.nbytes(weight.rows, weight.columns))

    return sum(
        of_weight(weight, used if ".experts." in name else 1.0)
        for name, linear in metadata.linears.items()
        for weight in linear.weights
        if name != "embedding" and weight.codec.kind == "int"
    )


def times(models: dict[str, Model], rounds: int) -> dict[str, float]:
    """The median time of a token of each, in turn."""
    return {name: statistics.median(taken for taken, _ in found) for name, found in in_turn(models, rounds, SPAN).items()}


def measure(files: tuple[Path, ...], threads: int, rounds: int) -> list[dict[str, Any]]:
    """For each file its bytes per token and its predicted and measured tokens per second.

    InputError: the files are not of one shape and mode.
    """
    about = {(metadata.config, metadata.default_mode) for metadata in (ModelFile.open(path).metadata for path in files)}
    if len(about) > 1:
        raise InputError("the files are of several shapes or modes: give those of one model")
    ((config, mode),) = about
    shape = with_layers(config, config.num_hidden_layers)
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        paths = {codec.name: Path(folder) / f"{place}.edgeq" for place, codec in enumerate(MEASURED)}
        for codec in MEASURED:
            write_random(paths[codec.name], shape, codec)
        every = {**paths, **{str(path): path for path in files}}
        models = {name: Model.load(path, context=TEXT.count, mode=mode, threads=threads) for name, path in every.items()}
        found = times(models, rounds)
    here = DecodeTimes({codec: (bytes_per_token(shape, codec, floats=False), found[codec.name]) for codec in MEASURED})
    return [
        {
            "file": str(path),
            "bytes_per_token": read_bytes(path),
            "predicted": 1 / seconds_of(path, here),
            "decoded": 1 / found[str(path)],
        }
        for path in files
    ]


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("-t", "--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of decode.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="How often the models take turns.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
def main(files: tuple[Path, ...], threads: int, rounds: int, as_json: bool) -> None:
    """Measure decode of FILES, of one model, beside what is predicted from their bytes."""
    found = measure(files, threads, rounds)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    click.echo("| file | MB per token | predicted, tok/s | decoded, tok/s | |\n|" + "---|" * 5)
    for row in found:
        numbers = f"{row['bytes_per_token'] / 1e6:.1f} | {row['predicted']:.1f} | {row['decoded']:.1f}"
        click.echo(f"| `{row['file']}` | {numbers} | {100 * (row['decoded'] / row['predicted'] - 1):+.0f} % |")


if __name__ == "__main__":
    main()
