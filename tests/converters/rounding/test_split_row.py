"""QuaRot with a split row: the column of means apart, which a rotation with a constant row makes the largest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.rotation.hadamard import hadamard
from edgeq.converters.rounding.presets import ABSMAX_SEARCH
from edgeq.converters.rounding.quantizer import fake
from edgeq.format.codec import Codec, dequantize
from edgeq.format.container import ModelFile
from edgeq.runtime import Model

BASES = (1, 20, 28, 36, 108, 140, 156, 172)


@pytest.mark.parametrize("base", BASES)
def test_the_first_output_is_the_mean_and_the_rest_have_none_of_it(base: int) -> None:
    size = 8 * base
    transform = hadamard(size, constant_row=True)
    found = transform(torch.full((size,), 3.0, dtype=torch.float64))
    assert found[0] == pytest.approx(3 * size**0.5) and float(found[1:].abs().max()) < 1e-9
    matrix = transform.matrix()
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize("base", BASES)
def test_the_error_falls_to_a_quarter_where_means_are_large(base: int) -> None:
    """Columns that meet equation 9 of arXiv 2502.00425, sqrt(n) |mean| > max |w|, in three quarters of the outputs."""
    size, outputs = 8 * base, 64
    torch.manual_seed(base)
    weight = torch.randn(outputs, size)
    weight[: 3 * outputs // 4] += 6 / size**0.5 * weight[: 3 * outputs // 4].abs().amax(1, keepdim=True)
    marked = size**0.5 * weight.mean(1).abs() > weight.abs().amax(1)
    assert marked.sum() >= 3 * outputs // 4
    rotated = hadamard(size, constant_row=True)(weight.double()).float()
    codec = Codec("int", 4, 0, symmetric=True)
    split = rotated.clone()
    split[:, 0] = 0
    plain, without = ((fake(w, codec, ABSMAX_SEARCH) - w).square().sum() for w in (rotated, split))
    assert without < 0.25 * plain


def made(source: Path, output: Path, **options: object) -> ModelFile:
    return convert(str(source), output, ConvertOptions(method="quarot", **options), lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_the_file_has_the_column_apart_and_computes_the_same(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("llama_gqa", dtype="float32", intermediate_size=320)
    tokens = [int(t) for t in np.random.default_rng(2).integers(2, 2048, 30)]
    found = {}
    for split in (False, True):
        file = made(source, tmp_path / f"{split}.edgeq", bits=8, kv_bits=16, activation_bits=16, split_row=split)
        model = Model.load(file.path, target="cpu", mode="a16", max_logits=32, context=64)
        found[split] = next(model.session().all_logits(tokens)).copy()
    exact = convert(str(source), tmp_path / "exact.edgeq", ConvertOptions(method="none"), lambda *_: None).path
    wanted = next(Model.load(exact, target="cpu", mode="a16", max_logits=32, context=64).session().all_logits(tokens))
    for split, logits in found.items():
        assert np.abs(logits - wanted).mean() < 0.03 * np.abs(wanted).mean(), split
    down = file.metadata.linears["layers.1.down"]
    assert down.split_row and down.split_row.index == 0 and file.metadata.linears["layers.1.o"].split_row is None
    plan = preflight(str(source), ConvertOptions(method="quarot", split_row=True))
    rotated = plan.method.tensors(plan.checkpoint, {}).whole("model.layers.1.mlp.down_proj.weight")
    assert np.array_equal(file.array(down.split_row.row), rotated[:, 0].astype(np.float16))


def test_gptq_leaves_the_column_alone(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """It is stored as it was, is 0 in the weight, and takes over no error."""
    source = checkpoint("llama_gqa", dtype="float32", intermediate_size=320)
    text = {"calibration_rows": 4, "calibration_length": 64}
    down = {}
    for gptq in (False, True):
        file = made(source, tmp_path / f"{gptq}.edgeq", bits=4, kv_bits=16, split_row=True, gptq=gptq, **(text if gptq else {}))
        linear = file.metadata.linears["layers.0.down"]
        assert linear.split_row and linear.weights[0].codec.integer and linear.weights[0].codec.symmetric
        arrays = {name: file.array(ref) for name, ref in linear.weights[0].arrays.items()}
        weight = dequantize(linear.weights[0].codec, linear.rows, linear.columns, arrays)
        assert not weight[:, 0].any() and weight[:, 1].any()
        down[gptq] = weight, file.array(linear.split_row.row)
    assert np.array_equal(down[True][1], down[False][1]) and not np.array_equal(down[True][0], down[False][0])
