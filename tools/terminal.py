"""What commands have in common on standard error: progress with ETA, when a person is watching, and how long compiling took."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[float, float, str], None]
"""(done, in all or 0 where nobody knows, what is being done)"""


def note(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Text to standard output at once, unless that is closed; what its encoding lacks becomes a question mark."""
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
        yield lambda done, total, what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(done: float, total: float, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        yield report


@contextmanager
def compilation() -> Iterator[Report]:
    """For Model.load, which reports only what is measured or compiled now: a bar, or lines where nobody watches; then how long
    compiling took."""
    started: float | None = None
    said = ""
    with progress() as bar:

        def report(done: float, total: float, what: str) -> None:
            nonlocal started, said
            stage = f"compiling {total:.0f} kernels" if total else what
            if done == 0 and stage != said and not sys.stderr.isatty():
                note(f"{stage}, once on this machine ...")
            said = stage
            if total and started is None:
                started = perf_counter()
            bar(done, total, what)

        yield report
    if started is not None:
        note(f"kernels compiled in {perf_counter() - started:.1f} s")
