"""The measurements of a model that a budget is met by: on which rows of the text, in how much memory, and kept between runs.

A probe (probe.py) makes those that the record (record.py) does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from edgeq.converters.budget.budget import MAX_TOKENS
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.calibration.compute import BATCH_ROWS, Compute, measurement_bytes, within_memory
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.moments import MOMENT_BYTES
from edgeq.converters.checkpoint.slabs import BASELINE, SLAB_BYTES
from edgeq.converters.methods.folded_rotation import rotating_bytes
from edgeq.converters.methods.gptq import moments_bytes
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing.estimate import grid
from edgeq.converters.probing.gradients import GradientProbe, by_gradients
from edgeq.converters.probing.massive import massive_shares
from edgeq.converters.probing.probe import OnProgress, Probe
from edgeq.converters.probing.record import Divergences, Record
from edgeq.converters.rounding.columns import SLAB_ELEMENTS
from edgeq.errors import InputError, ResourceError
from edgeq.format.codec import Codec
from edgeq.system.machine import available_bytes

WORK = 7.0
"""Passes of the calibration text through the decoder layers, about, that running the rows of the probe may take."""
MIN_TOKENS = 1024


@dataclass(frozen=True)
class Measurements:
    """What is measured of the model of `plan`, of `parts` of it, on token `rows` int64 [rows, length]."""

    plan: ConversionPlan
    parts: Sequence[AllocationPart]
    rows: Tensor
    record: Record

    @classmethod
    def of(cls, plan: ConversionPlan) -> Measurements:
        """Those that are kept.  InputError: the calibration text is too short for more."""
        refuse_short_text(plan)
        return cls(plan, plan.parts(), probe_rows(plan), record_of(plan))

    @property
    def divergences(self) -> Divergences:
        return self.record.divergences

    def measure(self, codecs: Mapping[str, tuple[Codec, ...]], on_progress: OnProgress, warn: Callable[[str], None]) -> None:
        """Add those of parts in codecs, by part, that are not there yet.

        ResourceError: too little memory.  Other errors: as `Probe.run`.
        """

        def missing() -> list[AllocationPart]:
            wanted = {part.name: {codec.name for codec in codecs.get(part.name, ())} for part in self.parts}
            return [part for part in self.parts if not wanted[part.name] <= set(self.divergences.get(part.name, {}))]

        def attempt(compute: Compute) -> None:
            # One that ran out of memory has kept what it measured.
            plan = replace(self.plan, compute=compute)
            probe = GradientProbe if by_gradients(plan) else Probe
            shares = massive_shares(plan)
            for measured in probe(plan, missing(), lambda part: codecs[part.name], self.rows, on_progress, shares).run():
                self.record.keep(measured)

        if not missing():
            return
        needed, available = probe_bytes(self.plan), available_bytes()
        if needed > available:
            raise ResourceError(
                f"{self.plan.checkpoint.name}: measuring for a budget needs {needed / 1e9:.1f} GB of memory, "
                f"{available / 1e9:.1f} GB are available; --plan takes an allocation that was made elsewhere"
            )
        within_memory(self.plan.compute, attempt, warn)
        if not self.record.keep():
            warn(f"{self.record.path.parent}: cannot write there; what was measured is not kept for the next run")


def record_of(plan: ConversionPlan) -> Record:
    """What is kept of the model."""
    apart = ("option budget", "option allocation")
    settings = {key: value for key, value in plan.fingerprint().items() if key not in apart}
    return Record.of(settings | {"probe rows": list(probe_rows(plan).shape)})


def refuse_short_text(plan: ConversionPlan) -> None:
    """InputError: the calibration text is too short for a probe."""
    assert isinstance(plan.calibration, Calibration)
    tokens, length = plan.calibration.tokens, plan.calibration.longest
    if tokens < MIN_TOKENS:
        raise InputError(
            f"calibration text {plan.calibration.source}: {tokens} tokens in rows of {length}; measuring what bits lose needs "
            f"at least {MIN_TOKENS}: give a longer text, or more or longer rows"
        )


def probe_rows(plan: ConversionPlan) -> Tensor:
    """The rows of the calibration text that divergences are measured on, evenly spaced: all rows of a short text."""
    assert isinstance(plan.calibration, Calibration)
    rows = plan.calibration.rows
    tokens, length = rows.numel(), rows.shape[1]
    work = MIN_TOKENS if by_gradients(plan) else WORK * tokens / _probes(plan.parts())
    wanted = min(max(MIN_TOKENS, work), MAX_TOKENS)
    count = min(-(-int(wanted) // length), len(rows))
    return rows[[i * len(rows) // count for i in range(count)]]


def _probes(parts: Sequence[AllocationPart]) -> float:
    """The work of probing every part, per token, in passes through all decoder layers: each runs its layer, those after it, and
    the head."""
    used = {part.name: float(part.weights * part.share) for part in parts}
    decoder = sum(used[part.name] for part in parts if part.layer is not None)
    first = {part.layer or 0 for part in parts}
    after = {layer: sum(used[x.name] for x in parts if x.layer is None or x.layer >= layer) for layer in first}
    return sum(len(grid(part)) * after[part.layer or 0] for part in parts) / decoder


def probe_bytes(plan: ConversionPlan) -> int:
    """The promise of a probe: anonymous memory that it will not exceed."""
    assert isinstance(plan.calibration, Calibration)
    config, parts, tokens = plan.method.config, plan.parts(), probe_rows(plan).numel()
    of_a_layer = max(sum(part.layer == layer for part in parts) for layer in range(config.num_hidden_layers))
    # What a layer gives with each part in each codec, and at the end its norm.
    codecs = max(len(grid(part)) for part in parts)
    states = 4 * tokens * config.hidden_size * (3 + 2 * codecs * max(of_a_layer, 1))
    _, logits = measurement_bytes(config, tokens)
    rotating = rotating_bytes(config.hidden_size, plan.method.widest) if plan.options.rotate else 0
    first, working = [part for part in parts if part.layer == 0], list[int]()
    for place, part in enumerate(first):
        # Moments of this part and those after it; its factor; its weights as they were, rounded before, and rounded now: of one
        # matrix one codec at a time, of many, experts, all codecs.
        left = sum(4 * len(x.items) * x.columns**2 for x in first[place:])
        weights = 4 * part.weights * (2 if len(part.items) == 1 else 1 + codecs)
        working.append(max(min(MOMENT_BYTES, left), 4 * part.columns**2) + 4 * part.columns**2 + weights)
    if by_gradients(plan):
        # Inputs and gradients of every layer, those of the linear layers of one, and what a layer keeps on its way back.
        ends = sum(part.columns + part.weights // part.columns for part in first)
        states = 4 * tokens * (config.hidden_size * (4 + 2 * config.num_hidden_layers) + 3 * ends)
        states += plan.batch_bytes(BATCH_ROWS)
    layer = plan.layer_bytes + max(plan.batch_bytes(BATCH_ROWS), 6 * 4 * SLAB_ELEMENTS) + max(working)
    head = logits + 6 * SLAB_BYTES + moments_bytes(config.hidden_size)
    found = BASELINE + rotating + 4 * plan.calibration.tokens * config.hidden_size + states + max(layer, head)
    # Before it, it is tried what massive tokens count, which the conversion has room for.
    return max(found, plan.memory_bytes) if plan.tries_massive else found
