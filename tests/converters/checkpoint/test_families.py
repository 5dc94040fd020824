"""What a family's configuration becomes, and what is refused by which key."""

from __future__ import annotations

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

from edgeq.converters.convert import convert
from edgeq.converters.families import recognise, table
from edgeq.converters.families.rearranged import pairs_apart
from edgeq.converters.importers import gguf_architectures, gguf_towers
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.network.config import ModelConfig
from tests.converters.checkpoint.family_configs import SIZES, config_of, opened

ROOT = Path(__file__).parents[3]
LONG = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_the_page_lists_every_architecture() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert set(
        re.findall(r"\b\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ForSequenceClassification|Model)\b", page)
    ) == set(table.FAMILIES)
    columns = [line.split("|")[3] for line in page.splitlines() if line.count("|") in (5, 6)]
    named = {*gguf_architectures.ARCHITECTURES, *gguf_towers.TOWERS}
    assert set(re.findall(r"`([\w.-]+)`", "".join(columns))) == named


def test_phi3_reads_the_rope_of_its_old_configurations() -> None:
    config = config_of(
        "Phi3ForCausalLM", rope_scaling=LONG, max_position_embeddings=131072, original_max_position_embeddings=4096
    )
    assert (config.rope.kind, config.rope.long_factor, config.rope.factor) == ("longrope", (2.0,) * 4, 32.0)
    assert config.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    partial = config_of("Phi3ForCausalLM", partial_rotary_factor=0.75, head_dim=16)
    assert partial.rope.rotary_size(16) == 12
    assert ModelConfig.from_json(config.to_json()) == config


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


def test_granites_experts_may_have_one_beside_them_for_all_tokens() -> None:
    keys = {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 3, "residual_multiplier": 0.5}
    plain, shared = (
        recognise({"architectures": [f"GraniteMoe{kind}ForCausalLM"], **keys, **more})
        for kind, more in (("", {}), ("Shared", {"shared_intermediate_size": 96}))
    )
    assert (plain[1].num_experts, plain[1].num_experts_per_tok, plain[1].norm_topk_prob) == (6, 3, True)
    assert [each[1].shared_expert_intermediate_size for each in (plain, shared)] == [0, 96]
    assert not shared[1].shared_expert_gate and plain[1].rms_norm_eps == shared[1].rms_norm_eps == 4e-6
    beside = {name for name in shared[0].sources() if name not in plain[0].sources()}
    assert beside == {
        f"model.layers.{i}.mlp.shared_expert.{part}_proj.weight" for i in range(8) for part in ("gate", "up", "down")
    }


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


def test_families_with_slopes_take_what_their_keys_say() -> None:
    falcon = config_of("FalconForCausalLM", alibi=True)
    assert falcon.slopes(0)[1] == 2**-4 * 8**-0.5 and falcon.layer_rope(0) is None
    assert config_of("FalconForCausalLM", alibi=None).slopes(0) == ()
    attention = {"clip_qkv": 6, "softmax_scale": 0.25, "alibi_bias_max": 6}
    mpt = config_of("MptForCausalLM", **MPT, attn_config=attention, expansion_ratio=2)
    assert (mpt.hidden_size, mpt.intermediate_size, mpt.clip_qkv, mpt.attention_scale(0)) == (48, 96, 6.0, 0.25)
    assert mpt.slopes(0) == tuple(2.0**-each for each in (1.5, 3, 4.5, 6, 0.75, 2.25))
    usual = config_of("MptForCausalLM", **MPT, attn_config={"clip_qkv": 0})
    assert (usual.clip_qkv, usual.attention_scale(0), usual.intermediate_size) == (None, 8**-0.5, 192)
    for scale, factor in ((None, 1.0), (0.5, 0.5), ("inv_sqrt_d_model", 48**-0.5)):
        family = recognise({"architectures": ["MptForCausalLM"], **SIZES, **MPT, "logit_scale": scale})[0]
        assert family.sources()["model.norm.weight"].factor == factor
    # Names of published files, old and new.
    for names in ({"n_embed": 32, "n_layer": 8}, {"n_head": 4}):
        bloom = config_of("BloomForCausalLM", **names, apply_residual_connection_post_layernorm=True)
        assert (bloom.hidden_size, bloom.num_hidden_layers, bloom.intermediate_size) == (32, 8, 128)
        assert bloom.embedding_norm and bloom.normed_residual == "all" and bloom.slopes(7) == (0.25, 2**-4, 2**-6, 2**-8)


def test_opt_ignores_keys_that_only_other_families_have() -> None:
    config = config_of("OPTForCausalLM", ffn_dim=96, num_key_value_heads=2, rope_theta=5.0)
    assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (96, 4, 8)
    assert config.rope.kind == "learned" and config.layer_norm and not config.gated


def test_experts_are_as_large_as_their_own_key_says() -> None:
    config = config_of("Qwen2MoeForCausalLM", moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2)
    assert (config.intermediate_size, config.num_experts, config.num_experts_per_tok) == (16, 6, 2)
    assert config.shared_expert_intermediate_size == 5632 and not config.norm_topk_prob
    assert config_of("MixtralForCausalLM").norm_topk_prob


MPT = {"d_model": 48, "n_heads": 6, "n_layers": 8}
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
    "positions of a table": ("MptForCausalLM", {**MPT, "attn_config": {"alibi": False}}, "attn_config: alibi is False"),
    "a prefix that sees itself": ("MptForCausalLM", {**MPT, "attn_config": {"prefix_lm": True}}, "prefix_lm is True"),
    "biases elsewhere": ("MptForCausalLM", {**MPT, "no_bias": False}, "no_bias is False"),
    "norms without a mean": ("MptForCausalLM", {**MPT, "norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'"),
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
    "settings of attention that are none": (
        "MptForCausalLM",
        {**MPT, "attn_config": [8]},
        r"attn_config is \[8\]; expected an obj",
    ),
    "a limit that is none": (
        "MptForCausalLM",
        {**MPT, "attn_config": {"clip_qkv": "6"}},
        "clip_qkv is '6'; expected a positive",
    ),
    "slopes to nowhere": ("MptForCausalLM", {**MPT, "attn_config": {"alibi_bias_max": [8]}}, r"alibi_bias_max is \[8\]"),
    "a scale below 0": ("MptForCausalLM", {**MPT, "attn_config": {"softmax_scale": -1.0}}, "softmax_scale is -1.0"),
    "an endless MLP": ("MptForCausalLM", {**MPT, "expansion_ratio": 1e300}, "expansion_ratio is 1e.300; expected a positive"),
    "no number of logits": ("MptForCausalLM", {**MPT, "logit_scale": "inv"}, "logit_scale is 'inv'; expected a number"),
    "no kind of slopes": ("FalconForCausalLM", {"alibi": "yes"}, "alibi is 'yes'; expected true or false"),
    "no kind of residual": (
        "BloomForCausalLM",
        {"apply_residual_connection_post_layernorm": 1},
        "apply_residual_connection_post_layernorm is 1; expected true or false",
    ),
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
