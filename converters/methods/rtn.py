"""Round to nearest: every group by itself, without calibration unless activations have constant scales."""

from __future__ import annotations

from dataclasses import replace

from edgeq.converters.families import Family
from edgeq.converters.method import Block
from edgeq.converters.methods.folded_rotation import FoldedRotation
from edgeq.converters.methods.static_scales import observed
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rounding.linears import Delivery, Recipe
from edgeq.format.codec import Codec
from edgeq.network.stack import Stack


class RoundToNearest(FoldedRotation):
    """A `Method` as its base classes are, and the constant scales of activations."""

    name = "rtn"
    keeps_channels = True

    def __init__(self, options: ConvertOptions, family: Family, stack: Stack) -> None:
        given = options.activations is not None and options.activation_bits is None
        super().__init__(replace(options, activation_bits=8) if given else options, family, stack)
        self.calibrates = self.propagates = bool(self.scales)

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        found = super().recipe(name, columns, stored)
        return replace(found, activation=self.activation, scales=self.scales) if self.activation else found

    def prepare(self, block: Block) -> dict[str, Delivery]:
        return observed(block)
