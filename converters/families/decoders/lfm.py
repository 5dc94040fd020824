"""LFM2: layers of a gated convolution over the last tokens, and layers of attention among them."""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, llama_settings
from edgeq.converters.families.family import NORM, FamilyDescription, Values
from edgeq.converters.families.rearranged import convolution
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.stack import MAX_SIZES

# Module of torch_decoder.py -> transformers' own.
EVERY_LAYER = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
ATTENTION = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}
CONVOLUTION = {"self_attn.in_proj": "conv.in_proj", "self_attn.conv": "conv.conv", "self_attn.out_proj": "conv.out_proj"}
KINDS = ("conv", "full_attention")
MAX_FACTOR = 1024
"""The largest factor of the inner channels."""


def conv_layers(values: Values) -> tuple[int, ...]:
    """Layers with a convolution, as `layer_types` says; without it, all that are not in `full_attn_idxs`."""
    layers, types, attends = values["num_hidden_layers"], values["layer_types"], values["full_attn_idxs"]
    if types is None:
        if attends is not None and (not isinstance(attends, list) or any(type(i) is not int for i in attends)):
            raise FormatError(f"full_attn_idxs is {str(attends)[:80]}; expected a list of layers")
        return () if attends is None else tuple(i for i in range(layers) if i not in attends)
    if not isinstance(types, list) or len(types) != layers:
        raise FormatError(f"layer_types is not a list of {layers} entries, one per layer")
    unknown = sorted({str(each) for each in types} - set(KINDS))
    if unknown:
        raise UnsupportedError(f"layer_types {unknown[0]!r} is not supported; supported: {', '.join(KINDS)}")
    return tuple(i for i, each in enumerate(types) if each == "conv")


def mlp_width(values: Values) -> int:
    """Inner channels: two thirds of what is written, times a factor, up to a multiple, where they are adjusted."""
    written, factor = values["block_ff_dim"], values["block_ffn_dim_multiplier"]
    width: int = values["intermediate_size"] if written is None else written
    multiple, most = values["block_multiple_of"], MAX_SIZES["intermediate_size"]
    for key, found in (("block_ff_dim", width), ("block_multiple_of", multiple)):
        if type(found) is not int or not 1 <= found <= most:
            raise FormatError(f"{key} is {found!r:.80}; expected an integer from 1 to {most}")
    if factor is not None and (type(factor) not in (int, float) or not 0 < factor <= MAX_FACTOR):
        raise FormatError(f"block_ffn_dim_multiplier is {factor!r:.80}; expected a number up to {MAX_FACTOR}, or null")
    if not values["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def lfm2_settings(values: Values) -> dict[str, Any]:
    convolutions = conv_layers(values)
    return llama_settings(values) | {
        "intermediate_size": mlp_width(values),
        "rms_norm_eps": values["norm_eps"],
        "qk_norm": True,
        "conv_layers": convolutions,
        "conv_taps": values["conv_L_cache"] if convolutions else 0,
    }


def lfm2_sources(config: ModelConfig) -> dict[str, TensorSource]:
    hidden, inner, heads, taps = config.hidden_size, config.intermediate_size, config.query_size, config.conv_taps
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
        "self_attn.in_proj": (3 * hidden, hidden),
        "self_attn.out_proj": (hidden, hidden),
    }
    sources = {NORM: TensorSource("model.embedding_norm.weight", (hidden,), (hidden,))}
    for layer in range(config.num_hidden_layers):
        for module, theirs in (EVERY_LAYER | (CONVOLUTION if layer in config.conv_layers else ATTENTION)).items():
            shape = shapes.get(module, (hidden,))
            name = f"model.layers.{layer}.{theirs}.weight"
            convolves = module == "self_attn.conv"
            source = convolution(name, (hidden, taps)) if convolves else TensorSource(name, shape, shape)
            sources[f"model.layers.{layer}.{module}.weight"] = source
    return sources


LFM2 = FamilyDescription(
    "Lfm2ForCausalLM",
    DEFAULTS
    | {
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
        "intermediate_size": 12288,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "block_ff_dim": None,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
        "layer_types": None,
    },
    NEUTRAL | {"conv_bias": (None, False), "tie_embedding": (None, True)},
    lfm2_settings,
    sources=lfm2_sources,
)
