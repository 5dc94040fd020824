"""The trained tiny Llama in every codec that methods round to beside integers with zero points, on the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec
from edgeq.runtime import Model
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.models.test_cuda_fused import equal

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

CODECS: dict[str, dict[str, Any]] = {
    "i3 g32 half": {"bits": 3, "half": True, "group_size": 32},
    "n4 g32": {"bits": 4, "table": True, "group_size": 32},
    "t2 g32 s4": {"bits": 2, "trellis": True, "group_size": 32},
}


@pytest.mark.parametrize("codec", CODECS)
def test_a_text_is_that_of_the_reference(codec: str, model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of more rows than fused launches take, then token by token; the head is in another codec."""
    monkeypatch.setattr(
        "edgeq.runtime.model.pick",
        lambda name, file: TargetChoice(CudaTarget(EmulatedDevice()) if name == "cuda" else load(name), []),
    )
    path = model_path("tiny-llama", method="rtn", **CODECS[codec])
    assert codec in {weight.codec.name for each in ModelFile.open(path).metadata.linears.values() for weight in each.weights}
    texts = []
    for target in ("reference", "cuda"):
        with Model.load(path, target=target, mode="a16", kv="f16", context=192) as model:
            prompt = "import os\n\n\ndef read_file(path):\n    with open(path) as file:\n        return file."
            assert len(model.text.encode(prompt)) > 16
            texts.append(model.generate(prompt, max_tokens=24, ignore_eos=True).text())
    assert texts[0] == texts[1] and len(texts[0]) > 24


@pytest.mark.parametrize("codec", ["i3 g32 half", "t2 g32 s4"])
def test_fused_launches_give_the_same_bits(codec: str, model_path: Callable[..., Path]) -> None:
    file = ModelFile.open(model_path("tiny-llama", method="rtn", **CODECS[codec]))
    assert equal(file, "a16", KvCodec()) <= 5
