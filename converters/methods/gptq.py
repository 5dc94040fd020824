"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded one after another, and the columns still to come take over
the error that the layer's inputs would see.

With H = X^T X over the calibration tokens and U the upper Cholesky factor of its inverse, rounding column i with the error
e = (w_i - q_i) / U_ii changes every later column j by - e U_ij.  Columns go in blocks, so that most of this is one product.

A decoder layer is quantized in the order of execution, every linear layer over inputs that come through the ones already
quantized ("true sequential"); the next layer's inputs come from the quantized layer.  With act_order columns go by falling
H_ii; the grids of their groups are then fixed beforehand ("static groups"), so that nothing is left to gather at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from edgeq.codec import Codec
from edgeq.converters.calibration.forward import token_activations
from edgeq.converters.linears import Delivery, Recipe
from edgeq.converters.method import Block, Method
from edgeq.converters.methods.awq import observe, scaled_dtype, search_and_apply
from edgeq.converters.quantizer import GPTQ, Grid, Preset, Quantized, grid

BLOCK = 128
DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the mean of H's diagonal that are added to it: the next one where the one before does not make H positive."""


class Gptq(Method):
    """Group-wise GPTQ over the ranges of its own code."""

    name = "gptq"
    calibrates = True
    propagates = True
    passes = 6

    @property
    def preset(self) -> Preset:
        return GPTQ

    def memory_bytes(self, tokens: int) -> int:
        return hessian_bytes(max(self.config.hidden_size, self.config.query_size, self.config.intermediate_size))

    def scale(self, block: Block) -> None:
        """Change the layer before it is quantized; its function stays the same."""

    def prepare(self, block: Block) -> dict[str, Delivery]:
        self.scale(block)
        return gptq_layer(block, act_order=bool(self.options.act_order))


class AwqGptq(Gptq):
    """AWQ's scales, then GPTQ on the scaled weights; ranges are not clipped: GPTQ's error goes to other columns instead."""

    name = "awq+gptq"
    passes = 30

    def dtype(self, part: str, stored: str) -> str:
        return scaled_dtype(self.family.awq_mappings(self.config), part, stored)

    def memory_bytes(self, tokens: int) -> int:
        """All that a layer computes from the text is kept while its scales are searched."""
        return super().memory_bytes(tokens) + 4 * tokens * token_activations(self.config)

    def scale(self, block: Block) -> None:
        mappings, before = self.family.awq_mappings(self.config), block.forward.hidden
        observed = observe(block, mappings)
        # The next layer's inputs come from this one quantized.
        block.forward.hidden = before
        search_and_apply(block.module, mappings, observed, self.codec, self.preset)


def hessian_bytes(columns: int) -> int:
    """Memory that `columns` input channels take here: H in three orders, its factor, the inverse and its factor."""
    return 6 * 4 * columns * columns


@torch.no_grad()
def gptq_layer(block: Block, act_order: bool) -> dict[str, Delivery]:
    """Quantize every linear layer of `block` by its recipe, and advance to the next decoder layer's inputs.

    The modules are left with the weights as stored.  A layer whose H cannot be factored is rounded to nearest, with a warning.
    """
    deliveries: dict[str, Delivery] = {}
    for done, item in enumerate(block.linears):
        block.on_part(done, len(block.linears))
        if item.recipe.codec.kind != "int":
            continue
        modules = block.modules(item)
        weight = torch.cat([module.weight.data for module in modules])
        hessian = torch.zeros(item.columns, item.columns)

        def add(x: Tensor, total: Tensor = hessian) -> None:
            x = x.reshape(-1, x.shape[-1])
            total.addmm_(x.T, x)

        path = next(name for name, module in block.module.named_modules() if module is modules[0])
        block.forward.watch(block.index, block.module, {path: add})
        factor = inverse_factor(hessian, item.recipe, act_order)
        if factor is None:
            block.warn(
                f"{item.name}: rounded to nearest instead of GPTQ: no calibration token reached it, or Cholesky failed at "
                f"every damping up to {DAMPINGS[-1]}; more calibration text may help"
            )
        quantized, rounded = quantize_matrix(weight, factor, item.recipe, item.title)
        row = 0
        for module in modules:
            module.weight.data = rounded[row : row + len(module.weight)]
            row += len(module.weight)
        deliveries[item.name] = Delivery(block.read, quantized)
    block.forward.advance(block.index, block.module)
    return deliveries


@dataclass(frozen=True)
class Factor:
    """The factor of the inverse of H, and the order in which columns are rounded.

    u         float32 [columns, columns]: upper Cholesky factor of H^-1, in the order in which columns are processed
    order     i64 [columns]: the stored column of each
    dead      bool [columns], in that order: those without input, whose weights are free and become 0
    falling   the order is not the stored one
    """

    u: Tensor
    order: Tensor
    dead: Tensor
    falling: bool


def inverse_factor(hessian: Tensor, recipe: Recipe, act_order: bool) -> Factor | None:
    """From H float32 [columns, columns], which is overwritten, columns in the matrix's own order.

    None: H is 0, not positive or not finite.
    """
    if not hessian.any():
        return None
    if recipe.order is not None:
        stored = torch.from_numpy(recipe.order.astype("int64"))
        hessian = hessian[stored][:, stored]
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(hessian))
    if act_order:
        hessian, dead = hessian[order][:, order], dead[order]
    diagonal = hessian.diagonal()
    diagonal[dead] = 1
    mean, undamped = diagonal.mean(), diagonal.clone()
    for damping in DAMPINGS:
        diagonal.copy_(undamped + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            u, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(u).all():
                return Factor(u, order, dead, act_order)
    return None


@dataclass(frozen=True)
class _Group:
    """Columns start ... stop, in stored order, of one group of weight block `block`."""

    block: int
    index: int
    start: int
    stop: int


def quantize_matrix(weight: Tensor, factor: Factor | None, recipe: Recipe, title: str) -> tuple[tuple[Quantized, ...], Tensor]:
    """Weight float32 [rows, columns] -> integers of every weight block, columns in stored order, and the weight they stand for,
    columns in the matrix's own order.  Without a factor every column is rounded to nearest, which is GPTQ with H = I.

    The grid of a group comes from its weights when its first column is reached; from the original ones where there is one group
    per row, or where columns are not taken in stored order.  CheckpointError: a scale overflows f16.
    """
    positions = torch.from_numpy(recipe.order.astype("int64")) if recipe.order is not None else None
    stored = weight if positions is None else weight[:, positions]
    columns = stored.shape[1]
    blocks = recipe.blocks(columns)
    groups = [_Group(b, g, start, stop) for b, (codec, block) in enumerate(blocks) for g, start, stop in _spans(codec, block)]
    grids: list[Grid | None] = [None] * len(groups)
    for i, group in enumerate(groups):
        codec, block = blocks[group.block]
        if factor is None or factor.falling or group.stop - group.start == block.stop - block.start:
            grids[i] = _grid(stored[:, group.start : group.stop], codec, recipe.preset, title)
    group_of = torch.tensor([i for i, group in enumerate(groups) for _ in range(group.start, group.stop)])
    order = torch.arange(columns) if factor is None else factor.order
    # [columns, rows]: a column is contiguous
    w = stored.T[order].contiguous()
    if factor is not None:
        w[factor.dead] = 0
    integers = torch.empty(columns, len(weight))
    rounded = torch.empty(columns, len(weight))
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.zeros(stop - start, len(weight))
        for i in range(start, stop):
            column = int(order[i])
            g = int(group_of[column])
            found = grids[g]
            if found is None:
                codec, _ = blocks[groups[g].block]
                found = grids[g] = _grid(w[i : i + groups[g].stop - groups[g].start].T, codec, recipe.preset, title)
            q = found.integers(w[i, :, None, None])
            back = found.weights(q)[:, 0, 0]
            integers[column], rounded[column] = q[:, 0, 0], back
            if factor is not None:
                errors[i - start] = (w[i] - back) / factor.u[i, i]
                w[i + 1 : stop].addr_(factor.u[i, i + 1 : stop], errors[i - start], alpha=-1)
        if factor is not None and stop < columns:
            w[stop:].addmm_(factor.u[start:stop, stop:].T, errors, alpha=-1)
    back_in_order = torch.empty_like(weight)
    back_in_order[:, torch.arange(columns) if positions is None else positions] = rounded.T
    found_grids = [g for g in grids if g is not None]
    quantized = (_block(b, codec, block, integers, groups, found_grids) for b, (codec, block) in enumerate(blocks))
    return tuple(quantized), back_in_order


def _spans(codec: Codec, block: slice) -> Iterator[tuple[int, int, int]]:
    """(index, start, stop) of the groups of a weight block."""
    for index, start in enumerate(range(block.start, block.stop, codec.group_size or block.stop - block.start)):
        yield index, start, min(start + (codec.group_size or block.stop), block.stop)


def _grid(columns: Tensor, codec: Codec, preset: Preset, title: str) -> Grid:
    """The grid of one group: weights [rows, group size]."""
    return grid(columns[:, None], codec, preset, title)


def _block(index: int, codec: Codec, block: slice, integers: Tensor, groups: list[_Group], grids: list[Grid]) -> Quantized:
    """The integers [columns, rows] of one weight block with the grids of its groups, [rows, 1] each."""
    own = [found for group, found in zip(groups, grids, strict=True) if group.block == index]
    return Grid.joined(own, 1).stored(integers[block].T.contiguous(), codec)
