"""Every family's decoder layer is its own: block by block, with folded scales, and of tensors that are wrong."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgeq.converters.calibration import logits
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.logits import Network
from edgeq.converters.checkpoint import slabs
from edgeq.converters.checkpoint.checkpoint import Checkpoint, TensorSource
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import convert
from edgeq.converters.families import Family, linear_module, recognise
from edgeq.converters.families.rearranged import pairs_apart
from edgeq.converters.importers import open_source
from edgeq.converters.method import Block
from edgeq.converters.methods.awq import Awq, apply_scale
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import CheckpointError
from edgeq.format.codec import Codec, from_bf16
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from tests.converters.checkpoint.family_configs import opened
from tests.turns import by_turns

FAMILIES = ("qwen2", "phi3", "phi3_longrope", "smollm3", "gemma3", "opt", "lfm2", "mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES += ("olmo2", "olmo3", "ministral3", "qwen3_yarn", "exaone4", "granite", "glm4", "ernie4_5")
FAMILIES += ("cohere", "cohere2", "hunyuan", "stablelm", "stablelm_parallel", "starcoder2", "gpt2")
FAMILIES += ("bigcode", "bigcode_mha", "neox", "neox_sequential")
FAMILIES += ("falcon_7b", "falcon_40b", "falcon_sequential", "qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "gpt_oss")
FAMILIES += ("gemma4", "gemma4_keys", "gemma4_moe", "granite_hybrid", "granite_hybrid_moe")
FAMILIES += ("falcon_h1", "falcon_h1_norm", "falcon_h1_gate", "gemma", "gemma2", "nemotron_h", "nemotron_h_biases")
FAMILIES += ("nemotron_h_experts", "falcon_rw", "mpt", "bloom", "bloom_odd", "granite_moe", "granite_moe_shared")
TOKENS = torch.randint(0, 2048, (3, 40), generator=torch.Generator().manual_seed(5))


def hidden_after(source: Checkpoint, family: Family, config: ModelConfig, scaled: int | None = None) -> torch.Tensor:
    """Hidden states after the last layer; with `scaled` every scale that can be folded is, at random from that seed."""
    blocks = BlockForward(source, family, config, TOKENS)
    generator = torch.Generator().manual_seed(scaled or 0)
    for index in range(config.num_hidden_layers):
        layer = blocks.load(index)
        for mapping in family.awq_mappings(index) if scaled is not None else ():
            columns = layer.get_parameter(f"{linear_module(mapping.consumers[0])}.weight").shape[1]
            apply_scale(layer, mapping, torch.rand(columns, generator=generator) * 3 + 0.2)
        blocks.advance(index, layer)
    return blocks.hidden


@pytest.mark.parametrize("name", by_turns(FAMILIES, 0))
def test_block_by_block_gives_the_logits_of_transformers(
    checkpoint: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    folder = checkpoint(name, dtype="float32", initializer_range=0.05)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS, use_cache=False).logits[:, :-1]
    network, found = Network.open(str(folder)), torch.full_like(expected, math.nan).flatten(0, 1)

    def collect(position: int, entry: int, part: np.ndarray[Any, Any]) -> None:
        found[position : position + len(part), entry : entry + part.shape[1]] = torch.from_numpy(part)

    # Several slabs of the head, and several parts of a window.
    monkeypatch.setattr(logits, "POSITIONS", 17)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 4 * 700 * 128)
    progress: list[float] = []
    logits.stream_logits(network, TOKENS.numpy(), collect, lambda done, total, label: progress.append(done / total))
    assert (found - expected.flatten(0, 1)).abs().max() < 1e-3
    assert progress == sorted(progress) and progress[0] == 0 and progress[-1] < 1


@pytest.mark.parametrize("name", by_turns(FAMILIES, 1))
def test_folding_scales_without_rounding_changes_nothing(checkpoint: Callable[..., Path], name: str) -> None:
    """The router of experts is folded as well, else tokens would go elsewhere."""
    source, family, config = opened(checkpoint(name, dtype="float32", initializer_range=0.05))
    with torch.no_grad():
        before, after = hidden_after(source, family, config), hidden_after(source, family, config, scaled=3)
    assert family.awq_mappings(0)
    assert (after - before).abs().max() < 1e-3 * before.abs().max()


def test_gains_above_one_are_folded_exactly(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("gemma3")
    file = convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="rtn", group_size=32), lambda *_: None)
    tensors = load_file(folder / "model.safetensors")
    theirs = {"attention_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    theirs |= {"mlp_norm": "pre_feedforward_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
    theirs |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for ours, name in theirs.items():
        stored = file.metadata.arrays[f"layers.1.{ours}"]
        assert stored.dtype == "f32"
        assert np.array_equal(file.array(stored), 1 + tensors[f"model.layers.1.{name}.weight"].float().numpy())


def test_the_first_two_learned_positions_are_left_out(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("opt")
    file = convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="rtn", group_size=32), lambda *_: None)
    table = load_file(folder / "model.safetensors")["model.decoder.embed_positions.weight"].float().numpy()
    stored = file.metadata.arrays["positions"]
    assert stored.shape == (512, 128) and np.array_equal(from_bf16(file.array(stored)), table[2:])


def test_experts_are_layers_of_their_own_and_the_router_stays_a_float(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, path = checkpoint("qwen2_moe"), tmp_path / "a.edgeq"
    file = convert(str(folder), path, ConvertOptions(method="rtn", group_size=32), lambda *_: None)
    linears = file.metadata.linears
    assert linears["layers.1.experts.5.gate_up"].weights[0].codec == Codec("int", 4, 32, symmetric=False)
    assert linears["layers.1.shared.down"].columns == 96
    assert [linears[f"layers.1.{name}"].weights[0].codec.kind for name in ("router", "shared_gate")] == ["bf16"] * 2
    experts = sum(x.nbytes for name, x in linears.items() if ".experts." in name)
    every = sum(x.nbytes for name, x in linears.items() if name != "head")
    arrays = sum(x.nbytes for name, x in file.metadata.arrays.items() if name != "embedding")
    assert ModelFile.open(path).metadata.bytes_per_token()["weights"] == every - experts // 2 + arrays


def test_an_expert_without_tokens_is_rounded_plainly_with_a_warning(checkpoint: Callable[..., Path]) -> None:
    source, family, config = opened(checkpoint("mixtral", dtype="float32"))
    method = Awq(ConvertOptions(method="awq", bits=3, group_size=32), family, config)
    blocks, said = BlockForward(source, family, config, TOKENS), list[str]()
    layer = blocks.load(0)
    direction = torch.randn(128, generator=torch.Generator().manual_seed(1))
    # The last logit is 0 and never among the two largest.
    layer.get_parameter("mlp.gate.weight").data = torch.stack([direction, direction, -direction, -direction, 0 * direction])
    paths = [f"mlp.experts.{expert}.{part}_proj.weight" for expert in (3, 4) for part in ("up", "down")]
    before = [layer.get_parameter(path).data.clone() for path in paths]
    method.prepare(Block(0, layer, (), source.rows, blocks, said.append, "model.layers.0."))
    assert said == ["layer 1: no calibration token reached the experts 4: they are rounded to nearest"]
    same = [torch.equal(layer.get_parameter(path), weight) for path, weight in zip(paths, before, strict=True)]
    # The scale of what enters all experts reaches this one too; its own channels and ranges stay.
    assert same == [False, False, False, True]


def test_factors_and_orders_are_exact_and_take_no_adapters(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A power of two leaves a type as it is; an adapter for such a file was trained on other rows."""
    name = "model.norm.weight"
    for scaling, kind in ((4.0, "bf16"), (3.0, "f32")):
        folder = checkpoint("granite", logits_scaling=scaling)
        source, *_ = opened(folder)
        stored = load_file(folder / "model.safetensors")[name].float().numpy()
        assert source.dtype(name) == kind and np.array_equal(source.whole(name), stored * np.float32(1 / scaling))
    options = ConvertOptions(method="rtn", group_size=32)
    file = convert(str(checkpoint("glm4")), tmp_path / "a.edgeq", options, lambda *_: None)
    assert "source_channels" not in file.metadata.provenance
    source, *_ = opened(checkpoint("glm4"))
    order = list(pairs_apart(4, 64, 48))
    tensors = load_file(checkpoint("glm4") / "model.safetensors")
    for kind in ("weight", "bias"):
        name = f"model.layers.0.self_attn.q_proj.{kind}"
        assert np.array_equal(source.rows(name, 3, 200), tensors[name].float().numpy()[order][3:200])


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Checkpoint:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return Checkpoint(open_source(str(target), HubAccess()))


def test_a_missing_or_misshapen_part_of_a_fused_matrix_is_named(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, name = checkpoint("phi3"), "model.layers.1.self_attn.qkv_proj.weight"
    family, _ = recognise(json.loads((folder / "config.json").read_text()))
    source = changed(folder, tmp_path / "a", lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        source.arrange(family.sources())
    source = changed(folder, tmp_path / "b", lambda t: t.update({name: t[name][:-1].contiguous()}))
    with pytest.raises(CheckpointError, match=rf"{name} has the shape \(255, 128\); config.json says \(256, 128\)"):
        source.arrange(family.sources())
    source = changed(folder, tmp_path / "c", lambda t: t.update({name.replace("qkv", "q"): torch.zeros(128, 128)}))
    with pytest.raises(CheckpointError, match="has both .*q_proj.*qkv_proj"):
        source.arrange(family.sources())


def test_bad_values_are_reported_under_the_name_in_the_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.gate_up_proj.weight"][300, 5] = math.nan

    source = changed(checkpoint("phi3"), tmp_path / "a", spoil)
    family, _ = recognise(source.config)
    source.arrange(family.sources())
    with pytest.raises(CheckpointError, match="gate_up_proj.weight has NaN"):
        source.whole("model.layers.0.mlp.up_proj.weight")
    assert np.isfinite(source.whole("model.layers.0.mlp.gate_proj.weight")).all()


def test_factors_that_leave_float32_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    source = changed(checkpoint("llama_gqa"), tmp_path / "a", lambda t: t.update({name: t[name].float() * 1e30}))
    family, _ = recognise(source.config)
    source.arrange(family.sources())
    assert np.isfinite(source.whole(name)).all()
    source.tensors[name] = replace(source.tensors[name], factor=1e10)
    with pytest.raises(CheckpointError, match=f"{name} is beyond float32"):
        source.whole(name)


def test_a_source_is_rows_of_what_is_stored(tmp_path: Path) -> None:
    values = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": values}, tmp_path / "model.safetensors")
    source = Checkpoint(open_source(str(tmp_path), HubAccess()))
    source.arrange({"b": TensorSource("a", (6, 4), (3, 4), 2, 0.5), "c": TensorSource("a", (6, 4), (1, 4), 5)})
    assert np.array_equal(source.whole("b"), values[2:5].numpy() + 0.5)
    assert np.array_equal(source.rows("b", 1, 2), values[3:4].numpy() + 0.5)
    assert np.array_equal(source.whole("c"), values[5:].numpy())
    assert sorted(source.tensors) == ["b", "c"]
