"""Scales of quantized weights, learned for a whole decoder layer by signed gradient descent (`--tune`).

SignRound (Cheng et al. 2023, arXiv 2309.05516, section 3) learns what is added to a weight before it is rounded, and how much
of a group's range its grid covers, on the output of a whole layer: each number moves by the learning rate against the sign of
its gradient, and the rate falls linearly to 0.  Here the ranges alone are learned, from the grids and integers that GPTQ chose:
a factor for the scale of every group.  The target is the output of the unquantized layer over the unquantized model's states,
while the inputs come through the layers quantized before.  Of scales of four bits those of rows are learned, which they are
shares of.  Offsets from GPTQ's integers are left out: they raised the loss (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.method import Block
from edgeq.converters.rounding.linears import Delivery, LinearItem
from edgeq.converters.rounding.quantizer import Quantized, restored, split_groups
from edgeq.converters.rounding.tuning_cost import ROWS, STEPS
from edgeq.format.codec import Codec
from edgeq.format.trellis import ring_indices

RATE = 0.003
"""By which a factor moves in the first step."""
SHARE = 5
"""Time of tuning a layer over that of quantizing it, for progress only."""


@dataclass(frozen=True)
class Tuned:
    """A linear module while its scales are learned.

    quantized   its integers and the scales that were chosen
    factors     float32 [rows, groups] on the device: learned; [rows, 1] of the scales of rows that four bits are shares of
    """

    module: nn.Linear
    quantized: Quantized
    codec: Codec
    factors: Tensor

    @classmethod
    def of(cls, module: nn.Linear, quantized: Quantized, codec: Codec) -> Tuned:
        """With factors of 1."""
        learned = quantized.scale if quantized.super_scale is None else quantized.super_scale
        factors = torch.ones(learned.shape, device=module.weight.device).requires_grad_()
        return cls(module, quantized, codec, factors)

    def result(self) -> Quantized:
        """The integers with the scales as they will be stored."""
        q, factors = self.quantized, self.factors.detach().cpu()
        if q.super_scale is not None:
            return replace(q, super_scale=(q.super_scale.float() * factors).half())
        return replace(q, scale=(q.scale.float() * factors).half())

    @cached_property
    def entries(self) -> Tensor | None:
        """What the indices of a table stand for, int8 [rows, columns] on the device."""
        q = self.quantized
        if q.table is None:
            return None
        indices = torch.from_numpy(ring_indices(q.q.numpy(), self.codec.bits)) if self.codec.coupled else q.q
        return q.table.gather(1, indices.long()).to(self.factors.device)

    def centered(self) -> list[Tensor]:
        """Integers less zero points, or entries of a table: float32 [rows, groups, group size] of each span of groups of one
        size."""
        q, device = self.quantized, self.factors.device
        if self.entries is not None:
            return split_groups(self.entries.float(), self.codec)
        zero = torch.full(q.scale.shape, self.codec.constant_zero) if q.zero is None else q.zero.float()
        parts, at = split_groups(q.q.to(device).float(), self.codec), 0
        for part in parts:
            part.sub_(zero[:, at : at + part.shape[1], None].to(device))
            at += part.shape[1]
        return parts

    def scale(self) -> Tensor:
        return self.quantized.scales.to(self.factors.device)


class _Product(torch.autograd.Function):
    """x W^T of W = centered * scale * factors: the gradients of x and of the factors, while no W is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, tuned: Tuned) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tuned = tuned
        return functional.linear(x, _weight(tuned.centered(), tuned.scale() * factors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (y,), (x,), tuned = gradients, ctx.saved_tensors, ctx.tuned
        parts, scale = tuned.centered(), tuned.scale()
        of_x = y @ _weight(parts, scale * tuned.factors)
        of_weight = split_groups(y.flatten(0, -2).T @ x.flatten(0, -2), tuned.codec)
        sums = [part.mul_(of).sum(-1) for part, of in zip(parts, of_weight, strict=True)]
        return of_x, (torch.cat(sums, 1) * scale).sum_to_size(tuned.factors.shape), None


def _weight(centered: Sequence[Tensor], scale: Tensor) -> Tensor:
    found, at = [], 0
    for part in centered:
        found.append((part * scale[:, at : at + part.shape[1], None]).flatten(1))
        at += part.shape[1]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


@torch.no_grad()
def tuned_layer(block: Block, rounded: Callable[[Block], dict[str, Delivery]]) -> dict[str, Delivery]:
    """What `rounded` makes of a decoder layer, with learned scales; the states are advanced through those.

    Scales are kept only where the loss over the whole text is lower with them.
    """
    forward, exact, index = block.forward, block.exact, block.index
    assert isinstance(forward, BlockForward) and exact is not None
    exact.advance(index, block.module)
    inputs, targets = forward.hidden.clone(), exact.hidden
    deliveries = rounded(replace(block, on_part=lambda done, parts: block.on_part(done, parts * (1 + SHARE))))
    layer = {item.name: _parts(block, item, deliveries[item.name]) for item in block.linears if item.name in deliveries}
    every = [part for parts in layer.values() for part in parts]
    before = _loss(forward, index, block.module, inputs, targets)
    with installed(every):
        _descend(block, every, inputs, targets)
    kept = [part.module.weight.data for part in every]
    for part in every:
        part.module.weight.data = restored(part.result(), part.codec).to(forward.compute.device)
    if _loss(forward, index, block.module, inputs, targets) < before:
        for name, parts in layer.items():
            joined = Quantized.joined([part.result() for part in parts])
            deliveries[name] = replace(deliveries[name], quantized=(joined,))
    else:
        for part, weight in zip(every, kept, strict=True):
            part.module.weight.data = weight
    forward.hidden.copy_(forward.run(index, block.module, inputs))
    return deliveries


def _parts(block: Block, item: LinearItem, delivery: Delivery) -> list[Tuned]:
    """The modules of a linear layer with their rows of its integers."""
    (joined,), found, top = delivery.quantized, list[Tuned](), 0
    for module in block.modules(item):
        rows = slice(top, top + module.out_features)
        found.append(Tuned.of(module, joined.rows(rows), item.recipe.codec))
        top = rows.stop
    return found


@contextmanager
def installed(layer: Sequence[Tuned]) -> Iterator[None]:
    """The modules multiply by their integers and the factors as they are then."""

    def forward(part: Tuned) -> Callable[[Tensor], Tensor]:
        def product(x: Tensor) -> Tensor:
            y: Tensor = _Product.apply(x, part.factors, part)  # type: ignore[no-untyped-call]
            return y if part.module.bias is None else y + part.module.bias

        return product

    for part in layer:
        part.module.forward = forward(part)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for part in layer:
            del part.module.forward


def _descend(block: Block, layer: Sequence[Tuned], inputs: Tensor, targets: Tensor) -> None:
    """Learn the factors.  The rows of each step follow from the layer alone, so that a resumed run takes the same."""
    forward, generator = block.forward, torch.Generator().manual_seed(block.index)
    assert isinstance(forward, BlockForward)
    compute = forward.compute
    factors = [part.factors for part in layer]
    for step in range(STEPS):
        block.on_part(STEPS + SHARE * step, STEPS * (1 + SHARE))
        rows = torch.randperm(len(inputs), generator=generator)[:ROWS]
        gradients = [torch.zeros_like(factor) for factor in factors]
        portions = compute.batches(inputs[rows]), compute.batches(targets[rows]), forward.arguments(block.index, rows)
        for x, target, arguments in zip(*portions, strict=True):
            with torch.enable_grad():
                loss = (block.module(compute.put(x), **arguments) - compute.put(target)).square().sum()
                # An expert that no token reached has none.
                found = torch.autograd.grad(loss, factors, allow_unused=True)
            for total, gradient in zip(gradients, found, strict=True):
                if gradient is not None:
                    total.add_(gradient)
        for factor, gradient in zip(factors, gradients, strict=True):
            factor.sub_(RATE * (1 - step / STEPS) * gradient.sign())


def _loss(forward: BlockForward, index: int, module: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """The sum of squares between the layer's outputs and the targets."""
    compute, total = forward.compute, 0.0
    for x, target, arguments in zip(compute.batches(inputs), compute.batches(targets), forward.arguments(index), strict=True):
        total += float((module(compute.put(x), **arguments) - compute.put(target)).square().sum())
    return total
