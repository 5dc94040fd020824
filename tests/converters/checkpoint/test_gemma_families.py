"""The Gemmas: what their configurations become, which layers share keys, what is refused by which key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgeq.converters.budget.budget import Budget
from edgeq.converters.convert import convert
from edgeq.converters.families import recognise
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.codec import Codec, from_bf16
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from tests.converters.checkpoint.family_configs import SIZES, assert_same_file, config_of, saved_otherwise


def test_gemma3_reads_the_rope_of_its_old_configurations() -> None:
    config = config_of(
        "Gemma3ForCausalLM",
        rope_theta=5e5,
        rope_local_base_freq=777.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=12,
        sliding_window_pattern=3,
    )
    assert config.sliding_windows == (12, 12, 0, 12, 12, 0, 12, 12)
    assert (config.layer_rope(2).theta, config.layer_rope(2).factor) == (5e5, 8.0)
    assert (config.layer_rope(1).theta, config.layer_rope(1).kind) == (777.0, "default")
    assert config.embedding_multiplier == math.sqrt(32) and config.hidden_act == "gelu_pytorch_tanh"
    assert config.head_dim == 256 and config.attention_scale(0) == 256**-0.5
    assert ModelConfig.from_json(config.to_json()) == config


def test_the_first_gemmas_are_read_as_transformers_reads_them() -> None:
    first, second = config_of("GemmaForCausalLM", hidden_act="gelu"), config_of("Gemma2ForCausalLM", sliding_window=12)
    assert first.hidden_act == second.hidden_act == "gelu_pytorch_tanh" and first.head_dim == 256
    assert first.embedding_multiplier == second.embedding_multiplier == math.sqrt(32) and not first.sliding_windows
    assert second.sliding_windows == (12, 0) * 4 and second.post_norms and not first.post_norms
    assert (second.attn_logit_softcapping, second.final_logit_softcapping) == (50.0, 30.0)
    uncapped = config_of("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert uncapped.attn_logit_softcapping is None and "softcapping" not in uncapped.to_json()
    assert ModelConfig.from_json(second.to_json()) == second


GEMMA_4_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}


def test_gemma4_reads_its_two_kinds_of_layers() -> None:
    plain = config_of("Gemma4ForCausalLM", vocab_size_per_layer_input=64)
    assert plain.sliding_windows == (512,) * 5 + (0, 512, 0) and plain.attention_scale(0) == 1 and plain.value_norm
    assert plain.heads_of(0) == (4, 4, 256) and plain.heads_of(5) == (4, 4, 512) and not plain.keys_are_values(5)
    assert (plain.rope.kind, plain.rope.theta, plain.rope.partial_rotary_factor) == ("proportional", 1e6, 0.25)
    assert (plain.local_rope.kind, plain.local_rope.theta) == ("default", 1e4)
    assert plain.embedding_multiplier == math.sqrt(32) and plain.hidden_size_per_layer_input == 256 and plain.layer_scalars
    assert plain.final_logit_softcapping is None and ModelConfig.from_json(plain.to_json()) == plain
    keys = config_of("Gemma4ForCausalLM", **GEMMA_4_KEYS)
    assert keys.heads_of(5) == (4, 1, 512) and keys.keys_are_values(5) and not keys.keys_are_values(0)
    # As transformers writes what it has read.
    layers = {str(i): {"head_dim": 512, "num_key_value_heads": 1} for i in (5, 7)}
    assert config_of("Gemma4ForCausalLM", **GEMMA_4_KEYS, per_layer_config=layers) == keys
    # Other heads are for keys that are values.
    assert config_of("Gemma4ForCausalLM", **GEMMA_4_KEYS | {"attention_k_eq_v": False}).heads_of(5) == (4, 4, 512)


def test_gemma4_shares_the_keys_of_the_last_layer_of_each_kind() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2
    shared = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 64}
    family, config = recognise({"architectures": ["Gemma4ForCausalLM"], **SIZES, **shared, "layer_types": types})
    # The last layer sees all positions whatever its type is.
    assert [config.cache_layer(layer) for layer in range(8)] == [0, 1, 2, 3, 4, 4, 2, 2]
    assert [config.mlp_size(layer) for layer in range(8)] == [48] * 5 + [96] * 3
    parts, unused = family.layer_parts(6).keys(), family.description.unused
    assert {"q", "q_norm", "o"} <= parts and not {"k", "v", "k_norm"} & parts
    of_layer = [unused(config, f"model.layers.{layer}.self_attn.k_proj.weight") for layer in range(8)]
    assert of_layer == [False] * 5 + [True] * 3
    assert unused(config, "model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight")
    assert {m.absorber for m in family.awq_mappings(0)} == {"mlp_norm", "up"}


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"vocab_size_per_layer_input": 65}, UnsupportedError, "vocab_size_per_layer_input is 65; supported: vocab_size, 64"),
        ({"use_bidirectional_attention": "all"}, UnsupportedError, "use_bidirectional_attention is 'all'"),
        ({"enable_moe_block": 1}, CheckpointError, "enable_moe_block is 1; expected true or false"),
        ({"enable_moe_block": True, "moe_intermediate_size": 8}, CheckpointError, "num_experts is None"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"sliding_window": None}, CheckpointError, "sliding_window is null"),
        ({"rope_parameters": {"rope_type": "default"}}, CheckpointError, "one object for each of the layer_types"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, UnsupportedError, "per_layer_config is"),
        ({"num_kv_shared_layers": 3}, CheckpointError, "layer 5 has a window of 0, and none of the first 5 layers"),
        ({"global_head_dim": "512"}, CheckpointError, "global_head_dim is '512'"),
    ],
)
def test_what_gemma4_does_not_have_is_refused_by_key(keys: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        config_of("Gemma4ForCausalLM", **{"vocab_size_per_layer_input": 64} | keys)


def test_gains_of_gemma4_are_stored_as_they_are_and_rows_in_bits(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("gemma4")
    file = convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="rtn", group_size=32), lambda *_: None)
    tensors, arrays = load_file(folder / "model.safetensors"), file.metadata.arrays
    theirs = {
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "layer_scalar": "layer_scalar",
    }
    for ours, name in theirs.items():
        stored = from_bf16(file.array(arrays[f"layers.1.{ours}"]))
        assert np.array_equal(stored, tensors[f"model.layers.1.{name}"].float().numpy())
    linears = file.metadata.linears
    assert linears["layer_rows"].weights[0].codec == Codec("int", 4, 32, symmetric=False)
    assert linears["row_context"].weights[0].codec.kind == "bf16"
    # Of the table of rows a token reads one.
    every = sum(x.nbytes for name, x in linears.items() if name not in ("head", "layer_rows"))
    read = ModelFile.open(tmp_path / "a.edgeq").metadata.bytes_per_token()
    assert read["weights"] == every + sum(x.nbytes for x in arrays.values())
    # Keys and values of two layers of each kind, two heads of 32 and of 64.
    assert read["kv_per_position"] == 2 * 2 * 2 * 2 * (32 + 64)


def test_the_mlp_beside_experts_of_gemma4_is_the_one_for_all_tokens() -> None:
    keys = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24} | GEMMA_4_KEYS
    family, config = recognise({"architectures": ["Gemma4ForCausalLM"], **SIZES, **keys})
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (6, 2, True)
    assert (config.intermediate_size, config.shared_expert_intermediate_size, config.experts_beside_mlp) == (24, 48, True)
    sources = family.sources()
    assert sources["model.layers.1.mlp.router_norm.weight"].factor == 32**-0.5
    assert sources["model.layers.1.mlp.experts.2.up_proj.weight"].row == (2 * 2 + 1) * 24
    scales = {m.absorber: m for m in family.awq_mappings(0)}
    assert scales["mlp_norm"].consumers == ("shared.gate", "shared.up") and not scales["experts_input_norm"].followers


def test_a_gemma4_without_a_vision_tower_is_the_text_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Layers that read keys of others may carry their own, which nothing reads."""
    folder = checkpoint("gemma4")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        named[f"model.language_model.layers.5.self_attn.{part}"] = torch.ones(2, 2)
    named |= {"model.audio_tower.layers.0.x": torch.ones(4, 4), "model.embed_audio.x": torch.ones(2)}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": config["model_type"], "audio_config": {}}
    saved_otherwise(folder, tmp_path / "seeing", named, outer | {"text_config": config, "tie_word_embeddings": True})
    notes = preflight(str(tmp_path / "seeing"), ConvertOptions(method="rtn", group_size=32)).notes()
    assert any("left out: its audio tower" in note for note in notes)
    assert_same_file(folder, tmp_path / "seeing", tmp_path)
    named["model.language_model.layers.1.self_attn.v_norm.weight"] = torch.ones(64)
    saved_otherwise(folder, tmp_path / "more", named, outer | {"text_config": config, "tie_word_embeddings": True})
    with pytest.raises(UnsupportedError, match="v_norm.weight has no place"):
        preflight(str(tmp_path / "more"), ConvertOptions(method="rtn"))


def test_of_layers_that_read_keys_of_others_no_budget_is_measured(checkpoint: Callable[..., Path]) -> None:
    folder = str(checkpoint("gemma4"))
    with pytest.raises(UnsupportedError, match="read keys and values of others"):
        preflight(folder, ConvertOptions(method="gptq", budget=Budget("bits", 4.5)))
    with pytest.raises(UnsupportedError, match="has layers of heads of several kinds; supported: none, as-stored, rtn"):
        preflight(folder, ConvertOptions(method="ttq"))


def test_gemma3_keeps_the_scale_out_of_its_queries() -> None:
    family, config = recognise({"architectures": ["Gemma3ForCausalLM"], **SIZES})
    assert {m.absorber for m in family.awq_mappings(0)} == {"v", "mlp_norm", "up"}
