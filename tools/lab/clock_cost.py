"""What the clocks around operations add to a token: `python -m edgeq.tools.lab.clock_cost FILE [-t 1,2] [--mode a8]`.

A text is decoded with and without them in turn, token by token: plain, with, with, plain.  On a machine that others share the
speed of two runs differs by more than the clocks cost; that of two tokens hardly does.  The ratio is the median of those of
four tokens, with the interval that its ranks give.
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
from edgeq.runtime.session import BatchItem, run_together
from edgeq.tools.bench import random_tokens
from edgeq.tools.entry import Command
from edgeq.tools.params import Count, Several
from edgeq.tools.profile.tape import Tapes

WARM_UP = 4
"""Tokens of each text that are not counted."""
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


def measured(path: Path, threads: int, mode: Mode | None, tokens: int, rounds: int) -> Cost:
    """Decode `rounds` texts of `tokens` tokens, a multiple of four."""
    plain, timed, ratios = list[float](), list[float](), list[float]()
    with Model.load(path, target="cpu", threads=threads, mode=mode, context=WARM_UP + tokens) as model:
        given, sampler, tapes = random_tokens(model, WARM_UP + tokens), Sampler(Sampling()), Tapes(model, False)
        for turn in range(rounds):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            # What was recorded is kept to the end of the text, as that of a profile is.
            with model.session() as session, tapes.recording("decode", False):
                for i, token in enumerate(given):
                    # The middle two of four, in every other text the outer two.
                    on = i >= WARM_UP and (i % 4 in (1, 2)) != bool(turn % 2)
                    tapes.switch(on)
                    began = perf_counter()
                    (logits,) = run_together([BatchItem(session, [token], [0])])
                    sampler.draw(logits[0], session.tokens)
                    seconds[on].append(perf_counter() - began)
            without, with_clocks = seconds[False][WARM_UP:], seconds[True]
            plain, timed = plain + without, timed + with_clocks
            for i in range(0, len(with_clocks) - 1, 2):
                ratios.append(sum(with_clocks[i : i + 2]) / sum(without[i : i + 2]))
        middle, low, high = median_with_interval(ratios)
        settings = model.program.options
        medians = statistics.median(plain), statistics.median(timed)
        return Cost(settings.threads, settings.mode, len(timed), *medians, middle, low, high)


@click.command(cls=Command)
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("-t", "--threads", type=Several(Count(1)), default="1", show_default=True, help="Threads.")
@click.option("--mode", type=click.Choice(["a16", "a8", "a4"]), help="Precision of activations.  [default: the file's]")
@click.option("-n", "--tokens", type=click.IntRange(4), default=256, show_default=True, help="Tokens of a text, in fours.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Texts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(file: Path, threads: tuple[int, ...], mode: Mode | None, tokens: int, rounds: int, as_json: bool) -> None:
    """Decode FILE with and without clocks around its operations, token by token."""
    found = [measured(file, count, mode, tokens // 4 * 4, rounds) for count in threads]
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
