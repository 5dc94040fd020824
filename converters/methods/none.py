"""No quantization: the weights stay floating point."""

from __future__ import annotations

from edgeq.converters.method import Method
from edgeq.converters.rounding.linears import Recipe
from edgeq.format.codec import Codec


class Unquantized(Method):
    """Every weight in the one float type of the options, or as stored."""

    name = "none"
    keeps_channels = True

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        # Of integers the products with their scales: no smaller type holds them all.
        return Recipe(Codec(self.options.dtype or ("f32" if stored.bits else stored.kind)))

    def dtype(self, part: str, stored: str) -> str:
        wanted = self.options.dtype
        # Norms and biases are small: they stay as stored unless everything is to be float32.
        small = "norm" in part or part.endswith(".bias")
        return wanted if wanted and (wanted == "f32" or not small) else stored
