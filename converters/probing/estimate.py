"""The divergence of every part in every codec, from those of a few that were measured.

From 3 bits on the divergence of a part falls as the square of its rounding steps, so by (2^b - 1)^-2 with b bits: by 4.6 from 3
to 4, by 4 from 7 to 8.  It grows by 30 %, about, when the group size doubles.  2 bits follow another law, for their
errors are no longer small, and are measured by themselves.  On the demo model the curve through 2, 3 and 4 bits in groups of
64 meets the other codecs within 8 to 10 %, which is how much GPTQ itself varies from one codec to its neighbour.
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
GRID_BITS = (2, 3, 4)
GROUP_SLOPE = 0.26
"""Logarithm of the factor by which the divergence grows when the group size doubles, where it is not measured."""
PRIOR = 1.0
"""Weight of GROUP_SLOPE against measurements a doubling apart."""
MIN_DIVERGENCE = 1e-12
"""Divergences below are counted as this: nothing is gained by less, and logarithms stay finite."""


def grid(part: AllocationPart) -> tuple[Codec, ...]:
    """The codecs that are measured of every part."""
    size = fitting_group_size(part.columns, MIDDLE)
    return tuple(Codec("int", bits, size, symmetric=False) for bits in GRID_BITS)


def estimated(part: AllocationPart, measured: Mapping[str, float]) -> dict[Codec, float]:
    """The divergence of `part` in all of its candidates; `measured`: by the name of the codec, those of `grid` at least."""
    known = {Codec.named(name): max(value, MIN_DIVERGENCE) for name, value in measured.items()}
    low = _Curve.through([(codec, value) for codec, value in known.items() if codec.bits == 2])
    high = _Curve.through([(codec, value) for codec, value in known.items() if codec.bits > 2])
    return {codec: known.get(codec, (high if codec.bits > 2 else low).at(codec)) for codec in part.candidates()}


@dataclass(frozen=True)
class _Curve:
    """log KL = level + slope log2(group size / 64) - 2 log(2^bits - 1)."""

    level: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[Codec, float]]) -> _Curve:
        """The curve nearest to the points, its slope held near GROUP_SLOPE."""
        x = [_doublings(codec) for codec, _ in points]
        y = [math.log(value) + 2 * math.log(2**codec.bits - 1) for codec, value in points]
        middle, height = sum(x) / len(x), sum(y) / len(y)
        spread = sum((a - middle) ** 2 for a in x)
        slope = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True))
        slope = (slope + PRIOR * GROUP_SLOPE) / (spread + PRIOR)
        return cls(height - slope * middle, slope)

    def at(self, codec: Codec) -> float:
        return math.exp(self.level + self.slope * _doublings(codec) - 2 * math.log(2**codec.bits - 1))


def _doublings(codec: Codec) -> float:
    return math.log2((codec.group_size or MIDDLE) / MIDDLE)
