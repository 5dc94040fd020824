"""Conversion of a checkpoint: what is in the way is refused, and a run (run.py) goes on where a killed one stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgeq.converters.calibration.compute import Compute, within_memory
from edgeq.converters.planning.existing import already_there
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.output import check_output
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import check_disk, preflight
from edgeq.converters.running.journal import Journal
from edgeq.converters.running.run import ConversionRun, OnLayer, Warn
from edgeq.converters.running.stages import VERIFY, OnProgress
from edgeq.format.container import ModelFile
from edgeq.format.partial import Partial
from edgeq.format.writer import Writer

__all__ = ["ConvertOptions", "ConversionResult", "OnLayer", "OnProgress", "Warn", "carry_out", "convert", "preflight"]


def convert(
    source: str, output: Path, options: ConvertOptions, on_progress: OnProgress, warn: Warn = lambda line: None
) -> ModelFile:
    """The checkpoint `source` (folder or hub id) as the model file `output`, verified.

    Killed at any moment and called again with the same source and options, it goes on and ends in the same bytes.  An existing
    .edgeq file of the same conversion is verified and returned; one of another conversion is replaced, with the option `force`,
    only by the finished file; nothing else is ever replaced.  Memory: see `edgeq.converters.planning.plan`.
    Errors: as `preflight` and `carry_out`; InputError: something else is at `output`.
    """
    check_output(source, output)
    plan = preflight(source, options)
    if options.rotate == "auto":
        from edgeq.converters.probing.rotation_choice import choose_rotation

        plan = choose_rotation(plan, on_progress, warn)
    if options.budget is not None:
        from edgeq.converters.probing.allocate import allocate

        plan = allocate(plan, on_progress, warn).plan
    return carry_out(plan, output, on_progress, warn).file


@dataclass(frozen=True)
class ConversionResult:
    """The verified file; `already_there`: it was there already, nothing was converted."""

    file: ModelFile
    already_there: bool


def carry_out(
    plan: ConversionPlan,
    output: Path,
    on_progress: OnProgress,
    warn: Warn = lambda line: None,
    on_layer: OnLayer = lambda report: None,
    on_begin: Callable[[], None] = lambda: None,
) -> ConversionResult:
    """`convert` for a plan that `preflight` made; `on_begin` is called when nothing is in the way, before anything is written.

    InputError: `output` was made by another conversion, is written by another process at this moment, or an interrupted
    conversion of other source or options is in the way; ResourceError: the disk is full, what is written stays for the next
    run.
    """
    partial = Partial(output)
    try:
        file = already_there(plan, output)
        journal = Journal(partial, plan.fingerprint())
        if file is None:
            segments = journal.resume(plan.options.restart)
            check_disk(plan, output, segments[-1].offset + segments[-1].length if segments else 0)
            on_begin()
            for line in plan.notes():
                warn(line)

            def attempt(compute: Compute) -> ModelFile:
                # Where the device ran out of memory, from the last layer that is safe.
                writer = Writer(output, journal.resume(restart=False), partial)
                kind = _run_of(plan)
                return kind(replace(plan, compute=compute), writer, journal, on_progress, warn, on_layer).finish()

            return ConversionResult(within_memory(plan.compute, attempt, warn), False)
    finally:
        partial.close()
    for done, size in file.verify():
        on_progress(done, size, VERIFY)
    if not partial.path.exists():
        journal.remove()
    return ConversionResult(file, True)


def _run_of(plan: ConversionPlan) -> type[ConversionRun]:
    """What carries out a plan; the one that runs calibration text, or studies the model, needs torch for it."""
    if plan.calibration is None and not plan.method.studies:
        return ConversionRun
    from edgeq.converters.running.calibrated import CalibratedRun

    return CalibratedRun
