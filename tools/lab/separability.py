"""Whether `edgeq profile --compare` tells what it should: `python -m edgeq.tools.lab.separability FILE [--pairs 20]`.

With `--keep PAIRS.json --seconds 60` it ends after the pair in which the minute is over; the same command goes on from there.

Each round makes three profiles: two with the same settings and one with a thread fewer.  The comparison of the first two must
report no regression, that of the first and the third must report one.

A profile is put together from short ones, each of a fresh process, which take turns with those of the other two: a neighbour
that comes or goes slows all three, and no process decides by where its memory happens to lie.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from edgeq.container import ModelFile
from edgeq.errors import InputError
from edgeq.tools.entry import Command
from edgeq.tools.profile.comparison import COMPARED, compare
from edgeq.tools.profile.record import read
from edgeq.tools.terminal import note, progress
from edgeq.whole_file import write_whole

Document = dict[str, Any]
SHORT = ("-p", "64", "-n", "16", "-r", "3")
"""The tests, unless others are asked for.  With one repetition of each of five profiles a single one that a neighbour slowed
would make two tests overlap, and nothing could be told apart."""


@dataclass(frozen=True)
class Outcome:
    """The largest ratio that was reported as slower in either comparison; None: none was.

    fewer_ratio   the smallest ratio of the second comparison, separable or not
    busy          tests of both comparisons in which the machine was busy
    """

    same: float | None
    fewer: float | None
    fewer_ratio: float
    busy: int


def measured(file: Path, threads: int, options: tuple[str, ...]) -> Document:
    """A profile of `file`, made in a process of its own.  CalledProcessError: that failed."""
    command = [sys.executable, "-m", "edgeq", "profile", str(file), "-t", str(threads), "--no-operations", *SHORT, *options]
    with tempfile.TemporaryDirectory() as folder:
        save = Path(folder) / "profile.json"
        subprocess.run([*command, "--save", str(save)], check=True, capture_output=True)
        return read(save)


def in_turn(file: Path, threads: Sequence[int], turns: int, options: tuple[str, ...]) -> list[Document]:
    """A profile for each number of threads; they take turns, and each turn begins with another one."""
    found: list[list[Document]] = [[] for _ in threads]
    for turn in range(turns):
        for i in range(len(threads)):
            chosen = (turn + i) % len(threads)
            found[chosen].append(measured(file, threads[chosen], options))
    return [together(each) for each in found]


def together(documents: Sequence[Document]) -> Document:
    """The repetitions of several profiles of the same tests as those of one, with the largest load and the mean wait."""
    records = []
    # One that had to compile has a record of that too.
    tests = ([record for record in each["measurements"] if record["kind"] in COMPARED] for each in documents)
    for same in zip(*tests, strict=True):
        times = {name: [second for record in same for second in record[name]] for name in ("samples_s", "step_s")}
        loads = [record["load"] for record in same if record["load"] is not None]
        waits = [record["core_wait"] for record in same if record["core_wait"] is not None]
        wait = statistics.mean(waits) if waits else None
        records.append({**same[0], **times, "load": max(loads, default=None), "core_wait": wait})
    return {**documents[0], "measurements": records}


def outcome(a: Document, b: Document, fewer: Document, share: float) -> Outcome:
    """What the two comparisons report."""
    same, other = compare(a, b), compare(a, fewer)
    reported = [max((line.ratio for line in lines if line.slower_by(share)), default=None) for lines in (same, other)]
    return Outcome(reported[0], reported[1], min(line.ratio for line in other), sum(line.busy for line in same + other))


def kept(path: Path | None, settings: Document) -> list[Outcome]:
    """The pairs of earlier runs.  InputError: the file is something else, or of other settings."""
    if path is None or not path.exists():
        return []
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = [Outcome(**pair) for pair in stored["pairs"]]
    except (OSError, ValueError, TypeError, KeyError):
        raise InputError(f"{path}: no pairs of this command are there; give --keep another file") from None
    if stored.get("settings") != settings:
        raise InputError(f"{path}: the pairs there have other settings than {settings}; give --keep another file")
    return found


def text(found: list[Outcome], share: float) -> str:
    """The counts, and what was wrong."""
    right = sum(each.same is None for each in found), sum(each.fewer is not None for each in found)
    lines = [
        f"same settings, no regression: {right[0]} of {len(found)}; a thread fewer, a regression: {right[1]} of {len(found)}"
    ]
    lines += [f"{i}: same settings reported as {each.same:.3f}" for i, each in enumerate(found) if each.same is not None]
    lines += [f"{i}: a thread fewer not reported" for i, each in enumerate(found) if each.fewer is None]
    return "\n".join([*lines, f"a regression: slower, separable, by at least {100 * share:.0f} %"])


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--threads", type=click.IntRange(2), default=2, show_default=True, help="Threads of the first two profiles.")
@click.option("--pairs", type=click.IntRange(1), default=20, show_default=True, help="Rounds.")
@click.option("--turns", type=click.IntRange(5), default=5, show_default=True, help="Short profiles that make one.")
@click.option("--share", type=float, default=0.05, show_default=True, help="A regression is slower by at least this.")
@click.option(
    "--keep", type=click.Path(path_type=Path, dir_okay=False), help="Keep the pairs there, and go on from those there."
)
@click.option("--seconds", type=float, help="Begin no pair after so long.  [default: no limit]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    file: Path,
    options: tuple[str, ...],
    threads: int,
    pairs: int,
    turns: int,
    share: float,
    keep: Path | None,
    seconds: float | None,
    as_json: bool,
) -> None:
    """Compare profiles of FILE that should and should not differ.  OPTIONS go to edgeq profile."""
    asked = {"identity": ModelFile.open(file).identity, "threads": threads, "turns": turns, "share": share}
    settings = {**asked, "options": list(options)}
    found, began = kept(keep, settings), perf_counter()
    with progress() as report:
        while len(found) < pairs and (seconds is None or perf_counter() - began < seconds):
            report(len(found), pairs, "comparing")
            a, b, fewer = in_turn(file, (threads, threads, threads - 1), turns, options)
            found.append(outcome(a, b, fewer, share))
            if keep is not None:
                write_whole(keep, json.dumps({"settings": settings, "pairs": [asdict(each) for each in found]}) + "\n")
            note(f"{len(found)} of {pairs}: {found[-1]}")
    click.echo(json.dumps([asdict(each) for each in found], indent=1) if as_json else text(found, share))


if __name__ == "__main__":
    main()
