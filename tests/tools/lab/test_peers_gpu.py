"""Competitors on a GPU: what of them can be run without one, by a stand-in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq.runtime import Model
from edgeq.tools.lab.peers import for_edgeq, for_llama_cpp, for_torch, table, weights
from edgeq.tools.lab.peers.__main__ import chosen, configuration, main
from edgeq.tools.lab.peers.contest import Entry
from edgeq.tools.lab.peers.peer import Stored, Times, Variant, variants

CONFIG = configuration("tiny")
PROMPT = [1, 5, 9, 2]


@pytest.fixture
def on_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch on the processor, traced and not compiled."""
    pytest.importorskip("torch")
    monkeypatch.setattr(for_torch, "DEVICE", "cpu")
    monkeypatch.setattr(for_torch, "COMPILE", {"backend": "eager", "fullgraph": True})


@pytest.mark.exhaustive
def test_torch_runs_the_network_of_the_other_files_eager_and_compiled(on_processor: None, tmp_path: Path) -> None:
    names = "torch-bf16-eager", "torch-bf16-compiled"
    (tmp_path / "torch").mkdir()
    stored = for_torch.build(CONFIG, variants()[names[0]], tmp_path / "torch")
    assert stored.head == 2 * CONFIG.vocab_size * CONFIG.hidden_size and stored.weights % 2 == 0
    eager, compiled = (for_torch.load(CONFIG, variants()[name], tmp_path / "torch", 1, 12) for name in names)
    down = eager._model.model.layers[1].mlp.down_proj.weight.detach().float().numpy()
    wanted = (weights.matrix("layers.1.down", *down.shape).astype(np.float32) - 8) * weights.step(down.shape[1])
    assert np.array_equal(down, wanted)
    first = eager.run(PROMPT, 4)
    assert len(first.tokens) == 5 and first.prefill_s > 0 and first.decode_s > 0
    # The cache is emptied before each run, and what is compiled draws what eager draws.
    assert eager.run(PROMPT, 4).tokens == first.tokens == compiled.run(PROMPT, 4).tokens
    assert "CUDA graphs" in compiled.settings and "eager" in eager.settings
    # The network of the file of 4 bits, but for the rounding of activations to bf16.
    (tmp_path / "edgeq").mkdir()
    for_edgeq.build(CONFIG, variants()["edgeq-cuda-a16-g128-h8"], tmp_path / "edgeq")
    own = Model.load(tmp_path / "edgeq" / "model.edgeq", target="reference", mode="a16", context=12).session().prefill(PROMPT)
    assert own.max() - own[first.tokens[0]] < 0.05 * (own.max() - own.min())


def test_torch_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU here"):
        for_torch.version()


def test_llama_cpp_puts_every_layer_on_the_gpu_or_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = list[Any]()
    llama = SimpleNamespace(
        llama_backend_init=lambda: None, llama_supports_gpu_offload=lambda: False,
        llama_model_default_params=lambda: SimpleNamespace(n_gpu_layers=-1), llama_context_default_params=SimpleNamespace,
        llama_model_load_from_file=lambda path, params: asked.append(params.n_gpu_layers) or object(),
        llama_init_from_model=lambda model, params: object(), llama_print_system_info=lambda: b"CUDA : ARCHS = 890 | F16 = 1",
        LLAMA_FLASH_ATTN_TYPE_ENABLED=1,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "llama_cpp", llama)
    variant = variants()["llama.cpp-cuda-q4_0-h8"]
    with pytest.raises(ValueError, match="GGML_CUDA=on"):
        for_llama_cpp.load(CONFIG, variant, tmp_path, 1, 8)
    llama.llama_supports_gpu_offload = lambda: True
    assert "all layers on the GPU" in for_llama_cpp.load(CONFIG, variant, tmp_path, 1, 8).settings
    assert "mmap" in for_llama_cpp.load(CONFIG, variants()["llama.cpp-q4_0-h8"], tmp_path, 1, 8).settings
    assert asked == [for_llama_cpp.EVERY_LAYER, 0]


def entry(name: str, mode: str, decode_s: float) -> Entry:
    variant = Variant(name, name.split("-")[0], name, 128, 8, mode, "cuda")
    return Entry(variant, 1, Stored(4_000_000, 1_000_000), times=[Times(1.0, decode_s, [1, 2])], load_s=[1.0])


def test_on_a_gpu_a_ratio_is_against_activations_of_16_bits() -> None:
    mine = [entry("edgeq-cuda-a8", "a8", 0.1), entry("edgeq-cuda-a16", "a16", 0.2), entry("torch-bf16-eager", "eager", 1.0)]
    *_, row = table.rows(CONFIG, mine, 8, {1: 1e9}, None)
    assert row.against == "edgeq-cuda-a16" and row.decode_ratio == pytest.approx(5)


def test_those_of_a_target_run_beside_each_other() -> None:
    on_gpu, on_processor = chosen(None, "cuda", published=False), chosen(None, "cpu", published=False)
    assert {"edgeq-cuda-a16-g128-h8", "torch-bf16-eager", "torch-bf16-compiled", "llama.cpp-cuda-q4_0-h6"} <= set(on_gpu)
    published = chosen(None, "cpu", published=True)
    assert sorted(on_gpu + on_processor + published) == sorted(variants())
    # Every competitor has an edgeq with the same head.
    heads = {variants()[name].head_bits for name in on_gpu if name.startswith("edgeq")}
    assert {variants()[name].head_bits for name in on_gpu} == heads


def test_without_a_gpu_all_are_named_with_the_reason(tmp_path: Path) -> None:
    arguments = ["--target", "cuda", "--shape", "tiny", "-p", "8", "-n", "4", "-r", "1", "--work", str(tmp_path), "--json"]
    result = CliRunner().invoke(main, [*arguments, "--only", "torch", "--peer-python", "/nowhere/python"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rows"] == [] and "No such file" in found["left_out"]["torch"] and found["machine"]["gpu"]["device"]
