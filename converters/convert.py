"""Carries out a plan step by step into a partial file, and resumes where a killed run stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edgeq.container import ModelFile
from edgeq.converters.calibration.choose_precision import PrecisionChoice, choose
from edgeq.converters.calibration.forward import BlockForward, WholeReader
from edgeq.converters.existing import already_there
from edgeq.converters.items import Deliver, write
from edgeq.converters.journal import Journal
from edgeq.converters.linears import Delivery, LinearItem
from edgeq.converters.method import Block, Study
from edgeq.converters.options import ConvertOptions
from edgeq.converters.output import check_output
from edgeq.converters.plan import ConversionPlan, WriteStep
from edgeq.converters.preflight import check_disk, preflight
from edgeq.converters.readback import stored_tensors
from edgeq.converters.slabs import RowReader, Tensors
from edgeq.partial import Partial
from edgeq.writer import Writer

__all__ = ["ConversionProgress", "ConvertOptions", "Converted", "Warn", "carry_out", "convert", "preflight"]

ConversionProgress = Callable[[int, int, str, int, int], None]
"""Progress callback: (step, total steps, label, bytes of the file written, total bytes).

Steps count from 0; verification is the last one.  After a resume the first call has the step at which it goes on."""
Warn = Callable[[str], None]
"""Called with a line that the user should read; the conversion goes on."""


def convert(
    source: str, output: Path, options: ConvertOptions, progress: ConversionProgress, warn: Warn = lambda line: None
) -> ModelFile:
    """The checkpoint `source` (folder or hub id) as the model file `output`, verified.

    Killed at any moment and called again with the same source and options, it goes on and ends in the same bytes.  An existing
    .edgeq file of the same conversion is verified and returned; one of another conversion is replaced, with the option `force`,
    only by the finished file; nothing else is ever replaced.  Memory: see `edgeq.converters.plan`.
    Errors: as `preflight` and `carry_out`; InputError: something else is at `output`.
    """
    check_output(source, output)
    return carry_out(preflight(source, options), output, progress, warn).file


@dataclass(frozen=True)
class Converted:
    """The verified file; `found`: it was there already, nothing was converted."""

    file: ModelFile
    found: bool


def carry_out(plan: ConversionPlan, output: Path, progress: ConversionProgress, warn: Warn = lambda line: None) -> Converted:
    """`convert` for a plan that `preflight` made.

    InputError: `output` was made by another conversion, is written by another process at this moment, or an interrupted
    conversion of other source or options is in the way; ResourceError: the disk is full, what is written stays for the next
    run.
    """
    partial = Partial(output)
    try:
        file = already_there(plan, output)
        found = file is not None
        journal = Journal(partial, plan.fingerprint())
        if file is None:
            for line in plan.notes():
                warn(line)
            segments = journal.resume(plan.options.restart)
            check_disk(plan, output, segments[-1].offset + segments[-1].length if segments else 0)
            writer = Writer(output, segments, partial)
            plan = _Run(plan, writer, journal, progress, warn).finish()
            file = writer.finish(plan.metadata())
    finally:
        partial.close()
    for done, size in file.verify():
        progress(len(plan.steps), len(plan.steps) + 1, "verify", done, size)
    if not partial.path.exists():
        journal.remove()
    return Converted(file, found)


class _Run:
    """One run of a plan: writes the steps that the journal does not have yet."""

    def __init__(
        self, plan: ConversionPlan, writer: Writer, journal: Journal, progress: ConversionProgress, warn: Warn
    ) -> None:
        self.plan, self.method, self.writer, self.journal = plan, plan.method, writer, journal
        self.progress, self.warn = progress, warn
        self.done = sum(segment.length for segment in writer.segments)
        self.skip, left = 0, len(writer.segments)
        while left > 0:
            left -= sum(len(item.nbytes) for item in plan.steps[self.skip].items)
            self.skip += 1

    def finish(self) -> ConversionPlan:
        """Returns the plan with what was measured on the way."""
        steps, last = self.plan.steps, len(self.plan.steps) - 1
        tensors = self.method.tensors(self.plan.checkpoint, self._study())
        if self.method.calibrates:
            self._calibrated(tensors)
        else:
            for index in range(self.skip, last):
                self._write(index, steps[index], tensors.rows, self._deliver(tensors.rows, {}))
        if self.plan.calibration is not None:
            self._report(last, "measure")
            self.plan = self.plan.with_choice(self._measure(tensors))
        if self.skip <= last:
            # The head is rounded as it is: a method's parts are those of decoder layers.
            self._write(last, self.plan.steps[last], tensors.rows, lambda item: Delivery(tensors.rows))
        return self.plan

    def _study(self) -> Study:
        """The method's statistics of the whole model: from the journal, or made now and kept there."""
        if not self.method.studies:
            return {}
        found = self.journal.study()
        if found is None:
            with torch.no_grad():
                layers = self.method.config.num_hidden_layers
                found = self.method.study(
                    self._forward(self.plan.checkpoint), lambda i: self._report(0, f"statistics of layer {i + 1} of {layers}")
                )
            self.journal.keep(found, self.writer.sync())
        return found

    def _forward(self, tensors: Tensors) -> BlockForward:
        assert self.plan.calibration is not None
        return BlockForward(self.plan.checkpoint, self.method.family, self.method.config, self.plan.calibration.rows, tensors)

    def _calibrated(self, tensors: Tensors) -> None:
        """All steps but the last.  Layers written by an earlier run are only run: their outputs are the inputs of the next."""
        blocks: BlockForward | None = None
        for index, step in enumerate(self.plan.steps[:-1]):
            if step.layer is None:
                if index >= self.skip:
                    self._write(index, step, tensors.rows, self._deliver(tensors.rows, {}))
                continue
            blocks = blocks or self._forward(tensors)
            self._report(index, step.label)
            finished = index < self.skip
            layer = blocks.load(step.layer, self._stored() if finished and self.method.propagates else None)
            self.method.install(step.layer, layer)
            if finished:
                blocks.advance(step.layer, layer)
            else:
                linears = tuple(item for item in step.items if isinstance(item, LinearItem))
                read = _layer_reader(step.layer, layer, tensors.rows)
                with torch.no_grad():
                    deliveries = self.method.prepare(Block(step.layer, layer, linears, read, blocks, self.warn))
                self._write(index, step, read, self._deliver(read, deliveries))
            blocks.unload(layer)

    def _deliver(self, read: RowReader, deliveries: dict[str, Delivery]) -> Deliver:
        return lambda item: deliveries.get(item.name) or self.method.deliver(item, read)

    def _stored(self) -> WholeReader:
        """Tensors of the layers already written."""
        items = [item for step in self.plan.steps for item in step.items]
        return stored_tensors(self.writer.partial, self.writer.segments, items)

    def _measure(self, tensors: Tensors) -> PrecisionChoice:
        """The bits of the head and the mode, chosen on the layers already written."""
        assert self.plan.calibration is not None
        rows = self.plan.calibration.rows
        return choose(self.method, self.plan.checkpoint, tensors, rows, self._stored(), self.plan.heads())

    def _write(self, index: int, step: WriteStep, read: RowReader, deliver: Deliver) -> None:
        def written(nbytes: int) -> None:
            self.done += nbytes
            self._report(index, step.label)

        self._report(index, step.label)
        for item in step.items:
            write(self.writer, item, read, deliver, written)
        self.journal.record(self.writer.sync())

    def _report(self, index: int, label: str) -> None:
        self.progress(index, len(self.plan.steps) + 1, label, self.done, self.plan.contents.nbytes)


def _layer_reader(index: int, layer: nn.Module, others: RowReader) -> RowReader:
    """Rows of the tensors of a decoder layer as `layer` has them when asked; what is not in it comes from `others`."""
    prefix = f"model.layers.{index}."

    def read(name: str, start: int, stop: int) -> NDArray[np.float32]:
        found = layer.state_dict().get(name.removeprefix(prefix))
        rows: NDArray[np.float32] = others(name, start, stop) if found is None else found[start:stop].numpy()
        return rows

    return read
