"""Constant scales of activations: the largest magnitude that a layer's inputs have over what the model is calibrated with.

They are never clipped (MQuant, arXiv 2502.00425, table 1).  Inputs are those of a block whose weights are rounded already,
after the online transform; rows of text and of pictures are apart, and a channel whose weights are not rounded does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.calibration.staged import add_largest
from edgeq.converters.method import Block
from edgeq.converters.rounding.linears import Delivery, LinearItem, Recipe
from edgeq.converters.rounding.quantizer import fake
from edgeq.format.manifest import MODALITIES
from edgeq.format.quantization import static_limit

MIN_INPUT = 1e-5
"""The largest input assumed of a layer that no sample reaches."""


@torch.no_grad()
def observed(block: Block) -> dict[str, Delivery]:
    """Constant scales for the linear layers of `block`, whose weights are rounded to nearest; advances to the next block.

    The module is left as it was.
    """
    with rounded(block):
        largest = largest_inputs(block)
        block.forward.advance(block.index, block.module)
    items = {item.name: item for item in block.linears}
    return {name: Delivery(block.read, scales=static_scales(found, items[name])) for name, found in largest.items()}


@torch.no_grad()
def largest_inputs(block: Block) -> dict[str, Tensor]:
    """max|x| of each channel that a linear layer with constant scales reads, float32 [modalities, channels] by its name."""
    items, compute = [item for item in block.linears if item.recipe.scales], block.forward.compute
    found = {item.name: torch.zeros(MODALITIES, item.columns, device=compute.device) for item in items}
    visual: Tensor | None = None

    def observer(largest: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: add_largest(largest, args[0].flatten(0, -2), visual)

    with ExitStack() as hooks:
        for item in items:
            hooks.enter_context(_hooked(block.modules(item)[0], observer(found[item.name])))
        for batch in block.forward.batches(block.index):
            visual = batch.visual
            block.module(compute.put(batch.x), **batch.arguments)
    return found


@contextmanager
def _hooked(module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...]], None]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def rounded(block: Block) -> Iterator[None]:
    """The weights of a block as they will be stored, rounded to nearest, until the end of the context."""
    linears = [(module, item.recipe) for item in block.linears for module in block.modules(item)]
    before = [linear.weight.data for linear, _ in linears]
    for linear, recipe in linears:
        linear.weight.data = as_stored(linear.weight.data, recipe)
    try:
        yield
    finally:
        for (linear, _), weight in zip(linears, before, strict=True):
            linear.weight.data = weight


def as_stored(weight: Tensor, recipe: Recipe) -> Tensor:
    """A weight of one block after a round trip through its codec, the column that is kept apart through f16."""
    assert recipe.high is None and recipe.order is None
    if not recipe.codec.integer:
        return weight
    if not recipe.split:
        return fake(weight, recipe.codec, recipe.preset)
    found = weight.clone()
    found[:, 0] = 0
    found = fake(found, recipe.codec, recipe.preset)
    found[:, 0] = weight[:, 0].half().float()
    return found


def static_scales(largest: Tensor, item: LinearItem) -> NDArray[np.float32]:
    """The scales [scales of the recipe] by which inputs of these magnitudes [modalities, channels] fill the integers."""
    recipe = item.recipe
    assert recipe.activation is not None
    reach = largest[:, int(recipe.split) :].amax(1)
    reach = reach if recipe.scales > 1 else reach.amax()[None]
    return np.asarray(reach.cpu().clamp(min=MIN_INPUT) / static_limit(recipe.activation, recipe.codec), np.float32)
