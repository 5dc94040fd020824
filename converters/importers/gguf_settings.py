"""What the keys of a GGUF file say of an architecture, as keys of transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

import math

import numpy as np

from edgeq.converters.importers.gguf_keys import DRAFT_LAYERS, EMBEDDING, FREQUENCIES, GgufKeys, Settings
from edgeq.errors import CheckpointError

GPT2_SIZES = {"n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count"}
GPT2_SIZES |= {"n_positions": "context_length", "n_inner": "feed_forward_length"}
"""Key of config.json -> llama.cpp's."""
DRAFT_TABLES = ("embed_tokens", "shared_head_head")
"""Tables of its own that a layer which drafts tokens may have."""
GEMMA_27B_LAYERS = 62
STARCODER2_WINDOW = 4096
"""Published models have this one, which llama.cpp does not store."""
STOPS = 1e9
"""The divisor of a frequency from which on a pair does not turn in any context."""
DELTA_PERIOD = 4
"""llama.cpp's own, for files that do not say which layers attend: every fourth."""
WINDOWS_PERIOD = 4
"""llama.cpp's own, for files that have a window and do not say in which layers: all but every fourth."""


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


def gemma4(keys: GgufKeys) -> Settings:
    """Layers that see all positions have heads of their own, and turn the pairs of a head that `rope_freqs` does not stop."""
    local = windows(keys)
    types, layers = local.get("layer_types") or [], keys.layers()
    seeing = [i for i, kind in enumerate(types) if kind == "full_attention"]
    wide, narrow = keys.integer("attention.key_length"), keys.integer("attention.key_length_swa")
    for key, size in (("attention.value_length_swa", narrow), ("rope.dimension_count_swa", narrow)):
        keys.only(key, size)
    heads, widths = keys.by_layer("attention.head_count_kv"), keys.by_layer("feed_forward_length")
    shared = keys.integer("attention.shared_kv_layers", 0)
    of_local = [heads[i] for i, kind in enumerate(types) if kind == "sliding_attention"]
    if not seeing or not of_local:
        raise keys.wrong("attention.sliding_window_pattern", types, "layers with a window, and layers without one")
    found = {
        "head_dim": narrow,
        "global_head_dim": wide,
        "num_key_value_heads": of_local[0],
        "num_global_key_value_heads": heads[seeing[0]],
        "attention_k_eq_v": not keys.has("attn_v.weight", seeing[0]),
    }
    if heads != [found["num_global_key_value_heads" if i in seeing else "num_key_value_heads"] for i in range(layers)]:
        raise keys.wrong("attention.head_count_kv", heads, "one number for layers with a window, and one for the others")
    doubled = [widths[0] * (2 if i >= layers - shared else 1) for i in range(layers)]
    if widths not in (doubled, widths[:1] * layers):
        raise keys.wrong("feed_forward_length", widths, "one number, or twice as much in the layers that share keys and values")
    turned = _turned(keys, wide)
    full = {"rope_type": "proportional", "rope_theta": keys.number("rope.freq_base"), "partial_rotary_factor": turned}
    experts = keys.integer("expert_count", 0)
    of_layers = keys.integer("embedding_length_per_layer_input", 0)
    return (
        local
        | found
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "intermediate_size": widths[0],
            "use_double_wide_mlp": bool(shared) and widths == doubled,
            "num_kv_shared_layers": shared,
            "hidden_size_per_layer_input": of_layers,
            "vocab_size_per_layer_input": keys.shapes[EMBEDDING][0],
            "final_logit_softcapping": keys.value("final_logit_softcapping"),
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa")},
            },
            "enable_moe_block": bool(experts),
            "num_experts": experts or None,
            "top_k_experts": keys.integer("expert_used_count", 0) or None,
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", 0) or None,
        }
    )


def _turned(keys: GgufKeys, head_dim: int) -> float:
    """The share of the pairs of a head that turn: divisors of their frequencies are 1, those of the others make them 0."""
    divisors = keys.factors.pop(FREQUENCIES, None)
    if divisors is None:
        return 1.0
    turned = int((divisors == 1).sum())
    if len(divisors) != head_dim // 2 or (divisors[:turned] != 1).any() or (divisors[turned:] < STOPS).any() or not turned:
        raise CheckpointError(
            f"{keys.place}: {FREQUENCIES} are not ones and then numbers from {STOPS:g} on, {head_dim // 2} in all; supported: "
            "pairs of a head that turn, and pairs that do not"
        )
    share = 2 * turned / head_dim
    return share if int(head_dim * share / 2) == turned else math.nextafter(share, 2)


def windows(keys: GgufKeys, period: int = WINDOWS_PERIOD, first: bool = False) -> Settings:
    """The window, and the layers that have it: a list, or all but every so many-th; 0 and none are no window.

    period   of files that do not say it
    first    whether the layer without a window is the first of so many, not the last
    """
    size, layers = keys.integer("attention.sliding_window", 0), keys.layers()
    found = keys.value("attention.sliding_window_pattern", period)
    if not size:
        return {"sliding_window": None}
    if type(found) is int and found > 0:
        local = [(layer + (not first)) % found != 0 for layer in range(layers)]
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


def attending(keys: GgufKeys) -> tuple[int, list[bool]]:
    """Heads of keys and values of the layers that have some, and which those are: the others have a state."""
    heads = keys.integers("attention.head_count_kv", 1 << 16)
    attends = {each for each in heads if each}
    if len(heads) != keys.layers() or len(attends) != 1:
        raise keys.wrong("attention.head_count_kv", heads, "a number for each layer, 0 or the same")
    return attends.pop(), [bool(each) for each in heads]


def lfm2(keys: GgufKeys) -> Settings:
    """A layer without heads of keys and values has a convolution."""
    heads, attends = attending(keys)
    return {
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def mamba(keys: GgufKeys, layer: int) -> Settings:
    """Sizes of a state space, which `layer` has."""
    return {
        "mamba_n_heads": keys.integer("ssm.time_step_rank"),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has("ssm_conv1d.bias", layer),
    }


def granite_hybrid(keys: GgufKeys) -> Settings:
    """A layer without heads of keys and values has a state space; llama.cpp calls a rope that is there fine-tuned."""
    heads, attends = attending(keys)
    rotated, experts = keys.flag("rope.scaling.finetuned", True), keys.integer("expert_count", 0)
    inner, hidden, width = keys.integer("ssm.inner_size"), keys.integer("embedding_length"), "feed_forward_length"
    if all(attends):
        raise keys.wrong("attention.head_count_kv", [heads] * len(attends), "0 for layers of a state space")
    if not hidden or inner % hidden:
        raise keys.wrong("ssm.inner_size", inner, f"a multiple of embedding_length, {hidden}")
    return (
        granite_multipliers(keys)
        | mamba(keys, attends.index(False))
        | {
            "num_key_value_heads": heads,
            "layer_types": ["attention" if each else "mamba" for each in attends],
            "position_embedding_type": "rope" if rotated else "nope",
            "mamba_expand": inner // hidden,
            "num_local_experts": experts,
            "num_experts_per_tok": keys.integer("expert_used_count", 0),
            "intermediate_size": keys.integer(width),
            "shared_intermediate_size": keys.integer(f"expert_shared_{width}" if experts else width),
        }
    )


def falcon_h1(keys: GgufKeys) -> Settings:
    """Multipliers are in the weights; llama.cpp gates before the norm, whatever the checkpoint did."""
    return mamba(keys, 0) | {
        "mamba_d_ssm": keys.integer("ssm.inner_size"),
        "mamba_rms_norm": keys.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def delta_net(keys: GgufKeys) -> Settings:
    """Layers with a state, and the sizes of their heads; the layers that draft tokens come after them."""
    written, drafts = keys.layers(), keys.integer("nextn_predict_layers", 0)
    if drafts >= written:
        raise keys.wrong("nextn_predict_layers", drafts, f"fewer than the {written} of block_count")
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if not heads or inner % heads:
        raise keys.wrong("ssm.inner_size", inner, f"a multiple of the {heads} heads of ssm.time_step_rank")
    states = _layers_with_states(keys, written)[: written - drafts]
    return {
        "num_hidden_layers": written - drafts,
        DRAFT_LAYERS: drafts,
        "mtp_use_dedicated_embeddings": any(keys.has(f"nextn.{table}.weight", written - drafts) for table in DRAFT_TABLES),
        "layer_types": ["linear_attention" if each else "full_attention" for each in states],
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
    }


def _layers_with_states(keys: GgufKeys, layers: int) -> list[bool]:
    """A list that says so, or all but every so many-th."""
    found, period = keys.value("attention.recurrent_layers"), keys.integer("full_attention_interval", DELTA_PERIOD)
    if found is None:
        if not period:
            raise keys.wrong("full_attention_interval", period, "a positive integer")
        return [(layer + 1) % period != 0 for layer in range(layers)]
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biu" or len(found) != layers:
        raise keys.wrong("attention.recurrent_layers", found, f"{layers} times true or false")
    return [bool(each) for each in found]


def qwen3_next(keys: GgufKeys) -> Settings:
    shared = keys.integer("expert_shared_feed_forward_length", 0)
    return delta_net(keys) | qwen3_moe(keys) | {"shared_expert_intermediate_size": shared}


def qwen3_5(keys: GgufKeys) -> Settings:
    """Without its tower: in a text the three positions are the same."""
    rope_sections(keys)
    return delta_net(keys)


def qwen3_5_moe(keys: GgufKeys) -> Settings:
    rope_sections(keys)
    return qwen3_next(keys)


def gpt_oss(keys: GgufKeys) -> Settings:
    """Every other layer has the window, from the first on."""
    stretched = keys.value("rope.scaling.type")
    if type(stretched) is not str or stretched != "yarn":
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
    """llama.cpp calls a network without a rope one that was not fine-tuned."""
    keys.only("rope.scaling.finetuned", True)
    return granite_multipliers(keys)


def granite_moe(keys: GgufKeys) -> Settings:
    return granite(keys) | {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0),
    }


def granite_multipliers(keys: GgufKeys) -> Settings:
    """llama.cpp takes 0 for an absent one."""
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
