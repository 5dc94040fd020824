"""`python -m edgeq.tools.lab.hybrid cost|gain|scan|continue`: see the commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from edgeq.tools.cli.entry import Commands
from edgeq.tools.cli.options import JSON
from edgeq.tools.cli.params import Count, Several
from edgeq.tools.cli.terminal import progress
from edgeq.tools.lab.hybrid import draft, states
from edgeq.tools.lab.hybrid.shapes import SHAPES

SHAPE = click.option(
    "--shape", type=click.Choice([*SHAPES]), default="qwen3.5-0.8b", show_default=True, help="Sizes of layers."
)
LAYERS = click.option("--layers", type=click.IntRange(4, 24), default=24, show_default=True, help="How many of the 24 layers.")
THREADS = click.option("-t", "--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads.")
ROUNDS = click.option(
    "-r", "--repetitions", "rounds", type=click.IntRange(1), default=9, show_default=True, help="Timed turns."
)

SHARES = (0.0, 0.5, 0.8, 1.0)
"""Shares of drafts that hold."""


@click.group(cls=Commands)
def main() -> None:
    """What states and the layer that drafts cost and gain, on random weights in the shapes of Qwen3.5."""


@main.command("cost")
@SHAPE
@LAYERS
@THREADS
@ROUNDS
@click.option(
    "--heads", type=Several(Count(16)), default="248320,65536,32768,16384", show_default=True, help="Tokens that are drafted."
)
@JSON
def cost_command(shape: str, layers: int, threads: int, rounds: int, heads: tuple[int, ...], as_json: bool) -> None:
    """Time a draft beside a token, by the tokens that it can be."""
    with progress() as report:
        found = draft.costs(shape, layers, heads, threads, rounds, report)
    lines = [(f"{c.drafted:,}", f"{c.step_ms:.2f}", f"{c.draft_ms:.2f}", f"{c.share:.3f}") for c in found]
    shown(found, ("tokens", "ms a token", "ms a draft", "of a token"), lines, as_json)


@main.command("gain")
@SHAPE
@LAYERS
@THREADS
@ROUNDS
@click.option("--drafted", type=click.IntRange(16), default=32768, show_default=True, help="Tokens that are drafted.")
@click.option("--gamma", type=click.IntRange(1, 7), help="Draft length in tokens.  [default: the best measured]")
@click.option("-n", "--tokens", type=click.IntRange(2, 900), default=96, show_default=True, help="Tokens of the text.")
@JSON
def gain_command(
    shape: str, layers: int, threads: int, rounds: int, *, drafted: int, gamma: int | None, tokens: int, as_json: bool
) -> None:
    """Time a text of whose drafts 0, 50, 80 and 100 in a hundred hold, beside no drafts."""
    with progress() as report:
        found = draft.gains(
            shape,
            layers,
            drafted,
            SHARES,
            gamma=gamma,
            threads=threads,
            tokens=tokens,
            rounds=rounds,
            report=report,
        )
    lines = [
        (
            "no drafts" if g.share is None else f"{100 * g.share:.0f} %",
            f"{g.tokens_per_s:.2f}",
            f"{g.speedup:.2f}",
            f"{g.tokens_per_cycle:.2f}",
            "" if g.accepted is None else f"{100 * g.accepted:.0f} %",
        )
        for g in found
    ]
    shown(found, ("right drafts", "tok/s", "times", "tokens a cycle", "accepted"), lines, as_json)


@main.command("scan")
@SHAPE
@LAYERS
@THREADS
@ROUNDS
@click.option("-p", "--prompt", type=click.IntRange(16), default=256, show_default=True, help="Tokens of the prompt.")
@JSON
def scan_command(shape: str, layers: int, threads: int, rounds: int, prompt: int, as_json: bool) -> None:
    """Time a prompt and tokens after it beside the same network without the scans of its gated delta nets."""
    with progress() as report:
        found = states.scans(shape, layers, prompt, threads, rounds, report)
    lines = [(str(s.rows), f"{s.with_ms:.2f}", f"{s.without_ms:.2f}", f"{s.ratio:.3f}", f"{s.bytes_ratio:.3f}") for s in found]
    shown(found, ("rows", "ms", "ms without scans", "ratio", "ratio of bytes"), lines, as_json)


@main.command("continue")
@SHAPE
@LAYERS
@THREADS
@ROUNDS
@click.option("-n", "--tokens", type=click.IntRange(256), default=4096, show_default=True, help="Tokens of the conversation.")
@JSON
def continue_command(shape: str, layers: int, threads: int, rounds: int, tokens: int, as_json: bool) -> None:
    """Time how a conversation goes on: from pages on disk, from pages in memory, from a saved session."""
    with progress() as report:
        found = states.continued(shape, layers, tokens, threads, rounds, report)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
        return
    for key, value in asdict(found).items():
        click.echo(f"{key:12} {value:.2f}" if isinstance(value, float) else f"{key:12} {value}")


def shown(records: Sequence[Any], head: Sequence[str], lines: Sequence[Sequence[str]], as_json: bool) -> None:
    """Print records as JSON, or as a markdown table."""
    if as_json:
        click.echo(json.dumps([asdict(each) for each in records], indent=1))
        return
    for line in (head, ["---"] * len(head), *lines):
        click.echo("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
