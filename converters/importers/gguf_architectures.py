"""What llama.cpp calls architectures and tensors, and what their keys are in transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edgeq.converters.importers.gguf_keys import GgufKeys, Keys, Settings
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.network.stack import MAX_SIZES

EMBEDDING, HEAD, NORM, FREQUENCIES = "token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"
ENDS = {EMBEDDING: "model.embed_tokens.weight", NORM: "model.norm.weight", HEAD: "lm_head.weight"}
ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")} | {"attn_output": "self_attn.o_proj"}
MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA = NORMS | ATTENTION | MLP
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
MIXTRAL = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
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
GPT_OSS = {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"}
HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
NORM_BIAS = {"output_norm.bias": "model.norm.bias"}
GPT2_SIZES = {"n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count"}
GPT2_SIZES |= {"n_positions": "context_length", "n_inner": "feed_forward_length"}
"""Key of config.json -> llama.cpp's."""
GEMMA_27B_LAYERS = 62
STARCODER2_WINDOW = 4096
"""Published models have this one, which llama.cpp does not store."""
WINDOWS_PERIOD = 4
"""llama.cpp's own, for files that have a window and do not say in which layers: all but every fourth."""
RMS_EPSILON = "rms_norm_eps"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    family        as in `architectures` of config.json;  model_type  there
    tensors       of a layer: llama.cpp's name -> module; {} stands for the number of an expert
    interleaved   rows of q and k in pairs of one rotation, as the original Llama has them, instead of half by half
    gain          what llama.cpp adds to the gains of norms
    settings      further keys of config.json
    epsilon       what config.json calls the epsilon of the norms; any name but RMS_EPSILON is that of a LayerNorm
    ends          tensors outside of the layers: llama.cpp's name -> transformers'
    layers        what transformers' names of tensors in layers begin with
    scaling       further keys of `rope_scaling`
    """

    family: str
    model_type: str
    tensors: Mapping[str, str]
    settings: Callable[[GgufKeys], Settings]
    interleaved: bool = False
    gain: float = 0.0
    epsilon: str = RMS_EPSILON
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    layers: str = "model.layers."
    scaling: Mapping[str, Any] = field(default_factory=dict)


def nothing_else(keys: GgufKeys) -> Settings:
    return {}


def mixtral(keys: GgufKeys) -> Settings:
    return {"num_local_experts": keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}


def no_windows(keys: GgufKeys) -> Settings:
    return {"use_sliding_window": False}


def qwen_experts(keys: GgufKeys, normalized: bool) -> Settings:
    if keys.value("expert_weights_norm", normalized) is not normalized:
        raise keys.wrong("expert_weights_norm", not normalized, str(normalized).lower())
    return {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": normalized,
    }


def qwen2_moe(keys: GgufKeys) -> Settings:
    shared = keys.integer("expert_shared_feed_forward_length", 4 * keys.integer("expert_feed_forward_length"))
    return qwen_experts(keys, normalized=False) | {"shared_expert_intermediate_size": shared}


def qwen3_moe(keys: GgufKeys) -> Settings:
    return qwen_experts(keys, normalized=True)


def phi3(keys: GgufKeys) -> Settings:
    window = keys.integer("attention.sliding_window", 0)
    return {"sliding_window": window or None}


def gemma3(keys: GgufKeys) -> Settings:
    head_dim, layers = keys.integer("attention.key_length", 256), keys.integer("block_count")
    scale = keys.integer("embedding_length") // keys.integer("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        # As llama.cpp has it: only the largest model scales by another number than the size of a head.
        "query_pre_attn_scalar": scale if layers == GEMMA_27B_LAYERS else head_dim,
    }


def windows(keys: GgufKeys) -> Settings:
    """The window, and the layers that have it: a list, or all but every so many-th; 0 and none are no window."""
    size, layers = keys.integer("attention.sliding_window", 0), keys.integer("block_count")
    found = keys.value("attention.sliding_window_pattern", WINDOWS_PERIOD)
    if not size:
        return {"sliding_window": None}
    if layers > MAX_SIZES["num_hidden_layers"]:
        # Before a list of as many is made.
        raise keys.wrong("block_count", layers, f"at most {MAX_SIZES['num_hidden_layers']}")
    if type(found) is int and found > 0:
        local = [(layer + 1) % found != 0 for layer in range(layers)]
    elif isinstance(found, np.ndarray) and found.dtype == np.bool_ and len(found) == layers:
        local = [bool(each) for each in found]
    else:
        raise keys.wrong("attention.sliding_window_pattern", found, f"a positive integer or {layers} times true or false")
    return {"sliding_window": size, "layer_types": ["sliding_attention" if each else "full_attention" for each in local]}


def olmo3(keys: GgufKeys) -> Settings:
    """Layers with a window have a rope of their own, which nothing stretches."""
    base = keys.number("rope.freq_base", 10000.0)
    bases = {"full_attention": base, "sliding_attention": keys.number("rope.freq_base_swa", base)}
    return windows(keys) | {"rope_parameters": {kind: {"rope_theta": theta} for kind, theta in bases.items()}}


def exaone4(keys: GgufKeys) -> Settings:
    return {"layer_types": None} | windows(keys)


def lfm2(keys: GgufKeys) -> Settings:
    """A layer without heads of keys and values has a convolution."""
    heads = keys.integers("attention.head_count_kv", 1 << 16)
    attends = {each for each in heads if each}
    if len(heads) != keys.integer("block_count") or len(attends) != 1:
        raise keys.wrong("attention.head_count_kv", heads, "a number for each layer, 0 or the same")
    return {
        "num_key_value_heads": attends.pop(),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def gpt_oss(keys: GgufKeys) -> Settings:
    """Every other layer has the window, from the first on."""
    if (stretched := keys.value("rope.scaling.type")) != "yarn":
        raise keys.wrong("rope.scaling.type", stretched, "yarn")
    return mixtral(keys) | {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
    }


def rope_sections(keys: GgufKeys) -> list[int]:
    """Pairs of a head that are rotated by time, by height and by width; a fourth kind is of no model here."""
    found = keys.integers("rope.dimension_sections", 1 << 16)
    if len(found) not in (3, 4) or any(found[3:]):
        raise keys.wrong("rope.dimension_sections", found, "three integers, and 0")
    return found[:3]


def qwen2_vl(keys: GgufKeys) -> Settings:
    """Without its tower: in a text the three positions are the same."""
    rope_sections(keys)
    return no_windows(keys)


def qwen3_vl(keys: GgufKeys) -> Settings:
    keys.integer("n_deepstack_layers", 0)
    return qwen2_vl(keys)


def glm4(keys: GgufKeys) -> Settings:
    return {"attention_bias": keys.has("attn_q.bias")}


def ernie4_5(keys: GgufKeys) -> Settings:
    return {"use_bias": keys.has("attn_q.bias")}


def granite(keys: GgufKeys) -> Settings:
    """llama.cpp takes 0 for an absent multiplier, and calls a network without a rope one that was not fine-tuned."""
    keys.only("rope.scaling.finetuned", True)
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // keys.integer("attention.head_count"))
    return {
        "attention_multiplier": keys.number("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale"),
    }


def command_r(keys: GgufKeys) -> Settings:
    return {"logit_scale": keys.number("logit_scale")}


def cohere2(keys: GgufKeys) -> Settings:
    return command_r(keys) | windows(keys)


def stablelm(keys: GgufKeys) -> Settings:
    """As llama.cpp has it, blocks are parallel where MLPs have no norm of their own, whatever the key says."""
    keys.value("use_parallel_residual")
    return {"use_qkv_bias": keys.has("attn_q.bias"), "use_parallel_residual": not keys.has("ffn_norm.weight")}


def starcoder2(keys: GgufKeys) -> Settings:
    window = keys.integer("attention.sliding_window", STARCODER2_WINDOW)
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": keys.has("attn_q.bias"), "sliding_window": window or None}


def gpt2(keys: GgufKeys) -> Settings:
    """llama.cpp's converter turns matrices."""
    return {name: keys.integer(key) for name, key in GPT2_SIZES.items()} | {"fan_in_fan_out": False}


def starcoder(keys: GgufKeys) -> Settings:
    keys.only("attention.head_count_kv", 1)
    return {name: keys.integer(key) for name, key in GPT2_SIZES.items()} | {"multi_query": True}


def gptneox(keys: GgufKeys) -> Settings:
    """llama.cpp stores no activation: published models have this one.  Its converter parts queries, keys and values."""
    return {
        "hidden_act": "gelu",
        "rotary_emb_base": keys.number("rope.freq_base", 10000.0),
        "use_parallel_residual": keys.value("use_parallel_residual", True),
        "qkv_by_heads": False,
    }


GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"}
    | {"ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    gpt2,
    epsilon="layer_norm_epsilon",
    ends={EMBEDDING: "transformer.wte.weight", "position_embd.weight": "transformer.wpe.weight", HEAD: "lm_head.weight"}
    | {NORM: "transformer.ln_f.weight", "output_norm.bias": "transformer.ln_f.bias"},
    layers="transformer.h.",
)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", LLAMA, nothing_else, interleaved=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", LLAMA, no_windows, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", LLAMA, no_windows),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", LLAMA | HEAD_NORMS, no_windows),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", LLAMA, qwen2_vl),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", LLAMA | HEAD_NORMS, qwen3_vl),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        phi3,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        ATTENTION
        | MLP
        | HEAD_NORMS
        | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        gemma3,
        gain=1.0,
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        NORMS | ATTENTION | EXPERTS | SHARED | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", NORMS | ATTENTION | HEAD_NORMS | EXPERTS | {"ffn_gate_inp": "mlp.gate"}, qwen3_moe
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", ATTENTION | MLP | HEAD_NORMS | POST_NORMS, nothing_else),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", ATTENTION | MLP | HEAD_NORMS | POST_NORMS, exaone4),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", NORMS | ATTENTION | GLM_NORMS | GLM_MLP, glm4),
    "granite": Architecture("GraniteForCausalLM", "granite", LLAMA, granite, interleaved=True),
    "command-r": Architecture("CohereForCausalLM", "cohere", COHERE, command_r, epsilon="layer_norm_eps"),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", COHERE, cohere2, epsilon="layer_norm_eps"),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", LLAMA | HUNYUAN_NORMS, nothing_else),
    "stablelm": Architecture(
        "StableLmForCausalLM", "stablelm", LLAMA, stablelm, epsilon="layer_norm_eps", ends=ENDS | NORM_BIAS
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        starcoder2,
        epsilon="norm_epsilon",
        ends=ENDS | NORM_BIAS,
    ),
    "gpt2": GPT2,
    "starcoder": replace(GPT2, family="GPTBigCodeForCausalLM", model_type="gpt_bigcode", settings=starcoder),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {"attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
        | {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        gptneox,
        epsilon="layer_norm_eps",
        ends={EMBEDDING: "gpt_neox.embed_in.weight", HEAD: "embed_out.weight"}
        | {NORM: "gpt_neox.final_layer_norm.weight", "output_norm.bias": "gpt_neox.final_layer_norm.bias"},
        layers="gpt_neox.layers.",
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", ATTENTION | LFM2 | LFM2_CONVOLUTION, lfm2, ends=ENDS | LFM2_NORM),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {"attn_norm": "input_layernorm"} | ATTENTION | GPT_OSS | EXPERTS,
        gpt_oss,
        # llama.cpp rounds the bounds of its frequencies, the checkpoints do not.
        scaling={"truncate": False},
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", LLAMA, ernie4_5),
}
"""llama.cpp's name of an architecture, in `general.architecture`."""
MIXTRAL_ARCHITECTURE = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    NORMS
    | ATTENTION
    | {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {name: f"block_sparse_moe.experts.{{}}.{module}" for name, module in MIXTRAL.items()},
    mixtral,
    interleaved=True,
)
"""Mixtral's files say "llama" and have experts."""
OLMO3_ARCHITECTURE = replace(ARCHITECTURES["olmo2"], family="Olmo3ForCausalLM", model_type="olmo3", settings=olmo3)
"""OLMo 3's files say "olmo2" and have windows."""


def architecture(metadata: Keys, place: str, tensors: Collection[str] = ()) -> tuple[Architecture, GgufKeys]:
    """What the metadata name, and its keys;  tensors: names of all.

    UnsupportedError: one that edgeq does not run, by name.  CheckpointError: none is named.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{place}: general.architecture is {'missing' if name is None else f'{name!r:.60}'}")
    if name == "clip" or metadata.get("general.type") in ("mmproj", "adapter"):
        kind = metadata.get("general.type", "mmproj")
        raise UnsupportedError(
            f"{place}: a file of kind {kind!r:.40}, not a model: give the file of the model itself, and that of its tower with "
            "--mmproj (docs/vision.md); LoRA adapters are read from the folder of PEFT (docs/adapters.md)"
        )
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{place}: architecture {name!r:.60} is not supported; supported: {', '.join(ARCHITECTURES)}")
    keys = GgufKeys(metadata, name, place, tensors)
    if name == "llama" and keys.integer("expert_count", 0):
        return MIXTRAL_ARCHITECTURE, keys
    if name == "olmo2" and keys.integer("attention.sliding_window", 0):
        return OLMO3_ARCHITECTURE, keys
    return ARCHITECTURES[name], keys
