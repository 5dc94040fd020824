"""Measures, for every part of a model and a few codecs, the KL divergence at the logits with this part alone quantized.

A layer-wise error says nothing certain about the output of the model: a lower one can come with a higher divergence.  Measured
is what is wanted, and it is affordable: the hidden states that enter a layer are at hand when its turn comes, so a probe of a
layer runs only that layer and what follows it, on a few rows of the calibration text.  Weights are rounded as the conversion
rounds them, by GPTQ over all of the text: what it saves against rounding to nearest differs from part to part by a factor of
ten, so rounding to nearest would order the parts wrongly.

For every layer: the moments X^T X of its inputs, the rounded weights of its parts, the outputs of the layer with each of them,
and these through all later layers.  Memory beyond a conversion's: `probe_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from edgeq.codec import Codec
from edgeq.converters.allocation.divergence import Rounded, unchanged
from edgeq.converters.allocation.estimate import GRID_BITS
from edgeq.converters.allocation.outcome import ChangedTable, divergences_through
from edgeq.converters.allocation.parts import HEAD, Part
from edgeq.converters.allocation.record import Record
from edgeq.converters.calibration.choose_precision import last_norm
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.head import gptq_rounding
from edgeq.converters.calibration.moments import Moments
from edgeq.converters.columns import factorize, quantize_matrix
from edgeq.converters.linears import LinearItem, Recipe, RoundRows
from edgeq.converters.methods.gptq import moments_bytes
from edgeq.converters.plan import ConversionPlan
from edgeq.converters.quantizer import quantize, restored
from edgeq.converters.slabs import SLAB_BYTES
from edgeq.errors import InputError

OnProgress = Callable[[float, float, str], None]
WORK = 6.0
"""Passes of the calibration text, about, that the rows of the probe are chosen for."""
LEAST_TOKENS, MOST_TOKENS = 1024, 4096
MOMENT_BYTES = 512 << 20
"""Moments that are collected in one pass; a layer with more, of many experts, is passed several times."""


def probe_rows(plan: ConversionPlan) -> Tensor:
    """The rows of the calibration text that a probe runs, evenly spaced.  InputError: the text is too short."""
    assert plan.calibration is not None
    rows = plan.calibration.rows
    tokens, length = rows.numel(), rows.shape[1]
    if tokens < LEAST_TOKENS:
        raise InputError(
            f"calibration text {plan.calibration.source}: {tokens} tokens in rows of {length}; measuring what bits lose needs "
            f"at least {LEAST_TOKENS}: give a longer text, or more or longer rows"
        )
    # A probe runs half of the model, on average.
    probes = len(GRID_BITS) * len(plan.parts())
    wanted = min(max(LEAST_TOKENS, WORK * tokens / (0.5 * probes)), MOST_TOKENS)
    count = min(-(-int(wanted) // length), len(rows))
    return rows[[i * len(rows) // count for i in range(count)]]


def probe_bytes(plan: ConversionPlan) -> int:
    """Memory that a probe takes beyond that of the conversion (`ConversionPlan.memory_bytes`)."""
    config, parts, tokens = plan.method.config, plan.parts(), probe_rows(plan).numel()
    of_a_layer = max(sum(part.layer == layer for part in parts) for layer in range(config.num_hidden_layers))
    # What a layer gives with each part in each codec, and at the end its norm.
    states = 4 * tokens * config.hidden_size * (3 + 2 * len(GRID_BITS) * max(of_a_layer, 1))
    logits = 5 * tokens * (SLAB_BYTES // config.hidden_size)
    # The weights of a part as they were and in each codec; the conversion's own second layer is not there yet.
    weights = 4 * len(GRID_BITS) * max(part.weights for part in parts if part.layer is not None)
    return states + logits + weights + MOMENT_BYTES + moments_bytes(max(part.columns for part in parts))


@dataclass(frozen=True)
class Probe:
    """One run over a model.

    missing  the parts that are measured, in the codecs of `grid`
    rows     the token rows that are run, int64 [rows, length]
    """

    plan: ConversionPlan
    missing: Sequence[Part]
    grid: Callable[[Part], Sequence[Codec]]
    rows: Tensor
    on_progress: OnProgress

    @torch.no_grad()
    def run(self, record: Record) -> None:
        """Add the measurements to `record`, which is kept after every layer."""
        layers, missing = self.plan.method.config.num_hidden_layers, self.missing
        assert self.plan.calibration is not None
        forward, short = self._forward(self.plan.calibration.rows), self._forward(self.rows)
        progress = _Progress(self)
        exact = self._through(short, 0, [short.hidden])[0]
        for layer in range(layers):
            parts = [part for part in missing if part.layer == layer]
            if not any(part.name == HEAD or (part.layer or 0) >= layer for part in missing):
                break
            progress.layer(layer)
            module = forward.load(layer)
            names, ends = list[tuple[str, str]](), list[Tensor]()
            for part, codec, outputs in self._changed(parts, module, forward, short):
                names.append((part.name, codec.name))
                ends.append(outputs)
            forward.advance(layer, module)
            short.advance(layer, module)
            forward.unload(module)
            for (name, codec_name), value in zip(
                names, self._measured(exact, self._through(short, layer + 1, ends)), strict=True
            ):
                record.add(name, codec_name, value)
            record.keep()
        for part in missing:
            if part.name == HEAD:
                progress.layer(layers)
                self._head(part, exact, self._head_rounding(forward.hidden), record)
                record.keep()
        self.on_progress(1, 1, "probe")

    def _forward(self, rows: Tensor) -> BlockForward:
        plan = self.plan
        return BlockForward(plan.checkpoint, plan.method.family, plan.method.config, rows, compute=plan.compute)

    def _through(self, forward: BlockForward, first: int, states: list[Tensor]) -> list[Tensor]:
        """`states` [rows, length, hidden], inputs of layer `first`, after the last layer, in the same list."""
        for layer in range(first, self.plan.method.config.num_hidden_layers):
            if states:
                module = forward.load(layer)
                for place, state in enumerate(states):
                    states[place] = forward.run(layer, module, state)
                forward.unload(module)
        return states

    def _changed(
        self, parts: Sequence[Part], module: nn.Module, forward: BlockForward, short: BlockForward
    ) -> Iterator[tuple[Part, Codec, Tensor]]:
        """The outputs of decoder layer `module` over the rows of the probe, with each part in each codec of the grid."""
        for part in parts:
            matrices = [_Matrix.of(item, module) for item in part.items]
            kept = [matrix.weight() for matrix in matrices]
            rounded = {codec: list[Tensor]() for codec in self.grid(part)}
            at_once = max(1, MOMENT_BYTES // (4 * part.columns**2))
            for start in range(0, len(matrices), at_once):
                batch = matrices[start : start + at_once]
                for matrix, moments in zip(batch, _moments(forward, part.layer or 0, module, batch), strict=True):
                    factor = factorize(moments.matrix, matrix.item.recipe, bool(self.plan.method.options.act_order))
                    for codec, weights in rounded.items():
                        recipe = Recipe(codec, matrix.item.recipe.preset)
                        weights.append(quantize_matrix(matrix.weight(), factor, recipe, matrix.item.title)[1])
            for codec, weights in rounded.items():
                for matrix, weight in zip(matrices, weights, strict=True):
                    matrix.put(weight)
                yield part, codec, short.run(part.layer or 0, module, short.hidden)
            for matrix, weight in zip(matrices, kept, strict=True):
                matrix.put(weight)

    def _head_rounding(self, hidden: Tensor) -> RoundRows:
        """How the conversion will round the head; `hidden`: outputs of the last layer over the calibration text."""
        if not self.plan.method.rounds_head:
            return quantize
        return gptq_rounding(hidden, last_norm(self.plan.method.stored_config, self.plan.checkpoint), self.plan.compute)

    def _head(self, part: Part, exact: Tensor, round_rows: RoundRows, record: Record) -> None:
        """Measure the head; one that is also the embedding changes what enters the first layer too."""
        for codec in self.grid(part):
            rounded = partial(_rounded, codec=codec, round_rows=round_rows)
            end = exact
            if self.plan.method.stored_config.tie_word_embeddings:
                changed = BlockForward(
                    self.plan.checkpoint,
                    self.plan.method.family,
                    self.plan.method.config,
                    self.rows,
                    ChangedTable(self.plan.checkpoint, self.plan.method.config.vocab_size, rounded),
                    self.plan.compute,
                )
                end = self._through(changed, 0, [changed.hidden])[0]
            (value,) = self._measured(exact, [end], rounded)
            record.add(part.name, codec.name, value)

    def _measured(self, exact: Tensor, ends: list[Tensor], head: Rounded = unchanged) -> list[float]:
        return divergences_through(self.plan, exact, [(end, head) for end in ends]) if ends else []


@dataclass(frozen=True)
class _Matrix:
    """A linear layer of the file with the modules that its rows come from, and the path of the first of them."""

    item: LinearItem
    modules: tuple[nn.Linear, ...]
    path: str

    @classmethod
    def of(cls, item: LinearItem, module: nn.Module) -> _Matrix:
        paths = [name.split(".", 3)[3].removesuffix(".weight") for name, _ in item.tensors]
        found = [module.get_submodule(path) for path in paths]
        return cls(item, tuple(x for x in found if isinstance(x, nn.Linear)), paths[0])

    def weight(self) -> Tensor:
        return torch.cat([module.weight.data for module in self.modules])

    def put(self, weight: Tensor) -> None:
        row = 0
        for module in self.modules:
            module.weight.data = weight[row : row + len(module.weight)]
            row += len(module.weight)


def _moments(forward: BlockForward, layer: int, module: nn.Module, matrices: Sequence[_Matrix]) -> list[Moments]:
    """The moments of the inputs of every matrix over the calibration text."""
    found = [Moments(matrix.item.columns, forward.compute.device) for matrix in matrices]

    def add(moments: Moments, x: Tensor) -> None:
        moments.add(x.reshape(-1, x.shape[-1]))

    forward.watch(layer, module, {matrix.path: partial(add, moments) for matrix, moments in zip(matrices, found, strict=True)})
    return found


def _rounded(rows: Tensor, first: int, codec: Codec, round_rows: RoundRows) -> Tensor:
    return restored(round_rows(rows, codec, HEAD), codec)


class _Progress:
    """Progress in multiplications of weights by tokens."""

    def __init__(self, probe: Probe) -> None:
        self._on_progress = probe.on_progress
        layers = probe.plan.method.config.num_hidden_layers
        weights = [sum(part.weights for part in probe.plan.parts() if part.layer == layer) for layer in range(layers)]
        head = sum(part.weights for part in probe.plan.parts() if part.name == HEAD)
        assert probe.plan.calibration is not None
        tokens, short = probe.plan.calibration.rows.numel(), probe.rows.numel()
        self._work = []
        for layer in range(layers):
            variants = sum(len(probe.grid(part)) for part in probe.missing if part.layer == layer)
            self._work.append(3 * tokens * weights[layer] + variants * short * (sum(weights[layer:]) + head))
        self._work.append(
            sum(len(probe.grid(part)) for part in probe.missing if part.name == HEAD) * short * (sum(weights) + 2 * head)
        )

    def layer(self, index: int) -> None:
        """Report that layer `index`, or the head after the last one, begins."""
        label = f"probe of layer {index + 1} of {len(self._work) - 1}" if index < len(self._work) - 1 else "probe of the head"
        self._on_progress(sum(self._work[:index]), sum(self._work), label)
