"""What massive tokens count in the moments of GPTQ, for every linear layer that reads some.

In a few layers the input of one token, most often the first, has thousands of times the squared norm of the others (Sun et
al. 2024, arXiv 2402.17762).  It is then most of the moments, and GPTQ changes the weights to keep that one output, at the cost
of all the others.  In some layers it is worth that, in others not, and neither its norm nor the norm of a gradient tells
which: it depends on the output channels that err (docs/quality.md).

So it is tried.  One pass back through the model, over a few rows of the text, gives the gradients g_t of the log-likelihood at
the layer's output for labels drawn from the model's own prediction.  The weights are rounded by GPTQ over other rows, with the
massive tokens counting each of SHARES, and the share is taken whose change D loses least by the second order, the mean of
1/2 sum_r g_tr^2 (D x_t)_r^2 over the tokens (gradients.py).  No row is judged on that its GPTQ has seen, unless the text has
no others.  A model without such tokens costs a pass of these few rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.moments import Moments, massive
from edgeq.converters.planning.plan import FITTED, JUDGED, ConversionPlan
from edgeq.converters.probing.gradients import Pair, back_through, gradient_at_end, inputs_and_gradients, loss_of
from edgeq.converters.probing.probe import Matrix
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import LinearItem

SHARES = (1 / 1024, 1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0)
RARE = 1 / 64
"""Share of the tokens that are massive, at most: of more they are no exception."""
Shares = Mapping[tuple[int, str], float]
"""(Decoder layer, path of the first module of a linear layer) -> what a massive token counts; 1: not there."""


@torch.no_grad()
def massive_shares(plan: ConversionPlan, on_share: Callable[[float], None] = lambda share: None) -> Shares:
    """The shares for the layers of `plan`, as the checkpoint has them; `on_share` takes the share of the work that is done.

    Nothing where massive tokens are not looked for: `ConversionPlan.tries_massive`.
    """
    if not plan.tries_massive:
        return {}
    assert isinstance(plan.calibration, Calibration)
    judged, fitted = split(plan.calibration.rows)
    layers = plan.method.config.num_hidden_layers
    # On the way back a layer keeps what it computed from a batch.
    one = replace(plan.compute, rows=1)
    forward, inputs, found = _forward(plan, judged, one), list[Tensor](), dict[int, list[LinearItem]]()
    for layer in range(layers):
        on_share(layer / layers / 4)
        module = forward.load(layer)
        inputs.append(forward.hidden.clone())
        if items := _reading_massive(plan, forward, layer, module):
            found[layer] = items
        forward.unload(module)
    if not found:
        return {}
    gradients = {layers: gradient_at_end(plan.method.config, plan.checkpoint, plan.compute, forward.hidden)}
    for layer in range(layers - 1, min(found), -1):
        on_share(0.75 - layer / layers / 2)
        module = forward.load(layer)
        gradients[layer] = back_through(forward, layer, module, inputs[layer], gradients[layer + 1], {})
        if layer not in found:
            # Needed no more; those of other layers are.
            del gradients[layer + 1]
        forward.unload(module)
    text, shares = _forward(plan, fitted, plan.compute), dict[tuple[int, str], float]()
    for layer in range(max(found) + 1):
        on_share(0.75 + layer / layers / 4)
        module = text.load(layer)
        for matrix in [Matrix.of(item, module) for item in found.get(layer, ())]:
            seen: dict[nn.Linear, list[Pair]] = {linear: [] for linear in matrix.modules}
            back_through(forward, layer, module, inputs[layer], gradients[layer + 1], seen)
            moments, tokens = _apart(text, layer, module, matrix.path)
            if len(tokens) and (share := _best(plan, matrix, moments, tokens, seen)) != 1:
                shares[layer, matrix.path] = share
        text.advance(layer, module)
        text.unload(module)
    return shares


def split(rows: Tensor, most: int = JUDGED) -> tuple[Tensor, Tensor]:
    """Rows that are judged on, and others that GPTQ has, both evenly spaced: at most `most` and FITTED tokens, and one row at
    least.  Of a text of one row both are that."""
    count, length = rows.shape
    judged = [i * count // n for n in [max(1, min(most // length, count // 2))] for i in range(n)]
    others = [i for i in range(count) if i not in judged] or judged
    taken = max(1, min(FITTED // length, len(others)))
    return rows[judged], rows[[others[i * len(others) // taken] for i in range(taken)]]


def _forward(plan: ConversionPlan, rows: Tensor, compute: Compute) -> BlockForward:
    """The source, which no method has changed."""
    return BlockForward(plan.checkpoint, plan.method.family, plan.method.config, rows, compute=compute)


def _reading_massive(plan: ConversionPlan, forward: BlockForward, layer: int, module: nn.Module) -> list[LinearItem]:
    """The linear layers of decoder layer `module` that are rounded and whose inputs are massive in some tokens, few; `forward`
    is advanced."""
    items = [
        x for step in plan.steps for x in step.items if isinstance(x, LinearItem) and x.name.startswith(f"layers.{layer}.")
    ]
    # An expert reads the tokens that are routed to it alone.
    rounded = [item for item in items if item.recipe.codec.integer and ".experts." not in item.name]
    paths = [Matrix.of(item, module).path for item in rounded]
    counts = {path: torch.zeros(2, dtype=torch.int64) for path in paths}

    def count(path: str, x: Tensor) -> None:
        of_batch = massive(x.reshape(-1, x.shape[-1]))
        counts[path] += torch.tensor([int(of_batch.sum()), len(of_batch)])

    forward.watch(layer, module, {path: partial(count, path) for path in counts}, advance=True)
    return [item for item, path in zip(rounded, paths, strict=True) if 0 < counts[path][0] <= RARE * counts[path][1]]


def _apart(forward: BlockForward, layer: int, module: nn.Module, path: str) -> tuple[Tensor, Tensor]:
    """The moments of the inputs of module `path` without the massive tokens, and those tokens' inputs [tokens, columns]."""
    linear = module.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    moments, tokens = Moments(linear.in_features, forward.compute.device), list[Tensor]()

    def add(x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        apart = massive(x)
        tokens.append(x[apart])
        moments.add(x[~apart])

    forward.watch(layer, module, {path: add})
    return moments.matrix, torch.cat(tokens)


def _best(
    plan: ConversionPlan, matrix: Matrix, moments: Tensor, tokens: Tensor, seen: Mapping[nn.Linear, Sequence[Pair]]
) -> float:
    """The share of SHARES with which rounding `matrix` loses least; `moments` are changed."""
    x, gradients = inputs_and_gradients(matrix, seen)
    squares = gradients.square_()
    weight, before, diagonal, losses = matrix.weight(), 0.0, moments.diagonal().clone(), list[float]()
    of_tokens = tokens.square().sum(0)
    for share in SHARES:
        moments.addmm_(tokens.T, tokens, alpha=share - before)
        # Factoring damps them.
        moments.diagonal().copy_(diagonal + share * of_tokens)
        before = share
        factor = factorize(moments, matrix.item.recipe, bool(plan.method.options.act_order))
        change = quantize_matrix(weight, factor, matrix.item.recipe, matrix.item.title)[1] - weight
        loss = loss_of(change, x, squares)
        losses.append(loss if math.isfinite(loss) else math.inf)
        del factor
    # Of shares that lose the same the largest.
    return max(share for share, loss in zip(SHARES, losses, strict=True) if loss == min(losses))
