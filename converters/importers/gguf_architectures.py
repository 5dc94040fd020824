"""What llama.cpp calls architectures, keys and tensors: a configuration as transformers' config.json has it, and names.

A key that changes the computation is read or refused: of the keys that begin with the architecture's name every one is listed
here.  Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq.errors import CheckpointError, UnsupportedError

Keys = Mapping[str, Any]
Settings = dict[str, Any]
"""Keys of config.json."""

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
GEMMA_27B_LAYERS = 62
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"attention.causal": (True,), "use_parallel_residual": (False,), "pooling_type": (0,)},
    **{"attention.clamp_kqv": (0.0,), "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0)},
    **{"attention.scale": (0.0,), "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,)},
    **{"rope.scaling.finetuned": (True, False), "tensor_data_layout": ("Meta AI original pth",)},
    **{
        "expert_count": (0,),
        "expert_used_count": (0,),
        "expert_shared_count": (0,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
    },
    **{"expert_weights_scale": (0.0, 1.0), "leading_dense_block_count": (0,), "nextn_predict_layers": (0,)},
}
"""Key after the architecture's name -> values under which it changes nothing."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    family        as in `architectures` of config.json;  model_type  there
    tensors       of a layer: llama.cpp's name -> module; {} stands for the number of an expert
    interleaved   rows of q and k in pairs of one rotation, as the original Llama has them, instead of half by half
    gain          what llama.cpp adds to the gains of norms
    settings      further keys of config.json
    """

    family: str
    model_type: str
    tensors: Mapping[str, str]
    settings: Callable[[GgufKeys], Settings]
    interleaved: bool = False
    gain: float = 0.0


@dataclass
class GgufKeys:
    """The metadata of a file, read by key without the architecture's name; what nobody reads is refused in the end."""

    metadata: Keys
    architecture: str
    place: str
    read: set[str] = field(default_factory=set)

    def value(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if type(found) is not int or not 0 <= found < 1 << 31:
            raise self.wrong(key, found, "an integer")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        if type(found) not in (int, float) or not math.isfinite(found):
            raise self.wrong(key, found, "a number")
        return float(found)

    def wrong(self, key: str, found: Any, expected: str) -> CheckpointError:
        shown = "missing" if found is None else f"{found!r:.60}"
        return CheckpointError(f"{self.place}: {self.architecture}.{key} is {shown}; expected {expected}")

    def check_all_read(self) -> None:
        """UnsupportedError: a key that may change the computation."""
        start = f"{self.architecture}."
        for key, found in self.metadata.items():
            name = key.removeprefix(start)
            if key.startswith(start) and name not in self.read and not any(found == value for value in NEUTRAL.get(name, ())):
                supported = " or ".join(map(repr, NEUTRAL[name])) if name in NEUTRAL else "files without it"
                raise UnsupportedError(f"{self.place}: {key} is {found!r:.60}; supported: {supported}")


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


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", LLAMA, nothing_else, interleaved=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", LLAMA, no_windows, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", LLAMA, no_windows),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", LLAMA | HEAD_NORMS, no_windows),
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


def architecture(metadata: Keys, place: str) -> tuple[Architecture, GgufKeys]:
    """UnsupportedError: one that edgeq does not run, by name.  CheckpointError: none is named."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{place}: general.architecture is {'missing' if name is None else f'{name!r:.60}'}")
    if name == "clip" or metadata.get("general.type") in ("mmproj", "adapter"):
        kind = metadata.get("general.type", "mmproj")
        raise UnsupportedError(
            f"{place}: a file of kind {kind!r:.40}, not a model: give the file of the model itself; pictures need the "
            "checkpoint in safetensors (docs/vision.md), LoRA adapters the folder of PEFT (docs/adapters.md)"
        )
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{place}: architecture {name!r:.60} is not supported; supported: {', '.join(ARCHITECTURES)}")
    keys = GgufKeys(metadata, name, place)
    mixture = name == "llama" and keys.value("expert_count", 0)
    return (MIXTRAL_ARCHITECTURE if mixture else ARCHITECTURES[name]), keys
