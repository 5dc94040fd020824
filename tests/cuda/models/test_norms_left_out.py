"""Which norms a launch of few rows leaves to those who read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import ArrayRef, LinearSpec, Transform, Weight
from edgeq.targets.cuda.lowering.fused import deferred
from edgeq.targets.graph import Graph, Linear, Operation, RmsNorm, Scale

GAIN = ArrayRef("f32", (32,), 0)
CODEC = Codec("int", 4, 32, True)
WEIGHT = Weight(CODEC, 32, 32, {part: ArrayRef("u8", (), 0) for part in CODEC.parts(32, 32)})
LAYER = LinearSpec("layer", (WEIGHT,))
NORM = RmsNorm(0, "x", GAIN, 1e-5, "normed")


def product(x: str, out: str, offset: int = 0, add: bool = False, layer: LinearSpec = LAYER) -> Linear:
    return Linear(0, x, layer, out, offset, add)


@pytest.mark.parametrize(
    ("following", "left_out"),
    [
        ((product("normed", "a"), product("normed", "y")), True),
        ((product("normed", "x", add=True), product("x", "y")), False),
        ((product("normed", "a"), product("a", "x", add=True), product("normed", "y")), False),
        ((product("normed", "a"), product("a", "x", add=True), product("x", "y")), True),
        ((Scale(0, "normed", 2.0, "y"),), False),
        ((product("normed", "y", layer=replace(LAYER, transform=Transform(32))),), False),
        # Its buffer is written again: by a norm, which is asked for itself, or by what is no norm and must be read as it is.
        ((product("normed", "a"), RmsNorm(0, "a", GAIN, 1e-5, "normed"), Scale(0, "normed", 2.0, "y")), True),
        ((product("normed", "a"), product("a", "normed"), product("normed", "y")), False),
        ((product("normed", "a"), Scale(0, "a", 2.0, "normed"), product("normed", "y")), False),
    ],
)
def test_a_norm_is_left_out_where_only_products_read_it(following: tuple[Operation, ...], left_out: bool) -> None:
    graph = Graph({name: 32 for name in ("x", "normed", "a", "y")}, (NORM, *following), "y", ())
    assert deferred(graph, 0, NORM) == left_out


def test_a_norm_that_is_the_result_stays() -> None:
    graph = Graph({"x": 32, "normed": 32}, (NORM,), "normed", ())
    assert not deferred(graph, 0, NORM)
