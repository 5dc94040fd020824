"""Scales that are learned on the output of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from edgeq.converters.convert import convert
from edgeq.converters.methods import tuning
from edgeq.converters.planning import tuning_time
from edgeq.converters.planning.method_options import check_method_options
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.planning.tuning_time import tuning_seconds
from edgeq.converters.rounding.quantizer import quantize, restored
from edgeq.errors import InputError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile

SMALL: dict[str, Any] = {
    "method": "gptq",
    "bits": 2,
    "group_size": 32,
    "head": 8,
    "calibration_rows": 8,
    "calibration_length": 64,
}


def silent(*_: object) -> None:
    pass


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STEPS", 12)


@pytest.mark.parametrize("name", ["i3 g32 zero", "i4 g64", "n3 g32", "i2 g32 half s4", "t2 g32 s4"])
def test_gradients_are_those_of_the_weights_written_out(name: str) -> None:
    codec = Codec.named(name)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((6, 80), (2, 5, 80)))
    part = tuning.Tuned.of(nn.Linear(80, 6), quantize(weight, codec, "w"), codec)
    factors = part.factors
    factors.data.add_(0.1 * torch.randn(factors.shape, generator=generator))
    ours = x.clone().requires_grad_()
    tuning._Product.apply(ours, factors, part).square().sum().backward()
    mine, of_factors = ours.grad, factors.grad
    factors.grad, theirs = None, x.clone().requires_grad_()
    widths = [80] if codec.coded else [min(codec.group_size, 80 - start) for start in range(0, 80, codec.group_size)]
    spread = factors.repeat_interleave(torch.tensor(widths), 1)
    functional.linear(theirs, restored(part.quantized, codec) * spread).square().sum().backward()
    # Processors add in other orders: 2e-5 apart on one.
    torch.testing.assert_close(mine, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_factors, factors.grad, rtol=1e-4, atol=1e-4)
    found = part.result()
    assert torch.equal(found.q, part.quantized.q)
    learned = found.scale if found.super_scale is None else found.super_scale
    assert learned.dtype == torch.float16 and (learned is found.scale or torch.equal(found.scale, part.quantized.scale))
    torch.testing.assert_close(restored(found, codec), restored(part.quantized, codec) * spread.detach(), rtol=1e-3, atol=1e-6)


def arrays(file: ModelFile, name: str) -> dict[str, Any]:
    (weight,) = file.metadata.linears[name].weights
    return {part: np.asarray(file.array(array)) for part, array in weight.arrays.items()}


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("codec", "learned"), [({}, "scale"), ({"trellis": True}, "super_scale")], ids=["zero points", "trellis"]
)
def test_scales_alone_change_and_the_layer_comes_closer(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: dict[str, Any], learned: str
) -> None:
    folder, losses, small = str(checkpoint("llama_gqa")), list[float](), SMALL | codec
    loss = tuning._loss
    monkeypatch.setattr(tuning, "_loss", lambda *arguments: losses.append(loss(*arguments)) or losses[-1])
    plain, tuned = (
        convert(folder, tmp_path / f"{tune}.edgeq", ConvertOptions(tune=tune, **small), silent) for tune in (None, True)
    )
    assert len(losses) == 4 and losses[1] < losses[0] and losses[3] < losses[2]
    # The inputs of the first linear layer are the same in both files.
    before, after = (arrays(file, "layers.0.qkv") for file in (plain, tuned))
    assert {name for name, array in before.items() if not np.array_equal(array, after[name])} == {learned}
    assert tuned.metadata.provenance["options"] == plain.metadata.provenance["options"] | {"tune": True}  # type: ignore[operator]
    # Where it does not help nothing changes.
    monkeypatch.setattr(tuning, "RATE", 8.0)
    refused = convert(folder, tmp_path / "same.edgeq", ConvertOptions(tune=True, **small), silent)
    assert all(
        np.array_equal(array, arrays(refused, name)[part])
        for name in plain.metadata.linears
        if name.startswith("layers.0")
        for part, array in arrays(plain, name).items()
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_quick")
def test_interrupted_it_goes_on_to_the_same_bytes(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, options = str(checkpoint("qwen2")), ConvertOptions(tune=True, **{**SMALL, "method": "awq+gptq"})
    reports: list[tuple[float, str]] = []
    whole = convert(folder, tmp_path / "whole.edgeq", options, lambda done, total, label: reports.append((done / total, label)))
    assert sum("layer 2" in label for _, label in reports) > tuning.STEPS

    def stop(done: float, total: float, label: str) -> None:
        if "layer 2" in label:
            raise KeyboardInterrupt

    output = tmp_path / "o.edgeq"
    with pytest.raises(KeyboardInterrupt):
        convert(folder, output, options, stop)
    assert convert(folder, output, options, silent).path.read_bytes() == whole.path.read_bytes()


def test_what_it_takes_is_said_and_what_it_cannot_do_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint("llama_gqa"))
    long = SMALL | {"calibration_rows": 64, "calibration_length": 256}
    plain, longer = (preflight(folder, ConvertOptions(tune=tune, **long)) for tune in (None, True))
    assert longer.memory_bytes > plain.memory_bytes
    tuned = preflight(folder, ConvertOptions(tune=True, **SMALL))
    assert 0 < tuning_seconds(tuned) < 600
    sparse = preflight(str(checkpoint("qwen2_moe")), ConvertOptions(tune=True, **SMALL))
    assert 0 < tuning_seconds(sparse) < 600
    # Two layers: four passes of eight rows, two at a time, and a hundred steps of four rows, in which weights are restored too.
    seconds = iter((1.0, 10.0))
    monkeypatch.setattr(tuning_time, "_fastest", lambda run: (float(run()), next(seconds))[1])
    assert tuning_seconds(tuned) == 2 * (4 * 4 * 1 + 100 * 2 * 10)
    with pytest.raises(InputError, match=r"--tune goes with --method gptq, awq\+gptq; --method rtn has no use for it"):
        check_method_options(ConvertOptions(method="rtn", tune=True))
    with pytest.raises(InputError, match=r"--tune goes with a calibration text, and .* is a folder"):
        preflight(folder, ConvertOptions(method="gptq", tune=True, calibration=tmp_path))
