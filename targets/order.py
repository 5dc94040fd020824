"""The order of a layer's input channels, as a file from anywhere may hold it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.errors import FormatError
from edgeq.linear import LinearSpec


def input_order(file: ModelFile, layer: LinearSpec) -> NDArray[np.int32] | None:
    """The stored `input_order`, i32 [columns], or None.

    FormatError: it names a channel that is not there.
    """
    if layer.input_order is None:
        return None
    order = file.array(layer.input_order)
    if order.min() < 0 or order.max() >= layer.columns:
        raise FormatError(
            f"{layer.name}: input_order has entries from {order.min()} to {order.max()}, the layer {layer.columns} channels; "
            "convert the model again"
        )
    return order
