"""Whether the weights of a rotated model are rounded, or those of the model as it is (`--auto-rotate`).

Neither the errors of single layers nor the second order of the loss tells what a rotation gives (docs/quality.md, "Rotated
weights").  So it is tried: the decoder layers of both models are rounded as the conversion rounds them, one after another, over
a part of the calibration text, and the KL divergence at the logits is measured on other rows, which GPTQ has not seen there.
What was found is kept (record.py), and on the way the states after every layer: a killed run goes on after the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from edgeq.converters.calibration.compute import Compute, within_memory
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.head import unchanged
from edgeq.converters.method import Block
from edgeq.converters.methods.folded_rotation import obstacle
from edgeq.converters.methods.gptq import Gptq
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing.divergence import divergences_through
from edgeq.converters.probing.massive import massive_shares, split
from edgeq.converters.probing.probe import OnProgress
from edgeq.converters.probing.record import Record
from edgeq.converters.rounding.linears import LinearItem
from edgeq.errors import CheckpointError, ResourceError
from edgeq.system.least_recently_used import remove_least_recently_used
from edgeq.system.machine import available_bytes

KINDS: dict[str, bool | None] = {"as it is": None, "rotated": True}
"""How a line for the user calls the two models -> the option that makes them, in the order in which they are tried."""
JUDGED = 4096
"""Tokens of the calibration text that divergences are measured on, or a row."""
WINS = 0.9
"""What a rotated model may lose, at most, of what the model as it is loses: of the demo model, which has 0.92, other text gains
nothing, and a rotated file takes no adapter and may have a second table (docs/quality.md)."""
PART = "decoder layers"
MAX_STATES = 1 << 30
"""Bytes of states kept of killed runs: those that were used last stay."""


def choose_rotation(plan: ConversionPlan, on_progress: OnProgress, note: Callable[[str], None]) -> ConversionPlan:
    """`plan`, whose option `rotate` is "auto", with a rotation where its layers then lose at most WINS of what they do without.

    `note` takes a line with both numbers.  Killed and called again, it goes on after the last decoder layer.
    ResourceError: too little memory.  CheckpointError: a divergence is not finite.
    """
    if reason := obstacle(plan.method.family, plan.method.config):
        note(f"not rotated: {plan.checkpoint.name} has {reason}")
        return _with(plan, None)
    assert isinstance(plan.calibration, Calibration)
    judged, fitted = split(plan.calibration.rows, JUDGED)
    needed, available = _trial_bytes(_with(plan, True), judged.numel()), available_bytes()
    if needed > available:
        raise ResourceError(
            f"{plan.checkpoint.name}: trying a rotation needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are "
            "available; leave out --auto-rotate"
        )
    settings = _with(plan, None).fingerprint() | {"judged": list(judged.shape), "fitted": list(fitted.shape)}
    record = Record.of(settings)
    for number, (name, rotate) in enumerate(KINDS.items()):
        if name in record.divergences.get(PART, {}):
            continue

        def report(done: float, label: str, number: int = number, name: str = name) -> None:
            on_progress(number + done, len(KINDS), f"trying the model {name}, {label}")

        trial = Trial(_with(plan, rotate), judged, fitted, record.path.with_suffix(f".{number}.npz"), note)

        def attempt(compute: Compute, trial: Trial = trial, report: Callable[[float, str], None] = report) -> float:
            return replace(trial, plan=replace(trial.plan, compute=compute)).loss(report)

        record.keep({PART: {name: within_memory(plan.compute, attempt, note)}})
        trial.states.unlink(missing_ok=True)
    on_progress(1, 1, "trying a rotation")
    found = record.divergences[PART]
    wins = found["rotated"] <= WINS * found["as it is"]
    shown = ", ".join(f"{name} {found[name]:.3g}" for name in KINDS)
    where = f"on {judged.numel():,} tokens that they were not fitted to"
    note(f"{'rotated' if wins else 'not rotated'}: KL divergence of the decoder layers in nats, {where}: {shown}")
    return _with(plan, True if wins else None)


def _with(plan: ConversionPlan, rotate: bool | None) -> ConversionPlan:
    return plan.with_options(replace(plan.options, rotate=rotate))


def _trial_bytes(plan: ConversionPlan, judged: int) -> int:
    """Memory of a trial: that of a conversion, and the states of rows that are judged on, before and after the last norm."""
    return plan.memory_bytes + 4 * 4 * judged * plan.method.config.hidden_size


@dataclass(frozen=True)
class Trial:
    """The decoder layers of the model of `plan`, rounded over token rows `fitted` and measured on rows `judged`, both int64
    [rows, length].

    states   file of the states after the last layer that is done
    """

    plan: ConversionPlan
    judged: Tensor
    fitted: Tensor
    states: Path
    warn: Callable[[str], None]

    @torch.no_grad()
    def loss(self, on_share: Callable[[float, str], None]) -> float:
        """Mean KL divergence in nats of the logits, the head as it is.  CheckpointError: it is not finite."""
        plan, method = self.plan, self.plan.method
        assert isinstance(method, Gptq) and isinstance(plan.calibration, Calibration)
        layers, fitted = method.config.num_hidden_layers, replace(plan.calibration, rows=self.fitted)
        exact, changed, text = (self._forward(rows) for rows in (self.judged, self.judged, self.fitted))
        text.massive = massive_shares(replace(plan, calibration=fitted), lambda done: on_share(0, "tokens unlike the others"))
        for layer in range(self._resume(exact, changed, text), layers):
            on_share(layer / layers, f"layer {layer + 1} of {layers}")
            module = text.load(layer)
            exact.advance(layer, module)
            items = (x for step in plan.steps if step.layer == layer for x in step.items)
            linears = tuple(item for item in items if isinstance(item, LinearItem))
            method.rounded(Block(layer, module, linears, plan.model.rows, text, self.warn, text.prefix(layer)))
            changed.advance(layer, module)
            text.unload(module)
            self._keep(layer + 1, exact, changed, text)
        (found,) = divergences_through(plan, exact.hidden, [(changed.hidden, unchanged)])
        if not np.isfinite(found):
            raise CheckpointError(
                f"{plan.checkpoint.name}: the KL divergence on the calibration text is {found}; a rotation cannot be chosen by "
                "such numbers: leave out --auto-rotate, or check the weights"
            )
        return found

    def _forward(self, rows: Tensor) -> BlockForward:
        plan, method = self.plan, self.plan.method
        return BlockForward(plan.checkpoint, method.family, method.config, rows, plan.model, plan.compute)

    def _keep(self, done: int, *forwards: BlockForward) -> None:
        """Keep the states after `done` layers; where the folder cannot be written, nothing."""
        part = self.states.with_suffix(".part")
        try:
            self.states.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as file:
                np.savez(file, np.array(done), *(each.hidden.numpy() for each in forwards))
            os.replace(part, self.states)
            remove_least_recently_used(self.states.parent.glob("*.npz"), MAX_STATES)
        except OSError:
            part.unlink(missing_ok=True)

    def _resume(self, *forwards: BlockForward) -> int:
        """Take the states that are kept; how many layers are done."""
        try:
            with np.load(self.states) as kept:
                done, *states = (torch.from_numpy(kept[name]) for name in kept.files)
        except (OSError, ValueError, EOFError, BadZipFile):
            return 0
        if [x.shape for x in states] != [each.hidden.shape for each in forwards]:
            return 0
        for each, state in zip(forwards, states, strict=True):
            each.hidden.copy_(state)
        return int(done)
