"""Products whose weights are unpacked for a panel of tokens: bit by bit what tiles give that unpack them for themselves."""

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import Activation, LinearSpec
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.kernels.panels.panel_matmul import GROUP_BLOCKS, PANEL
from edgeq.targets.cpu.kernels.panels.panel_tile import STEP_CHUNKS
from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear, Select
from edgeq.targets.target import Options
from tests.targets.cases import HERE, MODES, Arrays, case, in_turn, matrix, product, run, tried, weight
from tests.targets.products.test_swiglu_matmul import I3, I4, I8, mlp

PANELS = [isa.name for isa in all_isas() if isa.panels and isa.name in HERE]
TILES = "portable"
BLOCK_ROWS, STEP = 16, 32 * STEP_CHUNKS
pytestmark = pytest.mark.skipif(not PANELS, reason="a processor whose dot products are single instructions")


def same(graph: Graph, arrays: Arrays, count: int, mode: str) -> np.ndarray:
    """The result of `count` rows, which both ways must give to the bit."""
    tiles = run("cpu", graph, arrays, count, Options(mode, 2, TILES))  # type: ignore[arg-type]
    for isa in PANELS:
        panels = run("cpu", graph, arrays, count, Options(mode, 2, isa))  # type: ignore[arg-type]
        assert np.array_equal(panels, tiles), (isa, count)
    return tiles


@pytest.mark.parametrize(
    ("bits", "mode", "group", "symmetric"),
    [
        case(
            bits,
            mode,
            group,
            symmetric,
            common=bits == 4 and group == 128 and mode == "a8",
            id=f"{bits}-{mode}-{group}-{symmetric}",
        )
        for bits in range(2, 9)
        for mode in MODES
        for i, (group, symmetric) in enumerate(((16, True), (128, True), (32, False), (0, False)))
        # Those of other widths that `tried` has too: half of them, every size of groups and both modes.
        if bits == 4 or in_turn(bits + i, mode)
    ],
)
def test_they_give_the_bits_of_tiles(bits: int, mode: str, group: int, symmetric: bool) -> None:
    rng, codec, arrays = np.random.default_rng(bits), Codec("int", bits, group, symmetric), Arrays()
    # A step of channels and a part of one that ends within a chunk; more blocks than a group, the last a part of one.
    rows, columns = BLOCK_ROWS * (GROUP_BLOCKS + 1) * 2 + 5, STEP + 144
    w = weight(arrays, rng, codec, rows, columns)
    x = rng.standard_normal((PANEL + 7, columns)).astype(np.float32) * np.exp(rng.standard_normal((1, columns))).astype(
        np.float32
    )
    x[2] = 0
    graph = product(arrays, x, w, rng.standard_normal(rows).astype(np.float32))
    # Two panels, the last tile of 3, 1 and 2; a part of a tile; one row.
    whole = same(graph, arrays, PANEL + 7, mode)
    for count in (PANEL + 5, PANEL + 2, PANEL + 1, 6, 2, 1):
        assert np.array_equal(same(graph, arrays, count, mode), whole[:count])
    step = np.abs(x).max() * (1 / 127 if mode == "a8" else 1 / 32639)
    expected = x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64) + (whole - whole)
    bias = arrays.array(graph.operations[-1].linear.bias)  # type: ignore[union-attr]
    assert np.all(np.abs(whole - bias - expected) <= step * np.abs(matrix(arrays, w)).sum(1) + 1e-3)


@pytest.mark.parametrize(
    ("bits", "mode"),
    [case(bits, mode, common=bits == 4 and in_turn(bits, mode), id=f"{bits}-{mode}") for bits in range(2, 9) for mode in MODES],
)
@pytest.mark.parametrize("value", ["least", "most"])
def test_sums_of_integers_at_their_limits(bits: int, mode: str, value: str) -> None:
    """Sums in 16 bits as large as they can be: in all quads, with either sign and with both."""
    rng, arrays = np.random.default_rng(bits), Arrays()
    # With zero points or without, as `tried` has them in this mode: the integers are the same.
    codec = Codec("int", bits, 128, not tried(0, Codec("int", bits, 128, False), mode))
    w = weight(arrays, rng, codec, 32, STEP + 128, value)
    signs = np.ones((9, w.columns))
    signs[1:3], signs[3, ::2], signs[4, 1::2], signs[5, ::4], signs[6, : w.columns // 2] = -1, -1, -1, -1, -1
    signs[7] = rng.choice([-1, 1], w.columns)
    y = same(product(arrays, signs.astype(np.float32), w), arrays, 9, mode)
    expected = signs @ matrix(arrays, w).T.astype(np.float64)
    size = np.abs(matrix(arrays, w)).sum(1) + (1 << bits) * w.columns
    assert np.max(np.abs(y - expected) / size) < 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bits", "kind"), [(4, "token"), (8, "token"), (8, "token_zero")])
def test_rows_with_one_scale(bits: int, kind: str) -> None:
    """Integer sums of whole rows, longer than a step."""
    rng, arrays, codec = np.random.default_rng(bits), Arrays(), Codec("int", bits)
    columns = 2 * STEP + 48
    w = weight(arrays, rng, codec, 70, columns)
    x = rng.standard_normal((PANEL + 3, columns)).astype(np.float32)
    layer = LinearSpec("layer", (w,), activation=Activation(8, symmetric=kind == "token"))
    operations = (Embed(-1, arrays.add(x, "f32"), "x"), Select(-1, ("x",)), Linear(-1, "x", layer, "y"))
    graph = Graph({"x": columns, "y": 70}, operations, "y", cache=(CacheSpec(1, 2, 2),))
    y = same(graph, arrays, PANEL + 3, "a8")
    expected = x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64)
    assert np.max(np.abs(y - expected)) < 0.02 * np.abs(expected).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("codecs", "mode"),
    [((I4, I8), "a8"), ((I4, I8), "a16"), ((I3, I4), "a16"), ((I8, I4), "a8")],
    ids=["4-a8", "4-a16", "3", "8"],
)
def test_swiglu_of_more_than_a_panel(codecs: tuple[Codec, Codec], mode: str) -> None:
    for count in (PANEL + 5, PANEL + 7):
        arrays = Arrays()
        joined, apart = mlp(arrays, np.random.default_rng(1), *codecs, 272, count)
        assert np.array_equal(same(joined, arrays, count, mode), same(apart, arrays, count, mode))
