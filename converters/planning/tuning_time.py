"""How long `--tune` takes, stated before it begins."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from edgeq.converters.calibration.forward import angles, visible
from edgeq.converters.calibration.staged import quantized_linears
from edgeq.converters.calibration.torch_decoder import DecoderLayer
from edgeq.converters.methods.tuning import Tuned, installed
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.rounding.linears import LinearItem
from edgeq.converters.rounding.quantizer import Quantized, levels_of
from edgeq.converters.rounding.tuning_cost import FORWARDS, ROWS, STEPS
from edgeq.format.codec import Codec

RUNS, SECONDS = 5, 1.0
"""The most runs of each kind that are timed, and the time after which no other begins: the fastest counts."""


@torch.no_grad()
def tuning_seconds(plan: ConversionPlan) -> float:
    """Seconds that tuning takes, from passes and steps of one layer of the model's shape where the text will run."""
    assert plan.calibration is not None
    config, put, length = plan.method.config, plan.compute.put, plan.calibration.longest
    rows = plan.calibration.tokens // length
    learned = min(ROWS, rows)
    batch = min(plan.compute.rows, learned)
    layer = _layer(plan)
    rope = config.layer_rope(0)
    found = angles(rope, config.heads_of(0).head_dim, length) if rope else None
    turns = None if found is None else (put(found[0]), put(found[1]))
    arguments: dict[str, Any] = {"position_embeddings": turns, "attention_mask": put(visible(length, config.window(0)))}
    if size := config.hidden_size_per_layer_input:
        arguments["rows"] = put(torch.ones(batch, length, size))
    x = put(torch.randn(batch, length, config.hidden_size, generator=torch.Generator().manual_seed(0)))

    def passed() -> Tensor:
        y: Tensor = layer(x, **arguments)
        return y.square().sum()

    a_pass = _fastest(passed)
    layer_parts = [_part(module, _codec(plan)) for module in quantized_linears(layer).values()]
    factors = [part.factors for part in layer_parts]

    def step() -> Tensor:
        with torch.enable_grad():
            gradients = torch.autograd.grad(passed(), factors, allow_unused=True)
        return next(gradient for gradient in gradients if gradient is not None).sum()

    with installed(layer_parts):
        a_step = _fastest(step)
    return config.num_hidden_layers * (FORWARDS * rows * a_pass + STEPS * learned * a_step) / batch


def _fastest(run: Callable[[], Tensor]) -> float:
    times = list[float]()
    while len(times) < RUNS and sum(times) < SECONDS:
        began = perf_counter()
        # A GPU is waited for.
        float(run())
        times.append(perf_counter() - began)
    return min(times)


def _layer(plan: ConversionPlan) -> nn.Module:
    """The first layer with arbitrary weights."""
    with torch.device("meta"):
        layer = DecoderLayer(plan.method.config, plan.method.family.description.biases)
    made = layer.to_empty(device=plan.compute.device)
    for parameter in made.parameters():
        parameter.fill_(0.01)
    return made.requires_grad_(False).eval()


def _codec(plan: ConversionPlan) -> Codec:
    """That of the first part that is rounded."""
    items = (item for step in plan.steps if step.layer is not None for item in step.items if isinstance(item, LinearItem))
    return next(item.recipe.codec for item in items if item.recipe.codec.integer)


def _part(module: nn.Linear, codec: Codec) -> Tuned:
    rows, columns = module.weight.shape
    shape = rows, codec.groups(columns)
    whole, codes = torch.ones(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.uint8)
    scales = {"scale": codes, "super_scale": whole[:, :1]} if codec.coded else {"scale": whole}
    levels = levels_of(codec)
    quantized = Quantized(
        torch.zeros(rows, columns, dtype=torch.uint8),
        **scales,
        zero=None if codec.symmetric else codes,
        table=None if levels is None else levels.to(torch.int8).repeat(rows, 1),
    )
    return Tuned.of(module, quantized, codec)
