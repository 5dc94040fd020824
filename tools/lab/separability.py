"""Whether `edgeq profile --compare` tells what it should: `python -m edgeq.tools.lab.separability FILE [--pairs 20]`.

Each round makes three profiles in fresh processes: two with the same settings and one with a thread fewer.  The comparison of
the first two must report no regression, that of the first and the third must report one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from edgeq.tools.entry import Command
from edgeq.tools.profile.comparison import compare
from edgeq.tools.profile.record import read
from edgeq.tools.terminal import note, progress


@dataclass(frozen=True)
class Outcome:
    """The largest ratio that was reported as slower in either comparison; None: none was.

    fewer_ratio   the smallest ratio of the second comparison, separable or not
    """

    same: float | None
    fewer: float | None
    fewer_ratio: float


def measured(file: Path, threads: int, save: Path, options: tuple[str, ...]) -> None:
    """Profile `file` in a process of its own.  CalledProcessError: that failed."""
    command = [sys.executable, "-m", "edgeq", "profile", str(file), "-t", str(threads), "--no-operations", "--save", str(save)]
    subprocess.run([*command, *options], check=True, capture_output=True)


def outcome(a: Path, b: Path, fewer: Path, share: float) -> Outcome:
    """What the two comparisons report."""
    same, other = compare(read(a), read(b)), compare(read(a), read(fewer))
    reported = [max((line.ratio for line in lines if line.slower_by(share)), default=None) for lines in (same, other)]
    return Outcome(reported[0], reported[1], min(line.ratio for line in other))


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
@click.option("--share", type=float, default=0.05, show_default=True, help="A regression is slower by at least this.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(file: Path, options: tuple[str, ...], threads: int, pairs: int, share: float, as_json: bool) -> None:
    """Compare profiles of FILE that should and should not differ.  OPTIONS go to edgeq profile."""
    found = list[Outcome]()
    with tempfile.TemporaryDirectory() as folder, progress() as report:
        a, b, fewer = (Path(folder) / f"{name}.json" for name in ("a", "b", "fewer"))
        for i in range(pairs):
            report(i, pairs, "comparing")
            for count, save in ((threads, a), (threads, b), (threads - 1, fewer)):
                measured(file, count, save, options)
            found.append(outcome(a, b, fewer, share))
            note(f"{i + 1} of {pairs}: {found[-1]}")
    click.echo(json.dumps([asdict(each) for each in found], indent=1) if as_json else text(found, share))


if __name__ == "__main__":
    main()
