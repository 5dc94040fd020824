"""Constant scales of activations: the largest magnitude that a layer's inputs have over the calibration text.

They are never clipped (MQuant, arXiv 2502.00425, table 1).  Inputs are those of a layer whose weights are rounded already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.codec import Codec
from edgeq.converters.linears import LinearItem
from edgeq.converters.method import Block
from edgeq.converters.quantizer import Preset, fake
from edgeq.quantization import static_limit

SMALLEST = 1e-5
"""The largest input assumed of a layer that the text never reaches."""


@torch.no_grad()
def largest_inputs(block: Block, items: Sequence[LinearItem], preset: Preset) -> dict[str, float]:
    """max|x| of what each of `items` reads, with their weights rounded as they will be; the module is left as it was."""
    found = {item.name: 0.0 for item in items}
    paths = {id(module): path for path, module in block.module.named_modules()}

    def observer(name: str) -> Callable[[Tensor], None]:
        def add(x: Tensor) -> None:
            found[name] = max(found[name], float(x.abs().max()))

        return add

    observers = {paths[id(block.modules(item)[0])]: observer(item.name) for item in items}
    with rounded([(module, item.recipe.codec) for item in items for module in block.modules(item)], preset):
        block.forward.watch(block.index, block.module, observers)
    return found


@contextmanager
def rounded(linears: Sequence[tuple[nn.Linear, Codec]], preset: Preset) -> Iterator[None]:
    """The weights of `linears` after a round trip through their codecs, until the end of the block."""
    before = [linear.weight.data for linear, _ in linears]
    for linear, codec in linears:
        linear.weight.data = fake(linear.weight.data, codec, preset)
    try:
        yield
    finally:
        for (linear, _), weight in zip(linears, before, strict=True):
            linear.weight.data = weight


def static_scale(largest: float, item: LinearItem) -> NDArray[np.float32]:
    """The one scale [1] by which inputs of that magnitude fill the integers of the layer."""
    assert item.recipe.activation is not None
    return np.array([max(largest, SMALLEST) / static_limit(item.recipe.activation, item.recipe.codec)], np.float32)
