"""Nothing is rounded: weights keep the integers, or the floats, in which their source holds them."""

from __future__ import annotations

from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.slabs import RowReader, Tensors
from edgeq.converters.method import Method, Study
from edgeq.converters.rounding.linears import Delivery, LinearItem, Recipe
from edgeq.format.codec import Codec


class AsStored(Method):
    """Every weight in the codec in which the source has it; what has none stays as floats of its type."""

    name = "as-stored"
    keeps_channels = True
    keeps_integers = True

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        return Recipe(stored)

    def tensors(self, source: Tensors, study: Study) -> Tensors:
        # The tensors of a vision tower come through the decoder's method, which changes none.
        assert isinstance(source, Checkpoint)
        self._source = source
        return source

    def deliver(self, item: LinearItem, read: RowReader) -> Delivery:
        return Delivery(read, integers=self._source.quantized if item.recipe.codec.integer else None)
