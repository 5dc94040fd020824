"""How a range of weights becomes a grid, by name; `quantizer.py` has the list of names, and rounds."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.format.codec import GROUP_SIZES, Codec


@dataclass(frozen=True)
class Preset:
    """How a range becomes a grid.

    zero_inside   an asymmetric range is extended to contain 0
    full_range    a symmetric scale is 2 max|w| / (2^b - 1) instead of max|w| / (2^(b-1) - 1)
    search        the range is the part of the whole with the least sum |error|^2.4
    weighed       where columns have costs (columns.py) the range is the part of the whole with the least sum cost * error^2
    """

    zero_inside: bool = False
    full_range: bool = False
    search: bool = False
    weighed: bool = False

    def title(self, codec: Codec) -> str:
        """The name of the rounding, as in the list of quantizer.py; `min-max-search` is one over a codec with zero points."""
        name: str
        if codec.kind in ("table", "trellis"):
            name = codec.kind
        elif codec.kind in ("half", "s4"):
            name = "half"
        elif codec.symmetric:
            name = "absmax-full" if self.full_range else "absmax"
        else:
            name = "min-max-zero" if self.zero_inside else "min-max"
        return f"{name}-search" if self.search else f"{name}-weighed" if self.weighed else name


MIN_MAX = Preset()
MIN_MAX_ZERO_WEIGHED = Preset(zero_inside=True, full_range=True, weighed=True)
ABSMAX_SEARCH = Preset(search=True)


def fitting_group_size(columns: int, most: int = GROUP_SIZES[-1]) -> int:
    """The largest group size up to `most` that divides `columns`; `most` if none does: the last group is then shorter."""
    return next((size for size in reversed(GROUP_SIZES) if size <= most and columns % size == 0), most)
