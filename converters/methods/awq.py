"""AWQ: activation-aware weight quantization (Lin et al. 2023, arXiv 2306.00978).

Input channels with large activations get their weights multiplied by s > 1 before rounding, so that their relative error
shrinks; the operation before the layer divides by s, so that nothing is left to do at run time.  Then every group's range is
clipped where that lowers the error of the layer's output.  The plain variant: s = mean|x|^alpha, alpha from a grid of 20.

The paper measures a candidate at the output of the attention or of the MLP, with a forward for each.  Here it is the squared
error at the outputs of the linear layers that read the scaled channels, added up: tr(D M D^T) from the moments of their inputs,
all tokens counted.  For output and down projection both are the same.  For the others it costs nothing that can be measured
(docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from edgeq.converters.calibration.moments import Moments
from edgeq.converters.calibration.staged import Staged, sites, staged
from edgeq.converters.families import NORMS, ScaleMapping, linear_module
from edgeq.converters.method import Block, Method
from edgeq.converters.methods.folded_rotation import FoldedRotation
from edgeq.converters.rounding.linears import Delivery
from edgeq.converters.rounding.presets import MIN_MAX, Preset
from edgeq.converters.rounding.quantizer import fake, uniform_spans
from edgeq.format.codec import Codec

CodecOfColumns = Callable[[int], Codec]
CodecOfModule = Callable[[str], Codec]
"""Path of a linear module of a layer -> the codec of its weight."""
GRID = 20
CLIP_STEPS = 10
CLIP_ROWS = 256
SEARCH_ROWS = 512
"""Output channels of a matrix by whose error a scale is chosen, evenly spaced."""
# Clipping queries or keys raises the error of their product.
UNCLIPPED = ("q_proj", "k_proj")


class ScaledChannels(Method):
    """A method that folds scales of channels into what comes before the layers that read them."""

    def dtype(self, part: str, stored: str) -> str:
        """Gains, biases and floats that a scale may have changed are stored exactly."""
        scaled = {name for each in self.family.mappings for name in (each.absorber, *each.followers)}
        return "f32" if part.removesuffix("_bias") in scaled or part.endswith(".bias") else super().dtype(part, stored)


class Awq(ScaledChannels, FoldedRotation):
    """Scales and clipping; the layer so prepared is rounded to nearest."""

    name = "awq"
    calibrates = True
    passes = 4

    def memory_bytes(self, tokens: int) -> int:
        """The moments of the widest inputs; what a search has of some rows."""
        return super().memory_bytes(tokens) + 4 * self.widest * (self.widest + 8 * SEARCH_ROWS)

    def prepare(self, block: Block) -> dict[str, Delivery]:
        mappings = self.family.awq_mappings(block.index)
        run = staged(block.forward, block.index, block.module)
        unused = awq(run, block.module, mappings, self.codec, block.on_part)
        if unused:
            block.warn(
                f"layer {block.index + 1}: no calibration token reached the experts {', '.join(unused)}: they are rounded to "
                "nearest"
            )
        return {}


@torch.no_grad()
def awq(
    run: Staged,
    layer: nn.Module,
    mappings: list[ScaleMapping],
    codec: CodecOfColumns,
    on_part: Callable[[int, int], None] = lambda done, parts: None,
) -> list[str]:
    """Change `layer` in place so that rounding its weights loses less of its output, and finish `run`, over its text.

    codec    columns of a weight -> its codec
    on_part  as that of a Block
    Returns the experts that no token reached.

    Scales and ranges are found on the layer as it is, and applied when the next layer's inputs are known.
    """
    scales: dict[ScaleMapping, Tensor] = {}
    limits: dict[str, Tensor] = {}
    unused: list[str] = []
    reading = {linear_module(part): mapping for mapping in mappings for part in mapping.consumers}
    groups = sites(layer)
    for done, paths in enumerate(groups):
        on_part(done, len(groups))
        of_site = codec(linear(layer, paths[0]).in_features)
        mapping = reading.get(paths[0])
        if mapping and mapping not in scales:
            scales[mapping] = search_scale(run, layer, mapping, lambda path: codec(linear(layer, path).in_features), MIN_MAX)
        clipped = [path for path in paths if not path.endswith(UNCLIPPED)]
        if not clipped:
            continue
        moments = run.moments(paths[0])
        if not moments.tokens:
            unused += [paths[0].split(".")[2]] if paths[0].endswith("down_proj") else []
            continue
        s = scales[mapping] if mapping else torch.ones(len(moments.matrix), device=moments.matrix.device)
        for path in clipped:
            limits[path] = clip_limits(linear(layer, path).weight.data * s, moments, of_site, s)
    run.finish()
    for mapping, scale in scales.items():
        apply_scale(layer, mapping, scale)
    divisors = {linear_module(mapping.absorber): scale for mapping, scale in scales.items() if mapping.absorber not in NORMS}
    for path, limit in limits.items():
        module = linear(layer, path)
        if path in divisors:
            limit = limit / divisors[path][:, None]
        clamp(module, limit, codec(module.in_features))
    return unused


def linear(layer: nn.Module, path: str) -> nn.Linear:
    module = layer.get_submodule(path)
    assert isinstance(module, nn.Linear)
    return module


@torch.no_grad()
def search_scale(
    run: Staged, layer: nn.Module, mapping: ScaleMapping, codec: CodecOfModule, preset: Preset = MIN_MAX
) -> Tensor:
    """The s float32 [input channels] of the grid with the smallest squared error of the consumers' outputs.

    alpha = 0 gives s = 1, that is plain rounding: the result is never worse than it on this measure.  Where no token came, an
    expert's, it is that too, and where a plan leaves all consumers in floats.
    """
    modules = {linear_module(part) for part in mapping.consumers}
    consumers = {path for path in modules if codec(path).integer}
    if not consumers:
        return torch.ones(linear(layer, next(iter(modules))).in_features, device=run.device)
    reading = [[path for path in paths if path in consumers] for paths in sites(layer)]
    reading = [paths for paths in reading if paths]
    magnitude = run.moments(reading[0][0]).magnitude if len(reading) == 1 else _magnitude(run, mapping.inspected)
    candidates = [_scale(magnitude, i / GRID) for i in range(GRID)]
    losses = torch.zeros(GRID, dtype=torch.float64)
    for paths in reading:
        moments = run.moments(paths[0])
        if moments.tokens:
            for path in paths:
                losses += _errors(linear(layer, path).weight.data, moments.matrix, candidates, codec(path), preset)
    # A candidate whose loss is no number is skipped; of equal ones the first is taken.
    return candidates[int(losses.nan_to_num(torch.inf).argmin())]


def _magnitude(run: Staged, path: str) -> Tensor:
    """Mean |x| of every channel of the inputs of a module."""
    total, tokens = torch.zeros(()), 0
    for x, _ in run.inputs(path):
        total, tokens = total.to(x.device) + x.abs().sum(0), tokens + len(x)
    return total / tokens


def _scale(magnitude: Tensor, alpha: float) -> Tensor:
    s = magnitude.pow(alpha).clamp(min=1e-4)
    s = s / (s.max() * s.min()).sqrt()
    return torch.where(torch.isfinite(s), s, 1.0)


def _errors(weight: Tensor, moments: Tensor, candidates: list[Tensor], codec: Codec, preset: Preset) -> Tensor:
    """Squared error of the output of a weight [rows, columns] rounded under each scale, float64 [candidates]."""
    rows = weight[:: max(1, len(weight) // SEARCH_ROWS)]
    found = []
    for s in candidates:
        lost = fake(rows * s, codec, preset).div_(s).sub_(rows)
        # Not every GPU has float64.
        found.append(((lost @ moments) * lost).sum(1).cpu().sum(dtype=torch.float64))
    return torch.stack(found) * (len(weight) / len(rows))


def apply_scale(layer: nn.Module, mapping: ScaleMapping, scale: Tensor) -> None:
    """Consumers' input channels times s, the absorber's outputs divided by it: the function of the layer stays the same."""
    for part in (*mapping.consumers, *mapping.followers):
        module = linear(layer, linear_module(part))
        module.weight.data = module.weight * scale
    if mapping.absorber in NORMS:
        for vector in layer.get_submodule(NORMS[mapping.absorber]).parameters():
            vector.data = vector / scale
    else:
        absorber = linear(layer, linear_module(mapping.absorber))
        absorber.weight.data = absorber.weight / scale[:, None]
        if absorber.bias is not None:
            absorber.bias.data = absorber.bias / scale


def clip_limits(weight: Tensor, moments: Moments, codec: Codec, scale: Tensor) -> Tensor:
    """float32 [rows, groups]: to which of 1.00 ... 0.55 of the largest |w| of each group of the weight [rows, columns] it is
    best clamped before it is rounded, for the least change of the group's share of the output.

    moments  of the inputs, which are divided by `scale` [columns] before they meet this weight
    """
    found = []
    for span in uniform_spans(codec, weight.shape[1]):
        groups = codec.groups(span.stop - span.start)
        size = (span.stop - span.start) // groups
        starts = range(span.start, span.stop, size)
        diagonal = torch.stack([moments.matrix[i : i + size, i : i + size] for i in starts])
        s = scale[span].view(groups, size)
        diagonal = diagonal / s[:, None] / s[:, :, None]
        found.append(torch.cat([_limits(rows, diagonal, codec) for rows in torch.split(weight[:, span], CLIP_ROWS)]))
    return torch.cat(found, 1)


def _limits(weight: Tensor, moments: Tensor, codec: Codec) -> Tensor:
    """Limits [rows, groups] of some rows of a weight whose groups have the same size; moments [groups, size, size]."""
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
    return best[:, :, 0].T


def clamp(module: nn.Linear, limits: Tensor, codec: Codec) -> None:
    """Clamp each group of each row of a weight to its limit [rows, groups]."""
    columns = module.in_features
    each = limits.repeat_interleave(codec.group_size or columns, 1)[:, :columns]
    module.weight.data = module.weight.data.clamp(-each, each)
