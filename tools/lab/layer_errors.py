"""Bits chosen by the squared error of each layer's output, as many quantizers do: what the measured divergence is held against.

The error of a linear layer is tr(D M D^T) for a change D of its weight and the moments M of its inputs
(edgeq.converters.calibration.moments).  All else is as with a budget: the rounding, the codecs that are measured, the law for
the others, and the solver.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgeq.codec import Codec
from edgeq.converters.allocation.allocate import fixed_costs
from edgeq.converters.allocation.budget import Budget
from edgeq.converters.allocation.estimate import grid
from edgeq.converters.allocation.frontier import Frontier
from edgeq.converters.allocation.part_names import HEAD
from edgeq.converters.allocation.probe import Matrix, moments_over
from edgeq.converters.allocation.record import Divergences
from edgeq.converters.calibration.choose_precision import last_norm
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.moments import Moments
from edgeq.converters.columns import factorize, quantize_matrix
from edgeq.converters.families import EMBEDDING
from edgeq.converters.linears import LinearItem, Recipe
from edgeq.converters.plan import ConversionPlan
from edgeq.converters.quantizer import GPTQ


def by_layer_errors(plan: ConversionPlan, budget: Budget) -> dict[str, str]:
    """The allocation, part -> name of its codec, with the least sum of squared errors within `budget`."""
    parts = plan.parts()
    return Frontier(parts, squared_errors(plan), fixed_costs(plan, parts)).best(budget).names


@torch.no_grad()
def squared_errors(plan: ConversionPlan) -> Divergences:
    """Part -> codec -> squared error of its outputs over the calibration text with this part rounded by GPTQ."""
    assert isinstance(plan.calibration, Calibration)
    method, found, parts = plan.method, dict[str, dict[str, float]](), plan.parts()
    forward = BlockForward(plan.checkpoint, method.family, method.config, plan.calibration.rows)
    for layer in range(method.config.num_hidden_layers):
        module, own = forward.load(layer), [part for part in parts if part.layer == layer]
        matrices = [(part, Matrix.of(item, module)) for part in own for item in part.items]
        moments = moments_over(forward, layer, module, [matrix for _, matrix in matrices])
        for (part, matrix), found_moments in zip(matrices, moments, strict=True):
            errors = _errors(matrix.weight(), found_moments, grid(part), matrix.item)
            before = found.get(part.name, {})
            found[part.name] = {name: before.get(name, 0.0) + error for name, error in errors.items()}
        forward.unload(module)
    inputs = Moments(method.config.hidden_size)
    inputs.add(last_norm(method.stored_config, plan.checkpoint)(forward.hidden).flatten(0, 1))
    for part in parts:
        if part.name == HEAD:
            table = EMBEDDING if method.stored_config.tie_word_embeddings else part.items[0].tensors[0][0]
            found[HEAD] = _errors(torch.from_numpy(plan.checkpoint.whole(table)), inputs, grid(part), part.items[0])
    return found


def _errors(weight: Tensor, moments: Moments, codecs: Sequence[Codec], item: LinearItem) -> dict[str, float]:
    """The error of a weight [rows, columns] in each codec."""
    matrix = moments.matrix.clone()
    factor = factorize(moments.matrix, item.recipe, act_order=False)
    found = {}
    for codec in codecs:
        change = quantize_matrix(weight, factor, Recipe(codec, GPTQ), item.title)[1] - weight
        found[codec.name] = float(((change @ matrix) * change).sum())
    return found
