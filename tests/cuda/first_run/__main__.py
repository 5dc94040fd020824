"""The command `python -m tests.cuda.first_run`; docs/cuda.md explains it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from tests.cuda.first_run import carried
from tests.cuda.first_run.steps import SHAPES, Step, run, steps


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="The folder of the results.")
@click.option("--from", "first", help="Begin with this step; what earlier runs found of those before it stays.")
@click.option("--only", help="Steps to run, with commas between them.")
@click.option("--shapes", default=",".join(SHAPES), show_default=True, help="Shapes of models to decode; tiny is for a try.")
@click.option("--tests", default="tests/cuda", show_default=True, help="Tests to run, with commas between them.")
@click.option("--workers", default=1, show_default=True, help="Processes that share the tests (pytest-xdist).")
@click.option("--pack", type=click.Path(path_type=Path), default=carried.PACK, help="The kernels that were carried here.")
def main(out: Path, first: str | None, only: str | None, shapes: str, tests: str, workers: int, pack: Path) -> None:
    """Test and measure edgeq on this machine's GPU, step by step, into a folder that can be sent."""
    out = out.absolute()
    protocol = steps(out, shapes.split(","), tests.split(","), pack.absolute(), workers)
    names = [step.name for step in protocol]
    for name in [*([first] if first else []), *(only.split(",") if only else [])]:
        if name not in names:
            raise click.UsageError(f"no step {name!r}; there are {', '.join(names)}")
    begin = names.index(first) if first else 0
    wanted = set(only.split(",") if only else names) & set(names[begin:])
    out.mkdir(parents=True, exist_ok=True)
    # A cache of its own, with the kernels that were carried: tools look there first.
    environment = {**os.environ, "XDG_CACHE_HOME": str(out / "cache")}
    click.echo(carried.put(pack.absolute(), out / "cache"), err=True)

    def chosen(step: Step) -> bool:
        return step.name in wanted

    endings = run(protocol, out, chosen, lambda line: click.echo(line, err=True), environment)
    archive = f"tar -czf first-run.tar.gz --exclude cache -C {out.parent} {out.name}"
    click.echo(f"results: {out}; to send them without the cache: {archive}")
    sys.exit(any(each.status in ("failed", "out of time") for each in endings))


if __name__ == "__main__":
    main()
