"""QuaRot: outlier-free 4-bit inference in rotated models (Ashkboos et al. 2024, arXiv 2404.00456).

Hadamard matrices everywhere: diag(+-1) H on the residual stream, H of head_dim on every head's values and, with a cache of 4
bits, on queries and keys; online H across the heads before the output projection, which with the per-head ones makes the
whole H (x) H, and H before the down projection.  Any order is allowed, not only powers of two.  Activations are symmetric,
one scale per token; keys and values asymmetric, a scale per position and head.

With a split row the transform before the down projection has a constant row: the mean of each output channel's weights, which
it gathers in one column, is kept apart unrounded and no longer widens their range (MQuant's rotation magnitude suppression,
arXiv 2502.00425, section 3.3).
"""

from __future__ import annotations

from torch import Tensor

from edgeq.converters.families import Family
from edgeq.converters.method import Study
from edgeq.converters.methods.folded_rotation import SIGNS_SEED, signed_hadamard
from edgeq.converters.methods.rotated import Rotated, stored_transform
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rotation.fuse import Rotation
from edgeq.converters.rotation.hadamard import Hadamard, hadamard
from edgeq.converters.rounding.linears import Recipe
from edgeq.format.codec import Codec
from edgeq.format.records import Activation
from edgeq.network.config import ModelConfig


class QuaRot(Rotated):
    """W, A and KV in 4 bits by default, weights rounded or by GPTQ."""

    name = "quarot"

    def __init__(self, options: ConvertOptions, family: Family, config: ModelConfig) -> None:
        super().__init__(options, family, config)
        self.calibrates = self.propagates = bool(self.gptq or self.scales)
        self._head: Hadamard = hadamard(config.head_dim)
        self._across: Hadamard = hadamard(config.num_attention_heads)

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        bits, part = self.options.activation_bits, name.rpartition(".")[2]
        transform = None
        split = part == "down" and bool(self.options.split_row)
        if part == "down":
            transform = stored_transform(hadamard(columns, split))
        elif part == "o" and self.before_o():
            transform = stored_transform(self._across, self.config.head_dim)
        blocks = bits == 16 or self.options.activations == "block"
        activation = None if bits is None or blocks else Activation(bits)
        scales = self.scales if activation else 0
        return Recipe(self.codec(columns), self.preset, transform=transform, activation=activation, scales=scales, split=split)

    @property
    def details(self) -> dict[str, object]:
        return {"seeds": {"signs": SIGNS_SEED}, "activation_scales": self.options.activations or "token"}

    def transformed_sizes(self) -> tuple[int, ...]:
        return (*super().transformed_sizes(), self.config.hidden_size)

    def before_down(self, x: Tensor) -> Tensor:
        return hadamard(x.shape[-1], bool(self.options.split_row))(x)

    def residual(self, study: Study) -> Rotation:
        return signed_hadamard(self.config.hidden_size)

    def values(self, layer: int, study: Study) -> list[Rotation]:
        return [self._head] * self.config.num_key_value_heads

    def keys(self, layer: int, study: Study) -> Tensor:
        return self._head.matrix()

    def before_o(self) -> Rotation | None:
        if self._across.size == 1:
            return None
        return lambda x: self._across(x, self.config.head_dim)
