"""How long a token takes in an allocation, from models of the same shape that were decoded all in one codec.

The time of a token does not follow its bytes: a product of 6 bits can take longer than one of 8, which has nothing to unpack.
So every width is measured, and a part takes of the time of the whole model in its width what it has of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from edgeq.format.codec import BITS, Codec
from edgeq.format.trellis import TRELLIS_BITS

MIDDLE = 64
"""Channels of a group in which every width is measured: in the middle of those of an allocation."""
WIDTHS = tuple(Codec("int", bits, MIDDLE, symmetric=False) for bits in BITS)
"""Every width, by rising bytes."""
TRELLISES = tuple(Codec("trellis", bits, MIDDLE) for bits in TRELLIS_BITS)
SMALL_GROUPS = Codec("int", 4, 16, symmetric=False)
"""What smaller groups cost follows from this codec beside the one of as many bits in WIDTHS."""
SMALL_RINGS = Codec("trellis", 2, 16)
"""The same of trellises: a scale of theirs has a sixth of the bytes, and takes more instructions."""
MEASURED = (*WIDTHS, SMALL_GROUPS, *TRELLISES, SMALL_RINGS)
BytesIn = Callable[[Codec], float]
"""Bytes that a token reads of some weights in a codec."""


@dataclass(frozen=True)
class DecodeTimes:
    """Bytes and seconds of a token with the whole model in each codec of MEASURED.

    The bytes are those of the parts: what stays in floats, such as routers, is in the seconds alone, which the parts share.
    """

    whole: Mapping[Codec, tuple[int, float]]

    def seconds(self, codec: Codec, part: BytesIn) -> float:
        """Those of a part of the model in `codec`, of which all parts together add up to a token's.

        part   the bytes that a token reads of this part, by codec
        """
        middle = _middle(codec)
        read, seconds = self.whole[middle]
        return max(0.0, seconds * part(middle) / read + self._seconds_per_byte(codec) * (part(codec) - part(middle)))

    def scaled(self, by: float) -> DecodeTimes:
        """These with all seconds multiplied by a number."""
        return DecodeTimes({codec: (read, by * seconds) for codec, (read, seconds) in self.whole.items()})

    def _seconds_per_byte(self, codec: Codec) -> float:
        """Seconds that a byte of scales and zero points takes in codecs like this one."""
        small = SMALL_RINGS if codec.coupled else SMALL_GROUPS
        (more, slower), (less, faster) = self.whole[small], self.whole[_middle(small)]
        return max(0.0, slower - faster) / (more - less)


@cache
def _middle(codec: Codec) -> Codec:
    """The measured codec of as many bits."""
    return Codec("trellis", codec.bits, MIDDLE) if codec.coupled else Codec("int", codec.bits, MIDDLE, symmetric=False)
