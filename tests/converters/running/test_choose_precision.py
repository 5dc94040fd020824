"""What is measured for the head and the default mode, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.converters.rounding.quantizer import fake, quantize
from edgeq.converters.running import choose_precision
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.quantization import quantize_blocks
from tests.edgeq.format.sample_file import CONFIG

CODE = "def f(x):\n    return x + 1\n" * 400


def silent(*_: object) -> None:
    pass


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("cap", [None, 3.0])
def test_divergence_summed_over_slabs_is_the_divergence(cap: float | None) -> None:
    def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = x.double() @ weight.double().T
        return found if cap is None else cap * (found / cap).tanh()

    torch.manual_seed(0)
    head, exact, targets = torch.randn(130, 32), torch.randn(40, 32), torch.randint(0, 130, (40,))
    rounded, codec = exact + 0.05 * torch.randn(40, 32), Codec("int", 4, 32)
    slabs = iter([head[:48].numpy(), head[48:64].numpy(), head[64:].numpy()])
    config = replace(CONFIG, final_logit_softcapping=cap)
    kl, rise = choose_precision._measure(config, slabs, [exact, rounded], targets, {4: codec, 16: None}, quantize)
    p, q = (logits(exact, w).log_softmax(1) for w in (head, fake(head, codec)))
    assert kl[4] == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-4)
    assert kl[16] == pytest.approx(0, abs=1e-6)
    nll = [-logits(x, head).log_softmax(1)[torch.arange(40), targets].mean() for x in (exact, rounded)]
    assert rise[16] == pytest.approx(float(nll[1] - nll[0]), rel=1e-4)


@pytest.mark.parametrize("bits, limit", [(4, 120), (8, 127)])
@pytest.mark.parametrize("size", [16, 32, 128])
def test_activations_are_rounded_as_a_target_rounds_them(size: int, bits: int, limit: int) -> None:
    x = np.random.default_rng(size).standard_normal((5, 200)).astype(np.float32)
    x[2] = 0
    ours = choose_precision.rounded_activations(torch.from_numpy(x), Codec("int", bits, size)).numpy()
    assert np.abs(ours - quantize_blocks(x, size, limit)).max() < 1e-6


def made(folder: Path, output: Path, options: ConvertOptions) -> tuple[ModelFile, dict[str, Any]]:
    file = convert(str(folder), output, replace(options, force=True), silent)
    measured = file.metadata.provenance["measured"]
    return file, measured if isinstance(measured, dict) else {}


def test_the_smallest_head_under_the_gate_is_taken(
    checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama_gqa", initializer_range=0.2)
    options = ConvertOptions(method="rtn", calibration=text)
    _, measured = made(folder, tmp_path / "a.edgeq", options)
    kl = measured["head_kl"]
    assert kl["4"] > kl["6"] > kl["8"] >= 0
    for limit, bits in ((kl["4"] * 1.01, 4), (kl["6"] * 1.01, 6), (kl["8"] * 1.01, 8), (0.0, 8)):
        monkeypatch.setattr(choose_precision, "MAX_HEAD_KL", limit)
        file, _ = made(folder, tmp_path / "b.edgeq", options)
        assert file.metadata.linears["head"].weights[0].codec.bits == bits
        assert file.metadata.provenance["options"]["head"] == bits  # type: ignore[index, call-overload]


def test_the_default_mode_is_8_bit_only_if_that_costs_little(
    checkpoint: Callable[..., Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = checkpoint("llama_mha"), ConvertOptions(method="rtn", calibration=text, head=8)
    for limit, mode in ((1.0, "a8"), (-0.5, "a16")):
        monkeypatch.setattr(choose_precision, "MAX_A8_RISE", limit)
        assert made(folder, tmp_path / "a.edgeq", options)[0].metadata.default_mode == mode


def test_nothing_is_measured_without_text(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    file, measured = made(checkpoint("llama_mha"), tmp_path / "a.edgeq", ConvertOptions())
    assert not measured and file.metadata.default_mode == "a16"
    assert file.metadata.linears["head"].weights[0].codec.bits == 8


def test_what_is_measured_is_the_file(checkpoint: Callable[..., Path], tmp_path: Path, text: Path) -> None:
    """The layers that the gate reads back give the hidden states of the runtime."""
    from edgeq.runtime import Model

    folder = checkpoint("qwen2", initializer_range=0.1)
    file, measured = made(folder, tmp_path / "a.edgeq", ConvertOptions(method="rtn", calibration=text, head=16, group_size=32))
    model = Model.load(file.path, target="reference", max_logits=256)
    tokens = model.text.encode(CODE)[:512]
    nll = {}
    for mode in ("a16", "a8"):
        model = Model.load(file.path, target="reference", mode=mode, max_logits=256)  # type: ignore[arg-type]
        logits = torch.from_numpy(np.concatenate(list(model.session().all_logits(tokens)))).double()
        nll[mode] = float(-logits[:-1].log_softmax(1)[torch.arange(511), torch.tensor(tokens[1:])].mean())
    assert measured["a8_nll_rise"] == pytest.approx(nll["a8"] - nll["a16"], abs=5e-4)
