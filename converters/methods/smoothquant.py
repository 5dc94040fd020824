"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): the range of large input channels moves into the weights.

The norm before q,k,v and before gate,up divides channel j by s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), the weights after it
multiply it: then per-token integer activations lose little.  o and down are left as they are, as in the original.  Published
alphas: 0.5; 0.8 for Mistral, 0.85 for Llama 2 and 3, 0.9 for Llama 2 70B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgeq.converters.families import NORMS, ScaleMapping, linear_module
from edgeq.converters.method import Block
from edgeq.converters.methods.awq import ScaledChannels, apply_scale
from edgeq.converters.methods.gptq import Gptq
from edgeq.converters.methods.static_scales import largest_inputs, rounded, static_scales
from edgeq.converters.rounding.linears import Delivery, Recipe
from edgeq.converters.rounding.presets import MIN_MAX, Preset
from edgeq.format.codec import Codec
from edgeq.format.records import Activation

MIN_FACTOR = 1e-5


class SmoothQuant(ScaledChannels):
    """W8A8 by default: weights per row, activations per token or with one constant scale, both symmetric."""

    name = "smoothquant"
    calibrates = True

    @property
    def preset(self) -> Preset:
        return MIN_MAX

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        blocks = self.options.activations == "block"
        activation = None if blocks else per_token(self.options.activation_bits)
        return Recipe(self.codec(columns), self.preset, activation=activation, scales=self.scales)

    def prepare(self, block: Block) -> dict[str, Delivery]:
        kept = [x.clone() for x in block.forward.states]
        # Of the layer as it was: a resumed run has no other, and its sums have to be the same to the last bit.
        block.forward.advance(block.index, block.module)
        block.forward.swap(kept)
        smooth(block, self.family.awq_mappings(block.index), self.options.alpha or 0.0)
        deliveries = {}
        if self.scales:
            with rounded(block):
                largest = largest_inputs(block)
            items = {item.name: item for item in block.linears}
            deliveries = {name: Delivery(block.read, scales=static_scales(x, items[name])) for name, x in largest.items()}
        block.forward.swap(kept)
        return deliveries

    def memory_bytes(self, tokens: int) -> int:
        """Inputs beside the outputs."""
        return 4 * tokens * self.config.hidden_size


class SmoothQuantGptq(ScaledChannels, Gptq):
    """The smoothed weights by GPTQ instead of rounding."""

    name = "smoothquant+gptq"
    keeps_channels = False

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        return Recipe(self.codec(columns), self.preset, activation=per_token(self.options.activation_bits))

    def scale(self, block: Block) -> None:
        smooth(block, self.family.awq_mappings(block.index), self.options.alpha or 0.0)


def per_token(bits: int | None) -> Activation | None:
    """Symmetric activations, a scale per token; 16 bits: none."""
    return None if bits in (None, 16) else Activation(bits, symmetric=True)


@torch.no_grad()
def smooth(block: Block, mappings: list[ScaleMapping], alpha: float) -> None:
    """Move ranges over every norm of `mappings`; the function of the layer stays the same."""
    after_norms = [mapping for mapping in mappings if mapping.absorber in NORMS]
    largest = {mapping.inspected: _Largest() for mapping in after_norms}
    block.forward.watch(block.index, block.module, {path: found.add for path, found in largest.items()})
    for mapping in after_norms:
        readers = (*mapping.consumers, *mapping.followers)
        weights = [block.module.get_parameter(f"{linear_module(part)}.weight").data for part in readers]
        apply_scale(block.module, mapping, smoothing(largest[mapping.inspected].value, weights, alpha))


class _Largest:
    """max|x| of every channel, over all batches added."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def add(self, x: Tensor) -> None:
        self.value = torch.maximum(self.value, x.abs().amax(dim=(0, 1)))


def smoothing(largest: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """s float32 [channels] from max|x| of every channel and the weights [rows, channels] that read it."""
    reach = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=MIN_FACTOR)
    s = (largest.pow(alpha) / reach.pow(1 - alpha)).clamp(min=MIN_FACTOR)
    # A channel that was never used gives no measurement; 1e-5 would blow it up where another text uses it.
    return torch.where(largest > 0, s, 1.0)
