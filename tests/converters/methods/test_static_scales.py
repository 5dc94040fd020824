"""SmoothQuant with constant activation scales: measured on the rounded layer, stored, run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from tests.checkpoints.vision import build

CALIBRATION: dict[str, Any] = {"calibration_rows": 4, "calibration_length": 64}


class Interrupted(Exception):
    pass


def made(source: Path, output: Path, on_progress: Callable[..., None] = lambda *_: None, **options: Any) -> ModelFile:
    return convert(str(source), output, ConvertOptions(method="smoothquant", **options, **CALIBRATION), on_progress)


def test_every_layer_has_one_scale_that_fills_its_integers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("llama_gqa", dtype="float32")
    file = made(source, tmp_path / "static.edgeq", activations="static")
    assert file.metadata.default_mode == "a8"
    found: dict[str, float] = {}
    for name, linear in file.metadata.linears.items():
        assert linear.activation is None if name == "head" else linear.activation and linear.activation.scales
        if linear.activation and linear.activation.scales:
            (found[name],) = file.array(linear.activation.scales).tolist()
    # The largest inputs of the first layer's products as it is stored, on the same text.
    plan = preflight(str(source), ConvertOptions(method="smoothquant", activations="static", **CALIBRATION))
    assert plan.calibration
    forward = BlockForward(plan.checkpoint, plan.method.family, plan.method.config, plan.calibration.rows)
    items = [item for step in plan.steps for item in step.items]
    layer = forward.load(0, stored_tensors(file.path, file.segments, items))
    largest: dict[str, float] = {}

    def add(name: str) -> Callable[[torch.Tensor], None]:
        return lambda x: largest.__setitem__(name, max(largest.get(name, 0.0), float(x.abs().max())))

    modules = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    forward.watch(0, layer, {path: add(name) for name, path in modules.items()})
    for name, most in largest.items():
        assert found[f"layers.0.{name}"] == pytest.approx(most / 127, rel=1e-3), name
    assert len(set(found.values())) == len(found) == 8


@pytest.mark.exhaustive
def test_a_run_by_constant_scales_is_near_the_source(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("llama_gqa", dtype="float32")
    # Of the calibration text: a random model's inputs are larger for random tokens, and would be limited.
    plan = preflight(str(source), ConvertOptions(method="smoothquant", **CALIBRATION))
    assert plan.calibration
    tokens, logits = plan.calibration.rows[1].tolist(), []
    for name, options in (("exact", {"method": "none"}), ("static", {"method": "smoothquant", "activations": "static"})):
        limits = CALIBRATION if name == "static" else {}
        path = convert(str(source), tmp_path / f"{name}.edgeq", ConvertOptions(**options, **limits), lambda *_: None).path
        logits.append(next(Model.load(path, target="cpu", max_logits=64, context=128).session().all_logits(tokens)).copy())
    exact, static = logits
    assert 0 < np.abs(static - exact).mean() < 0.1 * np.abs(exact).mean()


@pytest.mark.exhaustive
def test_a_conversion_that_was_interrupted_ends_in_the_same_bytes(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("llama_gqa", dtype="float32")
    whole = made(source, tmp_path / "whole.edgeq", activations="static").path.read_bytes()

    def stop(done: float, total: float, label: str) -> None:
        if label == "layer 2 of 2":
            raise Interrupted

    with pytest.raises(Interrupted):
        made(source, tmp_path / "m.edgeq", stop, activations="static")
    assert made(source, tmp_path / "m.edgeq", activations="static").path.read_bytes() == whole


def test_what_has_no_constant_scales_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    options = ConvertOptions(method="smoothquant", activations="static")
    with pytest.raises(UnsupportedError, match="experts have no constant scales"):
        preflight(str(checkpoint("mixtral")), options)
    with pytest.raises(InputError, match="needs calibration pictures"):
        preflight(str(build(tmp_path / "vlm", "padded")), options)
    with pytest.raises(UnsupportedError, match="activations of 16 bits"):
        preflight(str(checkpoint("llama_gqa")), ConvertOptions(method="smoothquant", activations="static", activation_bits=16))
