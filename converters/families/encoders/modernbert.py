"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): windows in most layers, a rope for each kind, GeGLU, norms without biases.

The first layer has no norm before its attention: that of the embedding is taken for it, to which attention is then added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.encoders.bert import reranker_sources, score_layer
from edgeq.converters.families.family import EMBEDDING, NORM, FamilyDescription, Values
from edgeq.converters.families.positions import rope_of, typed_windows
from edgeq.converters.families.rearranged import Sources, norms_without_biases
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.pooling import DenseLayer, Pooling

KINDS = {"full_attention", "sliding_attention"}
NORMS = ("input_layernorm", "post_attention_layernorm")
ACTIVATIONS = ("gelu", "silu")
"""The second is that of Granite Embedding."""


def modernbert_settings(values: Values) -> dict[str, Any]:
    """Both spellings: `rope_parameters` by type of layer, and `global_rope_theta`, `local_rope_theta`."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        raise FormatError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if values["hidden_activation"] not in ACTIVATIONS:
        found = f"{values['hidden_activation']!r:.80}"
        raise UnsupportedError(f"hidden_activation {found} is not supported; supported: {', '.join(ACTIVATIONS)}")
    by_type = values["rope_parameters"] or {}
    if not isinstance(by_type, dict) or not set(by_type) <= KINDS:
        raise FormatError(f"rope_parameters is {by_type!r:.80}; expected one object for each of the layer_types")
    full, local = (by_type.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    return {
        "layer_norm": True,
        "rms_norm_eps": values["norm_eps"],
        "rope": rope_of(values, "rope_parameters of full_attention", full, values["global_rope_theta"]),
        "local_rope": rope_of(values, "rope_parameters of sliding_attention", local, values["local_rope_theta"]),
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "gated_mlp": True,
        "normed_residual": "first",
        "bidirectional": True,
    }


def modernbert_windows(values: Values, layers: int) -> tuple[int, ...]:
    """A token sees half of `local_attention` tokens on each side; all in every `global_attn_every_n_layers`-th layer."""
    types, every, found = values["layer_types"], values["global_attn_every_n_layers"], values["local_attention"]
    for key, number in {"global_attn_every_n_layers": every, "local_attention": found}.items():
        if type(number) is not int or number < 1:
            raise FormatError(f"{key} is {number!r:.40}; expected a positive integer")
    if types is None:
        types = ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]
    return typed_windows(found // 2 + 1, types, layers)


def modernbert_sources(config: ModelConfig) -> Sources:
    hidden, inner = config.hidden_size, config.intermediate_size
    table, square = (config.vocab_size, hidden), (hidden, hidden)
    sources = norms_without_biases(config, NORMS)
    sources[EMBEDDING] = TensorSource("embeddings.tok_embeddings.weight", table, table)
    sources[NORM] = TensorSource("final_norm.weight", (hidden,), (hidden,))
    for layer in range(config.num_hidden_layers):
        p, theirs = f"model.layers.{layer}.", f"layers.{layer}."
        first = f"{theirs}attn_norm.weight" if layer else "embeddings.norm.weight"
        for module, name in zip(NORMS, (first, f"{theirs}mlp_norm.weight"), strict=True):
            sources[f"{p}{module}.weight"] = TensorSource(name, (hidden,), (hidden,))
        for row, part in enumerate(("q_proj", "k_proj", "v_proj")):
            fused = f"{theirs}attn.Wqkv.weight"
            sources[f"{p}self_attn.{part}.weight"] = TensorSource(fused, (3 * hidden, hidden), square, row * hidden)
        sources[f"{p}self_attn.o_proj.weight"] = TensorSource(f"{theirs}attn.Wo.weight", square, square)
        for row, part in enumerate(("gate_proj", "up_proj")):
            fused, shape = f"{theirs}mlp.Wi.weight", (inner, hidden)
            sources[f"{p}mlp.{part}.weight"] = TensorSource(fused, (2 * inner, hidden), shape, row * inner)
        sources[f"{p}mlp.down_proj.weight"] = TensorSource(f"{theirs}mlp.Wo.weight", (hidden, inner), (hidden, inner))
    return sources


def modernbert_scores(values: Values) -> Pooling:
    """A layer with a GELU and a norm reads the state of the first token, or the mean of all."""
    kind, bias = values["classifier_pooling"], values["classifier_bias"]
    if kind not in ("cls", "mean"):
        raise UnsupportedError(f"classifier_pooling is {kind!r:.40}; supported: cls, mean")
    if type(bias) is not bool:
        raise FormatError(f"classifier_bias is {bias!r:.40}; expected true or false")
    layers = DenseLayer(values["hidden_size"], bias, "gelu", norm=True), score_layer(values)
    return Pooling(kind, False, layers, ranks=True)


def reranking_sources(config: ModelConfig) -> Sources:
    return modernbert_sources(config) | reranker_sources(config, ("head.dense", "classifier"), "head.norm")


MODERNBERT = FamilyDescription(
    "ModernBertModel",
    {
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "layer_types": None,
        "rope_parameters": None,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    {
        "norm_bias": (None, False),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "rope_scaling": (None,),
    },
    modernbert_settings,
    modernbert_windows,
    keys={"hidden_act": "hidden_activation"},
    sources=modernbert_sources,
    renamed={"model.": ""},
    headless=True,
)
MODERNBERT_RERANKER = replace(
    MODERNBERT,
    architecture="ModernBertForSequenceClassification",
    defaults={**MODERNBERT.defaults, "classifier_pooling": "cls", "classifier_bias": False},
    neutral={**MODERNBERT.neutral, "classifier_activation": (None, "gelu")},
    sources=reranking_sources,
    scores=modernbert_scores,
)
MODERNBERT_FAMILIES = (MODERNBERT, MODERNBERT_RERANKER)
