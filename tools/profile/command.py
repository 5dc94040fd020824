"""`edgeq profile`: measure, and say what was measured in the form that was asked for."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from edgeq.errors import InputError, ResourceError
from edgeq.tools.bench import Test
from edgeq.tools.profile import comparison, record, tables
from edgeq.tools.profile.collect import Plan, Profile, collect
from edgeq.tools.profile.document import document
from edgeq.tools.profile.page import page
from edgeq.tools.profile.runs import AnyTest, Picture, Setting
from edgeq.tools.profile.trace import trace
from edgeq.tools.terminal import note, progress, write

INTERRUPTED = 130
SLOWER = 3
"""Exit codes."""


def profile(
    *,
    model: Path,
    prompts: tuple[int, ...],
    tokens: tuple[int, ...],
    depths: tuple[int, ...],
    batches: tuple[int, ...],
    images: tuple[tuple[int, int], ...] | None,
    repetitions: int,
    threads: tuple[int, ...],
    modes: tuple[str, ...] | None,
    caches: tuple[str, ...],
    operations: bool,
    output: str,
    save: Path | None,
    **options: Any,
) -> None:
    """Every combination of settings, each with every test; the results alone go to standard output.

    InputError: nothing to measure or show, or a test that the model does not take.  Exit code 130 after an interrupt: what was
    measured until then is printed and saved, marked as partial.
    """
    tests: list[AnyTest] = [Test("pp", n, d) for d in depths for n in prompts if n]
    tests += [Test("tg", n, d, b) for d in depths for n in tokens for b in batches if n]
    tests += [Picture(size) for size in images or ()]
    if not tests:
        raise InputError("nothing to measure: give -p or -n a number above 0, or --image a size")
    if output == "trace" and not operations:
        raise InputError("a trace is made of operations; leave out --no-operations")
    settings = tuple(Setting(*chosen) for chosen in itertools.product(threads, modes or (None,), caches))
    plan = Plan(model, settings, tuple(tests), repetitions, operations, options)
    if save is not None:
        _check_place(save)
    with terminated(), progress() as report:
        found = collect(plan, report, _saver(save))
    made = document(found)
    if save is not None:
        record.write(save, made)
        note(f"saved in {save}")
    write(f"{SHOWN[output](found, made)}\n")
    if found.partial:
        raise click.exceptions.Exit(INTERRUPTED)


def compare(paths: tuple[Path, Path], output: str, fail_if_slower: float | None) -> None:
    """Print the comparison.  Exit code 3: a test is slower by at least `fail_if_slower`.

    InputError: another format than md and json, no such file, nothing in common.  FormatError: not a profile.
    """
    if output not in ("md", "json"):
        raise InputError(f"a comparison is printed as md or json, not as {output}")
    text, failed = comparison.command(paths, output, fail_if_slower)
    write(f"{text}\n")
    if failed:
        raise click.exceptions.Exit(SLOWER)


def _as_json(found: Profile, made: dict[str, Any]) -> str:
    return json.dumps(made, indent=1)


SHOWN: dict[str, Callable[[Profile, dict[str, Any]], str]] = {
    "md": lambda found, made: tables.markdown(made),
    "json": _as_json,
    "csv": lambda found, made: tables.as_csv(made),
    "html": lambda found, made: page(made),
    "trace": lambda found, made: trace(found),
}


def _saver(save: Path | None) -> Callable[[Profile], None]:
    """Keeps every round, so that a process that is killed leaves the last one."""

    def keep(found: Profile) -> None:
        if save is not None:
            record.write(save, document(found))

    return keep


def _check_place(path: Path) -> None:
    """ResourceError: the file cannot be written there, found out before minutes of measuring."""
    try:
        existed = path.exists()
        # What replaces a device or a pipe would be a file.
        if existed and not (path.is_file() or path.is_dir()):
            raise ResourceError(f"{path}: not a regular file; choose another file for --save")
        with open(path, "ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}; choose another file for --save") from None


@contextmanager
def terminated() -> Iterator[None]:
    """A termination ends the block as an interrupt does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
