"""What a conversion says of each layer: in order, with an error that is that of the stored file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edgeq.converters.convert import ConvertOptions, carry_out, preflight
from edgeq.converters.rounding.quantizer import fake, quantize, restored
from edgeq.converters.running.layer_report import EVERY, LayerReport, WeightError, output_error
from edgeq.format.codec import Codec


def reports(folder: Path, output: Path, **options: object) -> list[LayerReport]:
    found: list[LayerReport] = []
    plan = preflight(str(folder), ConvertOptions(**options))  # type: ignore[arg-type]
    carry_out(plan, output, lambda *_: None, on_layer=found.append)
    return found


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("columns", "group"), [(96, 32), (96, 0), (80, 32)])
def test_what_is_restored_is_what_rounding_left(symmetric: bool, columns: int, group: int) -> None:
    codec = Codec("int", 4, group, symmetric)
    weight = torch.randn(3 * EVERY, columns, generator=torch.Generator().manual_seed(1))
    quantized, wanted = quantize(weight, codec, "w"), fake(weight, codec)
    assert torch.equal(restored(quantized, codec), wanted)
    error = WeightError()
    error.add(weight, quantized, codec)
    rows = slice(None, None, EVERY)
    assert error.relative == pytest.approx(float((wanted - weight)[rows].norm() / weight[rows].norm()), rel=1e-5)
    assert WeightError().relative is None


def test_without_text_it_is_the_error_of_the_weights(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama_gqa")
    by_bits = {bits: reports(folder, tmp_path / f"{bits}.edgeq", bits=bits, group_size=32) for bits in (3, 4, 8)}
    for found in by_bits.values():
        assert [(r.index, r.layers) for r in found] == [(0, 2), (1, 2)] and all(r.output is None for r in found)
    errors = [by_bits[bits][0].weights or 0 for bits in (3, 4, 8)]
    # A step is half as wide with each bit; of normally distributed weights 4 bits lose about a tenth.
    assert 0.06 < errors[1] < 0.12 and errors[0] == pytest.approx(2 * errors[1], rel=0.2) and errors[2] < 0.01
    # 4 bits, 16 + 8 for each 32 weights.
    assert by_bits[4][0].bits == pytest.approx(4.75)
    assert str(by_bits[4][1]).startswith("layer 2 of 2: 4.75 bits per weight, error of weights ")
    assert reports(folder, tmp_path / "none.edgeq", method="none")[0].weights is None


@pytest.mark.parametrize(
    "method", ["gptq", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("awq", "smoothquant"))]
)
def test_with_text_it_is_the_error_of_the_output(checkpoint: Callable[..., Path], tmp_path: Path, method: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 400)
    errors = {}
    for bits in (3, 8):
        found = reports(
            checkpoint("qwen3"), tmp_path / f"{bits}.edgeq", method=method, bits=bits, group_size=32, calibration=text
        )
        assert [r.index for r in found] == [0, 1] and all(r.weights is None for r in found)
        errors[bits] = [r.output or 0 for r in found]
    assert all(10 * fine < coarse < 1 for fine, coarse in zip(errors[8], errors[3], strict=True))


def test_the_error_is_relative_to_what_a_layer_adds() -> None:
    x = torch.full((6, 4), 100.0)
    assert output_error(x, x + 2, x + 2.5) == pytest.approx(0.25)
    assert output_error(x, x, x + 1) == 0.0


def test_the_error_is_not_that_of_a_token_with_massive_activations() -> None:
    x, added = torch.full((6, 4), 100.0), torch.full((6, 4), 2.0)
    added[0] = 20000
    assert output_error(x, x + added, x + added + 0.5) == pytest.approx(0.25)
