"""Decoders."""

from __future__ import annotations

from typing import Any

from gguf_networks.entries import LAYER_NORM, WORDS, Entries, layer_norms, layers, matrices, norms, of

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [-0.5 * i for i in range(len(WORDS))],
    "tokenizer.ggml.token_type": [6] * 256 + [3, 3] + [1] * (len(WORDS) - 258),
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
SHAPES: dict[str, Any] = {
    "token_embd.weight": [8, [len(WORDS), 256]],
    "output_norm.weight": [0, [256]],
    "blk.0.attn_norm.weight": [0, [256]],
    "blk.0.ffn_norm.weight": [0, [256]],
    "blk.0.attn_q.weight": [34, [256, 256]],
    "blk.0.attn_k.weight": [12, [128, 256]],
    "blk.0.attn_v.weight": [14, [128, 256]],
    "blk.0.attn_output.weight": [1, [256, 256]],
    "blk.0.ffn_gate.weight": [3, [256, 256]],
    "blk.0.ffn_up.weight": [11, [256, 256]],
    "blk.0.ffn_down.weight": [10, [256, 256]],
}
HEADS = matrices(8, attn_q=[64, 64], attn_k=[32, 64], attn_v=[32, 64], attn_output=[64, 64])
MLP = matrices(2, ffn_gate=[64, 64], ffn_up=[64, 64], ffn_down=[64, 64])
GEMMA4_LAYER = (
    norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm", "post_ffw_norm_1", "post_ffw_norm_2")
    | norms("pre_ffw_norm_2")
    | norms("attn_q_norm", "attn_k_norm", size=16)
    | norms("layer_output_scale", size=1)
    | {"ffn_gate_inp.weight": [0, [2, 64]], "ffn_gate_inp.scale": [0, [64]], "ffn_down_exps.scale": [0, [2]]}
    | matrices(2, ffn_gate_up_exps=[2, 64, 64], ffn_down_exps=[2, 64, 32])
    | matrices(8, attn_q=[64, 64], attn_k=[32, 64], attn_output=[64, 64], inp_gate=[32, 64], proj=[64, 32])
    | MLP
)
WIDE = {
    **GEMMA4_LAYER,
    **norms("attn_q_norm", "attn_k_norm", size=32),
    **matrices(8, attn_q=[128, 64], attn_k=[32, 64], attn_output=[64, 128]),
}
SSM_KEYS = {"ssm__conv_kernel": 3, "ssm__state_size": 16, "ssm__group_count": 2, "ssm__time_step_rank": 4}
SPACE_KEYS = {**SSM_KEYS, "ssm__inner_size": 128}
DELTA_KEYS = {
    **{"block_count": 3, "attention__head_count_kv": 2, "full_attention_interval": 2, "rope__dimension_count": 8},
    **SSM_KEYS,
    "ssm__inner_size": 64,
}
ATTENDING = norms("attn_q_norm", "attn_k_norm", size=16)
ATTENDING |= matrices(8, attn_q=[128, 64], attn_k=[32, 64], attn_v=[32, 64], attn_output=[64, 64])
DELTA = {"ssm_a": [0, [4]], "ssm_dt.bias": [0, [4]], "ssm_conv1d.weight": [0, [128, 3]], **norms("ssm_norm", size=16)}
DELTA |= matrices(2, attn_qkv=[128, 64], attn_gate=[64, 64], ssm_out=[64, 64])
QWEN_NORMS = norms("attn_norm", "post_attention_norm")
QWEN_EXPERTS = {"ffn_gate_inp.weight": [0, [2, 64]], "ffn_gate_inp_shexp.weight": [0, [64]]}
QWEN_EXPERTS |= matrices(2, ffn_gate_exps=[2, 32, 64], ffn_up_exps=[2, 32, 64], ffn_down_exps=[2, 64, 32])
QWEN_EXPERTS |= matrices(2, ffn_gate_shexp=[32, 64], ffn_up_shexp=[32, 64], ffn_down_shexp=[64, 32])
DRAFTS = norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm") | {"nextn.eh_proj.weight": [8, [64, 128]]}
APART, JOINED = matrices(8, ssm_alpha=[4, 64], ssm_beta=[4, 64]), matrices(8, ssm_ba=[8, 64])
MAMBA = {f"ssm_{name}": [0, [4, 1]] for name in "ad"} | {"ssm_dt.bias": [0, [4]], "ssm_norm.weight": [0, [2, 64]]}
MAMBA |= {"ssm_conv1d.weight": [0, [192, 3]], "ssm_conv1d.bias": [0, [192]]} | matrices(2, ssm_in=[324, 64], ssm_out=[64, 128])
FUSED = matrices(8, attn_qkv=[192, 64], attn_output=[64, 64])
WIDE_MLP = matrices(2, ffn_up=[256, 64], ffn_down=[64, 256])
FUSED_BIASES = {f"{name}.bias": [0, [size]] for name, size in (("attn_qkv", 192), ("attn_output", 64), ("ffn_up", 256))}
FUSED_BIASES |= {"ffn_down.bias": [0, [64]]}
LAST_NORM = layer_norms("output_norm")
NETWORKS: dict[str, tuple[Entries, Entries]] = {
    "granitehybrid": (
        of(
            "granitehybrid",
            block_count=2,
            attention__head_count_kv=[0, 2],
            attention__scale=0.25,
            embedding_scale=2.0,
            residual_scale=0.5,
            logit_scale=4.0,
            rope__scaling__finetuned=False,
            **SPACE_KEYS,
        ),
        norms("output_norm")
        | layers(
            norms("attn_norm", "ffn_norm") | MLP | MAMBA,
            norms("attn_norm", "ffn_norm") | MLP | HEADS,
        ),
    ),
    "falcon-h1": (
        of(
            "falcon-h1",
            block_count=1,
            attention__head_count_kv=2,
            **SPACE_KEYS,
        ),
        norms("output_norm") | layers(norms("attn_norm") | {"ffn_norm": [0, [64]]} | MLP | MAMBA | HEADS),
    ),
    "nemotron_h": (
        of(
            "nemotron_h",
            block_count=3,
            feed_forward_length=[0, 0, 96],
            attention__head_count_kv=[0, 2, 0],
            **SPACE_KEYS,
        ),
        norms("output_norm")
        | matrices(8, output=[len(WORDS), 64])
        | layers(
            norms("attn_norm") | MAMBA,
            norms("attn_norm") | HEADS,
            norms("attn_norm") | matrices(2, ffn_up=[96, 64], ffn_down=[64, 96]),
        ),
    ),
    "nemotron_h_moe": (
        of(
            "nemotron_h_moe",
            block_count=3,
            feed_forward_length=[0, 0, 32],
            attention__head_count_kv=[0, 2, 0],
            expert_count=2,
            expert_used_count=1,
            expert_shared_count=1,
            expert_feed_forward_length=32,
            expert_shared_feed_forward_length=64,
            expert_gating_func=2,
            expert_weights_norm=True,
            expert_weights_scale=2.5,
            **SPACE_KEYS,
        ),
        norms("output_norm")
        | matrices(8, output=[len(WORDS), 64])
        | layers(
            norms("attn_norm") | MAMBA,
            norms("attn_norm") | HEADS,
            norms("attn_norm")
            | {"ffn_gate_inp.weight": [0, [2, 64]], "exp_probs_b.bias": [0, [2]]}
            | matrices(2, ffn_up_exps=[2, 32, 64], ffn_down_exps=[2, 64, 32], ffn_up_shexp=[64, 64], ffn_down_shexp=[64, 64]),
        ),
    ),
    "qwen35": (
        of("qwen35", **DELTA_KEYS, nextn_predict_layers=1, rope__dimension_sections=[2, 1, 1, 0]),
        norms("output_norm") | layers(*(QWEN_NORMS | MLP | each for each in (DELTA | APART, ATTENDING, ATTENDING | DRAFTS))),
    ),
    "qwen3next": (
        of(
            "qwen3next",
            **DELTA_KEYS,
            attention__recurrent_layers=[True, False, False],
            nextn_predict_layers=1,
            expert_count=2,
            expert_used_count=1,
            expert_feed_forward_length=32,
            expert_shared_feed_forward_length=32,
        ),
        norms("output_norm")
        | layers(*(QWEN_NORMS | QWEN_EXPERTS | each for each in (DELTA | JOINED, ATTENDING, ATTENDING | DRAFTS))),
    ),
    "gemma4": (
        of(
            "gemma4",
            block_count=2,
            attention__head_count_kv=[2, 1],
            attention__key_length=32,
            attention__value_length=32,
            attention__key_length_swa=16,
            attention__value_length_swa=16,
            attention__sliding_window=8,
            attention__sliding_window_pattern=[True, False],
            attention__shared_kv_layers=0,
            rope__freq_base_swa=1e4,
            rope__dimension_count=32,
            rope__dimension_count_swa=16,
            embedding_length_per_layer_input=32,
            final_logit_softcapping=30.0,
            expert_count=2,
            expert_used_count=1,
            expert_feed_forward_length=32,
        ),
        norms("output_norm")
        | norms("per_layer_proj_norm", size=32)
        | matrices(8, per_layer_token_embd=[263, 64], per_layer_model_proj=[64, 64])
        | layers(GEMMA4_LAYER | matrices(8, attn_v=[32, 64]), WIDE),
    ),
    "falcon": (
        of(
            "falcon",
            LAYER_NORM,
            block_count=1,
            attention__head_count_kv=1,
            feed_forward_length=256,
            tensor_data_layout="jploski",
        ),
        LAST_NORM | layers(layer_norms("attn_norm") | matrices(8, attn_qkv=[96, 64], attn_output=[64, 64]) | WIDE_MLP),
    ),
    "bloom": (
        of("bloom", LAYER_NORM, block_count=1, attention__head_count_kv=4, feed_forward_length=256),
        LAST_NORM
        | layer_norms("token_embd_norm")
        | layers(layer_norms("attn_norm", "ffn_norm") | FUSED | WIDE_MLP | FUSED_BIASES),
    ),
    "mpt": (
        of(
            "mpt",
            LAYER_NORM,
            block_count=1,
            feed_forward_length=256,
            attention__max_alibi_bias=8.0,
            attention__clamp_kqv=6.0,
        ),
        norms("output_norm") | layers(norms("attn_norm", "ffn_norm") | FUSED | WIDE_MLP),
    ),
    "lfm2": (
        of("lfm2", block_count=2, attention__head_count_kv=[0, 2], shortconv__l_cache=3),
        norms("token_embd_norm")
        | layers(
            norms("attn_norm", "ffn_norm")
            | MLP
            | matrices(2, shortconv__in_proj=[192, 64], shortconv__out_proj=[64, 64])
            | {"shortconv.conv.weight": [0, [64, 3]]},
            norms("attn_norm", "ffn_norm")
            | norms("attn_q_norm", "attn_k_norm", size=16)
            | MLP
            | matrices(2, attn_q=[64, 64], attn_k=[32, 64], attn_v=[32, 64], attn_output=[64, 64]),
        ),
    ),
    "gpt-oss": (
        of(
            "gpt-oss",
            block_count=1,
            attention__head_count_kv=2,
            attention__sliding_window=8,
            expert_count=2,
            expert_used_count=1,
            expert_feed_forward_length=32,
            rope__scaling__type="yarn",
            rope__scaling__factor=32.0,
            rope__scaling__original_context_length=32,
        ),
        norms("output_norm")
        | layers(
            norms("attn_norm", "post_attention_norm")
            | HEADS
            | matrices(2, ffn_gate_exps=[2, 32, 64], ffn_up_exps=[2, 32, 64], ffn_down_exps=[2, 64, 32])
            | {f"attn_{part}.bias": [0, [size]] for part, size in (("q", 64), ("k", 32), ("v", 32), ("output", 64))}
            | {f"ffn_{part}_exps.bias": [0, [2, size]] for part, size in (("gate", 32), ("up", 32), ("down", 64))}
            | {"ffn_gate_inp.weight": [0, [2, 64]], "ffn_gate_inp.bias": [0, [2]], "attn_sinks.weight": [0, [4]]}
        ),
    ),
}
"""Name -> metadata of the network, and number of the type and shape of its tensors, the embedding left out."""
VOCABULARY: Entries = {key: value for key, value in METADATA.items() if key.startswith("tokenizer.")}
