"""Progress with ETA on standard error, when it is a terminal; output that never fails on an encoding."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from edgeq.tools.cli.eta import Eta

Report = Callable[[float, float, str], None]
"""Progress callback: (steps done, total steps, label).  A total of 0 means unknown."""


def note(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)


_JOINERS = "\u200c\u200d\u200e\u200f"
"""Invisible characters that words of many languages, and emoji, are written with; they move nothing but their neighbours."""


def harmless(text: str) -> str:
    """`text` as a terminal may get it: what could be obeyed, or reorder or hide other text, is shown as U+FFFD.

    Those are control characters but line ends and tabs (ESC, CSI, OSC, also those of C1), format characters (such as the marks
    that reverse a line) and line separators.  A carriage return is dropped: before a line end it is nothing.
    """
    if text.isprintable():
        return text

    def shown(c: str) -> str:
        if c in "\n\t" or c in _JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return c
        return "" if c == "\r" else "\N{REPLACEMENT CHARACTER}"

    return "".join(map(shown, text))


def write(text: str) -> None:
    """Write text to standard output and flush, unless it is closed; characters outside its encoding become question marks.

    A terminal gets `harmless` text, since a model's can be anything; a pipe or a file gets it as it is.
    """
    _write(sys.stdout, text)


def write_aside(text: str) -> None:
    """The same to standard error."""
    _write(sys.stderr, text)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    if stream.isatty():
        text = harmless(text)
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


class Bar:
    """A progress callback that draws a bar with the time left, on a terminal; it opens at the first report."""

    def __init__(self) -> None:
        self._eta = Eta()
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._noted = ("", -1)

    def __call__(self, done: float, total: float, label: str) -> None:
        self._eta.report(done, total, label)
        if not self._console.is_terminal:
            return
        if self._progress is None:
            text, size = TextColumn("{task.description}"), TextColumn("{task.fields[size]}")
            columns = (text, BarColumn(), TaskProgressColumn(), size, TimeElapsedColumn(), _Left(self))
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task(label, total=total or None, completed=round(done), size="")
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total or None, description=label, size="")

    def in_bytes(self, done: float, total: float, label: str) -> None:
        """The same of bytes, which are shown; without a terminal: a line for every tenth of them."""
        if not self._console.is_terminal:
            tenth = int(10 * done / total) if total else 0
            if (label, tenth) != self._noted:
                self._noted = (label, tenth)
                note(f"{label}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")
        self(done, total, label)
        if self._progress is not None:
            self._progress.update(self._task, size=f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    @property
    def drawn(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._console.is_terminal

    @property
    def left(self) -> str:
        """The time left, as in 0:12:40, or -:--:-- where it is not known yet."""
        seconds = self._eta.left()
        return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._progress is not None:
            self._progress.stop()


class _Left(ProgressColumn):
    max_refresh = 0.5

    def __init__(self, bar: Bar) -> None:
        super().__init__()
        self._bar = bar

    def render(self, task: Task) -> Text:
        return Text(f"{self._bar.left} left", style="progress.remaining")


@contextmanager
def progress() -> Iterator[Bar]:
    """A bar with the time left on standard error when that is a terminal; otherwise nothing is drawn."""
    bar = Bar()
    try:
        yield bar
    finally:
        bar.close()


class Compilation:
    """Progress of Model.load, which reports only what is measured or compiled now: a bar on a terminal, else a line for each
    stage.

    seconds   from the first kernel that was compiled to the last report; 0 where all were kept from an earlier run
    """

    def __init__(self, bar: Bar, device: str | None = None) -> None:
        """`device`: what is compiled for, if that is not this machine."""
        self.seconds = 0.0
        self._when = f" for {device}" if device else ", once on this machine"
        self._bar, self._shown = bar, ""
        self._started: float | None = None

    def __call__(self, done: float, total: float, label: str) -> None:
        stage = f"compiling {total:.0f} kernel{'s' * (total != 1)}" if total else label
        if done == 0 and stage != self._shown and not sys.stderr.isatty():
            note(f"{stage}{self._when} ...")
        self._shown = stage
        if total:
            self._started = perf_counter() if self._started is None else self._started
            self.seconds = perf_counter() - self._started
        self._bar(done, total, label)


@contextmanager
def compilation(device: str | None = None) -> Iterator[Compilation]:
    """Progress of Model.load; after it a line with the time that compilation took, if any did."""
    with progress() as bar:
        report = Compilation(bar, device)
        yield report
    if report.seconds:
        note(f"kernels compiled in {report.seconds:.1f} s")
