"""The codecs that a budget chooses from: what loses least in so many bytes, and what decodes fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeq.format.codec import BITS, Codec
from edgeq.format.trellis import TRELLIS_BITS

MIN_HALF_GROUP = 32
"""Channels of the smallest groups in which a half grid of 2 bits loses less than zero points (docs/quality.md)."""


@dataclass(frozen=True)
class Menu:
    """Which codecs there are beside integers of 4 to 8 bits with zero points.

    half_grids   of 2 bits
    trellises    of 1 to 3 bits: they lose less than integers and half grids of as many bytes, but take more instructions
    fast         integers of 2 and 3 bits and half grids beside trellises, too: time is asked for, not bytes
    """

    half_grids: bool = True
    trellises: bool = True
    fast: bool = False

    def codecs(self, sizes: Sequence[int], rings: bool) -> tuple[Codec, ...]:
        """All of them in groups of `sizes`; `rings`: whether rows come in whole blocks, which a trellis needs."""
        trellises = self.trellises and rings
        few = self.fast or not trellises
        low = max(TRELLIS_BITS) + 1
        zeros = (Codec("int", bits, size, symmetric=False) for bits in BITS for size in sizes if few or bits >= low)
        # In smaller groups, and in more bits, zero points lose less.
        halves = (Codec("half", 2, size) for size in sizes if self.half_grids and few and size >= MIN_HALF_GROUP)
        coupled = (Codec("trellis", bits, size) for bits in TRELLIS_BITS for size in sizes if trellises)
        return (*zeros, *halves, *coupled)
