"""Rotary frequencies of a configuration (Su et al. 2021, arXiv 2104.09864)."""

from __future__ import annotations

import math

from edgeq.config import Rope
from edgeq.errors import FormatError


def frequencies(rope: Rope, head_dim: int, context: int = 0) -> tuple[float, ...]:
    """Radians per position of each rotated pair, for sessions of up to `context` positions.

    FormatError: the bounds of a llama3 rope are in the wrong order.
    """
    size = rope.rotary_size(head_dim)
    plain = [rope.theta ** (-2 * i / size) for i in range(size // 2)]
    if rope.kind == "linear":
        return tuple(f / rope.factor for f in plain)
    if rope.kind == "llama3":
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise FormatError(
                f"config rope has low_freq_factor {rope.low_freq_factor} and high_freq_factor {rope.high_freq_factor}; "
                "the first must be smaller"
            )
        return tuple(_llama3(f, rope) for f in plain)
    if rope.kind == "longrope":
        # One choice for a whole session: keys already in its cache keep the rotation that they got.
        factors = rope.long_factor if context > rope.original_max_position_embeddings else rope.short_factor
        return tuple(f / factor for f, factor in zip(plain, factors, strict=True))
    return tuple(plain)


def _llama3(frequency: float, rope: Rope) -> float:
    """Llama 3.1's long context: wavelengths beyond the original context are stretched by `factor`, short ones stay.

    With n = original_max_position_embeddings / wavelength turns in the original context: n > high_freq_factor stays,
    n < low_freq_factor is divided by `factor`, between them the two are mixed linearly in n.
    """
    turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = min(1.0, max(0.0, share))
    return (1 - share) * frequency / rope.factor + share * frequency
