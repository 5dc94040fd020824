"""AWQ: activation-aware weight quantization (Lin et al. 2023, arXiv 2306.00978).

Input channels with large activations get their weights multiplied by s > 1 before rounding, so that their relative error
shrinks; the operation before the layer divides by s, so that nothing is left to do at run time.  Then every group's range is
clipped where that lowers the error of the layer's output.  The plain variant: s = mean|x|^alpha, alpha from a grid of 20.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from edgeq.codec import Codec
from edgeq.converters.calibration.forward import Observed, token_activations
from edgeq.converters.calibration.torch_decoder import quantized_linears
from edgeq.converters.families import NORMS, ScaleMapping, linear_module
from edgeq.converters.linears import Delivery
from edgeq.converters.method import Block, Method
from edgeq.converters.quantizer import AWQ, Preset, fake, split_groups, uniform_spans

CodecOfColumns = Callable[[int], Codec]
GRID = 20
CLIP_STEPS = 10
CLIP_TOKENS = 512
CLIP_ROWS = 256
# Clipping queries or keys raises the error of their product.
UNCLIPPED = ("q_proj", "k_proj")


class Awq(Method):
    """Scales and clipping; the layer so prepared is rounded to nearest."""

    name = "awq"
    calibrates = True
    passes = 25

    def dtype(self, part: str, stored: str) -> str:
        return scaled_dtype(self.family.awq_mappings(self.config), part, stored)

    def memory_bytes(self, tokens: int) -> int:
        """All that a layer computes from the text is kept while its scales are searched."""
        return 4 * tokens * token_activations(self.config)

    def prepare(self, block: Block) -> dict[str, Delivery]:
        mappings = self.family.awq_mappings(self.config)
        awq(block.module, mappings, observe(block, mappings), self.codec, block.on_part)
        return {}


def scaled_dtype(mappings: list[ScaleMapping], part: str, stored: str) -> str:
    """Gains, biases and floats that a scale may have changed are stored exactly."""
    scaled = part.removesuffix("_bias") in {x for m in mappings for x in (m.absorber, *m.followers)}
    return "f32" if scaled or part.endswith(".bias") else stored


@torch.no_grad()
def awq(
    layer: nn.Module,
    mappings: list[ScaleMapping],
    observed: Observed,
    codec: CodecOfColumns,
    on_part: Callable[[int, int], None] = lambda done, parts: None,
) -> None:
    """Change `layer` in place so that rounding its weights loses less of its output; `codec`: columns of a weight -> its codec.

    `observed` comes from the unchanged layer.  All scales are searched on that layer, then applied, then ranges clipped;
    `on_part` is called as that of a Block.
    """
    linears = quantized_linears(layer)
    parts = len(mappings) + len(linears)
    scales = search_and_apply(layer, mappings, observed, codec, AWQ, lambda done: on_part(done, parts))
    divisors = {linear_module(part): scale for mapping, scale in scales.items() for part in mapping.consumers}
    for done, (path, linear) in enumerate(linears.items(), len(mappings)):
        on_part(done, parts)
        if not path.endswith(UNCLIPPED) and _observed_at(path) in observed.inputs:
            x = _strided(observed.inputs[_observed_at(path)])
            clip(linear, x / divisors[path] if path in divisors else x, codec(linear.in_features))


@torch.no_grad()
def search_and_apply(
    layer: nn.Module,
    mappings: list[ScaleMapping],
    observed: Observed,
    codec: CodecOfColumns,
    preset: Preset,
    on_mapping: Callable[[int], None] = lambda done: None,
) -> dict[ScaleMapping, Tensor]:
    """Only the scales: searched on the layer as it is, then applied; the layer's function stays the same."""
    scales = {}
    for done, mapping in enumerate(mappings):
        on_mapping(done)
        columns = _linear(layer, mapping.consumers[0]).in_features
        scales[mapping] = search_scale(layer, mapping, observed, codec(columns), preset)
    for mapping, scale in scales.items():
        apply_scale(layer, mapping, scale)
    return scales


def observe(block: Block, mappings: list[ScaleMapping]) -> Observed:
    """Advance over the layer of `block` and keep what `awq` needs of it; warns of experts that no token reached."""
    inspected = inspected_modules(block.module, mappings)
    observed = block.forward.advance(block.index, block.module, inspected)
    unused = [path.rpartition(".")[2] for path in inspected if path not in observed.inputs and not path.endswith("_proj")]
    if unused:
        numbers = ", ".join(unused)
        block.warn(f"layer {block.index + 1}: no calibration token reached the experts {numbers}: they are rounded to nearest")
    return observed


def inspected_modules(layer: nn.Module, mappings: list[ScaleMapping]) -> tuple[str, ...]:
    """The modules of a decoder layer whose inputs and outputs `awq` needs."""
    return tuple(dict.fromkeys([*map(_observed_at, quantized_linears(layer)), *(m.inspected for m in mappings)]))


def _observed_at(path: str) -> str:
    """The module that receives the same input as this linear layer."""
    return path if path.endswith(("o_proj", "down_proj")) else path.rpartition(".")[0]


def _linear(layer: nn.Module, part: str) -> nn.Linear:
    module = layer.get_submodule(linear_module(part))
    assert isinstance(module, nn.Linear)
    return module


def search_scale(layer: nn.Module, mapping: ScaleMapping, observed: Observed, codec: Codec, preset: Preset = AWQ) -> Tensor:
    """The s float32 [input channels] of the grid with the smallest mean squared error of the inspected module's output.

    alpha = 0 gives s = 1, that is plain rounding: the result is never worse than it on this measure.  A module that was not
    observed, an expert without tokens, gets that too.
    """
    linears = [_linear(layer, part) for part in mapping.consumers]
    if mapping.inspected not in observed.inputs:
        return torch.ones(linears[0].in_features)
    original = [linear.weight.data for linear in linears]
    inspected = layer.get_submodule(mapping.inspected)
    magnitude = observed.inputs[mapping.inspected].flatten(0, -2).abs().mean(0)
    best, best_loss = torch.ones_like(magnitude), float("inf")
    for i in range(GRID):
        s = magnitude.pow(i / GRID).clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        s = torch.where(torch.isfinite(s), s, 1.0)
        for linear, weight in zip(linears, original, strict=True):
            linear.weight.data = fake(weight * s, codec, preset).div_(s)
        loss = output_error(inspected, mapping.inspected, observed)
        # False for NaN too: such a candidate is skipped.
        if loss < best_loss:
            best, best_loss = s, loss
    for linear, weight in zip(linears, original, strict=True):
        linear.weight.data = weight
    return best


def output_error(module: nn.Module, path: str, observed: Observed) -> float:
    """Mean squared difference between the outputs of `module` now and those observed."""
    total = sum(float((now - before).square().sum(dtype=torch.float64)) for now, before in observed.run(path, module))
    return total / observed.outputs[path].numel()


def apply_scale(layer: nn.Module, mapping: ScaleMapping, scale: Tensor) -> None:
    """Consumers' input channels times s, the absorber's outputs divided by it: the function of the layer stays the same."""
    for part in (*mapping.consumers, *mapping.followers):
        linear = _linear(layer, part)
        linear.weight.data = linear.weight * scale
    if mapping.absorber in NORMS:
        for vector in layer.get_submodule(NORMS[mapping.absorber]).parameters():
            vector.data = vector / scale
    else:
        absorber = _linear(layer, mapping.absorber)
        absorber.weight.data = absorber.weight / scale[:, None]
        if absorber.bias is not None:
            absorber.bias.data = absorber.bias / scale


def _strided(x: Tensor) -> Tensor:
    """Every n-th token: 512 to 1023 of them, or all if fewer."""
    x = x.reshape(-1, x.shape[-1])
    return x[:: max(1, len(x) // CLIP_TOKENS)]


def clip(linear: nn.Linear, x: Tensor, codec: Codec) -> None:
    """Clamp each group of each row to the range, of 1.00 ... 0.55 of its largest weight, that least changes the group's share
    of the output over the tokens x [tokens, input channels].

    The mean square of x d over the tokens is d (x^T x / tokens) d^T: the small matrix of a group serves all its rows.
    """
    weight = linear.weight.data
    clipped = torch.empty_like(weight)
    for span, inputs in zip(uniform_spans(codec, linear.in_features), split_groups(x, codec), strict=True):
        per_group = inputs.transpose(0, 1)  # [groups, tokens, size]
        moments = per_group.transpose(1, 2) @ per_group / len(x)  # [groups, size, size]
        clipped[:, span] = torch.cat([_clip_rows(rows, moments, codec) for rows in torch.split(weight[:, span], CLIP_ROWS)])
    linear.weight.data = clipped


def _clip_rows(weight: Tensor, moments: Tensor, codec: Codec) -> Tensor:
    """Some rows of a weight, each group clamped to its best range."""
    groups = weight.reshape(len(weight), len(moments), -1).transpose(0, 1)  # [groups, rows, size]
    largest = groups.abs().amax(-1, keepdim=True)
    best, best_error = largest, torch.full_like(largest, float("inf"))
    for i in range(CLIP_STEPS):
        limit = largest * (1 - i / (2 * CLIP_STEPS))
        clamped = groups.clamp(-limit, limit).transpose(0, 1).reshape(weight.shape)
        difference = (fake(clamped, codec) - weight).reshape(len(weight), len(moments), -1).transpose(0, 1)
        error = ((difference @ moments) * difference).sum(-1, keepdim=True)
        better = error < best_error
        best, best_error = torch.where(better, limit, best), torch.where(better, error, best_error)
    return groups.clamp(-best, best).transpose(0, 1).reshape(weight.shape)
