"""What a conversion can say of a decoder layer when it is written: its bits, and how much rounding changed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeq.converters.planning.items import Item
from edgeq.converters.rounding.linears import LinearItem
from edgeq.format.codec import Codec

if TYPE_CHECKING:
    from torch import Tensor

    from edgeq.converters.rounding.quantizer import Quantized

EVERY = 16
"""One output channel of so many is compared: a percent of the time that rounding takes."""
ROWS = 4
"""Calibration rows over which outputs are compared, evenly spaced."""


@dataclass(frozen=True)
class LayerReport:
    """A decoder layer as stored.

    bits     per weight of its linear layers, everything counted that is stored for them
    output   relative error of its output over some calibration text, |y' - y| / |y - x|, the median over tokens: x are its
             inputs, y and y' the outputs of the layer as it was and as it is stored, so y - x is what it adds to the residual
             stream.  Summed over tokens it would be the error of the few with massive activations, where there are such
    weights  without calibration: relative error of its weights, |w' - w| / |w|, over one output channel of 16; of a method with
             a low-rank part, of what that leaves.  None: nothing was rounded
    """

    index: int
    layers: int
    bits: float
    output: float | None = None
    weights: float | None = None

    def __str__(self) -> str:
        of, error = ("output", self.output) if self.output is not None else ("weights", self.weights)
        found = f", error of {of} {100 * error:.2g} %" if error is not None else ""
        return f"layer {self.index + 1} of {self.layers}: {self.bits:.2f} bits per weight{found}"


class WeightError:
    """Squares of the weights and of their errors, summed over what `add` is given."""

    def __init__(self) -> None:
        self._weights = self._errors = 0.0

    def add(self, weight: Tensor, quantized: Quantized, codec: Codec) -> None:
        """Weight float32 [rows, columns] and its integers: every 16th row counts."""
        from edgeq.converters.rounding.quantizer import restored

        rows = slice(None, None, EVERY)
        self._weights += float(weight[rows].square().sum())
        found = restored(quantized, codec)[rows] if codec.coupled else restored(quantized.rows(rows), codec)
        self._errors += float((found - weight[rows]).square().sum())

    @property
    def relative(self) -> float | None:
        return (self._errors / self._weights) ** 0.5 if self._weights else None


def output_error(inputs: Tensor, before: Tensor, after: Tensor) -> float:
    """The median over tokens of |after - before| / |before - inputs|, all [tokens, hidden]; 0 where the layer adds nothing."""
    added = (before - inputs).norm(dim=1)
    changed = (after - before).norm(dim=1)[added > 0] / added[added > 0]
    return float(changed.median()) if len(changed) else 0.0


def bits_per_weight(items: Sequence[Item]) -> float:
    linears = [item for item in items if isinstance(item, LinearItem)]
    return 8 * sum(sum(item.nbytes) for item in linears) / sum(item.rows * item.columns for item in linears)
