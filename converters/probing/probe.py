"""Measures, for every part of a model and a few codecs, the KL divergence at the logits with this part alone quantized.

A layer-wise error says nothing certain about the output of the model: a lower one can come with a higher divergence.  Measured
is what is wanted, and it is affordable: the hidden states that enter a layer are at hand when its turn comes, so a probe of a
layer runs only that layer and what follows it, on a few rows of the calibration text.  Weights are rounded as the conversion
rounds them, by GPTQ over all of the text: what it saves against rounding to nearest differs from part to part by a factor of
ten, so rounding to nearest would order the parts wrongly.

For every layer: the moments X^T X of the inputs of all parts in one pass of the text, the rounded weights of each part, the
outputs of the layer with each of them, and these through all later layers.  Memory: `probe_bytes` (measurements.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from edgeq.converters.budget.part_names import HEAD, TABLE
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.head import ChangedTable, Rounded, gptq_rounding, last_norm, unchanged
from edgeq.converters.calibration.moments import MOMENT_BYTES, Moments, counted
from edgeq.converters.calibration.staged import staged
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing.divergence import divergences_through
from edgeq.converters.probing.record import Divergences
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import LinearItem, Recipe, RoundRows
from edgeq.converters.rounding.quantizer import quantize, restored
from edgeq.errors import CheckpointError
from edgeq.format.codec import Codec

OnProgress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Probe:
    """One run over a model.

    missing  the parts that are measured, in the codecs of `grid`
    rows     the token rows that are run, int64 [rows, length]
    massive  what massive tokens count in moments, as in Forward
    """

    plan: ConversionPlan
    missing: Sequence[AllocationPart]
    grid: Callable[[AllocationPart], Sequence[Codec]]
    rows: Tensor
    on_progress: OnProgress
    massive: Mapping[tuple[int, str], float] = field(default_factory=dict)

    @torch.no_grad()
    def run(self) -> Iterator[Divergences]:
        """Measure, and give after every layer, and after the head and the embedding, what was measured of it.

        CheckpointError: a divergence is not finite.
        """
        layers, missing = self.plan.method.config.num_hidden_layers, self.missing
        assert isinstance(self.plan.calibration, Calibration)
        forward, short = self._forward(self.plan.calibration.rows), self._forward(self.rows)
        progress = _Progress(self)
        exact = self._through(short, 0, [short.hidden])[0]
        self._check_outputs(exact)
        for layer in range(layers):
            parts = [part for part in missing if part.layer == layer]
            if not any(part.name == HEAD or (part.layer or 0) >= layer for part in missing):
                break
            progress.layer(layer)
            module = forward.load(layer)
            names, ends = list[tuple[str, str]](), list[Tensor]()
            for part, codec, outputs in self._changed(parts, layer, module, forward, short):
                names.append((part.name, codec.name))
                ends.append(outputs)
            short.advance(layer, module)
            forward.unload(module)
            yield self._measured(names, exact, self._through(short, layer + 1, ends))
        for part in missing:
            if part.layer is None:
                progress.table(part)
                yield self._table(part, exact, self._head_rounding(forward.states) if part.name == HEAD else quantize)
        self.on_progress(1, 1, "probe")

    def _check_outputs(self, exact: Tensor) -> None:
        """CheckpointError: outputs of the last layer are not finite."""
        if not torch.isfinite(exact).all():
            raise CheckpointError(
                f"{self.plan.checkpoint.name}: outputs of its last layer on the calibration text are not finite in float32; "
                "nothing can be measured of such a model: leave out the budget, or check the weights"
            )

    def _forward(self, rows: Tensor, tensors: Tensors | None = None) -> BlockForward:
        plan, model = self.plan, tensors or self.plan.model
        found = BlockForward(plan.checkpoint, plan.method.family, plan.method.config, rows, model, plan.compute)
        found.massive = self.massive
        return found

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
        self, parts: Sequence[AllocationPart], layer: int, module: nn.Module, forward: BlockForward, short: BlockForward
    ) -> Iterator[tuple[AllocationPart, Codec, Tensor]]:
        """The outputs of decoder layer `module` over the rows of the probe, with each part in each codec of the grid.

        `forward`, the calibration text, is advanced, and `short`, the rows of the probe, is not.
        """
        moments = moments_over(forward, layer, module, [Matrix.of(item, module) for part in parts for item in part.items])
        for part in parts:
            matrices = [Matrix.of(item, module) for item in part.items]
            kept = [matrix.weight() for matrix in matrices]
            for codec, weights in self._rounded(part, matrices, kept, moments):
                for matrix, weight in zip(matrices, weights, strict=True):
                    matrix.put(weight)
                del weights, weight
                yield part, codec, short.run(layer, module, short.hidden)
            for matrix, weight in zip(matrices, kept, strict=True):
                matrix.put(weight)
        if not parts:
            forward.advance(layer, module)

    def _rounded(
        self, part: AllocationPart, matrices: Sequence[Matrix], kept: Sequence[Tensor], moments: Iterator[Moments]
    ) -> Iterator[tuple[Codec, list[Tensor]]]:
        """The weights `kept` of the matrices of a part, in each codec of the grid.

        Of one matrix they are in memory one codec at a time; of several, experts, in all, since their moments are not kept.
        """
        act_order = bool(self.plan.method.options.act_order)
        if len(matrices) == 1:
            (matrix,), (weight,) = matrices, kept
            factor = factorize(next(moments).matrix, matrix.item.recipe, act_order)
            for codec in self.grid(part):
                recipe = Recipe(codec, matrix.item.recipe.preset)
                yield codec, [quantize_matrix(weight, factor, recipe, matrix.item.title)[1]]
            return
        rounded = {codec: list[Tensor]() for codec in self.grid(part)}
        for matrix, weight in zip(matrices, kept, strict=True):
            factor = factorize(next(moments).matrix, matrix.item.recipe, act_order)
            for codec, weights in rounded.items():
                recipe = Recipe(codec, matrix.item.recipe.preset)
                weights.append(quantize_matrix(weight, factor, recipe, matrix.item.title)[1])
            del factor
        yield from rounded.items()

    def _head_rounding(self, states: Sequence[Tensor]) -> RoundRows:
        """How the conversion will round the head; `states`: outputs of the last layer over the calibration text."""
        if not self.plan.method.rounds_head:
            return quantize
        config = self.plan.method.stored_config
        norm = last_norm(config, self.plan.model)
        return gptq_rounding(states, norm, self.plan.compute, tied=config.tie_word_embeddings)

    def _table(self, part: AllocationPart, exact: Tensor, round_rows: RoundRows) -> Divergences:
        """Measure the head or the embedding, or what is both; an embedding changes what enters the first layer."""
        measured = dict[str, float]()
        for codec in self.grid(part):
            rounded = partial(_rounded, codec=codec, round_rows=round_rows)
            end = exact
            if part.name == TABLE or self.plan.method.stored_config.tie_word_embeddings:
                table = ChangedTable(self.plan.model, self.plan.method.config.vocab_size, rounded)
                changed = self._forward(self.rows, table)
                end = self._through(changed, 0, [changed.hidden])[0]
            head = rounded if part.name == HEAD else unchanged
            measured |= self._measured([(part.name, codec.name)], exact, [end], head)[part.name]
        return {part.name: measured}

    def _measured(
        self, names: Sequence[tuple[str, str]], exact: Tensor, ends: Sequence[Tensor], head: Rounded = unchanged
    ) -> Divergences:
        """The divergences of `ends`, outputs of the last layer with the part and in the codec of `names`."""
        values = divergences_through(self.plan, exact, [(end, head) for end in ends]) if ends else []
        measured: Divergences = {}
        for (part, codec), value in zip(names, values, strict=True):
            self._check(part, codec, value)
            measured.setdefault(part, {})[codec] = value
        return measured

    def _check(self, part: str, codec: str, value: float) -> None:
        """CheckpointError: a divergence is not finite."""
        if not math.isfinite(value):
            raise CheckpointError(
                f"{self.plan.checkpoint.name}: with {part} in {codec} the KL divergence on the calibration text is "
                f"{value}; bits cannot be chosen by such numbers: give the allocation with --plan, or leave out the budget"
            )


@dataclass(frozen=True)
class Matrix:
    """A linear layer of the file with the modules that its rows come from, and the path of the first of them."""

    item: LinearItem
    modules: tuple[nn.Linear, ...]
    path: str

    @classmethod
    def of(cls, item: LinearItem, module: nn.Module) -> Matrix:
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


def moments_over(forward: BlockForward, layer: int, module: nn.Module, matrices: Sequence[Matrix]) -> Iterator[Moments]:
    """The moments of the inputs of every matrix over the calibration text, tokens weighed as GPTQ weighs them; the last pass
    advances the text.

    One pass serves as many matrices as MOMENT_BYTES allow.  The module has to be as it was whenever moments are asked for.
    """
    left, run = list(matrices), staged(forward, layer, module)
    while left:
        sizes = accumulate(4 * matrix.item.columns**2 for matrix in left)
        count = max(1, sum(size <= MOMENT_BYTES for size in sizes))
        batch, left = left[:count], left[count:]
        found = [Moments(matrix.item.columns, forward.compute.device) for matrix in batch]
        observers = {
            matrix.path: partial(_add, moments, iter(run.weights(matrix.path) or ()), run.massive_share(matrix.path))
            for matrix, moments in zip(batch, found, strict=True)
        }
        forward.watch(layer, module, observers, advance=not left)
        while found:
            yield found.pop(0)


def _add(moments: Moments, weights: Iterator[Tensor], share: float, x: Tensor) -> None:
    x = x.reshape(-1, x.shape[-1])
    moments.add(x, counted(x, next(weights, None), share))


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
        tokens, short = probe.plan.calibration.tokens, probe.rows.numel()
        self._work = []
        for layer in range(layers):
            variants = sum(len(probe.grid(part)) for part in probe.missing if part.layer == layer)
            self._work.append(3 * tokens * weights[layer] + variants * short * (sum(weights[layer:]) + head))
        self._work.append(
            sum(len(probe.grid(part)) for part in probe.missing if part.layer is None) * short * (sum(weights) + 2 * head)
        )

    def layer(self, index: int) -> None:
        """Report that layer `index` begins."""
        self._report(index, f"layer {index + 1} of {len(self._work) - 1}")

    def table(self, part: AllocationPart) -> None:
        """Report that the head or the embedding begins, after the last layer."""
        self._report(len(self._work) - 1, f"the {part.name}")

    def _report(self, index: int, label: str) -> None:
        self._on_progress(sum(self._work[:index]), sum(self._work), f"probe of {label}")
