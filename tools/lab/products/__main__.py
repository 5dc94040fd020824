"""The command `python -m edgeq.tools.lab.products`; docs/cuda.md explains it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from edgeq.errors import InputError
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.params import Several
from edgeq.tools.cli.terminal import progress
from edgeq.tools.lab.products.by_edgeq import Edgeq
from edgeq.tools.lab.products.contestants import OTHERS, Contestant, Prepared
from edgeq.tools.measure import gpu
from edgeq.tools.measure.alternating import Spread, aligned, listed, rounds

SHAPES = ("2048x2048", "4096x14336", "8192x28672")
TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048)
BEYOND = 512 << 20
"""Bytes of matrices that are read in turn: four times the largest L2 cache of an NVIDIA GPU."""
CALLS = 16
"""Products of one measurement at least."""


@dataclass(frozen=True)
class ProductLine:
    """One contestant, shape and number of token rows.

    cached   one matrix again and again, which the L2 cache may keep; else as many in turn as no cache keeps
    seconds  of a product, over the rounds
    bytes_per_s   of weights with their scales;  operations_per_s: multiplications and additions
    """

    name: str
    rows: int
    columns: int
    tokens: int
    cached: bool
    seconds: Spread
    bytes_per_s: float
    operations_per_s: float


@dataclass
class Turn:
    """A contestant whose matrices are ready; `seconds` of a product in each round."""

    name: str
    prepared: Prepared
    copies: int
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


def shape_of(text: str) -> tuple[int, int]:
    """Output and input channels.  InputError: no such shape."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and 0 < int(part) <= 1 << 18 and int(part) % 128 == 0 for part in parts):
        raise InputError(f"--shapes {text!r}: expected output x input channels, multiples of 128, such as 4096x14336")
    return int(parts[0]), int(parts[1])


def compete(
    contestants: Sequence[Contestant],
    shape: tuple[int, int],
    tokens: Sequence[int],
    repetitions: int,
    beyond: int = BEYOND,
    failed: Callable[[str, str], None] = lambda name, why: None,
) -> list[ProductLine]:
    """Rounds in which every contestant is measured once, first with matrices that no cache keeps, then with one.

    failed   is told the name of a contestant that cannot do a shape or a number of rows, and why
    """
    found = list[ProductLine]()
    for cached in (False, True):
        prepared = list[Turn]()
        for each in contestants:
            try:
                one = each.prepare(*shape, 1, max(tokens))
                copies = 1 if cached else max(2, -(-beyond // one.nbytes))
                prepared.append(Turn(each.name, one if cached else each.prepare(*shape, copies, max(tokens)), copies))
            except Exception as error:  # whatever another's library raises is told
                failed(each.name, f"{shape[0]}x{shape[1]}: {type(error).__name__}: {error}")
        for count in tokens:
            turns = [Turn(each.name, each.prepared, each.copies) for each in prepared]

            def measure(turn: Turn, count: int = count) -> None:
                turn.seconds += turn.prepared.seconds(count, max(CALLS, turn.copies), 1)

            rounds(turns, repetitions, measure, Exception, reason=lambda error: f"{type(error).__name__}: {error}")
            for turn in turns:
                if turn.failure:
                    failed(turn.name, f"{shape[0]}x{shape[1]}, {count} rows: {turn.failure}")
                if turn.seconds:
                    found.append(_line(turn, shape, count, cached))
    return found


def _line(turn: Turn, shape: tuple[int, int], tokens: int, cached: bool) -> ProductLine:
    seconds, work = Spread.of(turn.seconds), 2 * shape[0] * shape[1] * tokens
    rates = turn.prepared.nbytes / seconds.median, work / seconds.median
    return ProductLine(turn.name, *shape, tokens, cached, seconds, *rates)


def text(about: dict[str, Any], lines: Sequence[ProductLine], left_out: dict[str, str]) -> str:
    """The GPU and its conditions, a table, and who is not in it."""
    told = ", ".join(f"{name.removeprefix('device_')} {value}" for name, value in about.items() if value)
    missing = gpu.lacking(about)
    cells = [["", "shape", "rows", "L2", "µs", "GB/s", "TFLOP/s"]]
    for each in lines:
        rates = f"{each.bytes_per_s / 1e9:,.0f}", f"{each.operations_per_s / 1e12:,.1f}"
        where = f"{each.rows}x{each.columns}", str(each.tokens), "within" if each.cached else "beyond"
        cells.append([each.name, *where, each.seconds.shown(1e-6), *rates])
    parts = [told, *([f"INCOMPLETE: without {', '.join(missing)}"] if missing else []), aligned(cells)]
    return "\n\n".join([*parts, *listed("Left out", left_out)])


@click.command(cls=Command)
@click.option("--shapes", type=Several(click.STRING), default=",".join(SHAPES), help="Output x input channels of matrices.")
@click.option("--rows", "tokens", type=Several(click.IntRange(1, 8192)), default=",".join(map(str, TOKENS)), help="Token rows.")
@click.option("-r", "--repetitions", type=click.IntRange(1, 1000), default=9, show_default=True, help="Rounds.")
@click.option("--beyond", type=click.IntRange(1), default=BEYOND >> 20, show_default=True, help="MiB of matrices read in turn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(shapes: tuple[str, ...], tokens: tuple[int, ...], repetitions: int, beyond: int, as_json: bool) -> None:
    """Measure single products on a GPU beside those of others that are installed, alternating."""
    sizes, left_out, there = [shape_of(each) for each in shapes], dict[str, str](), list[Contestant]()
    for each in (Edgeq("a16"), Edgeq("a8"), *OTHERS):
        reason = each.refusal()
        if reason is None:
            there.append(each)
        else:
            left_out[each.name] = " ".join(reason.split())
    lines = list[ProductLine]()
    with progress() as report:
        for i, shape in enumerate(sizes if there else ()):
            report(i, len(sizes), f"{shape[0]}x{shape[1]}")
            lines += compete(there, shape, tokens, repetitions, beyond << 20, failed=left_out.__setitem__)
    about = gpu.only()
    if as_json:
        lacking = gpu.lacking(about)
        document = {**about, "incomplete": lacking, "left_out": left_out, "lines": [asdict(line) for line in lines]}
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo(text(about, lines, left_out))
    if there and not lines:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
