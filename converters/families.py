"""The families of decoders: config.json -> ModelConfig, and what the tensors of each part are called.

A family is a row of a table.  Every key of config.json that changes the computation is either read, or listed with the values
under which it changes nothing; any other value is refused by key.  Keys that neither this table nor transformers' model code
reads cannot change the computation and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeq.config import LIMITS, ROPE_KINDS, ModelConfig, Rope
from edgeq.errors import CheckpointError, FormatError, UnsupportedError

Values = Mapping[str, Any]

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Part of a decoder layer -> its module in transformers' decoder layer.
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
# Old checkpoints carry these tables; they follow from the configuration.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class ScaleMapping:
    """One AWQ scale: `absorber` divides its output channels by s, `consumers` multiply their input channels by it.

    inspected         the module of the decoder layer whose output error chooses s
    multi_head_only   outputs of the absorber are inputs of the consumer one to one only if every query head has a value head
    """

    absorber: str
    consumers: tuple[str, ...]
    inspected: str
    multi_head_only: bool = False


LLAMA_MAPPINGS = (
    ScaleMapping("attention_norm", ("q", "k", "v"), "self_attn"),
    ScaleMapping("v", ("o",), "self_attn.o_proj", multi_head_only=True),
    ScaleMapping("mlp_norm", ("gate", "up"), "mlp"),
    ScaleMapping("up", ("down",), "mlp.down_proj"),
)


def _no_windows(values: Values, layers: int) -> tuple[int, ...]:
    return ()


def _window(values: Values) -> int:
    """`sliding_window`; 0 for null, which means none."""
    window = values["sliding_window"]
    if window is not None and (type(window) is not int or window < 1):
        raise FormatError(f"sliding_window is {window!r}; expected a positive integer or null")
    return window or 0


def _one_window(values: Values, layers: int) -> tuple[int, ...]:
    """Mistral: every layer sees `sliding_window` positions; null: all."""
    window = _window(values)
    return (window,) * layers if window else ()


def _qwen_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Qwen2, Qwen3: windows where `layer_types` says so; without it, from layer `max_window_layers` on."""
    window, types = _window(values) if values["use_sliding_window"] else 0, values["layer_types"]
    if types is None:
        first = values["max_window_layers"]
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise FormatError(f"layer_types is not a list of {layers} entries, one per layer")
    unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(f"layer_types {unknown[0]!r} is not supported; supported: full_attention, sliding_attention")
    windows = tuple(window if t == "sliding_attention" else 0 for t in types)
    return windows if any(windows) else ()


@dataclass(frozen=True)
class Family:
    """`defaults`: transformers' own, for keys that config.json may leave out; `neutral`: values that have no effect."""

    architecture: str
    defaults: Values
    neutral: Mapping[str, tuple[Any, ...]]
    windows: Callable[[Values, int], tuple[int, ...]]
    qkv_bias: bool = False
    qk_norm: bool = False
    mappings: tuple[ScaleMapping, ...] = LLAMA_MAPPINGS

    def layer_tensors(self, layer: int) -> dict[str, str]:
        """Part of a decoder layer -> tensor name: q ... down, q.bias ..., attention_norm ..."""
        prefix = f"model.layers.{layer}."
        names = {part: f"{prefix}{module}.weight" for part, module in LINEARS.items()}
        if self.qkv_bias:
            names.update({f"{part}.bias": f"{prefix}{LINEARS[part]}.bias" for part in ("q", "k", "v")})
        norms = NORMS if self.qk_norm else {part: NORMS[part] for part in ("attention_norm", "mlp_norm")}
        return names | {part: f"{prefix}{module}.weight" for part, module in norms.items()}

    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor the model needs and its shape."""
        hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
        sizes: dict[str, tuple[int, ...]] = {
            "q": (q, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, q),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
            "q.bias": (q,),
            "k.bias": (kv,),
            "v.bias": (kv,),
            "attention_norm": (hidden,),
            "mlp_norm": (hidden,),
            "q_norm": (config.head_dim,),
            "k_norm": (config.head_dim,),
        }
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
        if not config.tie_word_embeddings:
            shapes[HEAD] = (config.vocab_size, hidden)
        for layer in range(config.num_hidden_layers):
            shapes.update({name: sizes[part] for part, name in self.layer_tensors(layer).items()})
        return shapes

    def awq_mappings(self, config: ModelConfig) -> list[ScaleMapping]:
        """The scales that this model can absorb: v -> o only where v has as many outputs as o has inputs (no GQA)."""
        multi_head = config.kv_size == config.query_size
        return [m for m in self.mappings if multi_head or not m.multi_head_only]


DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "no_rope_layers": (None, []),
    "attention_chunk_size": (None,),
}
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", DEFAULTS, NEUTRAL, _no_windows),
        Family(
            "MistralForCausalLM",
            DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
            NEUTRAL | {"layer_types": (None,)},
            _one_window,
        ),
        Family(
            "Qwen2ForCausalLM",
            DEFAULTS | {"num_key_value_heads": 32, "max_position_embeddings": 32768} | QWEN_WINDOW,
            NEUTRAL,
            _qwen_windows,
            qkv_bias=True,
        ),
        Family(
            "Qwen3ForCausalLM",
            DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768} | QWEN_WINDOW,
            NEUTRAL,
            _qwen_windows,
            qk_norm=True,
        ),
    )
}


def recognise(hf: Values) -> tuple[Family, ModelConfig]:
    """The family of a config.json and the network it describes.

    UnsupportedError: names the key, what was found and what is supported.  CheckpointError: a key missing or out of range, or a
    checkpoint that is already quantized.
    """
    if hf.get("quantization_config") is not None:
        method = hf["quantization_config"].get("quant_method") if isinstance(hf["quantization_config"], dict) else None
        raise CheckpointError(
            f"config.json: quantization_config: the checkpoint is already quantized ({method or 'method not named'}); "
            "convert the original checkpoint instead"
        )
    architectures = hf.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"config.json: architectures is {architectures!r} (model_type {hf.get('model_type')!r}); "
            f"supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    for key, neutral in family.neutral.items():
        if hf.get(key) not in neutral:
            supported = " or ".join(repr(value) for value in neutral if value is not None) or "absent"
            raise UnsupportedError(f"config.json: {key} is {hf[key]!r}; {name} is supported with: {supported}")
    values = {**family.defaults, **hf}
    try:
        return family, _model_config(family, values)
    except FormatError as error:
        raise CheckpointError(f"config.json: {error}") from None
    except UnsupportedError as error:
        raise UnsupportedError(f"config.json: {error}") from None


def _model_config(family: Family, values: Values) -> ModelConfig:
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if type(values.get(key)) is not int or not 1 <= values[key] <= LIMITS[key]:
            raise FormatError(f"{key} is {values.get(key)!r}; expected an integer from 1 to {LIMITS[key]}")
    heads = values["num_attention_heads"]
    head_dim, kv_heads = values["head_dim"], values["num_key_value_heads"]
    return ModelConfig(
        model_type=str(values.get("model_type")),
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=values["hidden_size"] // heads if head_dim is None else head_dim,
        rms_norm_eps=values["rms_norm_eps"],
        rope=_rope(values),
        max_position_embeddings=values["max_position_embeddings"],
        tie_word_embeddings=values["tie_word_embeddings"],
        hidden_act=values["hidden_act"],
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(values, values["num_hidden_layers"]),
    )


ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(values: Values) -> Rope:
    """Both spellings: `rope_theta` beside `rope_scaling`, and all of it in `rope_parameters` (transformers 5)."""
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = values[where] or {}
    if not isinstance(settings, dict):
        raise FormatError(f"{where} is {settings!r}; expected an object")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"{where}: rope kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if settings.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedError(f"{where}: partial_rotary_factor is {settings['partial_rotary_factor']!r}; supported: 1.0")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS["llama3"]}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise UnsupportedError(f"{where}: {unknown[0]} is not supported with rope kind {kind!r}")
    numbers = {key: settings[key] for key in ROPE_KEYS[kind] if key in settings}
    if kind == "llama3":
        numbers.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    missing = sorted(set(ROPE_KEYS[kind]) - set(numbers))
    if missing:
        raise FormatError(f"{where} of kind {kind!r} lacks {missing[0]}")
    theta: Any = settings.get("rope_theta", values["rope_theta"])
    return Rope(theta=theta, kind=kind, **numbers)
