"""Progress with ETA on standard error, when it is a terminal; output that never fails on an encoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[float, float, str], None]
"""Progress callback: (steps done, total steps, label).  A total of 0 means unknown."""


def note(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Write text to standard output and flush, unless it is closed; characters outside its encoding become question marks."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


@contextmanager
def progress() -> Iterator[Report]:
    """A bar with ETA on standard error when that is a terminal; otherwise nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, label: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(done: float, total: float, label: str) -> None:
            bar.update(task, completed=done, total=total or None, description=label)

        yield report


@contextmanager
def compilation() -> Iterator[Report]:
    """Progress of Model.load, which reports only what is measured or compiled now: a bar on a terminal, else a line for each
    stage; then the time that compilation took."""
    started: float | None = None
    shown = ""
    with progress() as bar:

        def report(done: float, total: float, label: str) -> None:
            nonlocal started, shown
            stage = f"compiling {total:.0f} kernel{'s' * (total != 1)}" if total else label
            if done == 0 and stage != shown and not sys.stderr.isatty():
                note(f"{stage}, once on this machine ...")
            shown = stage
            if total and started is None:
                started = perf_counter()
            bar(done, total, label)

        yield report
    if started is not None:
        note(f"kernels compiled in {perf_counter() - started:.1f} s")
