"""Carries out a plan: step by step into a partial file, resumed where a killed run stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from edgeq.container import ModelFile
from edgeq.converters.calibrate import BlockForward
from edgeq.converters.gate import Verdict, decide
from edgeq.converters.journal import Journal
from edgeq.converters.methods.awq import awq, inspected_modules
from edgeq.converters.preflight import ConvertOptions, Plan, Step, preflight
from edgeq.converters.storage import RowReader, write
from edgeq.converters.stored import stored_tensors
from edgeq.errors import InputError
from edgeq.writer import Writer

__all__ = ["ConvertOptions", "Plan", "Progress", "convert", "preflight"]

Progress = Callable[[int, int, str, int, int], None]
"""Hears (step, steps, what is being done, bytes of the file done, bytes of the file in all) as the conversion goes on.

Steps count from 0; verification is the last one.  After a resume the first call says where it goes on."""


def convert(source: str, output: Path, options: ConvertOptions, progress: Progress) -> ModelFile:
    """The checkpoint `source` (folder or hub id) as the model file `output`, verified.

    Killed at any moment and called again with the same source and options, it goes on and ends in the same bytes.  An existing
    `output` is replaced only by the finished file.  Memory: see `edgeq.converters.preflight`.
    Errors: as `preflight`; InputError: an interrupted conversion with other source or options is in the way; ResourceError: the
    disk is full, what is written stays for the next run.
    """
    plan = preflight(source, options)
    if output.is_dir():
        raise InputError(f"{output}: a folder; give the name of the file to write")
    journal = Journal(output, plan.fingerprint())
    segments = journal.resume(options.restart)
    plan.check_disk(output, segments[-1].offset + segments[-1].length if segments else 0)
    writer = Writer(output, segments)
    try:
        plan = _run(plan, writer, journal, progress)
        file = writer.finish(plan.metadata())
    finally:
        writer.close()
    for done, size in file.verify():
        progress(len(plan.steps), len(plan.steps) + 1, "verify", done, size)
    journal.remove()
    return file


def _run(plan: Plan, writer: Writer, journal: Journal, progress: Progress) -> Plan:
    """Write what the journal does not have yet; returns the plan with what was measured on the way."""
    steps, size = plan.steps, plan.contents.nbytes
    done = sum(segment.length for segment in writer.segments)
    skip, left = 0, len(writer.segments)
    while left > 0:
        left -= sum(len(item.nbytes) for item in steps[skip].items)
        skip += 1

    def run(index: int, step: Step, read: RowReader) -> None:
        def written(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(index, len(steps) + 1, step.label, done, size)

        progress(index, len(steps) + 1, step.label, done, size)
        for item in step.items:
            write(writer, item, read, written)
        journal.record(writer.sync())

    last = len(steps) - 1
    if plan.options.method == "awq" and skip < last:
        _run_awq(plan, skip, run)
    else:
        for index in range(skip, last):
            run(index, steps[index], plan.checkpoint.rows)
    if plan.calibration is not None:
        progress(last, len(steps) + 1, "measure", done, size)
        plan = plan.decided(_measure(plan, writer))
    if skip <= last:
        run(last, plan.steps[last], plan.checkpoint.rows)
    return plan


def _run_awq(plan: Plan, skip: int, run: Callable[[int, Step, RowReader], None]) -> None:
    """All steps but the last.  Layers written by an earlier run are only run: their outputs are the inputs of the next."""
    assert plan.calibration is not None
    blocks: BlockForward | None = None
    for index, step in enumerate(plan.steps[:-1]):
        if step.layer is None:
            if index >= skip:
                run(index, step, plan.checkpoint.rows)
            continue
        blocks = blocks or BlockForward(plan.checkpoint, plan.family, plan.config, plan.calibration.rows)
        layer = blocks.load(step.layer)
        if index < skip:
            blocks.advance(step.layer, layer)
        else:
            _prepare(plan, blocks, step.layer, layer)
            run(index, step, _layer_reader(plan, step.layer, layer))
        blocks.unload(layer)


def _measure(plan: Plan, writer: Writer) -> Verdict:
    """What the head and the mode should be, from the layers already written."""
    assert plan.calibration is not None
    items = [item for step in plan.steps for item in step.items]
    stored = stored_tensors(writer.partial, writer.segments, items)
    return decide(plan.checkpoint, plan.family, plan.config, plan.calibration.rows, stored, plan.codec, plan.heads())


def _prepare(plan: Plan, blocks: BlockForward, index: int, layer: nn.Module) -> None:
    """Change `layer` for rounding; what was observed of it is let go on return, before the next layer's is collected."""
    observed = blocks.advance(index, layer, inspected_modules())
    awq(layer, plan.family.awq_mappings(plan.config), observed, plan.codec)


def _layer_reader(plan: Plan, index: int, layer: nn.Module) -> RowReader:
    """Rows of the tensors of a decoder layer as `layer` has them now."""
    prefix = f"model.layers.{index}."
    state = layer.state_dict()

    def read(name: str, start: int, stop: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = state[name.removeprefix(prefix)][start:stop].numpy()
        return rows

    return read
