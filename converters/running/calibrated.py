"""A run that reads calibration text: layers prepared or measured on it, the bits of the head, what the whole file lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.calibration.compute import MEASURED_ROWS
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.expert_forward import TEXTS, ExpertForward
from edgeq.converters.calibration.forward import BlockForward, Forward, TokenForward, WholeReader
from edgeq.converters.calibration.head import Rounded, gptq_rounding, last_norm
from edgeq.converters.calibration.sample_forward import SampleForward
from edgeq.converters.calibration.samples import PictureSamples
from edgeq.converters.calibration.tower_forward import TowerForward
from edgeq.converters.checkpoint.slabs import RowReader, Tensors
from edgeq.converters.method import Block, Method, Study, features_of
from edgeq.converters.planning.plan import PrecisionChoice
from edgeq.converters.probing.massive import Shares, massive_shares
from edgeq.converters.probing.measurements import probe_rows
from edgeq.converters.probing.outcome import divergence_of_file
from edgeq.converters.rounding.linears import LinearItem, RoundRows
from edgeq.converters.rounding.quantizer import quantize
from edgeq.converters.running.choose_precision import choose, choose_for_embedding
from edgeq.converters.running.layer_report import ROWS, output_error
from edgeq.converters.running.readback import stored_rows, stored_tensors
from edgeq.converters.running.run import ConversionRun
from edgeq.converters.running.stages import DIVERGENCE, MEASURE, PREPARED, STUDY
from edgeq.network.config import VisionConfig
from edgeq.network.policy_stack import PolicyStack


class CalibratedRun(ConversionRun):
    """A run of a plan with calibration text, or of a method that studies the model."""

    def write_layers(self, tensors: Tensors) -> RoundRows | None:
        round_rows: RoundRows | None = None
        config = self.method.stored_config
        if self.method.calibrates:
            blocks = self._calibrated(tensors)
            if self.method.rounds_head and self.method.config.pooling is None:
                norm = last_norm(config, tensors)
                round_rows = gptq_rounding(blocks.states, norm, self.plan.compute, tied=config.tie_word_embeddings)
        else:
            super().write_layers(tensors)
        if self.plan.calibration is not None:
            # A tied head is the embedding too.  What its rounding costs there is not measured, and GPTQ, which goes by the
            # head's inputs above all, loses more there: its bits are chosen as for rounding to nearest.
            by_head = quantize if config.tie_word_embeddings else round_rows or quantize
            self.plan = self.plan.with_choice(self._measure(tensors, by_head))
        return round_rows

    def layer_written(self, index: int, tensors: Tensors) -> None:
        number = self.plan.steps[index].layer or 0
        # Of a layer without keys and values of its own those that it reads are not at hand.
        if index == self.stages.trial_after and not self.method.config.shares_cache(number):
            self._try_pass(number, tensors)

    def measure_file(self) -> None:
        if self.plan.options.allocation is not None and self.plan.calibration is not None:
            self.plan = replace(self.plan, divergence=self._divergence())

    def study(self) -> Study:
        """The method's statistics of the whole model: from the journal, or made now and kept there."""
        if not self.method.studies:
            return {}
        found = self.kept
        if found is None:
            layers = self.method.config.num_hidden_layers
            with torch.no_grad():
                found = self.method.study(
                    self._forward(self.plan.checkpoint),
                    lambda i: self.stages.at(STUDY, i / layers, f"statistics of layer {i + 1} of {layers}"),
                )
            self.journal.keep(found, self.writer.sync())
        return found

    def _forward(
        self,
        tensors: Tensors,
        calibration: Calibration | PictureSamples | None = None,
        features: Sequence[Tensor] | None = None,
    ) -> TokenForward:
        """What enters the first layer of the decoder.

        calibration   None: the plan's
        features      of its pictures; None: those of the tower as stored
        """
        calibration = calibration or self.plan.calibration
        assert calibration is not None
        if isinstance(calibration, Calibration):
            plan, method = self.plan, self.method
            return BlockForward(plan.checkpoint, method.family, method.config, calibration.rows, tensors, plan.compute)
        tower = self.plan.tower
        assert tower is not None
        if features is None:
            features = features_of(tower, calibration.pictures, self.plan.checkpoint, self._stored())
        return SampleForward(self.method.family, self.method.config, calibration.samples, features, tensors)

    def _calibrated(self, tensors: Tensors) -> TokenForward:
        """All steps but the last.  Blocks written by an earlier run are only run: their outputs are the inputs of the next.

        Returns the run through the decoder, whose states are now the outputs of the last layer.
        """
        tower: TowerForward | None = None
        decoder: TokenForward | None = None
        expert: ExpertForward | None = None
        exact: BlockForward | None = None
        shares: Shares = {}
        if self.tries:
            shares = massive_shares(self.plan, lambda done: self.stages.at(STUDY, done, "tokens unlike the others"))
        for index, step in enumerate(self.plan.steps[:-1]):
            method, finished, forward = step.method, index < self.skip, cast(Forward | None, None)
            if step.block is not None and method.calibrates:
                if isinstance(method.stack, PolicyStack):
                    forward = expert = expert or self._expert_forward(method, tensors)
                elif step.layer is None:
                    forward = tower = tower or self._tower_forward(method, tensors)
                else:
                    forward = decoder = decoder or self._forward(tensors, features=tower.states if tower else None)
                    forward.massive = shares
            if step.block is None or forward is None:
                if not finished:
                    self.write(index, step, tensors.rows, self.deliver(step, tensors.rows, {}))
                continue
            if exact is None and step.layer is not None and method.options.tune:
                exact = self._exact(tensors)
            self.stages.at(index, label=f"reading {step.label} again" if finished else None)
            block = forward.load(step.block, self._stored() if finished and method.propagates else None)
            method.install(step.block, block)
            if finished:
                forward.advance(step.block, block)
                forward.unload(block)
                if exact is not None:
                    unquantized = exact.load(step.block)
                    exact.advance(step.block, unquantized)
                    exact.unload(unquantized)
            else:
                self._prepared(index, step.block, block, forward, tensors, exact)
        assert decoder is not None
        return decoder

    def _exact(self, tensors: Tensors) -> BlockForward:
        """The unquantized decoder, which tuned layers are held to."""
        found = self._forward(tensors)
        assert isinstance(found, BlockForward)
        return found

    def _expert_forward(self, method: Method, tensors: Tensors) -> ExpertForward:
        """What enters the expert, after a few texts that the decoder reads as it is stored, or as the method propagates."""
        assert isinstance(method.stack, PolicyStack) and self.plan.calibration is not None
        decoder = self._forward(tensors, self.plan.calibration.few(TEXTS))
        # Pictures are not calibrated with where a prompt sees itself both ways.
        assert isinstance(decoder, BlockForward)
        read = self._stored() if method.propagates else None
        return ExpertForward(method.family, method.stack, decoder, tensors, read)

    def _tower_forward(self, method: Method, tensors: Tensors) -> TowerForward:
        assert isinstance(self.plan.calibration, PictureSamples) and isinstance(method.stack, VisionConfig)
        return TowerForward(method.family, method.stack, self.plan.calibration.pictures, tensors)

    def _prepared(
        self, index: int, number: int, block: nn.Module, forward: Forward, tensors: Tensors, exact: BlockForward | None
    ) -> None:
        """Prepare, write and report block `number` of its stack, step `index` of the plan."""
        step = self.plan.steps[index]
        linears = tuple(item for item in step.items if isinstance(item, LinearItem))
        prefix = forward.prefix(number)
        read = _block_reader(prefix, block, tensors.rows)
        # A copy: the states are advanced in place.  Blocks of a tower are not reported.
        few = None if step.layer is None else forward.few(ROWS)
        before = few.outputs(number, block) if few else []

        def on_part(done: int, parts: int) -> None:
            self.stages.at(index, PREPARED * done / parts)

        with torch.no_grad():
            deliveries = step.method.prepare(Block(number, block, linears, read, forward, self.warn, prefix, on_part, exact))
        self.write(index, step, read, self.deliver(step, read, deliveries), PREPARED)
        forward.unload(block)
        if few is None:
            return
        with self.stages.passing():
            stored = forward.load(number, self._stored())
            step.method.install(number, stored)
            after = few.outputs(number, stored)
        self.report(index, output=output_error(*(_flat(states) for states in (few.states, before, after))))
        forward.unload(stored)

    def _stored(self) -> WholeReader:
        """Tensors of the layers already written."""
        items = [item for step in self.plan.steps for item in step.items]
        return stored_tensors(self.writer.partial, self.writer.segments, items)

    def _measure(self, tensors: Tensors, round_rows: RoundRows) -> PrecisionChoice:
        """The bits of the head and the mode, chosen on the layers already written."""
        assert self.plan.calibration is not None
        few = self.plan.calibration.few(MEASURED_ROWS)
        self.stages.at(MEASURE)
        if self.method.config.pooling is not None:
            return choose_for_embedding(
                self.method,
                tensors,
                lambda: self._forward(tensors, few),
                self._stored(),
                self.plan.codecs(),
                lambda share: self.stages.at(MEASURE, share),
            )
        return choose(
            self.method,
            tensors,
            lambda: self._forward(tensors, few),
            self._stored(),
            self.plan.heads(),
            self.plan.codecs(),
            on_share=lambda share: self.stages.at(MEASURE, share),
            round_rows=round_rows,
            compute=self.plan.compute,
        )

    def _divergence(self) -> float:
        """What all that is written lost, on a few rows of the calibration text."""
        assert self.plan.calibration is not None
        tied = self.method.stored_config.tie_word_embeddings
        return divergence_of_file(
            self.plan,
            probe_rows(self.plan),
            self._stored(),
            self._stored_rows("head"),
            self._stored_rows("head" if tied else "embedding"),
            lambda share: self.stages.at(DIVERGENCE, share),
        )

    def _stored_rows(self, name: str) -> Rounded:
        """Rows of head or embedding as written."""
        items = [item for step in self.plan.steps for item in step.items]
        read = stored_rows(self.writer.partial, self.writer.segments, items, name)
        return lambda rows, first: torch.from_numpy(read(name, first, first + len(rows)))

    def _try_pass(self, number: int, tensors: Tensors) -> None:
        """Run the first layer as the measurement at the end will run all, so that the time left is known from here on."""
        assert self.plan.calibration is not None
        forward = self._forward(tensors, self.plan.calibration.few(MEASURED_ROWS))
        with self.stages.passing():
            layer = forward.load(number, self._stored())
            self.method.install(number, layer)
            forward.outputs(number, layer)
        forward.unload(layer)


def _flat(states: Sequence[Tensor]) -> Tensor:
    """[tokens, hidden]"""
    return torch.cat([state.flatten(0, -2) for state in states])


def _block_reader(prefix: str, block: nn.Module, others: RowReader) -> RowReader:
    """Rows of the tensors of a block as it has them when asked; what is not in it comes from `others`."""

    def read(name: str, start: int, stop: int) -> NDArray[np.float32]:
        found = block.state_dict().get(name.removeprefix(prefix))
        rows: NDArray[np.float32] = others(name, start, stop) if found is None else found[start:stop].cpu().numpy()
        return rows

    return read
