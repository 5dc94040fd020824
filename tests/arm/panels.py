"""Products whose weights are unpacked for a panel of rows: graphs that must give the same bits here and on an Arm processor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgeq.format.codec import Codec
from edgeq.format.records import Activation, LinearSpec, Mode
from edgeq.targets.cpu.kernels.panels.panel_tile import STEP_CHUNKS
from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear, Select
from tests.targets.cases import Arrays, product, weight

ROWS_OF_TOKENS = 7
"""A tile of four and one of three."""
COUNTS = (7, 5, 2, 1)


class PanelCase(NamedTuple):
    codec: Codec
    mode: Mode
    values: str
    whole: bool = False
    """Whether a row of activations has one scale."""

    @property
    def name(self) -> str:
        return " ".join([self.codec.name, self.mode, self.values, "whole" * self.whole])


CASES = [
    PanelCase(Codec("int", 4, 128), "a8", "random"),
    PanelCase(Codec("int", 4, 128), "a16", "most"),
    PanelCase(Codec("int", 3, 16, False), "a8", "most"),
    PanelCase(Codec("int", 8, 32), "a16", "random"),
    PanelCase(Codec("int", 8), "a8", "random", True),
]
"""Each needs two kernels; tiles.py has every codec."""


def graph_of(case: PanelCase) -> tuple[Graph, Arrays]:
    """Three blocks of output channels, the last a part of one; a step of input channels, and one that ends within a chunk."""
    rng, arrays, columns = np.random.default_rng(case.codec.bits), Arrays(), 32 * STEP_CHUNKS + 144
    w = weight(arrays, rng, case.codec, 37, columns, case.values)
    x = rng.standard_normal((ROWS_OF_TOKENS, columns)).astype(np.float32)
    if case.values == "most":
        # Integers at their limits: of one sign, of the other, and in turn.
        x = np.ones_like(x)
        x[1], x[2, ::2], x[3, 1::2], x[4, ::4], x[5, : columns // 2] = -1, -1, -1, -1, -1
    x[6] = 0
    if not case.whole:
        return product(arrays, x, w), arrays
    layer = LinearSpec("layer", (w,), activation=Activation(8))
    operations = (Embed(-1, arrays.add(x, "f32"), "x"), Select(-1, ("x",)), Linear(-1, "x", layer, "y"))
    return Graph({"x": columns, "y": 37}, operations, "y", cache=(CacheSpec(1, 2, 2),)), arrays
