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

from edgeq.errors import EdgeqError, InputError, ResourceError
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.tools.cli.terminal import note, progress, write
from edgeq.tools.commands.bench import Test
from edgeq.tools.profile import comparison, record
from edgeq.tools.profile.collect import Plan, Profile, collect, longest_decode
from edgeq.tools.profile.document import document
from edgeq.tools.profile.options import Change
from edgeq.tools.profile.output import tables
from edgeq.tools.profile.output.page import comparison_page, page
from edgeq.tools.profile.output.trace import trace
from edgeq.tools.profile.prediction.what_if import check
from edgeq.tools.profile.runs import AnyTest, Continuation, PictureTest, Setting
from edgeq.tools.profile.sustained import MINUTE

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
    drafts: tuple[DraftSource, ...] | None,
    gamma: int | None,
    operations: bool,
    sustained: float | None,
    output: str,
    save: Path | None,
    changes: tuple[Change, ...],
    baseline: Path | None,
    **options: Any,
) -> None:
    """Every combination of settings, each with every test; the results alone go to standard output.

    InputError: nothing to measure or show, or a test that the model does not take.  Exit code 130 after an interrupt: what was
    measured until then is printed and saved, marked as partial.
    """
    tests: list[AnyTest] = [Test("pp", n, d) for d in depths for n in prompts if n]
    tests += [Test("tg", n, d, b) for d in depths for n in tokens for b in batches if n]
    if drafts is not None:
        tests += [Continuation(n, draft, gamma if draft != "off" else None) for n in tokens for draft in drafts if n]
    if gamma is not None and (drafts is None or set(drafts) == {"off"}):
        raise InputError("--gamma is the length of drafts, and nothing drafts here: add --draft, such as --draft auto,off")
    tests += [PictureTest(size) for size in images or ()]
    if not tests:
        raise InputError("nothing to measure: give -p or -n a number above 0, or --image a size")
    if output == "trace" and not operations:
        raise InputError("a trace is made of operations; leave out --no-operations")
    decodes = any(isinstance(test, Test) and test.kind == "tg" and test.batch == 1 for test in tests)
    if changes and not (operations and decodes):
        raise InputError("--what-if works from the operations of decoded tokens: give -n a number above 0 and --operations")
    if changes and output in ("csv", "trace") and save is None:
        raise InputError(f"--what-if is not in {output}: choose another -o, or keep it with --save")
    for change in changes:
        check(change, options.get("target"))
    if baseline is not None and output not in ("md", "html"):
        raise InputError(f"--baseline goes with -o md or html, not with {output}: save the profile and give both to --compare")
    # Read first: minutes of measuring would be lost on a wrong file.
    before = None if baseline is None else record.read(baseline)
    settings = tuple(Setting(*chosen) for chosen in itertools.product(threads, modes or (None,), caches))
    plan = Plan(model, settings, tuple(tests), repetitions, operations, options, MINUTE * (sustained or 0))
    if sustained:
        longest_decode(plan.tests)
    if save is not None:
        _check_place(save)
    with terminated(), progress() as report:
        found = collect(plan, report, _saver(save))
    try:
        with terminated():
            made = document(found, changes)
    except EdgeqError as error:
        # What was measured is shown all the same.
        note(f"--what-if: {error}")
        made = document(found)
    except KeyboardInterrupt:
        note("--what-if: interrupted")
        found.partial = True
        made = document(found)
    if save is not None:
        record.write(save, made)
        note(f"saved in {save}")
    compared = None
    if before is not None and baseline is not None:
        try:
            compared = comparison.ProfilePair((baseline, save or Path("now")), (before, made))
        except EdgeqError as error:
            note(f"--baseline: {error}")
    write(f"{SHOWN[output](found, made, compared)}\n")
    if found.partial:
        raise click.exceptions.Exit(INTERRUPTED)


def compare(paths: tuple[Path, Path], output: str, fail_if_slower: float | None) -> None:
    """Print the comparison; as html the page of B with it.  Exit code 3: a test is slower by at least `fail_if_slower`.

    InputError: another format than md, json and html, no such file, nothing in common.  FormatError: not a profile.
    """
    if output not in ("md", "json", "html"):
        raise InputError(f"a comparison is printed as md, json or html, not as {output}")
    a, b = (record.read(path) for path in paths)
    found = comparison.ProfilePair(paths, (a, b))
    failed = fail_if_slower is not None and any(line.slower_by(fail_if_slower) for line in found.lines)
    shown: dict[str, Callable[[], str]] = {
        "md": found.markdown,
        "json": lambda: found.json(failed),
        "html": lambda: comparison_page(found),
    }
    write(f"{shown[output]()}\n")
    if failed:
        raise click.exceptions.Exit(SLOWER)


SHOWN: dict[str, Callable[[Profile, dict[str, Any], comparison.ProfilePair | None], str]] = {
    "md": lambda profile, made, compared: tables.markdown(made) + (f"\n\n{compared.markdown()}" if compared else ""),
    "json": lambda profile, made, compared: json.dumps(made, indent=1),
    "csv": lambda profile, made, compared: tables.as_csv(made),
    "html": lambda profile, made, compared: page(made, compared),
    "trace": lambda profile, made, compared: trace(profile),
}


def _saver(save: Path | None) -> Callable[[Profile], None]:
    """Keeps every round, so that a process that is killed leaves the last one."""

    def keep(profile: Profile) -> None:
        if save is not None:
            record.write(save, document(profile))

    return keep


def _check_place(path: Path) -> None:
    """ResourceError: the file cannot be written there, found out before minutes of measuring."""
    try:
        existed = path.exists()
        # What replaces a device or a pipe would be a file.
        if existed and not (path.is_file() or path.is_dir()):
            raise ResourceError(f"{path}: not a regular file; choose another file for --save")
        if existed and path.is_file() and path.stat().st_size and not record.is_profile(path):
            raise InputError(f"{path}: there is another file, which is no profile; choose another one for --save")
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
