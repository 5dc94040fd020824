"""Whole models on the emulated device: one tiny random one of every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec, Mode
from edgeq.runtime import Model, Sampling
from edgeq.runtime.network.decoder import decoder
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.target import Options
from tests.checkpoints.embeddings import embedding_checkpoint
from tests.converters.importers.test_mxfp4_folders import published
from tests.cuda.comparing import read
from tests.cuda.emulated import EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

FAMILIES = (
    "llama3_rope", "mistral", "qwen2", "qwen3", "phi3", "phi3_longrope", "smollm3", "gemma3", "opt", "mixtral", "qwen2_moe",
    "qwen3_moe", "olmo2", "olmo3", "exaone4", "granite", "glm4", "ernie4_5", "cohere2", "hunyuan",
    "stablelm_parallel", "starcoder2", "gpt2", "bigcode", "neox", "lfm2", "gpt_oss",
    "gemma4", "gemma4_keys", "gemma4_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "granite_hybrid",
    "granite_hybrid_moe", "falcon_h1", "falcon_h1_norm", "nemotron_h", "nemotron_h_experts", "gemma2", "falcon_rw",
    "mpt", "bloom",
)  # fmt: skip
LENGTH = 70
MAX_ERROR = 1e-2
"""As a share of the largest logit of the reference, in a16."""


def logits(target: Any, file: ModelFile, count: int, mode: Mode, kv: KvCodec, chunks: tuple[int, ...] = ()) -> np.ndarray:
    options = Options(mode, max_rows=count, max_logits=count, kv=kv)
    return read(target.compile(decoder(file.metadata, 192), file, options), count, chunks)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family(family: str, model_path: Callable[..., Path]) -> None:
    """Tokens are 0 to 69; weights large enough that a mistake shows."""
    file = ModelFile.open(model_path(family, {"initializer_range": 0.05}, method="rtn", bits=4, group_size=32))
    f16 = KvCodec()
    wanted, found = (logits(t, file, LENGTH, "a16", f16) for t in (load("reference"), CudaTarget(EmulatedDevice())))
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    print(f"{family}: largest error {error:.1e} of the largest logit")
    assert error <= MAX_ERROR
    for cuts in ((1, 17, 52), *([(*[1] * 20, 50)] if file.metadata.config.state_layers else [])):
        assert np.array_equal(logits(CudaTarget(EmulatedDevice()), file, LENGTH, "a16", f16, cuts), found)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cuda target of a model that is loaded runs on the emulated device."""
    monkeypatch.setattr(
        "edgeq.runtime.model.pick",
        lambda name, file: TargetChoice(CudaTarget(EmulatedDevice()) if name == "cuda" else load(name), []),
    )


def greedy(path: Path, target: str) -> list[int]:
    """A prompt of more rows than fused launches take, longer than the windows, then token by token."""
    with Model.load(path, target=target, mode="a16", kv="f16", context=192) as model:
        prompt = "import os\n\n\ndef read_file(path):\n    with open(path) as file:\n        return file.read()\n"
        assert len(model.text.encode(prompt)) > 24
        generation = model.generate(prompt, max_tokens=24, sampling=Sampling(temperature=0), ignore_eos=True)
        assert generation.text()
        return generation.tokens


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_a_text_is_that_of_the_reference(family: str, model_path: Callable[..., Path]) -> None:
    path = model_path(family, {"initializer_range": 0.05}, method="rtn", bits=4, group_size=32)
    found = greedy(path, "cuda")
    assert found == greedy(path, "reference") and len(set(found)) > 1


@pytest.mark.usefixtures("emulated")
def test_a_text_of_experts_in_mxfp4_as_they_are_published(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    stored, _ = published(checkpoint("gpt_oss", dtype="float32", initializer_range=0.05), tmp_path)
    path = tmp_path / "kept.edgeq"
    file = convert(str(stored), path, ConvertOptions(), lambda *_: None)
    assert "n4 g32" in {weight.codec.name for each in file.metadata.linears.values() for weight in each.weights}
    found = greedy(path, "cuda")
    assert found == greedy(path, "reference") and len(set(found)) > 1


def test_the_states_of_a_model_that_embeds_texts(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = embedding_checkpoint(checkpoint("qwen3", initializer_range=0.05), tmp_path / "source", "mean")
    options = ConvertOptions(method="rtn", bits=4, group_size=32)
    file = convert(str(source), tmp_path / "embeds.edgeq", options, lambda *_: None)
    wanted, found = (logits(t, file, 20, "a16", KvCodec()) for t in (load("reference"), CudaTarget(EmulatedDevice())))
    assert found.shape == (20, file.metadata.config.hidden_size)
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_an_untied_embedding_and_a_head_of_floats(model_path: Callable[..., Path]) -> None:
    file = ModelFile.open(model_path("llama_mha", {"initializer_range": 0.05}, method="none", dtype="bf16"))
    wanted, found = (logits(t, file, 20, "a16", KvCodec()) for t in (load("reference"), CudaTarget(EmulatedDevice())))
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()
