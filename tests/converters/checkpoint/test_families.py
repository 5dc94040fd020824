"""What a family's configuration becomes, what is refused by which key, and that every family's decoder layer is its own."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgeq.converters.budget.budget import Budget
from edgeq.converters.calibration import logits
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.logits import Network
from edgeq.converters.checkpoint import slabs
from edgeq.converters.checkpoint.checkpoint import Checkpoint, TensorSource
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import convert
from edgeq.converters.families import Family, linear_module, recognise, table
from edgeq.converters.families.rearranged import pairs_apart
from edgeq.converters.importers import gguf_architectures, gguf_tower_kinds, open_source
from edgeq.converters.method import Block
from edgeq.converters.methods.awq import Awq, apply_scale
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.codec import Codec, from_bf16
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.network.delta_net import DeltaNet
from edgeq.network.ssd import StateSpace

ROOT = Path(__file__).parents[3]
FAMILIES = ("qwen2", "phi3", "phi3_longrope", "smollm3", "gemma3", "opt", "lfm2", "mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES += ("olmo2", "olmo3", "ministral3", "qwen3_yarn", "exaone4", "granite", "glm4", "ernie4_5")
FAMILIES += ("cohere", "cohere2", "hunyuan", "stablelm", "stablelm_parallel", "starcoder2", "gpt2")
FAMILIES += ("bigcode", "bigcode_mha", "neox", "neox_sequential")
FAMILIES += ("falcon_7b", "falcon_40b", "falcon_sequential", "qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "gpt_oss")
FAMILIES += ("gemma4", "gemma4_keys", "gemma4_moe", "granite_hybrid", "granite_hybrid_moe")
FAMILIES += ("falcon_h1", "falcon_h1_norm", "falcon_h1_gate", "gemma", "gemma2")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LONG = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TOKENS = torch.randint(0, 2048, (3, 40), generator=torch.Generator().manual_seed(5))


def test_the_page_lists_every_architecture() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert set(
        re.findall(r"\b\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ForSequenceClassification|Model)\b", page)
    ) == set(table.FAMILIES)
    columns = [line.split("|")[3] for line in page.splitlines() if line.count("|") in (5, 6)]
    named = {*gguf_architectures.ARCHITECTURES, *gguf_tower_kinds.TOWERS}
    assert set(re.findall(r"`([\w.-]+)`", "".join(columns))) == named


def config_of(architecture: str, **keys: Any) -> ModelConfig:
    return recognise({"architectures": [architecture], **SIZES, **keys})[1]


def opened(folder: Path) -> tuple[Checkpoint, Family, ModelConfig]:
    source = Checkpoint(open_source(str(folder), HubAccess()))
    family, config = recognise(source.config)
    source.arrange(family.sources())
    return source, family, config


def test_phi3_reads_the_rope_of_its_old_configurations() -> None:
    config = config_of(
        "Phi3ForCausalLM", rope_scaling=LONG, max_position_embeddings=131072, original_max_position_embeddings=4096
    )
    assert (config.rope.kind, config.rope.long_factor, config.rope.factor) == ("longrope", (2.0,) * 4, 32.0)
    assert config.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    partial = config_of("Phi3ForCausalLM", partial_rotary_factor=0.75, head_dim=16)
    assert partial.rope.rotary_size(16) == 12
    assert ModelConfig.from_json(config.to_json()) == config


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
        ({"shared_intermediate_size": 0}, UnsupportedError, "shared_expert_gate"),
    ],
)
def test_what_granite_4_does_not_have_is_refused_by_key(keys: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        config_of("GraniteMoeHybridForCausalLM", **{"layer_types": ["mamba", "attention"] * 4, "mamba_n_heads": 8} | keys)


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


def saved_otherwise(folder: Path, other: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    shutil.copytree(folder, other)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(config))


def assert_same_file(first: Path, second: Path, folder: Path) -> None:
    """The integers that rounding makes of both checkpoints, and their arrays."""
    options = ConvertOptions(method="rtn", group_size=32)
    one, two = (convert(str(each), folder / f"{each.name}.edgeq", options, lambda *_: None) for each in (first, second))
    assert one.metadata.config == two.metadata.config and one.metadata.arrays.keys() == two.metadata.arrays.keys()
    for name, array in one.metadata.arrays.items():
        assert np.array_equal(one.array(array), two.array(two.metadata.arrays[name])), name
    for name, linear in one.metadata.linears.items():
        arrays = linear.weights[0].arrays, two.metadata.linears[name].weights[0].arrays
        for part in arrays[0]:
            assert np.array_equal(one.array(arrays[0][part]), two.array(arrays[1][part])), (name, part)


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


def test_gpt_oss_reads_its_windows_and_limits() -> None:
    plain = config_of("GptOssForCausalLM", num_local_experts=6)
    assert plain.sliding_windows == (128, 0) * 4 and plain.attention_sinks and plain.clamp == (1.702, 7.0)
    assert (plain.rope.kind, plain.rope.truncate, plain.rope.theta) == ("yarn", False, 150000.0)
    assert plain.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert (plain.head_dim, plain.num_experts_per_tok, plain.norm_topk_prob) == (64, 4, True)
    assert config_of("GptOssForCausalLM", sliding_window=None, layer_types=["full_attention"] * 8).sliding_windows == ()
    with pytest.raises(CheckpointError, match="sliding_window is null"):
        config_of("GptOssForCausalLM", sliding_window=None)
    with pytest.raises(UnsupportedError, match="attention_bias is False"):
        config_of("GptOssForCausalLM", attention_bias=False)
    family, _ = recognise({"architectures": ["GptOssForCausalLM"], **SIZES, "num_local_experts": 6})
    assert not any(mapping.absorber.endswith("up") for mapping in family.awq_mappings(0))


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


def test_of_a_gemma4_that_sees_the_text_model_is_converted(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Layers that read keys of others may carry their own, which nothing reads."""
    folder = checkpoint("gemma4")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        named[f"model.language_model.layers.5.self_attn.{part}"] = torch.ones(2, 2)
    named |= {"model.vision_tower.patch_embedder.input_proj.weight": torch.ones(4, 4), "model.embed_audio.x": torch.ones(2)}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": config["model_type"], "vision_config": {}}
    saved_otherwise(folder, tmp_path / "seeing", named, outer | {"text_config": config, "tie_word_embeddings": True})
    notes = preflight(str(tmp_path / "seeing"), ConvertOptions(method="rtn", group_size=32)).notes()
    assert any("the text model alone is converted; its vision tower is left out" in note for note in notes)
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


def test_yarn_reads_its_options_and_computes_what_is_absent() -> None:
    plain = config_of("Qwen3ForCausalLM", rope_scaling=YARN).rope
    assert (plain.kind, plain.factor, plain.beta_fast, plain.beta_slow, plain.truncate) == ("yarn", 4.0, 32.0, 1.0, True)
    assert plain.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    options = {"beta_fast": 8, "beta_slow": 0.5, "truncate": False, "mscale": 2.0, "mscale_all_dim": 0.5}
    found = config_of("Qwen3ForCausalLM", rope_scaling=YARN | options).rope
    assert (found.beta_fast, found.beta_slow, found.truncate) == (8, 0.5, False)
    assert found.attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    given = config_of("LlamaForCausalLM", rope_scaling=YARN | {"attention_factor": 1.25, "mscale": None}).rope
    assert given.attention_factor == 1.25


def test_olmo3_stretches_the_layers_without_a_window() -> None:
    config = config_of("Olmo3ForCausalLM", rope_scaling=YARN, sliding_window=12)
    assert config.sliding_windows == (12, 12, 12, 0) * 2 and not config.pre_norms and config.qk_norm_kind == "whole"
    assert [config.layer_rope(layer).kind for layer in range(4)] == ["default"] * 3 + ["yarn"]
    assert {config.layer_rope(layer).theta for layer in range(4)} == {500000.0}
    by_type = {"full_attention": YARN | {"rope_theta": 777.0}, "sliding_attention": {"rope_theta": 555.0}}
    newer = config_of("Olmo3ForCausalLM", rope_parameters=by_type)
    assert (newer.rope.kind, newer.rope.theta, newer.local_rope.theta) == ("yarn", 777.0, 555.0)


def test_ministral3_ends_where_its_queries_would_begin_to_grow() -> None:
    config = config_of("Ministral3ForCausalLM")
    assert config.max_position_embeddings == 16384 and config.head_dim == 128
    assert (config.rope.kind, config.rope.factor, config.rope.attention_factor) == ("yarn", 16.0, 1.0)
    still = YARN | {"llama_4_scaling_beta": 0, "max_position_embeddings": 5}
    assert config_of("Ministral3ForCausalLM", rope_parameters=still, max_position_embeddings=999).max_position_embeddings == 999


def test_exaone4_rotates_in_layers_with_windows_where_there_are_some() -> None:
    plain = config_of("Exaone4ForCausalLM", sliding_window=12)
    assert plain.sliding_windows == (12, 12, 12, 0) * 2 and plain.layers_without_rope == (3, 7)
    assert (plain.pre_norms, plain.post_norms, plain.qk_norm, plain.qk_norm_kind) == (False, True, True, "heads")
    every = config_of("Exaone4ForCausalLM", sliding_window=None, sliding_window_pattern=None)
    assert every.sliding_windows == () and every.layers_without_rope == ()
    full = ["full_attention"] * 8
    assert config_of("Exaone4ForCausalLM", sliding_window=12, layer_types=full).layers_without_rope == tuple(range(8))
    assert config_of("Exaone4ForCausalLM", sliding_window=None, layer_types=full).layers_without_rope == ()
    assert ModelConfig.from_json(plain.to_json()) == plain


def test_granites_multipliers_are_settings_or_a_factor_of_a_gain() -> None:
    keys = {"architectures": ["GraniteForCausalLM"], **SIZES, "attention_multiplier": 0.125, "embedding_multiplier": 12}
    family, config = recognise(keys | {"residual_multiplier": 0.22, "logits_scaling": 8})
    # The stream is divided by what its branches would be multiplied by.
    assert config.attention_scale(0) == 0.125 and config.embedding_multiplier == 12.0 / 0.22
    assert config.rms_norm_eps == 1e-6 / 0.22**2
    assert {name: source.factor for name, source in family.sources().items()} == {"model.norm.weight": 1 / 8}
    with pytest.raises(CheckpointError, match="rms_norm_eps is .small.; expected a positive number"):
        recognise(keys | {"rms_norm_eps": "small"})


def test_rows_of_neighbouring_pairs_become_halves() -> None:
    assert pairs_apart(2, 6, 4) == (0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11)
    sources = recognise({"architectures": ["Glm4ForCausalLM"], **SIZES, "head_dim": 8})[0].sources()
    assert sources["model.layers.7.self_attn.q_proj.bias"].order == pairs_apart(4, 8, 4)
    assert "model.layers.7.self_attn.v_proj.bias" not in sources


def test_cohere2_rotates_in_layers_with_windows() -> None:
    config = config_of("Cohere2ForCausalLM", sliding_window=12, layer_norm_eps=3e-5, head_dim=64)
    assert config.sliding_windows == (12, 12, 12, 0) * 2 and config.layers_without_rope == (3, 7)
    assert (config.parallel_blocks, config.layer_norm, config.rms_norm_eps, config.head_dim) == ("one_norm", True, 3e-5, 8)
    still = config_of("Cohere2ForCausalLM", sliding_window=None)
    assert still.sliding_windows == () and still.layers_without_rope == tuple(range(8))
    assert config_of("CohereForCausalLM").layers_without_rope == () and config_of("CohereForCausalLM").rope.theta == 5e5
    assert ModelConfig.from_json(config.to_json()) == config


def test_hunyuans_base_grows_with_its_alpha() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    config = config_of("HunYuanDenseV1ForCausalLM", head_dim=16, rope_scaling=scaling)
    assert (config.rope.kind, config.qk_norm_kind) == ("default", "rotated")
    assert config.rope.theta == pytest.approx(10000 * 1000 ** (16 / 14))
    assert config_of("HunYuanDenseV1ForCausalLM").rope.theta == 10000


def test_neox_and_gpt2_read_the_keys_of_their_old_configurations() -> None:
    old = {"rotary_pct": 0.5, "rotary_emb_base": 777, "layer_norm_eps": 3e-5}
    config = config_of("GPTNeoXForCausalLM", **old)
    assert config.rope.rotary_size(8) == 4 and config.rope.theta == 777 and config.rms_norm_eps == 3e-5
    assert (config.parallel_blocks, config.hidden_act, config.gated) == ("two_norms", "gelu", False)
    assert config_of("GPTNeoXForCausalLM", use_parallel_residual=False).parallel_blocks == "none"
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 77}
    gpt2 = recognise({"architectures": ["GPT2LMHeadModel"], **sizes})[1]
    assert (gpt2.hidden_size, gpt2.intermediate_size, gpt2.max_position_embeddings) == (32, 128, 77)
    assert (gpt2.rope.kind, gpt2.hidden_act, gpt2.gated) == ("learned", "gelu_pytorch_tanh", False)
    assert recognise({"architectures": ["GPT2LMHeadModel"], **sizes, "n_inner": 40})[1].intermediate_size == 40
    assert recognise({"architectures": ["GPT2LMHeadModel"], **sizes, "multi_query": True})[1].num_key_value_heads == 4
    unscaled = recognise({"architectures": ["GPT2LMHeadModel"], **sizes, "scale_attn_weights": False})[1]
    assert unscaled.attention_scale(0) == 1 and gpt2.attention_scale(0) == 8**-0.5
    assert recognise({"architectures": ["GPTBigCodeForCausalLM"], **sizes})[1].num_key_value_heads == 1


def test_falcons_of_all_sizes() -> None:
    small = config_of("FalconForCausalLM", num_key_value_heads=3)
    assert (small.num_key_value_heads, small.intermediate_size, small.parallel_blocks) == (1, 128, "one_norm")
    newer = {"new_decoder_architecture": True, "num_kv_heads": 2}
    large = config_of("FalconForCausalLM", **newer)
    assert (large.num_key_value_heads, large.parallel_blocks) == (2, "two_norms")
    assert config_of("FalconForCausalLM", **newer, num_ln_in_parallel_attn=1).parallel_blocks == "one_norm"
    family = recognise({"architectures": ["FalconForCausalLM"], **SIZES, **newer})[0]
    orders = {part: family.sources()[f"model.layers.0.self_attn.{part}_proj.weight"].order for part in "qkv"}
    # Two heads of queries, keys, values; and again.
    assert orders["q"] == (*range(16), *range(32, 48)) and orders["k"] == (*range(16, 24), *range(48, 56))
    assert orders["v"] == (*range(24, 32), *range(56, 64))


def test_gpt2_is_read_column_by_column_and_with_or_without_its_first_name(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("gpt2")
    tensors = load_file(folder / "model.safetensors")
    stored = tensors["transformer.h.1.attn.c_attn.weight"].float().numpy()
    # Several blocks of the stored rows.
    monkeypatch.setattr("edgeq.converters.checkpoint.checkpoint.TRANSPOSED_VALUES", 5000)
    source, *_ = opened(folder)
    for at, part in enumerate("qkv"):
        rows = source.rows(f"model.layers.1.self_attn.{part}_proj.weight", 3, 128)
        assert np.array_equal(rows, stored[:, 128 * at + 3 : 128 * (at + 1)].T)
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    # A causal mask that old checkpoints carry.
    short["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    shutil.copytree(folder, tmp_path / "short")
    save_file(short, tmp_path / "short" / "model.safetensors")
    paths = [tmp_path / "a.edgeq", tmp_path / "b.edgeq"]
    files = [
        convert(str(each), path, ConvertOptions(method="rtn", group_size=32), lambda *_: None)
        for each, path in zip((folder, tmp_path / "short"), paths, strict=True)
    ]
    first, second = (file.metadata.linears["layers.1.qkv"].weights[0].arrays["q"] for file in files)
    assert np.array_equal(files[0].array(first), files[1].array(second))


def test_biases_follow_from_keys() -> None:
    def biases(architecture: str, **keys: Any) -> tuple[str, ...]:
        return recognise({"architectures": [architecture], **SIZES, **keys})[0].description.biases

    assert biases("Glm4ForCausalLM") == ("q", "k", "v") and biases("Glm4ForCausalLM", attention_bias=False) == ()
    assert biases("GPTNeoXForCausalLM", attention_bias=False) == ("up", "down") and len(biases("GPTNeoXForCausalLM")) == 6
    assert biases("Starcoder2ForCausalLM", use_bias=False) == () and biases("StableLmForCausalLM", use_qkv_bias=True) == tuple(
        "qkv"
    )
    assert biases("Ernie4_5ForCausalLM") == () and len(biases("Ernie4_5ForCausalLM", use_bias=True)) == 7


def test_smollm3_rotates_where_its_list_or_its_interval_says() -> None:
    plain = config_of("SmolLM3ForCausalLM")
    assert plain.layers_without_rope == (3, 7) and plain.sliding_windows == () and plain.rope.theta == 2e6
    assert [rope is None for rope in map(plain.layer_rope, range(8))] == [False, False, False, True] * 2
    listed = config_of("SmolLM3ForCausalLM", no_rope_layers=[1, 0] * 5, use_sliding_window=True, sliding_window=12)
    assert listed.layers_without_rope == (1, 3, 5, 7) and listed.sliding_windows == (0, 12) * 4
    typed = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 6, "use_sliding_window": True, "sliding_window": 9}
    assert config_of("SmolLM3ForCausalLM", **typed).sliding_windows == (9, 9, 0, 0, 0, 0, 0, 0)
    assert config_of("SmolLM3ForCausalLM", no_rope_layers=[1] * 8).layers_without_rope == ()
    assert ModelConfig.from_json(listed.to_json()) == listed


def test_opt_ignores_keys_that_only_other_families_have() -> None:
    config = config_of("OPTForCausalLM", ffn_dim=96, num_key_value_heads=2, rope_theta=5.0)
    assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (96, 4, 8)
    assert config.rope.kind == "learned" and config.layer_norm and not config.gated


def test_experts_are_as_large_as_their_own_key_says() -> None:
    config = config_of("Qwen2MoeForCausalLM", moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2)
    assert (config.intermediate_size, config.num_experts, config.num_experts_per_tok) == (16, 6, 2)
    assert config.shared_expert_intermediate_size == 5632 and not config.norm_topk_prob
    assert config_of("MixtralForCausalLM").norm_topk_prob


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms after the blocks": ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
    "a projected embedding": ("OPTForCausalLM", {"word_embed_proj_dim": 16}, r"word_embed_proj_dim is 16.*opt-350m"),
    "no final norm": ("OPTForCausalLM", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    "another activation": ("OPTForCausalLM", {"activation_function": "swish"}, "hidden_act 'swish' is not supported"),
    "capped logits": ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "capped scores": ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "looking ahead": ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "an unknown rope": ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope kind 'yarn'"),
    "another rope's key": ("LlamaForCausalLM", {"rope_scaling": {**LONG, "type": "linear"}}, "long_factor"),
    "a rotation of a part": ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "dense layers between": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
    "every second layer": ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    "biases of positions": ("FalconForCausalLM", {"alibi": True}, "alibi is True"),
    "norms of an older model": ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
    "newer blocks one after another": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "parallel_attn is False",
    ),
    "norms of heads": ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm is True"),
    "norms of other heads": ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm is True"),
    "a scale for each layer": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_head": 4, "scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx is True",
    ),
    "a second attention": (
        "GPTBigCodeForCausalLM",
        {"n_embd": 32, "n_head": 4, "add_cross_attention": True},
        "add_cross_attention",
    ),
    "no plain activation": ("GPTNeoXForCausalLM", {"hidden_act": ["gelu"]}, r"hidden_act \['gelu'\] is not supported"),
    "another plain activation": ("GPTNeoXForCausalLM", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    "a base that grows": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope kind 'dynamic'",
    ),
    "a bias": ("Olmo2ForCausalLM", {"attention_bias": True}, "attention_bias is True"),
    "layers without rope elsewhere": ("LlamaForCausalLM", {"no_rope_layers": [1, 0] * 4}, "no_rope_layers is"),
    "windows that are not used": ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 8}, "use_sliding_window"),
    "windows of experts": ("Qwen2MoeForCausalLM", {"layer_types": ["sliding_attention"] * 8}, "layer_types"),
}
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "factors for another size": (
        "Phi3ForCausalLM",
        {"rope_scaling": {**LONG, "long_factor": [1.0] * 3}, "original_max_position_embeddings": 64},
        "long_factor has 3 entries for 4 pairs",
    ),
    "a factor that is none": ("Phi3ForCausalLM", {"rope_scaling": {**LONG, "long_factor": [0, 1, 1, 1]}}, r"long_factor\[0\]"),
    "factors that are no list": ("Phi3ForCausalLM", {"rope_scaling": {**LONG, "long_factor": 2.0}}, "long_factor is 2.0"),
    "half a pair": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.4}, "rotates 3 of 8 channels"),
    "types of other layers": ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "not a list of 8 entries"),
    "no window": ("Gemma3ForCausalLM", {"sliding_window": None}, "sliding_window is null"),
    "no pattern": ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    "no multiplier": ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier is 0; expected a number"),
    "a multiplier that is none": ("GraniteForCausalLM", {"logits_scaling": [8]}, r"logits_scaling is \[8\]; expected a number"),
    "no switch": ("Glm4ForCausalLM", {"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false"),
    "no pattern of letters": ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "or layer_types"),
    "types without a window": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 8},
        "sliding_window is null",
    ),
    "a context that is none": (
        "Ministral3ForCausalLM",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": "64"}},
        "original_max_position_embeddings is '64'",
    ),
    "no factor": ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn"}}, "of kind 'yarn' lacks factor"),
    "a beta that is none": ("LlamaForCausalLM", {"rope_scaling": YARN | {"beta_fast": "32"}}, "beta_fast is '32'"),
    "betas the wrong way": ("LlamaForCausalLM", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "the first beta smaller"),
    "no switch of rounding": ("LlamaForCausalLM", {"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1"),
    "one rope for two kinds of layers": (
        "Olmo3ForCausalLM",
        {"rope_parameters": YARN},
        "one object for each of the layer_types",
    ),
    "local layers that see all": ("Olmo3ForCausalLM", {"sliding_window": None}, "sliding_window is null"),
    "an alpha that is none": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_scaling": {"type": "dynamic", "alpha": "1000"}},
        "alpha is '1000'; expected a positive number",
    ),
    "heads of another size": ("GPTNeoXForCausalLM", {"num_attention_heads": 5}, "32 is not a multiple of 5 heads"),
    "no scale of logits": ("CohereForCausalLM", {"logit_scale": None}, "logit_scale is None; expected a number"),
    "no kind of heads": ("GPTBigCodeForCausalLM", {"n_embd": 32, "multi_query": 1}, "multi_query is 1; expected true or false"),
    "no interval": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    "too few rotated layers": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers is .1, 0.; expected a list of 8",
    ),
    "indices for switches": ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 1, 2, 3, 4, 5, 6, 7]}, "no_rope_layers is"),
    "no scale": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    "heads that do not divide": ("OPTForCausalLM", {"hidden_size": 34}, "hidden_size 34 is not a multiple"),
    "more chosen than there are": ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
    "none chosen": ("MixtralForCausalLM", {"num_experts_per_tok": 0}, "uses none"),
    "too many": ("MixtralForCausalLM", {"num_local_experts": 1 << 20}, "num_experts is 1048576"),
}


@pytest.mark.parametrize(("architecture", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_its_key(architecture: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        config_of(architecture, **keys)


@pytest.mark.parametrize(("architecture", "keys", "message"), BROKEN.values(), ids=BROKEN)
def test_values_out_of_range_are_named(architecture: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(architecture, **keys)


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


@pytest.mark.parametrize("name", FAMILIES)
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


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_scales_without_rounding_changes_nothing(checkpoint: Callable[..., Path], name: str) -> None:
    """The router of experts is folded as well, else tokens would go elsewhere."""
    source, family, config = opened(checkpoint(name, dtype="float32", initializer_range=0.05))
    with torch.no_grad():
        before, after = hidden_after(source, family, config), hidden_after(source, family, config, scaled=3)
    assert family.awq_mappings(0)
    assert (after - before).abs().max() < 1e-3 * before.abs().max()


def test_gemma3_keeps_the_scale_out_of_its_queries() -> None:
    family, config = recognise({"architectures": ["Gemma3ForCausalLM"], **SIZES})
    assert {m.absorber for m in family.awq_mappings(0)} == {"v", "mlp_norm", "up"}


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
