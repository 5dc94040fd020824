"""Predicts, for every part of a deep model and a few codecs, the KL divergence at the logits with this part alone quantized.

A probe of layer after layer (probe.py) runs all that follows a layer once for each part and codec: with the depth its time
grows as the square.  Here one pass back through the model serves all of them.  To second order a change D of a weight whose
inputs are x_t costs

    KL = 1/2 E (sum_t g_t^T D x_t)^2,

where g_t is the gradient of -log p(label) at the layer's output for token t, of labels that are drawn from the model's own
prediction: the Fisher information (Amari 1998, Neural Computation 10).  Output channels are rounded apart from each other, so
that products of the errors of two of them are left out, and so are those of two tokens: what is taken is the mean of
1/2 sum_r g_tr^2 (D x_t)_r^2 over the tokens.  D is the error of GPTQ over all of the text, in some blocks of output channels,
which stand for the others.  The head and the embedding are measured as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from edgeq.converters.budget.part_names import HEAD
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.head import LogSumExp, capped, head_slabs, last_norm
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing.probe import Matrix, Probe, moments_over
from edgeq.converters.probing.record import Divergences
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import Recipe
from edgeq.converters.rounding.quantizer import quantize
from edgeq.format.codec import ROWS
from edgeq.network.config import ModelConfig

DEEP = 16
"""Decoder layers up to which every part is measured."""
SAMPLE = 12
"""Blocks of output channels of a part, at least, that are rounded, where it has so many."""
LARGE = {1: 1.6, 2: 1.2}
"""What is measured over what the second order gives, by bits: the median on the demo model (docs/budgets.md)."""
Pair = tuple[Tensor, Tensor]
"""Inputs of a linear layer and gradients at its outputs, float32 [tokens, channels]."""


def by_gradients(plan: ConversionPlan) -> bool:
    """Whether the model is deep, and each of its layers reads no more than the one before it wrote, every weight of a part for
    every token."""
    config = plan.method.config
    layers = range(config.num_hidden_layers)
    single = all(len(part.items) == 1 for part in plan.parts())
    alone = not any(config.shares_cache(layer) for layer in layers) and not config.hidden_size_per_layer_input
    return config.num_hidden_layers > DEEP and single and alone and not config.state_layers


def taken_rows(rows: int) -> Tensor:
    """The output channels that are rounded, int64: evenly spaced blocks.

    The distance is odd, so that it is not always the same place of an attention head.
    """
    blocks = torch.arange(rows).split(ROWS)
    return torch.cat(blocks[:: max(1, len(blocks) // SAMPLE) // 2 * 2 + 1])


@dataclass(frozen=True)
class GradientProbe(Probe):
    """As Probe, over a deep model; what `run` gives of layers is predicted."""

    @torch.no_grad()
    def run(self) -> Iterator[Divergences]:
        layers, missing = self.plan.method.config.num_hidden_layers, self.missing
        assert isinstance(self.plan.calibration, Calibration)
        short = self._forward(self.rows)
        inputs = list[Tensor]()
        for layer in range(layers):
            self.on_progress(layer, 8 * layers, f"probe, forward through layer {layer + 1} of {layers}")
            module = short.load(layer)
            inputs.append(short.hidden.clone())
            short.advance(layer, module)
            short.unload(module)
        exact = short.hidden
        self._check_outputs(exact)
        gradients = [gradient_at_end(self.plan.method.stored_config, self.plan.model, self.plan.compute, exact)]
        for layer in range(layers - 1, 0, -1):
            self.on_progress(2 * layers - layer, 8 * layers, f"probe, back through layer {layer + 1} of {layers}")
            module = short.load(layer)
            gradients.append(back_through(short, layer, module, inputs[layer], gradients[-1], {}))
            short.unload(module)
        gradients.reverse()
        forward = self._forward(self.plan.calibration.rows)
        for layer in range(layers):
            parts = [part for part in missing if part.layer == layer]
            if not any(part.name == HEAD or (part.layer or 0) >= layer for part in missing):
                break
            self.on_progress(2 * layers + 5 * layer, 8 * layers, f"probe of layer {layer + 1} of {layers}")
            module = forward.load(layer)
            watch = partial(back_through, short, layer, module, inputs[layer], gradients[layer])
            yield self._predicted(parts, layer, module, forward, watch)
            forward.unload(module)
        for part in missing:
            if part.layer is None:
                self.on_progress(7 * layers, 8 * layers, f"probe of the {part.name}")
                yield self._table(part, exact, self._head_rounding(forward.states) if part.name == HEAD else quantize)
        self.on_progress(1, 1, "probe")

    def _predicted(
        self,
        parts: Sequence[AllocationPart],
        layer: int,
        module: nn.Module,
        forward: BlockForward,
        watch: Callable[[dict[nn.Linear, list[Pair]]], Tensor],
    ) -> Divergences:
        """The divergences of the parts of a layer in the codecs of the grid; `forward`, the calibration text, is advanced."""
        if not parts:
            forward.advance(layer, module)
            return {}
        matrices = [Matrix.of(part.items[0], module) for part in parts]
        seen: dict[nn.Linear, list[Pair]] = {linear: [] for matrix in matrices for linear in matrix.modules}
        watch(seen)
        found: Divergences = {}
        for part, matrix, moments in zip(parts, matrices, moments_over(forward, layer, module, matrices), strict=True):
            item, weight = matrix.item, matrix.weight()
            taken = taken_rows(len(weight))
            x, gradients = inputs_and_gradients(matrix, seen)
            squares = gradients[:, taken].square()
            del gradients
            factor = factorize(moments.matrix, item.recipe, bool(self.plan.method.options.act_order))
            some, found[part.name] = weight[taken], {}
            for codec in self.grid(part):
                change = quantize_matrix(some, factor, Recipe(codec, item.recipe.preset), item.title)[1] - some
                value = 0.5 * LARGE.get(codec.bits, 1.0) * loss_of(change, x, squares) * len(weight) / len(taken)
                self._check(part.name, codec.name, value)
                found[part.name][codec.name] = value
            del factor
        return found


def inputs_and_gradients(matrix: Matrix, seen: Mapping[nn.Linear, Sequence[Pair]]) -> tuple[Tensor, Tensor]:
    """What `matrix` reads of each token, [tokens, columns], and the gradients at its outputs, [tokens, rows], as `back_through`
    has seen them."""
    x = torch.cat([x for x, _ in seen[matrix.modules[0]]])
    return x, torch.cat([torch.cat([g for _, g in seen[linear]]) for linear in matrix.modules], 1)


def loss_of(change: Tensor, x: Tensor, squares: Tensor) -> float:
    """Twice what a change [rows, columns] of weights loses by the second order, the mean over the tokens.

    x   what they read, [tokens, columns];  squares: of the gradients at their outputs, [tokens, rows]
    """
    return float(((x @ change.T).square() * squares).sum(1).double().mean())


@torch.no_grad()
def gradient_at_end(config: ModelConfig, tensors: Tensors, compute: Compute, exact: Tensor) -> Tensor:
    """The gradient of -log p(label), summed over the tokens, at outputs of the last layer float32 [rows, tokens, hidden].

    A label of every token is drawn from the prediction, by the largest logit with Gumbel's noise added, always with the same.
    """
    norm, random = last_norm(config, tensors), torch.Generator().manual_seed(0)
    with torch.enable_grad():
        states = exact.clone().requires_grad_()
        normed = norm(states).flatten(0, 1)
    h = compute.put(normed.detach())
    total, best = LogSumExp.of(len(h)), torch.full((len(h),), -torch.inf)
    labels, first = torch.zeros(len(h), dtype=torch.int64), 0
    for rows in head_slabs(tensors.rows, config, len(h)):
        logits = capped(h @ compute.put(torch.from_numpy(rows)).T, config)
        total.add(logits)
        noise = -torch.empty(logits.shape).exponential_(generator=random).log_()
        highest, place = (logits.cpu() + noise).max(1)
        labels = torch.where(highest > best, place + first, labels)
        best, first = torch.maximum(best, highest), first + len(rows)
    gradient, first = torch.zeros_like(h), 0
    norms = compute.put(total.value.float())[:, None]
    for rows in head_slabs(tensors.rows, config, len(h)):
        weight = compute.put(torch.from_numpy(rows))
        logits = capped(h @ weight.T, config)
        of_logits = (logits - norms).exp()
        inside = (labels >= first) & (labels < first + len(rows))
        at = torch.nonzero(inside)[:, 0]
        of_logits[at.to(h.device), (labels[at] - first).to(h.device)] -= 1
        if (cap := config.final_logit_softcapping) is not None:
            of_logits *= 1 - (logits / cap).square()
        gradient += of_logits @ weight
        first += len(rows)
    (found,) = torch.autograd.grad(normed, states, gradient.cpu())
    return found


def back_through(
    forward: BlockForward, layer: int, module: nn.Module, inputs: Tensor, gradient: Tensor, seen: dict[nn.Linear, list[Pair]]
) -> Tensor:
    """The gradient at `inputs` of decoder layer `module` from that at its outputs, both float32 [rows, tokens, hidden].

    seen   linear layers of the module -> takes their inputs and the gradients at their outputs, portion by portion
    """
    compute, found = forward.compute, list[Tensor]()
    portions = zip(compute.batches(inputs), compute.batches(gradient), forward.arguments(layer), strict=True)
    passed: dict[nn.Module, Pair] = {}

    def keep(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        passed[linear] = args[0].detach(), output

    hooks = [linear.register_forward_hook(keep) for linear in seen]
    for x, of_end, arguments in portions:
        with torch.enable_grad():
            begin = compute.put(x).clone().requires_grad_()
            end = module(begin, **arguments)
            outputs = [passed[linear][1] for linear in seen]
            of_begin, *of_outputs = torch.autograd.grad(end, [begin, *outputs], compute.put(of_end))
        found.append(of_begin.cpu())
        for linear, of_output in zip(seen, of_outputs, strict=True):
            seen[linear].append((passed[linear][0].flatten(0, -2), of_output.flatten(0, -2)))
    for hook in hooks:
        hook.remove()
    return torch.cat(found)
