"""No quantization: the weights stay floating point."""

from __future__ import annotations

from edgeq.codec import Codec, Kind
from edgeq.converters.linears import Recipe
from edgeq.converters.method import Method


class Unquantized(Method):
    """Every weight in the one float type of the options, or as stored."""

    name = "none"
    keeps_channels = True

    def recipe(self, name: str, columns: int, stored: Kind) -> Recipe:
        return Recipe(Codec(self.options.dtype or stored))

    def dtype(self, part: str, stored: str) -> str:
        wanted = self.options.dtype
        # Norms and biases are small: they stay as stored unless everything is to be float32.
        small = "norm" in part or part.endswith(".bias")
        return wanted if wanted and (wanted == "f32" or not small) else stored
