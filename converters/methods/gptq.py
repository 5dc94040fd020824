"""GPTQ (Frantar et al. 2022, arXiv 2210.17323) of the layers of a model, and its combination with AWQ's scales.

A decoder layer is quantized in the order of execution, every linear layer over inputs that come through the ones already
quantized ("true sequential"); the next layer's inputs come from the quantized layer.  With act_order columns go by falling
moments; the grids of their groups are then fixed beforehand ("static groups"), so that nothing is left to gather at run time.
What is done to one matrix is in edgeq.converters.rounding.columns.  Not all tokens count alike in the moments
(calibration/staged.py); what a massive one counts is tried beforehand (probing/massive.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from edgeq.converters.calibration.staged import Staged, staged
from edgeq.converters.families import linear_module
from edgeq.converters.method import Block
from edgeq.converters.methods.awq import ScaledChannels, apply_scale, search_scale
from edgeq.converters.methods.folded_rotation import FoldedRotation
from edgeq.converters.methods.static_scales import static_scales
from edgeq.converters.methods.tuning import tuned_layer
from edgeq.converters.rounding.columns import DAMPINGS, SLAB_ELEMENTS, factorize, quantize_matrix
from edgeq.converters.rounding.linears import Delivery
from edgeq.converters.rounding.presets import MIN_MAX_ZERO_WEIGHED, Preset
from edgeq.converters.rounding.quantizer import Quantized

BeforeLinear = Callable[[Staged, Sequence[str]], None]
"""Called before linear layers, modules with the same inputs, are quantized; may change the layer but not its function."""


class Gptq(FoldedRotation):
    """Group-wise GPTQ over ranges searched by what rounding costs."""

    name = "gptq"
    keeps_channels = True
    calibrates = True
    propagates = True
    rounds_head = True
    weighs_tokens = True
    passes = 4

    @property
    def preset(self) -> Preset:
        return MIN_MAX_ZERO_WEIGHED

    def memory_bytes(self, tokens: int) -> int:
        return super().memory_bytes(tokens) + moments_bytes(self.widest)

    def scale(self, block: Block) -> None:
        """Change the layer before it is quantized; its function stays the same."""

    def prepare(self, block: Block) -> dict[str, Delivery]:
        return tuned_layer(block, self.rounded) if self.options.tune else self.rounded(block)

    def rounded(self, block: Block) -> dict[str, Delivery]:
        """As `prepare`, without tuning."""
        self.scale(block)
        return gptq_layer(block, act_order=bool(self.options.act_order))


class AwqGptq(ScaledChannels, Gptq):
    """AWQ's scales, then GPTQ on the scaled weights; ranges are not clipped: GPTQ's error goes to other columns instead."""

    name = "awq+gptq"
    keeps_channels = False
    passes = 6

    def rounded(self, block: Block) -> dict[str, Delivery]:
        left = dict.fromkeys(self.family.awq_mappings(block.index))
        names = {module: name for name, module in block.module.named_modules()}
        codecs = {names[module]: item.recipe.codec for item in block.linears for module in block.modules(item)}

        def scale(run: Staged, paths: Sequence[str]) -> None:
            """Fold the scales that change these modules: those that they absorb first, so that the moments of their own inputs
            are the last ones computed, and serve GPTQ too.
            """
            absorbed = [m for m in left if linear_module(m.absorber) in paths]
            consumed = [m for m in left if any(linear_module(part) in paths for part in m.consumers)]
            for mapping in (*absorbed, *consumed):
                found = search_scale(run, block.module, mapping, codecs.__getitem__, self.preset)
                apply_scale(block.module, mapping, found)
                for part in mapping.consumers:
                    run.divided(linear_module(part), found)
                del left[mapping]

        return gptq_layer(block, bool(self.options.act_order), scale)


def moments_bytes(columns: int) -> int:
    """Memory that `columns` input channels take here: their moments and the factor; what rounding holds of a slab of rows."""
    return 2 * 4 * columns * columns + 6 * 4 * SLAB_ELEMENTS


@torch.no_grad()
def gptq_layer(block: Block, act_order: bool, before: BeforeLinear = lambda run, paths: None) -> dict[str, Delivery]:
    """Quantize every linear layer of `block` by its recipe, and advance to the next decoder layer's inputs.

    The modules are left with the weights as stored.  A layer whose moments cannot be factored is rounded to nearest, with a
    warning.
    """
    deliveries: dict[str, Delivery] = {}
    run = staged(block.forward, block.index, block.module, weighed=True)
    names = {module: name for name, module in block.module.named_modules()}
    for done, item in enumerate(block.linears):
        block.on_part(done, len(block.linears))
        if not item.recipe.codec.integer:
            continue
        modules = block.modules(item)
        paths = [names[module] for module in modules]
        before(run, paths)
        moments = run.moments(paths[0]).matrix
        if item.recipe.split:
            # What is kept apart takes over no error and leaves none.
            moments[0], moments[:, 0] = 0, 0
        factor = factorize(moments, item.recipe, act_order)
        run.changed()
        scales = static_scales(run.largest[paths[0]], item) if item.recipe.scales else None
        if factor is None:
            block.warn(
                f"{item.name}: rounded to nearest instead of GPTQ: no calibration token reached it, or Cholesky failed at "
                f"every damping up to {DAMPINGS[-1]}; more calibration text may help"
            )
        parts: list[tuple[Quantized, ...]] = []
        for module in modules:
            apart = module.weight.data[:, 0].half().float()
            if item.recipe.split:
                module.weight.data = module.weight.data.clone()
                module.weight.data[:, 0] = 0
            quantized, module.weight.data = quantize_matrix(module.weight.data, factor, item.recipe, item.title)
            if item.recipe.split:
                module.weight.data[:, 0] = apart
            parts.append(quantized)
        joined = tuple(Quantized.joined(blocks) for blocks in zip(*parts, strict=True))
        deliveries[item.name] = Delivery(block.read, joined, scales=scales)
        # Two matrices of moments, which the next layer's would stand beside.
        del factor
    run.finish()
    return deliveries
