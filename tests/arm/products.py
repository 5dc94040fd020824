"""Products of one matrix whose kernels are compiled here, and checked on an Arm processor against sums of 64 bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgeq.format.codec import Codec
from edgeq.format.quantization import activation_limit
from edgeq.format.records import Mode, Weight
from edgeq.targets.graph import Graph
from tests.targets.cases import Arrays, product, weight

ROWS, COLUMNS = 7, 192
"""Rows of tokens: a tile of four and one of three."""


class ProductCase(NamedTuple):
    codec: Codec
    mode: Mode

    def graph(self) -> tuple[Graph, Arrays, Weight, np.ndarray]:
        """A product of 33 output channels, its arrays and weight, and activations f32 [ROWS, COLUMNS] that 8 bits hold."""
        rng, arrays = np.random.default_rng(self.codec.bits), Arrays()
        w = weight(arrays, rng, self.codec, 33, COLUMNS)
        limit = activation_limit(w.codec, "a8") if self.mode == "a8" else 127
        x = rng.integers(-limit, limit + 1, (ROWS, COLUMNS)).astype(np.float32) / 128
        x[:, ::32] = limit / 128
        return product(arrays, x, w), arrays, w, x


CASES = [ProductCase(codec, mode) for codec in (Codec("int", 4, 32, True), Codec("int", 3, 0, False)) for mode in ("a8", "a16")]
