"""Families whose layers have a state: which layers those are, what is refused by which key, how their tensors lie."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edgeq.converters.families import recognise
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.delta_net import DeltaNet
from edgeq.network.ssd import StateSpace
from tests.converters.checkpoint.family_configs import SIZES, assert_same_file, config_of, saved_otherwise


def test_lfm2_has_convolutions_where_its_types_or_its_list_say() -> None:
    types = ["conv", "full_attention"] * 4
    config = config_of("Lfm2ForCausalLM", layer_types=types, norm_eps=3e-5, conv_L_cache=5, rope_theta=777.0)
    assert config.conv_layers == (0, 2, 4, 6) and config.conv_taps == 5 and config.qk_norm and config.tie_word_embeddings
    assert (config.rms_norm_eps, config.rope.theta) == (3e-5, 777.0)
    # Two thirds of 48 are 32, up to a multiple of 256.
    assert config.intermediate_size == 256
    kept = config_of("Lfm2ForCausalLM", full_attn_idxs=[1, 7], block_auto_adjust_ff_dim=False, block_ff_dim=40)
    assert kept.conv_layers == (0, 2, 3, 4, 5, 6) and kept.intermediate_size == 40
    adjusted = config_of("Lfm2ForCausalLM", full_attn_idxs=[0], block_multiple_of=10, block_ffn_dim_multiplier=1.3)
    assert adjusted.intermediate_size == 50
    assert config_of("Lfm2ForCausalLM").conv_layers == () and config_of("Lfm2ForCausalLM").conv_taps == 0


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"conv_bias": True}, UnsupportedError, "conv_bias is True"),
        ({"layer_types": ["conv", "linear_attention"] * 4}, UnsupportedError, "'linear_attention' is not supported"),
        ({"layer_types": ["conv"] * 7}, CheckpointError, "not a list of 8 entries"),
        ({"layer_types": ["conv"] * 8}, UnsupportedError, "beside layers of attention"),
        ({"full_attn_idxs": ["1"]}, CheckpointError, "full_attn_idxs is"),
        ({"full_attn_idxs": [1], "conv_L_cache": 0}, CheckpointError, "conv_taps is 0"),
        ({"block_multiple_of": 0}, CheckpointError, "block_multiple_of is 0"),
        ({"block_ff_dim": 10**400}, CheckpointError, "block_ff_dim is 1000"),
        ({"block_ffn_dim_multiplier": math.inf}, CheckpointError, "block_ffn_dim_multiplier is inf"),
        ({"block_ffn_dim_multiplier": math.nan}, CheckpointError, "block_ffn_dim_multiplier is nan"),
        ({"tie_embedding": False}, UnsupportedError, "tie_embedding is False"),
    ],
)
def test_what_lfm2_does_not_have_is_refused_by_key(keys: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        config_of("Lfm2ForCausalLM", **keys)


@pytest.mark.parametrize("method", ["quarot", "resq", "mquant", "ttq", "smoothquant"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("lfm2", "convolutions"),
        ("qwen3_5", "a gated delta net"),
        ("granite_hybrid", "a state space"),
        ("falcon_h1", "a state space"),
        ("nemotron_h", "a state space"),
    ],
)
def test_methods_that_take_every_layer_to_attend_refuse_states(
    checkpoint: Callable[..., Path], method: str, family: str, kind: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"--method {method}: this model .*has layers of {kind}; supported: none"):
        preflight(str(checkpoint(family)), ConvertOptions(method=method))


def test_granite_4_reads_which_layers_have_a_state_and_which_experts() -> None:
    sizes = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "rms_norm_eps": 3e-5, "residual_multiplier": 0.5}
    found = config_of("GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"] * 4, **sizes)
    assert found.ssd == StateSpace((0, 2, 4, 6), 8, 8, 2, 10, 4, 3e-5) and found.rms_norm_eps == 3e-5 / 0.25
    assert found.layers_without_rope == tuple(range(8)) and found.ssd.time_step_limits == (0.0, math.inf)
    assert (found.num_experts, found.num_experts_per_tok, found.norm_topk_prob) == (8, 2, True)
    assert (found.shared_expert_intermediate_size, found.shared_expert_gate) == (1024, False)
    limits = {"time_step_limit": [0.1, {"__float__": "Infinity"}], "num_local_experts": 0, "shared_intermediate_size": 40}
    types = {"layers_block_type": ["full_attention"] * 7 + ["linear_attention"], "position_embedding_type": "rope"}
    dense = config_of("GraniteMoeHybridForCausalLM", **types, **sizes, **limits)
    assert dense.ssd is not None and dense.ssd.layers == (7,) and dense.ssd.time_step_limits == (0.1, math.inf)
    assert (dense.num_experts, dense.intermediate_size, dense.layers_without_rope) == (0, 40, ())
    plain = config_of("GraniteMoeHybridForCausalLM", layer_types=["attention"] * 8, **limits)
    assert plain.ssd is None and not plain.state_layers


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"mamba_proj_bias": True}, UnsupportedError, "mamba_proj_bias is True"),
        ({"position_embedding_type": "alibi"}, UnsupportedError, "position_embedding_type is 'alibi'"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act is 'gelu'"),
        ({"layer_types": ["mamba", "conv"] * 4}, UnsupportedError, "'conv' is not supported"),
        ({"layer_types": ["mamba"] * 7}, CheckpointError, "not a list of 8 entries"),
        ({"layer_types": ["mamba"] * 8}, UnsupportedError, "beside layers of attention"),
        ({"mamba_d_head": 12}, CheckpointError, "mamba_d_head is 12 for 8 mamba_n_heads"),
        ({"mamba_n_heads": 0}, CheckpointError, "mamba_n_heads is 0"),
        ({"mamba_expand": 1.5}, CheckpointError, "mamba_expand is 1.5"),
        ({"mamba_n_groups": 3}, CheckpointError, "8 heads and 3 groups"),
        ({"mamba_conv_bias": 1}, CheckpointError, "mamba_conv_bias is 1"),
        ({"time_step_limit": [0.1]}, CheckpointError, "time_step_limit is"),
        ({"time_step_limit": [0.2, 0.1]}, CheckpointError, "time steps from 0.2 to 0.1"),
        ({"time_step_limit": ["0", 0.1]}, CheckpointError, "time_step_min is '0'"),
        ({"num_local_experts": 10**9}, CheckpointError, "num_experts is 1000000000"),
    ],
)
def test_what_granite_4_does_not_have_is_refused_by_key(keys: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        config_of("GraniteMoeHybridForCausalLM", **{"layer_types": ["mamba", "attention"] * 4, "mamba_n_heads": 8} | keys)


NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "M-M*-M--",
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 10,
}


NANO: dict[str, Any] = {
    "hybrid_override_pattern": "MEM*EMEE",
    "n_routed_experts": 6,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
}


def test_layers_of_nemotron_3_are_experts_in_place_of_mlps() -> None:
    found = config_of("NemotronHForCausalLM", **NEMOTRON | NANO, routed_scaling_factor=2.5)
    assert found.ssd is not None and found.ssd.mlp_layers == (1, 4, 6, 7) and found.ssd_layers == (0, 2, 5)
    assert (found.num_experts, found.num_experts_per_tok, found.intermediate_size, found.norm_topk_prob) == (6, 2, 40, True)
    assert (found.shared_expert_intermediate_size, found.shared_expert_gate, found.expert_scores) == (56, False, "sigmoid")
    assert found.routed_scaling_factor == 2.5 and type(found).from_json(found.to_json()) == found


def test_every_layer_of_nemotron_h_is_one_block() -> None:
    found = config_of("NemotronHForCausalLM", **NEMOTRON, layer_norm_epsilon=3e-5, head_dim=16)
    assert found.ssd == StateSpace((0, 2, 5), 6, 8, 2, 10, 4, 3e-5, mlp_layers=(1, 4, 6, 7))
    assert [layer for layer in range(8) if found.attends(layer)] == [3] and found.layers_without_rope == tuple(range(8))
    assert (found.hidden_act, found.gated, found.rms_norm_eps, found.head_dim) == ("relu2", False, 3e-5, 16)
    limited = config_of("NemotronHForCausalLM", **NEMOTRON, time_step_min=0.3, time_step_limit=[0.02, 0.8])
    # The first Nemotron-H call it attention_head_dim.
    assert limited.ssd is not None and limited.ssd.time_step_limits == (0.02, 0.8) and limited.head_dim == 128
    assert config_of("NemotronHForCausalLM", **NEMOTRON, attention_head_dim=24).head_dim == 24
    # transformers writes a list, and no number of layers.
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    types = [names[each] for each in NEMOTRON["hybrid_override_pattern"]]
    sizes = {
        key: value for key, value in (SIZES | NEMOTRON).items() if key not in ("num_hidden_layers", "hybrid_override_pattern")
    }
    saved = {"architectures": ["NemotronHForCausalLM"], **sizes, "layers_block_type": types}
    assert recognise(saved)[1] == config_of("NemotronHForCausalLM", **NEMOTRON)


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"hybrid_override_pattern": "MEM*-M--"}, UnsupportedError, "hybrid_override_pattern has MLPs and experts"),
        ({"layers_block_type": ["mamba", "moe"] * 4}, UnsupportedError, "no layer of kind 'attention'"),
        (NANO | {"mlp_bias": True}, UnsupportedError, "mlp_bias is True beside experts"),
        (NANO | {"moe_latent_size": 24}, UnsupportedError, "moe_latent_size is 24"),
        (NANO | {"n_group": 2}, UnsupportedError, "n_group is 2"),
        (NANO | {"n_shared_experts": 2}, UnsupportedError, "n_shared_experts is 2"),
        (NANO | {"norm_topk_prob": 1}, CheckpointError, "norm_topk_prob is 1"),
        (NANO | {"routed_scaling_factor": 0}, CheckpointError, "routed_scaling_factor is 0"),
        (NANO | {"num_experts_per_tok": 0}, CheckpointError, "6 experts and uses none"),
        (NANO | {"moe_shared_expert_intermediate_size": 0}, CheckpointError, "moe_shared_expert_intermediate_size is 0"),
        ({"hybrid_override_pattern": "M-M*-M-x"}, UnsupportedError, "has 'x'; supported: M, mamba"),
        ({"layers_block_type": [["mamba"]] * 8}, UnsupportedError, "layers_block_type has"),
        ({"hybrid_override_pattern": "M-M*-M-"}, CheckpointError, "num_hidden_layers is 8; 7 layers are described"),
        ({"hybrid_override_pattern": ["M"]}, CheckpointError, "expected a str of layers"),
        ({"hybrid_override_pattern": "M" * 1025}, CheckpointError, "expected a str of layers"),
        ({"hybrid_override_pattern": None}, CheckpointError, "says of no layer what it is"),
        ({"hybrid_override_pattern": "M-M--M--"}, UnsupportedError, "no layer of kind 'attention'"),
        ({"hybrid_override_pattern": "MMM*MMMM"}, UnsupportedError, "no layer of kind 'mlp'"),
        ({"mlp_hidden_act": "silu"}, UnsupportedError, "mlp_hidden_act is 'silu'"),
        ({"mamba_hidden_act": "gelu"}, UnsupportedError, "mamba_hidden_act is 'gelu'"),
        ({"use_bias": True}, UnsupportedError, "use_bias is True"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"sliding_window": 64}, UnsupportedError, "sliding_window is 64"),
        ({"tie_word_embeddings": True}, UnsupportedError, "tie_word_embeddings is True"),
        ({"mlp_bias": 1}, CheckpointError, "mlp_bias is 1"),
        ({"mamba_head_dim": 1.5}, CheckpointError, "mamba_head_dim is 1.5"),
        ({"n_groups": 4}, CheckpointError, "6 heads and 4 groups"),
    ],
)
def test_what_nemotron_h_does_not_have_is_refused_by_key(keys: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        config_of("NemotronHForCausalLM", **NEMOTRON | keys)


def test_falcon_h1_has_a_state_space_beside_every_attention() -> None:
    sizes = {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "num_hidden_layers": 3}
    found = config_of("FalconH1ForCausalLM", embedding_multiplier=2.0, **sizes)
    space = StateSpace((0, 1, 2), 6, 8, 2, 10, 4, 1e-5, norm="none", beside_attention=True)
    assert found.ssd == space and found.state_layers == (0, 1, 2) and all(map(found.attends, range(3)))
    assert found.embedding_multiplier == 2.0 and found.layers_without_rope == ()
    expanded = config_of("FalconH1ForCausalLM", **sizes | {"mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_rms_norm": True})
    assert expanded.ssd is not None and (expanded.ssd.inner_size, expanded.ssd.norm) == (64, "before_gate")
    after = config_of("FalconH1ForCausalLM", mamba_rms_norm=True, mamba_norm_before_gate=False, **sizes)
    assert after.ssd is not None and after.ssd.norm == "after_gate"


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"mamba_proj_bias": True}, UnsupportedError, "mamba_proj_bias is True"),
        ({"projectors_bias": True}, UnsupportedError, "projectors_bias is True"),
        ({"mlp_bias": True}, UnsupportedError, "mlp_bias is True"),
        ({"mamba_rms_norm": 1}, CheckpointError, "mamba_rms_norm is 1"),
        ({"mamba_d_ssm": 49}, CheckpointError, "mamba_d_head is 8 for 6 mamba_n_heads"),
        ({"mamba_d_ssm": "48"}, CheckpointError, "mamba_d_ssm is '48'"),
        ({"mlp_multipliers": [1.0]}, CheckpointError, "mlp_multipliers is"),
        ({"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 0]}, CheckpointError, "ssm_multipliers 4 is 0"),
        ({"key_multiplier": "1"}, CheckpointError, "key_multiplier is '1'"),
    ],
)
def test_what_falcon_h1_does_not_have_is_refused_by_key(keys: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        config_of("FalconH1ForCausalLM", **{"mamba_d_ssm": 48, "mamba_n_heads": 6} | keys)


def test_qwen3_5_reads_which_layers_have_a_state() -> None:
    plain = config_of("Qwen3_5ForCausalLM")
    assert plain.delta_layers == (0, 1, 2, 4, 5, 6) and plain.attention_gate and plain.qk_norm and plain.head_dim == 256
    assert plain.delta_net == DeltaNet(plain.delta_layers, 16, 32, 128, 128, 4) and plain.rope.rotary_size(256) == 64
    assert config_of("Qwen3_5ForCausalLM", full_attention_interval=2).delta_layers == (0, 2, 4, 6)
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, **sections}
    typed = config_of("Qwen3_5ForCausalLM", layer_types=["linear_attention", "full_attention"] * 4, rope_parameters=rope)
    assert typed.delta_layers == (0, 2, 4, 6)
    assert (typed.rope.theta, typed.rope.rotary_size(256), typed.rope.sections) == (1e7, 128, ())
    experts = config_of("Qwen3NextForCausalLM", moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2)
    assert (experts.intermediate_size, experts.num_experts, experts.shared_expert_intermediate_size) == (24, 6, 512)
    assert experts.norm_topk_prob and ModelConfig.from_json(experts.to_json()) == experts


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"layer_types": ["linear_attention", "conv"] * 4}, UnsupportedError, "'conv' is not supported; supported: linear"),
        ({"layer_types": ["linear_attention"] * 7}, CheckpointError, "not a list of 8 entries"),
        ({"layer_types": ["linear_attention"] * 8}, UnsupportedError, "beside layers of attention"),
        ({"layer_types": ["full_attention"] * 8}, CheckpointError, "delta_net has no layers"),
        ({"full_attention_interval": 0}, CheckpointError, "full_attention_interval is 0"),
        ({"linear_num_value_heads": 24}, CheckpointError, "24 value heads and 16 key heads"),
        ({"linear_key_head_dim": "128"}, CheckpointError, "delta_net.key_dim is '128'"),
        ({"attn_output_gate": False}, UnsupportedError, "attn_output_gate is False"),
        ({"rope_parameters": [1]}, CheckpointError, "rope_parameters is"),
    ],
)
def test_what_qwen3_5_does_not_have_is_refused_by_key(keys: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        config_of("Qwen3_5ForCausalLM", **keys)


@pytest.mark.parametrize(
    ("architecture", "keys", "readers"),
    [
        ("Lfm2ForCausalLM", {"full_attn_idxs": [1]}, [{"conv_in"}, {"q", "k", "v"}]),
        (
            "Qwen3_5ForCausalLM",
            {"full_attention_interval": 2},
            [{"delta_qkv", "delta_gate"}, {"q", "k", "v", "attention_gate"}],
        ),
    ],
)
def test_a_scale_is_folded_into_what_a_layer_has(architecture: str, keys: dict[str, Any], readers: list[set[str]]) -> None:
    family, _ = recognise({"architectures": [architecture], **SIZES, **keys})
    for layer, expected in enumerate(readers):
        found = {mapping.absorber: mapping for mapping in family.awq_mappings(layer)}
        assert set(found["attention_norm"].consumers) == expected and "mlp_norm" in found
        assert set(found["attention_norm"].followers) == ({"delta_b", "delta_a"} if "delta_qkv" in expected else set())


def test_qwen3_nexts_rows_lie_key_head_by_key_head() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 2, "linear_value_head_dim": 3}
    sources = recognise({"architectures": ["Qwen3NextForCausalLM"], **SIZES, **sizes})[0].sources()
    found = {part: sources[f"model.layers.0.self_attn.{part}.weight"] for part in ("qkv_proj", "gate_proj", "b", "a")}
    orders = {part: (source.otherwise or source).order for part, source in found.items()}
    # In GGUF files those of the first two are in order.
    assert not found["qkv_proj"].order and not found["gate_proj"].order
    # Of a head 2 rows of q, 2 of k, 6 of v, 6 of z.
    assert orders["qkv_proj"] == (0, 1, 16, 17, 2, 3, 18, 19, *range(4, 10), *range(20, 26))
    assert orders["gate_proj"] == (*range(10, 16), *range(26, 32))
    assert orders["b"] == (0, 1, 4, 5) and orders["a"] == (2, 3, 6, 7)


SEEING_QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {**SIZES, "vocab_size": 300000, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}},
    "vision_config": {"model_type": "qwen3_5", "depth": 3, "hidden_size": 48, "num_heads": 2, "out_hidden_size": 32}
    | {"deepstack_visual_indexes": []},
}
PICTURES = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}


def test_a_qwen3_5_that_sees_has_a_tower_without_taps() -> None:
    family, found = recognise(SEEING_QWEN, PICTURES)
    tower = found.vision
    assert tower and tower.interpolated and tower.position_rows == 2304 and tower.tap_layers == () and tower.patch_size == 16
    assert (found.rope.sections, found.rope.interleaved, found.rope.rotary_size(found.head_dim)) == ((11, 11, 10), True, 64)
    assert found.delta_layers == (0, 1, 2, 4, 5, 6) and tower.image_token_id == 248056
    assert family.description.unused(found, "mtp.fc.weight") and not family.description.unused(found, "visual.pos_embed.weight")
    assert ModelConfig.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("place", "keys", "error", "why"),
    [
        ("text_config", {"rope_parameters": {"mrope_section": [11, 11, 11]}}, CheckpointError, "sections are .* add up to 32"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False}}, UnsupportedError, "mrope_interleaved is False"),
        ("text_config", {"rope_parameters": [1]}, CheckpointError, "rope_parameters is"),
        ("vision_config", {"deepstack_visual_indexes": [1]}, UnsupportedError, "deepstack_visual_indexes is .1."),
        ("vision_config", {"depth": 0}, CheckpointError, "depth is 0"),
    ],
)
def test_what_a_qwen3_5_that_sees_does_not_have_is_refused_by_key(
    place: str, keys: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        recognise({**SEEING_QWEN, place: {**SEEING_QWEN[place], **keys}}, PICTURES)


def test_qwen3_5_moe_divides_the_shares_of_its_experts() -> None:
    """No key says so, and one that does is not read."""
    found = config_of("Qwen3_5MoeForCausalLM", moe_intermediate_size=24, num_experts=9, norm_topk_prob=False)
    assert (found.intermediate_size, found.num_experts, found.num_experts_per_tok) == (24, 9, 8) and found.norm_topk_prob
    assert (found.shared_expert_intermediate_size, found.num_key_value_heads) == (512, 4)


def test_experts_of_published_checkpoints_lie_in_two_tensors(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_moe")
    stored, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    named = dict(stored)
    for p in (f"model.layers.{layer}.mlp.experts." for layer in range(3)):
        gate, up, down = (
            torch.stack([named.pop(f"{p}{expert}.{part}_proj.weight") for expert in range(6)])
            for part in ("gate", "up", "down")
        )
        named |= {f"{p}gate_up_proj": torch.cat([gate, up], 1), f"{p}down_proj": down}
    saved_otherwise(folder, tmp_path / "fused", named, config)
    assert_same_file(folder, tmp_path / "fused", tmp_path)
    del named["model.layers.1.mlp.experts.down_proj"]
    saved_otherwise(folder, tmp_path / "less", named, config)
    with pytest.raises(CheckpointError, match="layers.1.mlp.experts.0.down_proj.weight is missing"):
        preflight(str(tmp_path / "less"), ConvertOptions())


def test_olmo_hybrid_reads_its_sizes_and_where_it_does_not_rotate() -> None:
    rope = {"rope_type": "default", "rope_theta": None}
    plain = config_of("OlmoHybridForCausalLM", rope_parameters=rope)
    assert plain.delta_net == DeltaNet((0, 1, 2, 4, 5, 6), 4, 4, 6, 12, 4, allow_neg_eigval=True, norm_eps=1e-5)
    assert plain.layers_without_rope == tuple(range(8)) and plain.qk_norm_kind == "whole"
    assert [(plain.norms_before(i), plain.norms_after(i)) for i in (2, 3)] == [(True, False), (False, True)]
    few = config_of("OlmoHybridForCausalLM", num_hidden_layers=2, rope_parameters=rope | {"rope_theta": 777.0})
    assert few.delta_layers == (0,) and few.layers_without_rope == () and few.rope.theta == 777.0
    for missing in (None, {}, {"rope_type": "default"}):
        with pytest.raises(CheckpointError, match="rope_parameters is .*or null where queries and keys are not rotated"):
            config_of("OlmoHybridForCausalLM", rope_parameters=missing)


def test_an_olmo_hybrid_as_published_is_read_as_one_saved_again(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """transformers cuts its convolutions into thirds, and gives a norm of attention the name of a delta net's."""
    folder = checkpoint("olmo_hybrid")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for p in (f"model.layers.{layer}.linear_attn." for layer in (0, 2, 3)):
        whole = torch.cat([tensors.pop(f"{p}{part}_conv1d.weight") for part in "qkv"])
        tensors |= {f"{p}{part}_conv1d.weight": each for part, each in zip("qkv", whole.split([48, 48, 120]), strict=True)}
    norms = ("feedforward_layer_norm", "post_attention_layernorm")
    old, new = (f"model.layers.1.{name}.weight" for name in norms)
    tensors[new] = tensors.pop(old)
    saved_otherwise(folder, tmp_path / "published", tensors, config)
    assert_same_file(folder, tmp_path / "published", tmp_path)
