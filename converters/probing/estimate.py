"""The divergence of every part in every codec, from those of a few that were measured.

From 3 bits on the divergence of a part falls as the square of its rounding steps, so by (2^b - 1)^-2 with b bits: by 4.6 from 3
to 4, by 4 from 7 to 8.  It grows by 30 %, about, when the group size doubles.  2 bits follow another law, for their
errors are no longer small, and are measured by themselves, with zero points and on half grids; so is every width of a trellis.
On the demo model the curve through 2, 3 and 4 bits in groups of 64 meets the other codecs within 8 to 10 %, which is how much
GPTQ itself varies from one codec to its neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.rounding.presets import fitting_group_size
from edgeq.format.codec import Codec

MIDDLE = 64
"""The group size that is measured, and which the other sizes are compared with."""
MAX_GRID_BITS = 4
"""More bits follow from these."""
SLOPES = {"int": 0.26, "half": 0.11, "trellis": 0.12}
"""Logarithm of the factor by which the divergence grows when the group size doubles, where it is not measured, by kind.

Of half grids 24 % from groups of 32 to 128 (docs/quality.md), of single parts 0.10 in the median; of trellises of 2 bits 28 %.
"""
PRIOR = 1.0
"""Weight of the slope against measurements a doubling apart."""
MIN_DIVERGENCE = 1e-12
"""Divergences below are counted as this: nothing is gained by less, and logarithms stay finite."""


def grid(part: AllocationPart) -> tuple[Codec, ...]:
    """The codecs that are measured of every part."""
    size = fitting_group_size(part.columns, MIDDLE)
    return tuple(codec for codec in part.candidates() if codec.group_size == size and codec.bits <= MAX_GRID_BITS)


def estimated(part: AllocationPart, measured: Mapping[str, float]) -> dict[Codec, float]:
    """The divergence of `part` in all of its candidates; `measured`: by the name of the codec, those of `grid` at least."""
    known = {Codec.named(name): max(value, MIN_DIVERGENCE) for name, value in measured.items()}
    curves = {
        law: _Curve.through([(codec, value) for codec, value in known.items() if _law(codec) == law])
        for law in {_law(codec) for codec in part.candidates()}
    }
    return {codec: known.get(codec, curves[_law(codec)].at(codec)) for codec in part.candidates()}


def _law(codec: Codec) -> tuple[str, int]:
    """What tells the codecs of one curve from the others: their kind, and bits up to 2 or of a trellis."""
    return codec.kind, 0 if codec.bits > 2 and codec.kind != "trellis" else codec.bits


@dataclass(frozen=True)
class _Curve:
    """log KL = level + slope log2(group size / 64) - 2 log(2^bits - 1)."""

    level: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[Codec, float]]) -> _Curve:
        """The curve nearest to the points, all of one law, its slope held near that of SLOPES."""
        usual = SLOPES[points[0][0].kind]
        x = [_doublings(codec) for codec, _ in points]
        y = [math.log(value) + 2 * math.log(2**codec.bits - 1) for codec, value in points]
        middle, height = sum(x) / len(x), sum(y) / len(y)
        spread = sum((a - middle) ** 2 for a in x)
        slope = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True))
        slope = (slope + PRIOR * usual) / (spread + PRIOR)
        return cls(height - slope * middle, slope)

    def at(self, codec: Codec) -> float:
        return math.exp(self.level + self.slope * _doublings(codec) - 2 * math.log(2**codec.bits - 1))


def _doublings(codec: Codec) -> float:
    return math.log2((codec.group_size or MIDDLE) / MIDDLE)
