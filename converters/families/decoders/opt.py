"""OPT (Zhang et al. 2022, arXiv 2205.01068): LayerNorm, learned positions, ReLU, biases everywhere.

Its smallest but one, 350m, is another network: norms after the blocks instead of before them, so that no norm feeds q, k, v or
the MLP, and an embedding of half the width between two projections.  It is refused by those keys.
"""

from __future__ import annotations

from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.family import (
    ATTENTION_MAPPINGS,
    EMBEDDING,
    HEAD,
    NORM,
    POSITIONS,
    FamilyDescription,
    ScaleMapping,
    Values,
)
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope
from edgeq.network.stack import Stack

# Module of torch_decoder.py -> transformers' own.
MODULES = {
    "input_layernorm": "self_attn_layer_norm",
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
FIRST_POSITION = 2
"""The row of position 0: those before it were meant for padding."""


def opt_settings(values: Values) -> dict[str, Any]:
    width, hidden = values["word_embed_proj_dim"], values["hidden_size"]
    if width not in (None, hidden):
        raise UnsupportedError(
            f"word_embed_proj_dim is {width!r} and hidden_size {hidden}: projections around the embedding (opt-350m) are not "
            "supported; supported: the same size"
        )
    heads = values["num_attention_heads"]
    if hidden % heads:
        raise FormatError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return {
        "layer_norm": True,
        "rms_norm_eps": 1e-5,
        "rope": Rope(theta=10000.0, kind="learned"),
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
    }


def opt_sources(config: ModelConfig) -> dict[str, TensorSource]:
    hidden, inner = config.hidden_size, config.intermediate_size
    decoder, table = "model.decoder.", (config.vocab_size, hidden)
    positions = (config.max_position_embeddings + FIRST_POSITION, hidden)
    sources = {
        EMBEDDING: TensorSource(f"{decoder}embed_tokens.weight", table, table),
        POSITIONS: TensorSource(
            f"{decoder}embed_positions.weight", positions, (config.max_position_embeddings, hidden), FIRST_POSITION
        ),
    }
    if not config.tie_word_embeddings and config.pooling is None:
        sources[HEAD] = TensorSource(HEAD, table, table)
    norm = NORM.removesuffix("weight")
    sizes = {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for kind in ("weight", "bias"):
        sources[f"{norm}{kind}"] = TensorSource(f"{decoder}final_layer_norm.{kind}", (hidden,), (hidden,))
        for layer in range(config.num_hidden_layers):
            for module, theirs in MODULES.items():
                shape: tuple[int, ...] = sizes.get(module, (hidden, hidden))
                if kind == "bias" or module.endswith("norm"):
                    shape = shape[:1]
                name = f"{decoder}layers.{layer}.{theirs}.{kind}"
                sources[f"model.layers.{layer}.{module}.{kind}"] = TensorSource(name, shape, shape)
    return sources


def opt_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """ReLU lets a positive scale pass, so fc1 absorbs that of fc2."""
    return (
        *ATTENTION_MAPPINGS,
        ScaleMapping("mlp_norm", ("up",), "mlp.up_proj"),
        ScaleMapping("up", ("down",), "mlp.down_proj"),
    )


OPT_FAMILIES = (
    FamilyDescription(
        "OPTForCausalLM",
        {
            "activation_function": "relu",
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "word_embed_proj_dim": None,
        },
        {
            "do_layer_norm_before": (None, True),
            "_remove_final_layer_norm": (None, False),
            "enable_bias": (None, True),
            "layer_norm_elementwise_affine": (None, True),
        },
        opt_settings,
        keys={"hidden_act": "activation_function", "intermediate_size": "ffn_dim"},
        biases=("q", "k", "v", "o", "up", "down"),
        sources=opt_sources,
        mappings=opt_mappings,
    ),
)
