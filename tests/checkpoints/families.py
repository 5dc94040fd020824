"""Tiny checkpoints of every family that is text alone, with random weights and the tokenizer of the trained demo model.

torch and transformers are imported when a checkpoint is first asked for, so that tests of the runtime alone stay without them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.checkpoints.drafts import add_draft_layer

TINY_LLAMA = Path(__file__).parents[2] / "models" / "tiny-llama"

# The sizes make every group size divide, and differ from each other so that a transposed matrix is noticed.
COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PHI3_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PHI3_LONG = {
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + 0.05 * i for i in range(16)],
        "long_factor": [1 + 0.9 * i for i in range(16)],
    },
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 6.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
OLMO3_ROPE = {
    "full_attention": {**YARN, "attention_factor": 1.3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
}
FALCON_H1 = {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6,
             "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.4,
             "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7]}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mha": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama_gqa": ("Llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 64}),
    "phi3": ("Phi3", {"tie_word_embeddings": False, "rope_parameters": {**PHI3_ROPE, "partial_rotary_factor": 0.75}}),
    "phi3_longrope": ("Phi3", {**PHI3_LONG, "num_key_value_heads": 4, "original_max_position_embeddings": 64}),
    "phi3_shortrope": ("Phi3", {**PHI3_LONG, "original_max_position_embeddings": 256, "sliding_window": 24}),
    "phi4_mini": (
        "Phi3",
        {"tie_word_embeddings": True, "original_max_position_embeddings": 64}
        | {
            "rope_parameters": {
                **PHI3_LONG["rope_parameters"],
                "partial_rotary_factor": 0.75,
                "short_factor": [1 + 0.05 * i for i in range(12)],
                "long_factor": [1 + 0.9 * i for i in range(12)],
            }
        },
    ),
    "gemma": ("Gemma", {"head_dim": 48, "rms_norm_eps": 3e-5, "rope_theta": 20000.0, "hidden_act": "gelu"}),
    "gemma2": (
        "Gemma2",
        {"num_hidden_layers": 3, "head_dim": 64, "query_pre_attn_scalar": 20, "sliding_window": 24, "rms_norm_eps": 3e-5}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, "rope_theta": 20000.0},
    ),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 3, "head_dim": 64, "query_pre_attn_scalar": 48, "sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": GEMMA3_ROPE},
    ),
    "gemma4": (
        "Gemma4",
        {"num_hidden_layers": 6, "head_dim": 32, "global_head_dim": 64, "sliding_window": 24, "rms_norm_eps": 3e-5}
        | {"layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention", "full_attention"]}
        | {"rope_parameters": GEMMA4_ROPE, "final_logit_softcapping": 4.0, "num_kv_shared_layers": 2}
        | {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 2048},
    ),
    "gemma4_keys": (
        "Gemma4",
        {"num_hidden_layers": 3, "head_dim": 32, "global_head_dim": 64, "sliding_window": 24, "rms_norm_eps": 3e-5}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "rope_parameters": GEMMA4_ROPE}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_moe": (
        "Gemma4",
        {"num_hidden_layers": 3, "head_dim": 32, "global_head_dim": 64, "sliding_window": 24, "rms_norm_eps": 3e-5}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rope_parameters": GEMMA4_ROPE}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 64}
        | {"final_logit_softcapping": 4.0},
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 3, "tie_word_embeddings": True, "no_rope_layers": [1, 0, 1]}
        | {"use_sliding_window": True, "sliding_window": 24},
    ),
    "lfm2": (
        "Lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 4, "norm_eps": 3e-5}
        | {"intermediate_size": 300, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.1, "rope_theta": 50000.0},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}
        | {"head_dim": 64, "rms_norm_eps": 3e-5, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
        | {"linear_key_head_dim": 24, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}
            | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 64}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
        | {"norm_topk_prob": False, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 64}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 20, "linear_value_head_dim": 24}
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
        | {"rms_norm_eps": 3e-5, "linear_conv_kernel_dim": 3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 20}
        | {"linear_conv_kernel_dim": 3, "rms_norm_eps": 3e-3, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    ),
    "olmo_hybrid_still": (
        "OlmoHybrid",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "num_key_value_heads": 4}
        | {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo2": ("Olmo2", {"num_hidden_layers": 3, "rms_norm_eps": 3e-5, "rope_theta": 50000.0, "tie_word_embeddings": False}),
    "olmo3": (
        "Olmo3",
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"sliding_window": 24, "rms_norm_eps": 3e-5, "rope_parameters": OLMO3_ROPE, "tie_word_embeddings": False},
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 64, "rms_norm_eps": 3e-5, "sliding_window": 40, "tie_word_embeddings": True}
        | {"rope_parameters": {**YARN, "original_max_position_embeddings": 192, "llama_4_scaling_beta": 0.1, "mscale": 1.0}},
    ),
    "qwen3_yarn": ("Qwen3", {"head_dim": 64, "rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}}),
    "exaone4": (
        "Exaone4",
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"sliding_window": 24, "rope_theta": 50000.0, "rms_norm_eps": 3e-5, "tie_word_embeddings": True},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.05, "residual_multiplier": 0.4, "logits_scaling": 3.0}
        | {"tie_word_embeddings": True, "rms_norm_eps": 3e-5},
    ),
    "granite_moe": (
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 64, "rms_norm_eps": 3e-5}
        | {"embedding_multiplier": 6.0, "attention_multiplier": 0.05, "residual_multiplier": 0.4, "logits_scaling": 3.0}
        | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    ),
    "granite_moe_shared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 64, "shared_intermediate_size": 96}
        | {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 5.0},
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}
        | {"num_local_experts": 0, "shared_intermediate_size": 192, "position_embedding_type": "rope", "rms_norm_eps": 3e-3}
        | {"embedding_multiplier": 6.0, "attention_multiplier": 0.05, "residual_multiplier": 0.4, "logits_scaling": 3.0}
        | {"mamba_n_heads": 6, "mamba_d_head": 64, "mamba_expand": 3, "mamba_n_groups": 2, "mamba_d_state": 24}
        | {"mamba_d_conv": 3, "tie_word_embeddings": True, "time_step_limit": (0.02, 0.8)},
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybrid",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 64, "shared_intermediate_size": 96}
        | {"embedding_multiplier": 6.0, "attention_multiplier": 0.05, "residual_multiplier": 0.4, "logits_scaling": 3.0}
        | {"mamba_n_heads": 8, "mamba_expand": 2, "mamba_d_state": 40, "mamba_conv_bias": False, "rms_norm_eps": 3e-5}
        | {"position_embedding_type": "nope", "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    ),
    "glm4": (
        "Glm4",
        {"num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 3e-5, "attention_bias": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.75}},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 64, "rms_norm_eps": 3e-5, "use_bias": True, "tie_word_embeddings": True}),
    "cohere": (
        "Cohere",
        {"layer_norm_eps": 3e-5, "logit_scale": 0.7, "rope_theta": 50000.0, "tie_word_embeddings": True},
    ),
    "cohere2": (
        "Cohere2",
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"sliding_window": 24, "layer_norm_eps": 3e-5, "logit_scale": 0.7, "tie_word_embeddings": False},
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {"head_dim": 64, "rms_norm_eps": 3e-5, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "stablelm": (
        "StableLm",
        {"layer_norm_eps": 3e-5, "use_qkv_bias": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}},
    ),
    "stablelm_parallel": (
        "StableLm",
        {"num_hidden_layers": 3, "use_parallel_residual": True, "num_key_value_heads": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.25}},
    ),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 3e-5, "sliding_window": 24, "rope_theta": 50000.0}),
    "gpt2": ("GPT2", {"n_inner": 384, "layer_norm_epsilon": 3e-5}),
    "bigcode": ("GPTBigCode", {"layer_norm_epsilon": 3e-5, "activation_function": "gelu_pytorch_tanh"}),
    "bigcode_mha": ("GPTBigCode", {"multi_query": False, "n_inner": 384, "tie_word_embeddings": False}),
    "neox": (
        "GPTNeoX",
        {"num_hidden_layers": 3, "layer_norm_eps": 3e-5, "hidden_act": "gelu", "use_parallel_residual": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}},
    ),
    "neox_sequential": ("GPTNeoX", {"hidden_act": "gelu_fast", "use_parallel_residual": False, "attention_bias": False}),
    "falcon_7b": ("Falcon", {"layer_norm_epsilon": 3e-5, "rope_theta": 20000.0, "ffn_hidden_size": 384}),
    "falcon_40b": (
        "Falcon",
        {
            "num_hidden_layers": 3,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {"num_hidden_layers": 3, "head_dim": 64, "rms_norm_eps": 3e-3, "rope_theta": 20000.0, "tie_word_embeddings": True}
        | {"mamba_d_ssm": 192, "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 24}
        | {"mamba_d_conv": 3, "mamba_rms_norm": False, "time_step_limit": (0.02, 0.8), **FALCON_H1},
    ),
    "falcon_h1_norm": (
        "FalconH1",
        {"mamba_d_ssm": None, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 40}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_conv_bias": False, **FALCON_H1},
    ),
    "falcon_h1_gate": (
        "FalconH1",
        {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_n_groups": 4, "mamba_d_state": 16, "rms_norm_eps": 3e-3}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, **FALCON_H1},
    ),
    "nemotron_h": (
        "NemotronH",
        {"hybrid_override_pattern": "M-M*--M", "head_dim": 64, "layer_norm_epsilon": 3e-3, "conv_kernel": 3, "expand": 3}
        | {"mamba_num_heads": 6, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 24, "time_step_min": 1e-9},
    ),
    "nemotron_h_biases": (
        "NemotronH",
        {"hybrid_override_pattern": "M*-", "head_dim": 32, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 1e-9}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 16, "num_key_value_heads": 4},
    ),
    "nemotron_h_experts": (
        "NemotronH",
        {"hybrid_override_pattern": "MEM*EE", "head_dim": 64, "layer_norm_epsilon": 3e-3, "conv_kernel": 3, "expand": 3}
        | {"mamba_num_heads": 6, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 24, "time_step_min": 1e-9}
        | {"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "routed_scaling_factor": 1.7}
        | {"moe_shared_expert_intermediate_size": 160},
    ),
    "falcon_rw": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True, "layer_norm_epsilon": 3e-5}
        | {"num_hidden_layers": 3, "ffn_hidden_size": 384, "tie_word_embeddings": False},
    ),
    "falcon_rw_parallel": (
        "Falcon",
        {"multi_query": False, "alibi": True, "hidden_size": 192, "num_attention_heads": 6, "activation": "gelu_new"},
    ),
    "mpt": (
        "Mpt",
        {"layer_norm_epsilon": 3e-5, "tie_word_embeddings": False, "num_hidden_layers": 3}
        | {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    ),
    "mpt_odd": (
        "Mpt",
        {"hidden_size": 160, "num_attention_heads": 5, "attn_config": {"alibi_bias_max": 3}, "max_seq_len": 768},
    ),
    "bloom": ("Bloom", {"layer_norm_epsilon": 3e-5, "num_hidden_layers": 3, "tie_word_embeddings": False}),
    "bloom_odd": (
        "Bloom",
        {"hidden_size": 192, "num_attention_heads": 6, "apply_residual_connection_post_layernorm": True},
    ),
    "falcon_sequential": ("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "opt": ("OPT", {"ffn_dim": 256, "dropout": 0.0, "activation_function": "relu"}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 96, "head_dim": 64}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 24}
        | {"swiglu_limit": 0.6, "swiglu_alpha": 1.3, "rms_norm_eps": 3e-5, "tie_word_embeddings": False}
        | {"rope_parameters": {**YARN, "truncate": False}},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64, "norm_topk_prob": True},
    ),
}

for made in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
    FAMILIES[f"{made}_mtp"] = (FAMILIES[made][0], {**FAMILIES[made][1], "mtp_num_hidden_layers": 1})

CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
MODELS = {"GPT2": "GPT2LMHeadModel"}
TOKENIZERS = {"Qwen2": "Qwen2Tokenizer", "Qwen3_5Moe": "Qwen3_5Tokenizer"}
NORM_NAMES = ("norm", "ln_")
ABOVE_ONE = ("Gemma", "Gemma2", "Gemma3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")


def build_checkpoint(folder: Path, family: str, dtype: str, max_shard_size: str, overrides: dict[str, Any]) -> None:
    """Save a random model of `family` and a tokenizer into `folder`; norms and biases are random too: a lost one shows."""
    import torch
    import transformers

    # Matrices of this size gain nothing from a second thread, and lose much when it spins beside another process.
    torch.set_num_threads(1)
    name, settings = FAMILIES[family]
    settings = {**COMMON, **settings, **overrides}
    if name == "OPT":
        settings["init_std"] = settings.pop("initializer_range")
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, MODELS.get(name, f"{name}ForCausalLM"))(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.data = 0.3 * torch.randn_like(parameter)
            elif any(each in parameter_name for each in NORM_NAMES):
                # Weights of these families are what gains have above 1, but for the norm of a delta net.
                above = name in ABOVE_ONE and not parameter_name.endswith("linear_attn.norm.weight")
                parameter.data = float(not above) + 0.3 * torch.randn_like(parameter)
                if name == "Gemma4" and parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
                    # Scores are not divided by the root of head_dim: gains of 1 would make them as large as no model has them.
                    parameter.data *= 0.35
            elif parameter_name.endswith(("router.scale", "per_expert_scale")):
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
            elif parameter_name.endswith("A_log"):
                # Memories of one token to hundreds.
                parameter.data = torch.linspace(-6, 1, len(parameter))
            elif parameter_name.endswith((".mamba.D", ".mixer.D")):
                parameter.data = torch.linspace(-2, 3, len(parameter))
            elif parameter_name.endswith("sinks"):
                parameter.data = torch.linspace(-2, 4, len(parameter))
            elif "conv1d" in parameter_name:
                parameter.data = 0.6 * torch.randn_like(parameter)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.data = 0.7 + 0.5 * torch.rand_like(buffer)
            elif buffer_name.endswith("e_score_correction_bias"):
                buffer.data = 0.3 * torch.randn_like(buffer)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if "mtp_num_hidden_layers" in settings:
        add_draft_layer(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA / file, folder / file)
    if name in TOKENIZERS:
        # transformers puts its own pre-tokenizer into these families' tokenizers, as tokenizer.json of the real ones has it.
        kind = getattr(transformers, TOKENIZERS[name])
        kind.from_pretrained(folder, pad_token="<|end|>", unk_token=None).save_pretrained(folder)
