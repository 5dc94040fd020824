"""What the clocks around operations add to a token: `python -m edgeq.tools.lab.clock_cost FILE [-t 1,2] [--mode a8]`.

A text is decoded with and without them in turn, in pieces of 32 tokens: plain, with, with, plain.  On a machine that others
share the speed of two runs differs by more than the clocks cost, that of neighbouring pieces by less.  Single tokens in turn
would hide a part of the cost: what is kept of a recorded token is memory that the next one has to find elsewhere.  The ratio is
the median of those of four pieces, with the interval that its ranks give.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import click

from edgeq.records import Mode
from edgeq.runtime import Model, Sampling
from edgeq.runtime.sampling import Sampler
from edgeq.runtime.session import BatchItem, Session, run_together
from edgeq.tools.bench import random_tokens
from edgeq.tools.entry import Command
from edgeq.tools.params import Count, Several
from edgeq.tools.profile.tape import Tapes

WARM_UP, PIECE = 4, 32
"""Tokens at the beginning of each text that are not counted, and in a piece."""
DEVIATIONS = 2.576
"""Of a normal distribution, between which 99 % of it lie."""


@dataclass(frozen=True)
class Cost:
    """plain_s, timed_s: the median token without clocks and with them;  ratio, low, high: of fours, with its 99 % interval."""

    threads: int
    mode: str
    tokens: int
    plain_s: float
    timed_s: float
    ratio: float
    low: float
    high: float


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 99 % interval: order statistics, by the normal approximation of their binomial ranks."""
    ordered = sorted(values)
    reach = DEVIATIONS * len(ordered) ** 0.5 / 2
    first, last = (round((len(ordered) - 1) / 2 + sign * reach) for sign in (-1, 1))
    return statistics.median(ordered), ordered[max(0, first)], ordered[min(len(ordered) - 1, last)]


def measured(path: Path, threads: int, mode: Mode | None, fours: int, rounds: int) -> Cost:
    """Decode `rounds` texts of so many times four pieces."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    ratios, length = list[float](), WARM_UP + 4 * PIECE * fours
    with Model.load(path, target="cpu", threads=threads, mode=mode, context=length) as model:
        given, sampler, tapes = random_tokens(model, length), Sampler(Sampling()), Tapes(model, False)

        def decoded(session: Session, tokens: Sequence[int]) -> list[float]:
            times = []
            for token in tokens:
                began = perf_counter()
                (logits,) = run_together([BatchItem(session, [token], [0])])
                sampler.draw(logits[0], session.tokens)
                times.append(perf_counter() - began)
            return times

        for turn in range(rounds):
            # What was recorded is kept to the end of the text, as that of a profile is.
            with model.session() as session, tapes.recording("decode", False):
                decoded(session, given[:WARM_UP])
                for first in range(WARM_UP, length, 4 * PIECE):
                    medians: dict[bool, list[float]] = {False: [], True: []}
                    for i in range(4):
                        # The middle two of four, in every other text the outer two.
                        on = (i in (1, 2)) != bool(turn % 2)
                        tapes.switch(on)
                        times = decoded(session, given[first + PIECE * i : first + PIECE * (i + 1)])
                        seconds[on] += times
                        medians[on].append(statistics.median(times))
                    tapes.switch(False)
                    ratios.append(sum(medians[True]) / sum(medians[False]))
        middle, low, high = median_with_interval(ratios)
        settings = model.program.options
        plain, timed = (statistics.median(seconds[on]) for on in (False, True))
        return Cost(settings.threads, settings.mode, len(seconds[True]), plain, timed, middle, low, high)


@click.command(cls=Command)
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("-t", "--threads", type=Several(Count(1)), default="1", show_default=True, help="Threads.")
@click.option("--mode", type=click.Choice(["a16", "a8", "a4"]), help="Precision of activations.  [default: the file's]")
@click.option("--fours", type=click.IntRange(1), default=2, show_default=True, help="Four pieces, so often in a text.")
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True, help="Texts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(file: Path, threads: tuple[int, ...], mode: Mode | None, fours: int, rounds: int, as_json: bool) -> None:
    """Decode FILE with and without clocks around its operations, in turn."""
    found = [measured(file, count, mode, fours, rounds) for count in threads]
    if as_json:
        click.echo(json.dumps([asdict(cost) for cost in found], indent=1))
        return
    for cost in found:
        percents = ", ".join(f"{100 * (share - 1):+.2f}" for share in (cost.low, cost.high))
        times = f"{1e3 * cost.plain_s:.4f} ms plain, {1e3 * cost.timed_s:.4f} with clocks"
        click.echo(
            f"t {cost.threads}, {cost.mode}: {times}, {100 * (cost.ratio - 1):+.2f} % ({percents}), {cost.tokens} tokens each"
        )


if __name__ == "__main__":
    main()
