"""One run of a plan: the steps that are missing are quantized and written, then the whole file is verified.

What reads calibration text on the way is in calibrated.py.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeq.converters.checkpoint.slabs import RowReader, Tensors
from edgeq.converters.method import Study
from edgeq.converters.planning.items import Deliver, write
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.steps import WriteStep
from edgeq.converters.rounding.linears import Delivery, LinearItem, RoundRows
from edgeq.converters.running.journal import Journal
from edgeq.converters.running.layer_report import LayerReport, WeightError, bits_per_weight
from edgeq.converters.running.stages import VERIFY, OnProgress, Stages
from edgeq.format.container import ModelFile
from edgeq.format.writer import Writer

Warn = Callable[[str], None]
"""Called with a line that the user should read; the conversion goes on."""
OnLayer = Callable[[LayerReport], None]
"""Called when a decoder layer is safe on the disk."""


class ConversionRun:
    """One run of a plan: writes the steps that the journal does not have yet."""

    def __init__(
        self,
        plan: ConversionPlan,
        writer: Writer,
        journal: Journal,
        on_progress: OnProgress,
        warn: Warn,
        on_layer: OnLayer,
    ) -> None:
        self.plan, self.method, self.writer, self.journal = plan, plan.method, writer, journal
        self.warn, self.on_layer = warn, on_layer
        self.skip, left = 0, len(writer.segments)
        while left > 0:
            left -= sum(len(item.nbytes) for item in plan.steps[self.skip].items)
            self.skip += 1
        self.kept = journal.study() if self.method.studies else None
        studies = self.method.studies and self.kept is None
        self.tries = plan.tries_massive and self.skip < len(plan.steps) - 1
        self.stages = Stages(plan, self.skip, studies or self.tries, on_progress)
        if 0 < self.skip < len(plan.steps):
            warn(f"continuing at {plan.steps[self.skip].label}")

    def finish(self) -> ModelFile:
        """Writes what is missing; returns the finished file, verified."""
        last = len(self.plan.steps) - 1
        tensors = self.method.tensors(self.plan.checkpoint, self.study())
        if self.plan.tower:
            tensors = self.plan.tower.tensors(tensors, {})
        if self.plan.draft:
            tensors = self.plan.draft.tensors(tensors, {})
        round_rows = self.write_layers(tensors)
        if self.skip <= last:
            # A method's parts are those of decoder layers: the head has a weight alone.
            step, rounded = self.plan.steps[last], Delivery(tensors.rows, round_rows=round_rows)
            deliver = self.deliver(step, tensors.rows, {}) if self.method.keeps_integers else lambda item: rounded
            self.write(last, step, tensors.rows, deliver)
        self.measure_file()
        file = self.writer.finish(self.plan.metadata(self.journal.provenance))
        for done, size in file.verify():
            self.stages.at(VERIFY, done / size)
        self.journal.remove()
        return file

    def study(self) -> Study:
        """The method's statistics of the whole model."""
        return {}

    def write_layers(self, tensors: Tensors) -> RoundRows | None:
        """Write all steps but the last that are missing; returns how the head is rounded, None: to nearest."""
        steps = self.plan.steps
        for index in range(self.skip, len(steps) - 1):
            self.write(index, steps[index], tensors.rows, self.deliver(steps[index], tensors.rows, {}))
            self.layer_written(index, tensors)
        return None

    def layer_written(self, index: int, tensors: Tensors) -> None:
        """Called when step `index` is safe, where no text runs through the layers while they are written."""

    def measure_file(self) -> None:
        """Called when everything is written: what is measured of it goes into the plan."""

    def deliver(self, step: WriteStep, read: RowReader, deliveries: dict[str, Delivery]) -> Deliver:
        return lambda item: deliveries.get(item.name) or step.method.deliver(item, read)

    def write(self, index: int, step: WriteStep, read: RowReader, deliver: Deliver, begun: float = 0.0) -> None:
        """Write the items of step `index`, of whose work the share `begun` is done."""
        done, size, error = 0, sum(sum(item.nbytes) for item in step.items), WeightError()

        def written(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.stages.at(index, begun + (1 - begun) * done / size)

        self.stages.at(index, begun)

        def delivered(item: LinearItem) -> Delivery:
            found = deliver(item)
            if found.provenance is not None:
                self.journal.provenance[item.name] = found.provenance
            return found

        for item in step.items:
            write(self.writer, item, read, delivered, written, error.add)
        self.journal.record(self.writer.sync())
        if step.layer is not None and not begun:
            self.report(index, weights=error.relative)

    def report(self, index: int, output: float | None = None, weights: float | None = None) -> None:
        """Report the decoder layer of step `index`, which is finished."""
        step = self.plan.steps[index]
        assert step.layer is not None
        self.stages.ended(index)
        layers = self.method.config.num_hidden_layers
        self.on_layer(LayerReport(step.layer, layers, bits_per_weight(step.items), output, weights))
