"""Texts whose tokens see both ways: each is one run, in which a token has a range of slots that it sees.

Of a model that goes on from a prompt, only the prompt is such a text; the tokens after it see those before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.network.config import ModelConfig


@dataclass(frozen=True)
class WholeTexts:
    """How a model reads texts in one run each.

    ranges     as of ModelConfig
    second     position of the first token of a model's second table of positions; 0: it has one table
    goes_on    other tokens may come after the text, which see what is before them; what a layer's window has of them says its
               range, but of the text's own tokens nothing
    """

    ranges: tuple[int, ...]
    second: int
    goes_on: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> WholeTexts | None:
        """None: tokens see those before them."""
        second = config.max_position_embeddings if config.segments > 1 else 0
        return cls(config.ranges, second, config.bidirectional_prompt) if config.ranges else None

    def spans(self, lengths: Sequence[int]) -> NDArray[np.int32]:
        """Rows.spans of texts of so many tokens, a kind for each of `ranges`."""
        counts = np.array(lengths, np.int32)
        ends = np.repeat(counts, counts)
        slots = np.arange(len(ends), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        ranges = [0 if self.goes_on else window for window in self.ranges]
        seen = [(np.maximum(slots - w + 1, 0), np.minimum(slots + w, ends)) if w else (0 * slots, ends) for w in ranges]
        return np.array(seen, np.int32)

    def positions(self, slots: NDArray[np.int32], seconds: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int32]:
        """int32 [1, rows] of texts of so many tokens; `seconds`: the slot at which the second of a pair begins, 0: there is
        none."""
        begins = np.repeat(np.array(seconds, np.int32), lengths)
        return np.where((begins > 0) & (slots >= begins), slots + self.second, slots)[None].astype(np.int32)
