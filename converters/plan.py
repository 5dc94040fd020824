"""Carries out a plan: step by step into a partial file, resumed where a killed run stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from edgeq.container import ModelFile
from edgeq.converters.calibrate import BlockForward
from edgeq.converters.journal import Journal
from edgeq.converters.methods.awq import awq, inspected_modules
from edgeq.converters.preflight import ConvertOptions, Plan, Step, preflight
from edgeq.converters.storage import RowReader, write
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
        _run(plan, writer, journal, progress)
        file = writer.finish(plan.metadata())
    finally:
        writer.close()
    for done, size in file.verify():
        progress(len(plan.steps), len(plan.steps) + 1, "verify", done, size)
    journal.remove()
    return file


def _run(plan: Plan, writer: Writer, journal: Journal, progress: Progress) -> None:
    """Write what the journal does not have yet."""
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

    if plan.calibration is None:
        for index in range(skip, len(steps)):
            run(index, steps[index], plan.checkpoint.rows)
        return
    blocks: BlockForward | None = None
    last_layer = max(index for index, step in enumerate(steps) if step.layer is not None)
    for index, step in enumerate(steps):
        if step.layer is None or skip > last_layer:
            if index >= skip:
                run(index, step, plan.checkpoint.rows)
            continue
        blocks = blocks or BlockForward(plan.checkpoint, plan.family, plan.config, plan.calibration.rows)
        progress(index, len(steps) + 1, step.label, done, size)
        layer = blocks.load(step.layer)
        if index < skip:
            # Written by an earlier run: only its outputs are needed.
            blocks.advance(step.layer, layer)
        else:
            _prepare(plan, blocks, step.layer, layer)
            run(index, step, _layer_reader(plan, step.layer, layer))
        blocks.unload(layer)


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
