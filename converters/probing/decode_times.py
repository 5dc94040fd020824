"""How long a token takes in an allocation, from models of the same shape that were decoded all in one codec.

The time of a token does not follow its bytes: a product of 6 bits can take longer than one of 8, which has nothing to unpack.
So every width is measured, and a part takes of the time of the whole model in its width what it has of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgeq.format.codec import BITS, Codec

MIDDLE = 64
"""Channels of a group in which every width is measured: in the middle of those of an allocation."""
WIDTHS = tuple(Codec("int", bits, MIDDLE, symmetric=False) for bits in BITS)
"""Every width, by rising bytes."""
SMALL_GROUPS = Codec("int", 4, 16, symmetric=False)
"""What smaller groups cost follows from this codec beside the one of as many bits in WIDTHS."""
MEASURED = (*WIDTHS, SMALL_GROUPS)
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
        middle = Codec("int", codec.bits, MIDDLE, symmetric=False)
        read, seconds = self.whole[middle]
        return max(0.0, seconds * part(middle) / read + self._seconds_per_byte * (part(codec) - part(middle)))

    def scaled(self, by: float) -> DecodeTimes:
        """These with all seconds multiplied by a number."""
        return DecodeTimes({codec: (read, by * seconds) for codec, (read, seconds) in self.whole.items()})

    @property
    def _seconds_per_byte(self) -> float:
        """Seconds that a byte of scales and zero points takes."""
        (more, slower), (less, faster) = (
            self.whole[codec] for codec in (SMALL_GROUPS, Codec("int", SMALL_GROUPS.bits, MIDDLE, symmetric=False))
        )
        return max(0.0, slower - faster) / (more - less)
