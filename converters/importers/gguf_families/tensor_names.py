"""What llama.cpp calls tensors, and what they are called in checkpoints: suffixes of layers, and whole names of what is beside
them.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_families.encoders import SEGMENTS
from edgeq.converters.importers.gguf_keys import EMBEDDING, HEAD, NORM

ENDS = {EMBEDDING: "model.embed_tokens.weight", NORM: "model.norm.weight", HEAD: "lm_head.weight"}
ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")} | {"attn_output": "self_attn.o_proj"}
MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA = NORMS | ATTENTION | MLP
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
MIXTRAL = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
GRANITE_EXPERTS = EXPERTS | SHARED | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
"""Norms after attention and MLP, of layers that have none before them."""
GLM_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
GLM_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
COHERE = ATTENTION | MLP | {"attn_norm": "input_layernorm"}
LFM2_CONVOLUTION = {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")}
LFM2 = {
    **{"attn_norm": "operator_norm", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
    **{f"ffn_{part}": f"feed_forward.{module}" for part, module in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **{"ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj"},
}
LFM2_NORM = {name: "model.embedding_norm.weight" for name in (NORM, "token_embd_norm.weight")}
"""llama.cpp calls the last norm one of the embedding."""
GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
}
GEMMA_NORMS = HEAD_NORMS | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
GEMMA_NORMS |= {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA4 = ATTENTION | MLP | GEMMA_NORMS
GEMMA4 |= {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
GEMMA4 |= {"pre_ffw_norm_2": "pre_feedforward_layernorm_2", "ffn_gate_inp": "router.proj"}
GEMMA4 |= {f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)}
GEMMA4 |= {"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale"}
GEMMA4 |= {"ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj"}
GEMMA4 |= {"ffn_down_exps.scale": "router.per_expert_scale"}
GEMMA4_ENDS = {"per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight"}
GEMMA4_ENDS |= {"per_layer_model_proj.weight": "model.per_layer_model_projection.weight"}
GEMMA4_ENDS |= {"per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight"}
HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
NORM_BIAS = {"output_norm.bias": "model.norm.bias"}
QWEN_NEXT = ATTENTION | HEAD_NORMS | MLP | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
QWEN_NEXT |= {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_out": "linear_attn.out_proj"}
QWEN_NEXT |= {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d"}
QWEN_NEXT |= {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_norm": "linear_attn.norm"}
QWEN_NEXT |= {"ssm_a.weight": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
QWEN_DRAFTS = {"nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden"}
QWEN_DRAFTS |= {"nextn.shared_head_norm": "mtp.norm", "nextn.embed_tokens": "mtp.embed_tokens"}
QWEN_DRAFTS |= {"nextn.shared_head_head": "mtp.lm_head"}
QWEN_EXPERTS = EXPERTS | SHARED | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
QWEN_EXPERTS |= {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}
MAMBA = {f"ssm_{part}": f"mamba.{module}" for part, module in (("in", "in_proj"), ("conv1d", "conv1d"), ("norm", "norm"))}
MAMBA |= {"ssm_out": "mamba.out_proj", "ssm_dt.bias": "mamba.dt_bias", "ssm_a.weight": "mamba.A_log", "ssm_d.weight": "mamba.D"}
NEMOTRON_H = {name: f"mixer.{module.rpartition('.')[2]}" for name, module in (ATTENTION | MAMBA).items()}
NEMOTRON_H |= {"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}
NEMOTRON_H_EXPERTS = {f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")}
NEMOTRON_H_EXPERTS |= {f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")}
NEMOTRON_H_EXPERTS |= {"ffn_gate_inp": "mixer.gate", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"}
FALCON_H1 = ATTENTION | MAMBA | {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
FALCON_H1 |= {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
FALCON = {"attn_norm": "input_layernorm", "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
FALCON |= {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
BLOOM = FALCON | {"ffn_norm": "post_attention_layernorm"}
MPT = {"attn_norm": "norm_1", "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj"}
MPT |= {"ffn_norm": "norm_2", "ffn_up": "ffn.up_proj", "ffn_down": "ffn.down_proj"}
BERT = {f"attn_{part}": f"attention.self.{module}" for part, module in (("q", "query"), ("k", "key"), ("v", "value"))}
BERT |= {"attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm"}
BERT |= {"ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm"}
BERT_ENDS = {EMBEDDING: "embeddings.word_embeddings.weight", "position_embd.weight": "embeddings.position_embeddings.weight"}
BERT_ENDS |= {SEGMENTS: "embeddings.token_type_embeddings.weight"}
BERT_ENDS |= {f"token_embd_norm.{kind}": f"embeddings.LayerNorm.{kind}" for kind in ("weight", "bias")}
NOMIC = {"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1", "layer_output_norm": "norm2"}
NOMIC |= {"ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2"}
NOMIC_ENDS = {name: BERT_ENDS[name] for name in (EMBEDDING, SEGMENTS)}
NOMIC_ENDS |= {f"token_embd_norm.{kind}": f"emb_ln.{kind}" for kind in ("weight", "bias")}
MODERN_BERT = {"attn_norm": "attn_norm", "attn_qkv": "attn.Wqkv", "attn_output": "attn.Wo"}
MODERN_BERT |= {"ffn_norm": "mlp_norm", "ffn_up": "mlp.Wi", "ffn_down": "mlp.Wo"}
MODERN_BERT_ENDS = {EMBEDDING: "embeddings.tok_embeddings.weight", NORM: "final_norm.weight"}
MODERN_BERT_ENDS |= {"token_embd_norm.weight": "embeddings.norm.weight"}
MODERN_BERT_SCORES = {f"cls.{kind}": f"head.dense.{kind}" for kind in ("weight", "bias")}
MODERN_BERT_SCORES |= {"cls.norm.weight": "head.norm.weight"}
MODERN_BERT_SCORES |= {f"cls.output.{kind}": f"classifier.{kind}" for kind in ("weight", "bias")}
SCORES = {f"cls.{kind}": f"pooler.dense.{kind}" for kind in ("weight", "bias")}
SCORES |= {f"cls.output.{kind}": f"classifier.{kind}" for kind in ("weight", "bias")}
