"""Constant activation scales: one for rows of text, one for rows of pictures (MQuant, arXiv 2502.00425, section 3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeq.errors import FormatError
from edgeq.format.codec import Codec
from edgeq.format.quantization import check_scales, quantize_static
from edgeq.format.records import Activation, LinearSpec, Transform
from edgeq.targets import load
from edgeq.targets.graph import Activate, CacheSpec, Embed, Graph, Linear, RmsNorm, Select
from edgeq.targets.rows import TEXT, VISION
from edgeq.targets.target import Options
from tests.targets.cases import ISAS, Arrays, matrix, rows_of, weight

COUNT, WIDTH, INNER = 31, 100, 256
MODALITY = np.where(np.arange(COUNT) % 3 == 1, VISION, TEXT).astype(np.uint8)
SCALES = (0.03, 0.5)


def network(arrays: Arrays, scales: tuple[float, ...], codec: Codec, transform: int = 0, group_norm: bool = True) -> Graph:
    """A norm, a gated MLP and a selection: the norm and the activation write what the products read."""
    rng = np.random.default_rng(1)
    stored = arrays.add(np.array(scales, np.float32), "f32")
    activation = Activation(8, scales=stored)
    up, down = weight(arrays, rng, codec, 2 * INNER, WIDTH), weight(arrays, rng, codec, 24, INNER)
    for each in (up, down):
        if each.codec.integer:
            arrays.array(each.arrays["scale"])[...] = np.abs(arrays.array(each.arrays["scale"])) * np.float16(0.02)
    table = arrays.add(rng.standard_normal((COUNT, WIDTH)).astype(np.float32), "f32")
    gain = arrays.add(np.ones(WIDTH, np.float32), "f32")
    changed = Transform(transform) if transform else None
    operations = (
        Embed(-1, table, "x"),
        RmsNorm(0, "x", gain, 1e-5, "normed"),
        Linear(0, "normed", LinearSpec("gate_up", (up,), activation=activation), "gate_up"),
        Activate(0, "gate_up", INNER, "inner"),
        Select(0, ("inner",)),
        Linear(0, "inner", LinearSpec("down", (down,), activation=activation, transform=changed), "y"),
    )
    buffers = {"x": WIDTH, "normed": WIDTH, "gate_up": 2 * INNER, "inner": INNER, "y": 24}
    return Graph(buffers, operations, "y", cache=(CacheSpec(1, 2, 2),))


def result(target: str, graph: Graph, arrays: Arrays, modality: np.ndarray | None, isa: str | None = None) -> np.ndarray:
    """[wanted, 24]; the wanted rows come in another order than the rows."""
    options = Options("a8", 2, isa if target == "cpu" else None, max_rows=COUNT, max_logits=COUNT)
    program = load(target).compile(graph, arrays, options)
    rows = replace(rows_of(program, COUNT), modality=modality, wanted=np.arange(COUNT, dtype=np.int32)[::-1].copy())
    return program.run(rows).copy()


CODECS = (Codec("int", 4, 0, True), Codec("int", 8, 0, True), Codec("int", 4, 64, False), Codec("int", 3, 32))


CASES = ((CODECS[0], SCALES, 0), (CODECS[1], SCALES[:1], 32), (CODECS[2], SCALES, 32), (CODECS[3], SCALES[:1], 0))


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_equals_the_reference(isa: str) -> None:
    for codec, scales, transform in CASES:
        arrays = Arrays()
        graph = network(arrays, scales, codec, transform)
        oracle = result("reference", graph, arrays, MODALITY)
        y = result("cpu", graph, arrays, MODALITY, isa)
        # An activation exactly between two integers may fall to either side.
        assert np.abs(y - oracle).max() < 0.02 * np.abs(oracle).max(), (codec.name, scales, transform)
        assert np.median(np.abs(y - oracle)) < 1e-5 * np.abs(oracle).max(), (codec.name, scales, transform)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_a_row_reads_the_scale_of_its_modality_alone(target: str) -> None:
    codec = CODECS[0]

    def found(*scales: float, modality: np.ndarray | None = MODALITY) -> np.ndarray:
        arrays = Arrays()
        return result(target, network(arrays, scales, codec), arrays, modality)[::-1]

    mixed, text, vision = found(*SCALES), MODALITY == TEXT, MODALITY == VISION
    assert np.array_equal(mixed[text], found(SCALES[0], 1000.0)[text])
    assert np.array_equal(mixed[vision], found(1000.0, SCALES[1])[vision])
    assert np.array_equal(mixed[text], found(SCALES[0])[text]) and np.array_equal(mixed[vision], found(SCALES[1])[vision])
    assert np.array_equal(found(*SCALES, modality=None), found(SCALES[0]))
    assert not np.array_equal(mixed[vision], found(SCALES[0])[vision])


def test_the_integers_are_those_of_the_definition() -> None:
    rng, arrays = np.random.default_rng(4), Arrays()
    x = rng.standard_normal((COUNT, WIDTH)).astype(np.float32)
    w = weight(arrays, rng, CODECS[0], 16, WIDTH)
    layer = LinearSpec("l", (w,), activation=Activation(8, scales=arrays.add(np.array(SCALES, np.float32), "f32")))
    graph = Graph(
        {"x": WIDTH, "y": 16},
        (Embed(-1, arrays.add(x, "f32"), "x"), Select(0, ("x",)), Linear(0, "x", layer, "y")), "y", (CacheSpec(1, 2, 2),),
    )  # fmt: skip
    scale = np.array(SCALES, np.float32)[MODALITY][:, None]
    # 4-bit weights: the limit of mode a8.
    integers = np.rint(x * (np.float32(1) / scale)).clip(-120, 120)
    assert (np.abs(integers) == 120).any() and np.array_equal(quantize_static(x, scale[:, 0], 120), integers * scale)
    wanted = (integers.astype(np.float64) * scale) @ matrix(arrays, w).T
    for target in ("reference", "cpu"):
        assert np.allclose(result(target, graph, arrays, MODALITY)[::-1], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_limited_away(target: str, bad: float) -> None:
    arrays = Arrays()
    graph = network(arrays, SCALES, CODECS[0])
    first = graph.operations[0]
    assert isinstance(first, Embed)
    arrays.array(first.table)[5, 7] = bad  # type: ignore[arg-type]
    found = result(target, graph, arrays, MODALITY)[::-1]
    assert np.isnan(found[5]).all() and np.isfinite(np.delete(found, 5, 0)).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e-38])
def test_scales_that_are_no_scales_are_refused(bad: float) -> None:
    with pytest.raises(FormatError, match="layer: its activation scales are"):
        check_scales("layer", np.array([1.0, bad], np.float32))
